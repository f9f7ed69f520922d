"""Streams in which the store assigns the place."""

from __future__ import annotations

import asyncio

from loom.errors import InboxFullError, WrongHeadError
from loom.ids import inbox_stream
from loom.stores.contracts import NO_EVENTS, Appended
from loom.testing.conformance.event_store.support import (
    EventBench,
    LogSuite,
    attempt,
    message,
    refused,
    sequences,
    steps,
)


class InboxConformance(LogSuite):
    """Streams in which the store assigns the place."""

    async def test_messages_queue_in_the_order_they_were_accepted(self, bench: EventBench) -> None:
        handles = [await bench.open(), await bench.open()]
        inbox = inbox_stream(bench.chain(), "t")
        results = await asyncio.gather(*(handles[n % 2].append(message(inbox, f"m{n}")) for n in range(20)))
        events = await handles[0].read(inbox)
        assert [e.sequence for e in events] == list(range(20))
        assert {f"m{n}": r.first for n, r in enumerate(results)} == {e.id: e.sequence for e in events}

    async def test_a_message_enters_once(self, bench: EventBench) -> None:
        store, inbox = await bench.open(), inbox_stream(bench.chain(), "t")
        await store.append(message(inbox, "m0"))
        first = await store.append(message(inbox, "m1"))
        await store.append(message(inbox, "m2"))
        again = await (await bench.open()).append(message(inbox, "m1"))
        assert (again.first, again.head, again.repeated) == (first.first, first.head, True)
        twice = await asyncio.gather(*(store.append(message(inbox, "m3")) for _ in range(4)))
        assert {r.first for r in twice} == {3}
        assert await sequences(store, inbox) == [0, 1, 2, 3]

    async def test_a_trimmed_message_is_still_known(self, bench: EventBench) -> None:
        store, inbox = await bench.open(), inbox_stream(bench.chain(), "t")
        for n in range(4):
            await store.append(message(inbox, f"m{n}"))
        await store.truncate(inbox, 4)
        again = await store.append(message(inbox, "m2"))
        assert (again.first, again.repeated) == (2, True)
        assert (await store.append(message(inbox, "m4"))).first == 4

    async def test_a_backlog_is_bounded(self, bench: EventBench) -> None:
        store, chain = await self.log(bench)
        inbox = inbox_stream(chain, "a topic")
        for n in range(3):
            await store.append(message(inbox, f"m{n}", backlog_cap=3))
        error = await refused(store.append(message(inbox, "m3", backlog_cap=3)), InboxFullError)
        assert (error.execution_id, error.topic, error.backlog, error.cap) == (chain, "a topic", 3, 3)
        assert (await store.append(message(inbox, "m1", backlog_cap=3))).repeated
        await store.append(steps(chain, 0, consumed=((inbox, 1),)))
        assert (await store.append(message(inbox, "m3", backlog_cap=3))).head == 3
        assert (await store.append(message(inbox, "m4", backlog_cap=3))).head == 4
        await refused(store.append(message(inbox, "m5", backlog_cap=3)), InboxFullError)
        await store.append(steps(chain, 1, consumed=((inbox, 0),)))
        await refused(store.append(message(inbox, "m5", backlog_cap=3)), InboxFullError)
        await store.truncate(inbox, 4)
        assert (await store.append(message(inbox, "m5", backlog_cap=3))).head == 5

    async def test_the_cap_holds_against_a_crowd(self, bench: EventBench) -> None:
        store, inbox = await bench.open(), inbox_stream(bench.chain(), "t")
        offers = (store.append(message(inbox, f"m{n}", backlog_cap=5)) for n in range(12))
        results = await asyncio.gather(*map(attempt, offers))
        assert sum(isinstance(r, Appended) for r in results) == 5
        assert await sequences(store, inbox) == [0, 1, 2, 3, 4]

    async def test_a_message_and_its_delivery_are_one_append(self, bench: EventBench) -> None:
        store, chain = await self.log(bench)
        inbox = inbox_stream(chain, "t")
        together = [steps(chain, 0, consumed=((inbox, 0),)), message(inbox, "m0", expected_head=NO_EVENTS)]
        done = await store.append_many(together)
        assert [(a.head, a.repeated) for a in done] == [(1, False), (0, False)]
        assert [a.repeated for a in await store.append_many(together)] == [True, True]
        await store.append(message(inbox, "m1", backlog_cap=1))  # nothing waits before it
        for known, expected in (("m2", 0), ("m0", 1)):  # another was first; the message stands already
            refusal = store.append_many([steps(chain, 1), message(inbox, known, expected_head=expected)])
            await refused(refusal, WrongHeadError)
        assert await sequences(store, chain) == [0, 1]
        assert await sequences(store, inbox) == [0, 1]
