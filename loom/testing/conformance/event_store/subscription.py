"""Subscriptions go from history to what comes, without a gap and without a double."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from loom.testing.conformance.event_store.support import EventBench, LogSuite, sequences, started, steps, take

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from loom.schemas.envelope import Envelope
    from loom.stores.contracts import EventStore


class SubscriptionConformance(LogSuite):
    """Subscriptions go from history to what comes without a gap and without a double."""

    async def test_history_then_live(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench, 3)
        events = (await bench.open()).subscribe(stream_id)
        assert [e.sequence for e in await take(events, 2)] == [0, 1]
        writing = asyncio.create_task(_write_on(store, stream_id, range(2, 12)))
        assert [e.sequence for e in await take(events, 11)] == list(range(2, 13))
        await writing
        waiting = asyncio.ensure_future(take(events, 1))
        await store.append(steps(stream_id, 12))
        assert [e.id for e in await waiting] == [f"{stream_id}#13"]
        await _close(events)

    async def test_from_a_sequence(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench, 5)
        events = store.subscribe(stream_id, 3)
        assert [e.sequence for e in await take(events, 2)] == [3, 4]
        await store.append(steps(stream_id, 4))
        assert [e.sequence for e in await take(events, 1)] == [5]
        await _close(events)

    async def test_before_there_is_anything(self, bench: EventBench) -> None:
        store, stream_id = await bench.open(), bench.chain()
        subscriptions = [store.subscribe(stream_id), (await bench.open()).subscribe(stream_id)]
        waiting = [asyncio.ensure_future(take(events, 2)) for events in subscriptions]
        await asyncio.sleep(0)
        await store.append(started(stream_id))
        await store.append(steps(stream_id, 0))
        for found in await asyncio.gather(*waiting):
            assert [e.sequence for e in found] == [0, 1]
        for events in subscriptions:
            await _close(events)

    async def test_what_was_trimmed_is_passed_over(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench, 6)
        await store.truncate(stream_id, 4)
        events = store.subscribe(stream_id)
        assert [e.sequence for e in await take(events, 3)] == [0, 4, 5]
        await _close(events)

    async def test_the_envelopes_are_those_that_are_read(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench, 3)
        events = store.subscribe(stream_id)
        assert await take(events, 3) == await store.read(stream_id)
        await _close(events)

    async def test_closing_twice_and_beside_others(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench)
        other = await bench.open()
        await store.close()
        await store.close()
        assert await sequences(other, stream_id) == [0]
        assert (await other.append(steps(stream_id, 0))).head == 1


async def _write_on(store: EventStore, stream_id: str, heads: range) -> None:
    for head in heads:
        await store.append(steps(stream_id, head))


async def _close(events: AsyncIterator[Envelope]) -> None:
    close = getattr(events, "aclose", None)
    assert close is not None, "a subscription can be closed"
    await close()
