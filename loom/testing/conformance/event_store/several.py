"""Appends to several streams, copies, and work on other chains."""

from __future__ import annotations

from loom.errors import ExecutionNotFoundError, InvalidInputError, WrongHeadError
from loom.ids import inbox_stream, quarantine_stream
from loom.schemas.envelope import Kind
from loom.stores.contracts import Observation, Outgoing, StreamAppend
from loom.testing.conformance.event_store.support import (
    SEAL,
    EventBench,
    LogSuite,
    event,
    message,
    refused,
    sequences,
    started,
    steps,
    until,
)


class SeveralStreamsConformance(LogSuite):
    """Appends to several streams, copies, and work on other chains."""

    async def test_all_streams_or_none(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench)
        inbox, other = inbox_stream(stream_id, "t"), bench.chain()
        good = [steps(stream_id, 0), message(inbox, "m1"), started(other)]
        results = await store.append_many(good)
        assert [(r.stream_id, r.first, r.head) for r in results] == [
            (stream_id, 1, 1),
            (inbox, 0, 0),
            (other, 0, 0),
        ]
        bad = [steps(stream_id, 1), message(inbox, "m2"), steps(other, 7)]
        await refused(store.append_many(bad), WrongHeadError)
        assert await sequences(store, stream_id) == [0, 1]
        assert await sequences(store, inbox) == [0]
        assert await sequences(store, other) == [0]

    async def test_log_inbox_and_quarantine_move_together(self, bench: EventBench) -> None:
        store, chain = await self.log(bench)
        streams = [inbox_stream(chain), inbox_stream(chain, "a:b/c"), quarantine_stream(chain)]
        await store.append_many([steps(chain, 0), *(message(s, f"m{n}") for n, s in enumerate(streams))])
        for n, stream_id in enumerate(streams):
            assert [e.id for e in await store.read(stream_id)] == [f"m{n}"]

    async def test_two_appends_to_one_stream_follow_each_other(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench)
        inbox = inbox_stream(stream_id, "t")
        results = await store.append_many(
            [
                steps(stream_id, 0),
                steps(stream_id, 1),
                message(inbox, "m1"),
                message(inbox, "m2"),
                message(inbox, "m1"),
            ]
        )
        assert [(r.first, r.repeated) for r in results] == [
            (1, False),
            (2, False),
            (0, False),
            (1, False),
            (0, True),
        ]
        assert await sequences(store, inbox) == [0, 1]

    async def test_a_repeat_of_several_is_success_as_a_whole(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench)
        inbox = inbox_stream(stream_id, "t")
        several = [steps(stream_id, 0), message(inbox, "m1")]
        first = await store.append_many(several)
        again = await (await bench.open()).append_many(several)
        assert [(r.first, r.head) for r in again] == [(r.first, r.head) for r in first]
        assert [r.repeated for r in again] == [True, True]
        assert await sequences(store, inbox) == [0]

    async def test_streams_of_two_shards_are_refused(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench)
        other = bench.elsewhere()
        await refused(store.append_many([steps(stream_id, 0), started(other)]), InvalidInputError)
        await refused(store.copy_prefix(stream_id, other, 0), InvalidInputError)
        assert await store.info(other) is None
        assert await sequences(store, stream_id) == [0]

    async def test_no_appends_are_no_write(self, bench: EventBench) -> None:
        assert await (await bench.open()).append_many([]) == []

    # -- copies -------------------------------------------------------------------------------------------------

    async def test_a_copy_is_verbatim_and_goes_its_own_way(self, bench: EventBench) -> None:
        store, source = await bench.open(), bench.chain()
        sealed = event(
            "s0", Kind.EXECUTION_STARTED, metadata={"seal": SEAL, "node": "n:1"}, input={"__loomEnc": "x"}
        )
        await store.append(
            StreamAppend(source, (sealed, event("s1"), event("s2")), expected_head=-1, fence=1)
        )
        target = bench.chain()
        assert await store.copy_prefix(source, target, 1) == 1
        ours, theirs = await store.read(source), await store.read(target)
        assert [(e.id, e.sequence, e.type, e.timestamp, e.data, e.metadata) for e in theirs] == [
            (e.id, e.sequence, e.type, e.timestamp, e.data, e.metadata) for e in ours[:2]
        ]
        assert {e.stream_id for e in theirs} == {target}
        assert await store.observe(target) == Observation(1, 0, "s0")
        await store.append(steps(target, 1))
        await store.append(steps(source, 2))
        assert await sequences(store, target) == [0, 1, 2]
        assert await sequences(store, source) == [0, 1, 2, 3]

    async def test_a_copy_may_be_repeated_but_replaces_nothing(self, bench: EventBench) -> None:
        store, source = await self.log(bench, 3)
        target, taken = bench.chain(), bench.chain()
        await store.append(started(taken))
        assert await store.copy_prefix(source, target, 2) == 2
        assert await store.copy_prefix(source, target, 2) == 2
        await refused(store.copy_prefix(source, taken, 2), WrongHeadError)
        await refused(store.copy_prefix(source, bench.chain(), 3), WrongHeadError)
        await refused(store.copy_prefix(bench.chain(), bench.chain(), 0), ExecutionNotFoundError)
        assert await sequences(store, target) == [0, 1, 2]

    async def test_a_copy_of_a_trimmed_log_lacks_what_was_trimmed(self, bench: EventBench) -> None:
        store, source = await self.log(bench, 6)
        await store.truncate(source, 4)
        target, short = bench.chain(), bench.chain()
        assert await store.copy_prefix(source, target, 4) == 4
        assert await sequences(store, target) == [0, 4]
        assert await store.copy_prefix(source, short, 2) == 2
        assert await sequences(store, short) == [0]
        assert (await store.append(steps(short, 2))).first == 3

    # -- work on other chains -----------------------------------------------------------------------------------

    async def test_a_request_leaves_with_its_event_and_is_applied_once(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench)
        for receiver in (bench.chain(), bench.elsewhere()):
            inbox = inbox_stream(receiver, "t")
            head = (await store.observe(stream_id)).head
            out = Outgoing(
                "request", f"{stream_id}#{head + 1}:send", receiver, message(inbox, f"{stream_id}:{head}")
            )
            sending = steps(stream_id, head, outgoing=(out,))
            await store.append(sending)
            assert (await store.append(sending)).repeated
            after = Outgoing("request", f"{stream_id}#{head + 2}:send", receiver, message(inbox, "the end"))
            await store.append(steps(stream_id, head + 1, outgoing=(after,)))

            async def arrived(inbox: str = inbox) -> bool:
                last = await store.read_last(inbox)
                return last is not None and last.id == "the end"

            await until(arrived)
            assert [e.id for e in await store.read(inbox)] == [f"{stream_id}:{head}", "the end"]

    async def test_a_refused_append_sends_nothing(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench)
        receiver = bench.chain()
        inbox = inbox_stream(receiver, "t")
        lost = Outgoing("request", f"{stream_id}:lost", receiver, message(inbox, "lost"))
        await refused(store.append(steps(stream_id, 7, outgoing=(lost,))), WrongHeadError)
        sent = Outgoing("request", f"{stream_id}:sent", receiver, message(inbox, "sent"))
        await store.append(steps(stream_id, 0, outgoing=(sent,)))

        async def arrived() -> bool:
            return await store.read_last(inbox) is not None

        await until(arrived)
        assert [e.id for e in await store.read(inbox)] == ["sent"]
