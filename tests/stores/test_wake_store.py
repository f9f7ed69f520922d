"""The wake contract on memory and on a real Redis."""

from functools import partial

import pytest
from redis_bench import RedisBench

from loom.stores.contracts import WakeStore
from loom.stores.memory.wake_store import MemoryWakeStore, WakeTable
from loom.stores.redis.wake_store import RedisWakeStore
from loom.testing.conformance.wake_store import WakeStoreConformance

PARTITIONS = 6


class MemoryBench:
    partitions = PARTITIONS

    def __init__(self):
        self.now = 1_600_000_000_000
        self.table = WakeTable(lambda: self.now, PARTITIONS)

    def open(self):
        return MemoryWakeStore(self.table)

    async def advance(self, ms):
        self.now += ms

    async def empty(self):
        self.table.flush()


class TestMemory(WakeStoreConformance):
    @pytest.fixture
    def bench(self):
        return MemoryBench()


class TestRedis(WakeStoreConformance):
    @pytest.fixture(params=["plain", "scripts flushed before each call"])
    async def bench(self, request, redis_url, redis_prefix):
        make = partial(RedisWakeStore, partitions=PARTITIONS)
        bench = RedisBench(redis_url, redis_prefix, make, forgetful=request.param != "plain")
        bench.partitions = PARTITIONS
        yield bench
        await bench.close()


def test_both_are_wake_stores():
    assert isinstance(MemoryBench().open(), WakeStore)
    assert isinstance(RedisWakeStore("redis://127.0.0.1:1", "p", partitions=8), WakeStore)
