"""Continue-as-new: a chain goes on with a fresh log, and no message is lost or doubled on the way."""

from __future__ import annotations

import asyncio
import random

from runtime_support import kinds

from loom import FlowFailedError, flow
from loom.schemas.envelope import Kind
from loom.testing.runtime import crash, until


@flow("collector")
async def collector(ctx, given):
    seen = list(given["seen"])
    for _ in range(given["batch"]):
        message = await ctx.receive("go")
        if message == "end":
            return seen
        seen.append(message)
    ctx.continue_as_new({"seen": seen, "batch": given["batch"]})


async def chain_of(runtime, execution_id):
    ids = [execution_id]
    while (last := (await runtime.history(ids[-1]))[-1]).type == Kind.EXECUTION_CONTINUED:
        ids.append(last.data["successorId"])
    return ids


async def test_a_hundred_messages_racing_the_switch_are_each_handled_once(fleet):
    async with fleet.runtime("node", [collector]) as runtime, fleet.client() as client:
        handle = await runtime.start(collector, {"seen": [], "batch": 7})
        random.seed(1)

        async def send(n, sender):
            await asyncio.sleep(random.random() * 0.05)
            await sender.send(handle.execution_id, "go", n, message_id=f"m{n}")
            if n % 3 == 0:
                await sender.send(handle.execution_id, "go", n, message_id=f"m{n}")

        await asyncio.gather(*(send(n, runtime if n % 2 else client) for n in range(100)))
        await runtime.send(handle.execution_id, "go", "end")
        assert sorted(await handle.result(10)) == list(range(100))
        ids = await chain_of(runtime, handle.execution_id)
        assert len(ids) == 100 // 7 + 1
        assert await runtime.follow_to_head(handle.execution_id) == ids[-1]
        assert {fleet.log.shard_of(i) for i in ids} == {fleet.log.shard_of(ids[0])}


async def test_both_events_stand_or_neither(fleet):
    async with fleet.runtime("node", [collector]) as runtime:
        handle = await runtime.start(collector, {"seen": [], "batch": 1})
        await runtime.send(handle.execution_id, "go", 1)
        await until(
            lambda: len(runtime._engine.runs) == 1 and handle.execution_id not in runtime._engine.runs
        )
        first, second = await chain_of(runtime, handle.execution_id)
        start = (await runtime.history(second))[0].data
        assert start["continuedFrom"]["executionId"] == first
        assert start["continuedFrom"]["carried"]["inbox"]["cursors"] == {"go": 0}
        assert start["chainId"] == first
        await runtime.send(first, "go", "end")
        assert await handle.result(5) == [1]


async def test_a_chain_survives_a_crash_at_every_switch(fleet):
    runtime = fleet.runtime("node-0", [collector])
    await runtime.open()
    handle = await runtime.start(collector, {"seen": [], "batch": 2})
    execution_id = handle.execution_id
    for n in range(8):
        await runtime.send(execution_id, "go", n)
        if n % 2:
            await until(lambda: True)
            await crash(runtime)
            runtime = fleet.runtime(f"node-{n}", [collector])
            await runtime.open()
    await runtime.send(execution_id, "go", "end")
    assert await runtime.handle(execution_id).result(15) == list(range(8))
    await runtime.close()


async def test_an_input_over_the_limit_fails_the_execution(fleet):
    @flow("grows")
    async def grows(ctx, text=""):
        ctx.continue_as_new("x" * 5000)

    async with fleet.runtime("node", [grows], settings={"max_payload_bytes": 2048}) as runtime:
        handle = await runtime.start(grows)
        try:
            await handle.result(5)
        except FlowFailedError as error:
            assert "5002 bytes" in str(error)
        assert kinds(await runtime.history(handle.execution_id))[-1] == Kind.EXECUTION_FAILED
