"""Truncation and deletion."""

from __future__ import annotations

from loom.errors import ExecutionAlreadyExistsError, ExecutionNotFoundError, WrongHeadError
from loom.ids import inbox_stream
from loom.stores.contracts import NO_EVENTS
from loom.testing.conformance.event_store.support import (
    EventBench,
    LogSuite,
    message,
    refused,
    sequences,
    started,
    steps,
)


class RemovalConformance(LogSuite):
    """Truncation and deletion."""

    async def test_truncation_keeps_sequence_0_and_the_numbering(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench, 6)
        seen = await store.observe(stream_id)
        await store.truncate(stream_id, 4)
        assert await sequences(store, stream_id) == [0, 4, 5]
        assert [e.sequence for e in await store.read(stream_id, 1)] == [4, 5]
        assert [e.sequence for e in await store.read(stream_id, 0, 2)] == [0, 4]
        info = await store.info(stream_id)
        assert info is not None
        assert (info.first, info.head) == (4, 5)
        assert await store.observe(stream_id) == seen
        assert (await store.append(steps(stream_id, 5, fence=1))).first == 6
        assert await sequences(await bench.open(), stream_id) == [0, 4, 5, 6]

    async def test_truncation_never_goes_back(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench, 6)
        for before in (4, 4, 2, 0, -3):
            await store.truncate(stream_id, before)
            assert await sequences(store, stream_id) == [0, 4, 5]

    async def test_a_wholly_trimmed_stream_goes_on_counting(self, bench: EventBench) -> None:
        store, inbox = await bench.open(), inbox_stream(bench.chain(), "t")
        for n in range(4):
            await store.append(message(inbox, f"m{n}"))
        await store.truncate(inbox, 99)
        assert await sequences(store, inbox) == [0]
        last = await store.read_last(inbox)
        assert last is not None
        assert last.sequence == 0
        assert (await store.observe(inbox)).head == 3
        assert (await store.append(message(inbox, "m4"))).first == 4
        assert await sequences(store, inbox) == [0, 4]

    async def test_what_was_trimmed_is_no_repeat(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench, 4)
        await store.truncate(stream_id, 4)
        await refused(store.append(steps(stream_id, 0)), WrongHeadError)
        assert (await store.append(started(stream_id))).repeated

    async def test_a_deleted_stream_is_gone(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench, 3)
        await store.delete(stream_id)
        await store.delete(stream_id)
        assert await store.read(stream_id) == []
        assert await store.read_last(stream_id) is None
        assert await store.info(stream_id) is None
        seen = await store.observe(stream_id)
        assert (seen.head, seen.anchor) == (NO_EVENTS, None)

    async def test_a_deleted_id_refuses_reuse(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench, 3)
        inbox, never = inbox_stream(stream_id, "t"), bench.chain()
        await store.append(message(inbox, "m0"))
        for gone in (stream_id, inbox, never):
            await store.delete(gone)
        other = await bench.open()
        await refused(other.append(started(stream_id)), ExecutionAlreadyExistsError)
        await refused(other.append(started(never)), ExecutionAlreadyExistsError)
        await refused(other.append(message(inbox, "m1")), ExecutionAlreadyExistsError)
        elsewhere = message(inbox_stream(stream_id, "first on its topic"), "m1")
        await refused(other.append(elsewhere), ExecutionNotFoundError)
        await refused(other.append(steps(stream_id, 2, fence=1)), WrongHeadError)
        await refused(other.acquire_fence(stream_id, "n:2"), ExecutionNotFoundError)
        source = bench.chain()
        await store.append(started(source))
        await refused(store.copy_prefix(source, stream_id, 0), ExecutionAlreadyExistsError)
        await refused(store.copy_prefix(stream_id, bench.chain(), 0), ExecutionNotFoundError)
        assert await store.read(stream_id) == []
