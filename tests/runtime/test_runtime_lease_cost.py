"""What leases cost, as a count of calls of their store: nothing for a short run if lazy, two groups if eager."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from runtime_support import add

from loom import flow
from loom.stores.memory.lease_store import MemoryLeaseStore
from loom.testing.runtime import MemoryFleet

EXECUTIONS = 1_000
CALLS_OF_RUNS = ("acquire", "acquire_many", "renew_many", "release_many", "steal", "get")


@flow("short")
async def short(ctx, n):
    return await ctx.run(add, n, 1)


class Counting(MemoryLeaseStore):
    def __init__(self, table):
        super().__init__(table)
        self.calls = Counter()

    def __getattribute__(self, name):
        if name in CALLS_OF_RUNS:
            self.calls[name] += 1
        return super().__getattribute__(name)


@pytest.mark.parametrize("mode", ["lazy", "eager"])
async def test_calls_for_a_thousand_short_executions(mode):
    fleet = MemoryFleet(ttl_ms=60_000)
    leases = Counting(fleet.leases)
    runtime = fleet.runtime("node", [short], settings={"leases": {"ttl_ms": 60_000, "acquire": mode}})
    runtime._given["leases"] = leases
    async with runtime:
        handles = await asyncio.gather(*(runtime.start(short, n) for n in range(EXECUTIONS)))
        assert [await handle.result(30) for handle in handles] == [n + 1 for n in range(EXECUTIONS)]
        if mode == "lazy":
            assert not leases.calls
        else:
            assert set(leases.calls) == {"acquire_many", "release_many"}
            assert leases.calls.total() < EXECUTIONS / 10
        assert not fleet.leases.rows
