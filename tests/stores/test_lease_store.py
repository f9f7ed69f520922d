"""The lease contract on memory and on a real Redis."""

from functools import partial

import pytest
from redis_bench import RedisBench

from loom.stores.contracts import LeaseStore
from loom.stores.memory.lease_store import LeaseTable, MemoryLeaseStore
from loom.stores.redis.lease_store import RedisLeaseStore
from loom.testing.conformance.lease_store import LeaseStoreConformance

PATIENT = partial(RedisLeaseStore, floor_ms=1_000)
"""Its short leases do not make for short bounds: the suite is about leases."""


class MemoryBench:
    def __init__(self):
        self.now = 1_700_000_000_000
        self.table = LeaseTable(lambda: self.now)

    def open(self):
        return MemoryLeaseStore(self.table)

    async def advance(self, ms):
        self.now += ms

    async def empty(self):
        self.table.flush()


class TestMemory(LeaseStoreConformance):
    @pytest.fixture
    def bench(self):
        return MemoryBench()


class TestRedis(LeaseStoreConformance):
    @pytest.fixture(params=["plain", "scripts flushed before each call"])
    async def bench(self, request, redis_url, redis_prefix):
        bench = RedisBench(redis_url, redis_prefix, PATIENT, forgetful=request.param != "plain")
        yield bench
        await bench.close()


def test_both_are_lease_stores():
    assert isinstance(MemoryBench().open(), LeaseStore)
    assert isinstance(RedisLeaseStore("redis://127.0.0.1:1", "p"), LeaseStore)
    assert MemoryLeaseStore.scope == RedisLeaseStore.scope == "cluster"


async def test_more_leases_than_one_script_sorts_in_expire_at_once(redis_url, redis_prefix):
    bench = RedisBench(redis_url, redis_prefix, PATIENT)
    store = bench.open()
    ids = sorted(f"e{n}" for n in range(2_100))
    await store.acquire_many(ids, "dead", 600)
    await bench.advance(600)
    assert [lease.execution_id for lease in await store.expired(1_500)] == ids[:1_500]
    assert [lease.execution_id for lease in await store.expired(1_500, after=ids[1_499])] == ids[1_500:]
    await bench.close()
