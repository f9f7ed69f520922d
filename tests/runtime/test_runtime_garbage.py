"""What has ended is freed with its last reference, and leaves nothing for the garbage collector to find."""

from __future__ import annotations

import asyncio
import gc

import pytest

from loom import flow, receive, timer
from loom.testing.runtime import MemoryFleet, until


async def add(a, b):
    return a + b


@flow("adds")
async def adds(ctx, n):
    return await ctx.run(add, n, 1)


@flow("waits")
async def waits(ctx, n):
    pair = await asyncio.gather(ctx.run(add, n, 1), ctx.run(add, n, 2))
    arm = await ctx.select(receive("go"), timer(60))
    return [*pair, arm.value]


AT_ONCE = 50


@pytest.mark.parametrize("acquire", ["lazy", "eager"])
async def test_what_has_ended_leaves_no_garbage(acquire):
    fleet = MemoryFleet()

    async def all_of_it(runtime):
        handles = await asyncio.gather(*(runtime.start(adds, n) for n in range(AT_ONCE)))
        await asyncio.gather(*(handle.result(20) for handle in handles))
        handles = await asyncio.gather(*(runtime.start(waits, n) for n in range(AT_ONCE)))
        await until(lambda: len(runtime._engine.parked_runs) == AT_ONCE)
        await asyncio.gather(*(runtime.send(handle.execution_id, "go", 1) for handle in handles))
        await asyncio.gather(*(handle.result(20) for handle in handles))

    async with fleet.runtime("node", [adds, waits], settings={"leases": {"acquire": acquire}}) as runtime:
        await all_of_it(runtime)
        gc.collect()
        gc.disable()
        try:
            await all_of_it(runtime)
            await asyncio.sleep(0.05)
            assert gc.collect() < AT_ONCE
        finally:
            gc.enable()
