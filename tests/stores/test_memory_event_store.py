"""The event store in memory keeps the contract."""

import asyncio

import pytest

from loom.ids import ulid
from loom.stores.contracts import EventStore, OwningEventStore
from loom.stores.memory.event_store import MemoryEventStore
from loom.stores.memory.log import MAX_EVENT_BYTES, MemoryLog
from loom.testing.conformance.event_store import EventStoreConformance, OwningEventStoreConformance
from loom.topics.partitioner import mint


class MemoryBench:
    too_large = MAX_EVENT_BYTES

    def __init__(self):
        self.now = 1_000
        self.log = MemoryLog(self.tick)
        self.handles = []

    def tick(self):
        self.now += 1
        return self.now

    async def open(self):
        return await self.own(None)

    async def own(self, origin):
        self.handles.append(MemoryEventStore(self.log, origin=origin))
        return self.handles[-1]

    def chain(self):
        return mint(3, self.log.shards, ulid)

    def elsewhere(self):
        return mint(4, self.log.shards, ulid)


@pytest.fixture
async def bench():
    bench = MemoryBench()
    yield bench
    for handle in bench.handles:
        await handle.close()


class TestMemoryEventStore(EventStoreConformance, OwningEventStoreConformance):
    pass
