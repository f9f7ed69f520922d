"""What a store that serves shards tells the runtime of its process (``loom.stores.contracts.OwningEventStore``)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from loom.ids import inbox_stream, quarantine_stream
from loom.schemas.envelope import Envelope, Kind
from loom.stores.contracts import Outgoing, StreamAppend
from loom.testing.conformance.event_store.support import PATIENCE_S, event, message, started, steps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loom.stores.contracts import Committed, OwningEventStore


class OwningBench(Protocol):
    """A log under test."""

    async def own(self, origin: str) -> OwningEventStore:
        """Return a handle that serves every shard, its own appends labelled ``origin``; the bench closes it."""
        ...

    async def open(self) -> OwningEventStore:
        """Return another handle on the one log, as another node has; the bench closes it."""
        ...

    def chain(self) -> str:
        """Return a fresh chain id; all ids of one bench are of one shard."""
        ...

    def elsewhere(self) -> str:
        """Return a fresh chain id of another shard."""
        ...


class Listener:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.heard: list[Committed] = []
        self.shards: set[int] = set()

    def committed(self, batch: Sequence[Committed]) -> None:
        """See ``CommitListener``."""
        self.heard += batch

    def gained(self, shard: int) -> None:
        """See ``CommitListener``."""
        self.shards.add(shard)

    def lost(self, shard: int) -> None:
        """See ``CommitListener``."""
        self.shards.discard(shard)

    def of(self, stream_id: str) -> list[Envelope]:
        """Events heard of a stream, in the order in which they were heard."""
        return [e for c in self.heard if c.stream_id == stream_id for e in c.envelopes]

    def origins(self, stream_id: str) -> list[str | None]:
        """Origins of what was heard of a stream."""
        return [c.origin for c in self.heard if c.stream_id == stream_id]


async def heard(condition: Callable[[], bool]) -> None:
    """Return once the condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - a listener is called, it wakes nobody
            await asyncio.sleep(0.001)


class OwningEventStoreConformance:
    """The suite."""

    async def test_the_listener_is_told_what_is_owned(self, bench: OwningBench) -> None:
        store, listener = await bench.own("a"), Listener()
        store.listen(listener)
        await heard(lambda: store.owned() <= listener.shards and bool(store.owned()))
        assert store.shard_of(bench.chain()) in store.owned()
        assert store.mint_shard() in store.owned()

    async def test_all_streams_of_a_chain_are_of_one_shard(self, bench: OwningBench) -> None:
        store, chain = await bench.own("a"), bench.chain()
        streams = [chain, inbox_stream(chain), inbox_stream(chain, "a:b/c"), quarantine_stream(chain)]
        assert len({store.shard_of(stream_id) for stream_id in streams}) == 1
        assert store.shard_of(bench.elsewhere()) != store.shard_of(chain)

    async def test_what_becomes_durable_is_heard_once_and_in_order(self, bench: OwningBench) -> None:
        store, listener, stream_id = await bench.own("a"), Listener(), bench.chain()
        store.listen(listener)
        await store.append(started(stream_id))
        await asyncio.gather(
            *(store.append(message(inbox_stream(stream_id, "t"), f"m{n}")) for n in range(10))
        )
        for head in range(5):
            await store.append(steps(stream_id, head))
        await heard(lambda: listener.of(stream_id)[-1:] != [] and listener.of(stream_id)[-1].sequence == 5)
        assert listener.of(stream_id) == await store.read(stream_id)
        assert listener.of(inbox_stream(stream_id, "t")) == await store.read(inbox_stream(stream_id, "t"))
        assert set(listener.origins(stream_id)) == {"a"}

    async def test_one_append_is_told_as_one(self, bench: OwningBench) -> None:
        store, listener, stream_id = await bench.own("a"), Listener(), bench.chain()
        store.listen(listener)
        await store.append(started(stream_id))
        await store.append(steps(stream_id, 0, 3))
        await heard(lambda: len(listener.of(stream_id)) == 4)
        assert [len(c.envelopes) for c in listener.heard if c.stream_id == stream_id] == [1, 3]

    async def test_appends_of_other_nodes_are_heard_without_an_origin(self, bench: OwningBench) -> None:
        store, listener, stream_id = await bench.own("a"), Listener(), bench.chain()
        store.listen(listener)
        other = await bench.open()
        await other.append(started(stream_id))
        await store.append(steps(stream_id, 0))
        await heard(lambda: len(listener.of(stream_id)) == 2)
        assert listener.origins(stream_id) == [None, "a"]

    async def test_requests_of_other_chains_are_heard_where_they_are_applied(
        self, bench: OwningBench
    ) -> None:
        store, listener, stream_id = await bench.own("a"), Listener(), bench.chain()
        store.listen(listener)
        inbox = inbox_stream(bench.elsewhere(), "t")
        receiver = inbox.split(":")[1]
        out = Outgoing("request", f"{stream_id}#1:send", receiver, message(inbox, "m"))
        await store.append(started(stream_id))
        await store.append(steps(stream_id, 0, outgoing=(out,)))
        await heard(lambda: bool(listener.of(inbox)))
        assert [e.id for e in listener.of(inbox)] == ["m"]

    async def test_a_repeat_is_not_heard_again(self, bench: OwningBench) -> None:
        store, listener, stream_id = await bench.own("a"), Listener(), bench.chain()
        store.listen(listener)
        for _ in range(3):
            await store.append(started(stream_id))
        await store.append(steps(stream_id, 0))
        await heard(lambda: len(listener.of(stream_id)) >= 2)
        assert [e.sequence for e in listener.of(stream_id)] == [0, 1]

    async def test_open_logs_are_listed_by_id_page_by_page(self, bench: OwningBench) -> None:
        store = await bench.own("a")
        ids = sorted(bench.chain() for _ in range(7))
        for stream_id in ids:
            await store.append(started(stream_id))
        await store.append(message(inbox_stream(ids[0], "t"), "m"))
        end = event("end", Kind.EXECUTION_COMPLETED, output=None)
        await store.append(StreamAppend(ids[2], (end,), expected_head=0))
        await store.append(StreamAppend(ids[2], (event("o", Kind.OUTCOME_RECORDED),), expected_head=1))
        await store.delete(ids[4])
        expected = [stream_id for n, stream_id in enumerate(ids) if n not in {2, 4}]
        shard = store.shard_of(ids[0])
        found: list[str] = []
        while page := store.open_logs(shard, found[-1] if found else "", 2):
            assert len(page) <= 2
            found += [info.stream_id for info in page]
        assert [stream_id for stream_id in found if stream_id in ids] == expected
        assert {info.fence for info in store.open_logs(shard) if info.stream_id in expected} == {1}
        assert store.shard_of(bench.elsewhere()) != shard

    async def test_inbox_streams_of_a_chain_are_listed(self, bench: OwningBench) -> None:
        store, chain = await bench.own("a"), bench.chain()
        await store.append(started(chain))
        topics = [None, "a", "b:c", "ü"]
        streams = sorted(inbox_stream(chain, topic) for topic in topics)
        for n, stream_id in enumerate(streams):
            for k in range(n + 1):
                await store.append(message(stream_id, f"m{k}"))
        listed = store.inbox_streams(chain)
        assert [info.stream_id for info in listed] == streams
        assert [info.head for info in listed] == [0, 1, 2, 3]
        elsewhere: Any = await bench.own("b")
        assert sorted(await elsewhere.list_inboxes(chain)) == streams
        assert store.inbox_streams(bench.chain()) == []
