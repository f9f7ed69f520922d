"""Several nodes at one execution: exactly one wins, whatever the order."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from runtime_support import add, kinds, of_kind

from loom import (
    ExecutionAlreadyExistsError,
    ExecutionFinishedError,
    FlowCancelledError,
    GateNotOpenError,
    flow,
)
from loom.schemas.envelope import TERMINAL_KINDS, Kind
from loom.testing.runtime import crash, until


@flow("waits")
async def waits(ctx):
    message = await ctx.receive("go")
    return await ctx.run(add, message, 1)


@flow("gated")
async def gated(ctx):
    return await ctx.gate("approve")


async def parked_by_a_node_that_died(fleet, flow_, execution_id="x"):
    node = fleet.runtime("first", [waits, gated])
    await node.open()
    await node.start(flow_, execution_id=execution_id)
    await until(lambda: node._engine.parked_runs)
    await crash(node)


@pytest.mark.parametrize("seed", range(10))
async def test_one_node_wins_the_notify_race(fleet, seed):
    await parked_by_a_node_that_died(fleet, waits)
    async with fleet.client() as client:
        await client.send("x", "go", 1)
    rng = random.Random(seed)
    async with (
        fleet.runtime("a", [waits], owned=()) as a,
        fleet.runtime("b", [waits], owned=()) as b,
        fleet.runtime("c", [waits], owned=()) as c,
    ):

        async def notify(node):
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            return await node.notify_inbox("x")

        await asyncio.gather(*(notify(node) for node in (a, b, c)))
        assert await a.handle("x").result(10) == 2
        history = await a.history("x")
        assert kinds(history).count(Kind.MESSAGE_CONSUMED) == 1
        assert kinds(history).count(Kind.EXECUTION_RESUMED) == 1
        winners = {e.metadata["node"] for e in history[2:]}
        assert len(winners) == 1


@pytest.mark.parametrize("seed", range(10))
async def test_one_answer_wins_the_resume_race(fleet, seed):
    rng = random.Random(seed)
    async with fleet.runtime("owner", [gated]) as owner, fleet.client() as one, fleet.client() as two:
        await owner.start(gated, execution_id="x")
        await until(lambda: owner._engine.parked_runs)

        async def resume(node, answer):
            for _ in range(rng.randrange(6)):
                await asyncio.sleep(0)
            try:
                await node.resume("x", "approve", answer)
            except (GateNotOpenError, ExecutionFinishedError):
                return None
            return answer

        answers = await asyncio.gather(resume(owner, "owner"), resume(one, "one"), resume(two, "two"))
        accepted = [answer for answer in answers if answer is not None]
        assert [await owner.handle("x").result(5)] == accepted
        assert len(of_kind(await owner.history("x"), Kind.EXECUTION_RESUMED)) == 1


@pytest.mark.parametrize("seed", range(10))
async def test_a_cancel_racing_the_end_leaves_one_end(fleet, seed):
    rng = random.Random(seed)
    async with fleet.runtime("owner", [waits]) as owner, fleet.client() as client:
        await owner.start(waits, execution_id="x")
        await until(lambda: owner._engine.parked_runs)

        async def later(call):
            for _ in range(rng.randrange(8)):
                await asyncio.sleep(0)
            return await call

        outcomes = await asyncio.gather(
            later(client.send("x", "go", 1)), later(client.cancel("x")), return_exceptions=True
        )
        history = await owner.history("x")
        await until(lambda: fleet.log.index.row("x").finished)
        history = await owner.history("x")
        assert sum(e.type in TERMINAL_KINDS for e in history) == 1
        if history[-1].type == Kind.EXECUTION_CANCELLED:
            assert outcomes[1] is None
            with pytest.raises(FlowCancelledError):
                await owner.handle("x").result(5)
        else:
            assert isinstance(outcomes[1], ExecutionFinishedError)


async def test_of_many_starts_of_one_id_one_wins(fleet):
    async with (
        fleet.runtime("a", [gated]) as a,
        fleet.runtime("b", [gated], owned=()) as b,
        fleet.client() as c,
    ):
        outcomes = await asyncio.gather(
            *(node.start("gated", execution_id="x") for node in (a, b, c) * 5), return_exceptions=True
        )
        counted = Counter(type(outcome) for outcome in outcomes)
        assert counted[ExecutionAlreadyExistsError] == 14


@pytest.mark.parametrize("resident", [0, 100])
async def test_messages_from_everywhere_are_each_consumed_once_in_order_per_sender(fleet, resident):
    @flow("collects")
    async def collects(ctx, count):
        seen = []
        for _ in range(count):
            seen.append(await ctx.receive("go"))
            if len(seen) % 10 == 0:
                await ctx.run(add, 1, 1)
        return seen

    async with (
        fleet.runtime("a", [collects], settings={"max_resident": resident}) as a,
        fleet.runtime("b", [collects], owned=()) as b,
        fleet.client() as c,
    ):
        await a.start(collects, 90, execution_id="x")

        async def send(node, name):
            for n in range(30):
                await node.send("x", "go", [name, n], message_id=f"{name}{n}")

        await asyncio.gather(send(a, "a"), send(b, "b"), send(c, "c"))
        seen = await a.handle("x").result(20)
        for name in "abc":
            assert [n for who, n in seen if who == name] == list(range(30))


async def test_a_stale_resident_run_gives_way_to_whoever_took_its_execution(fleet):
    """The owner keeps a parked run while another node takes the execution and parks it again."""

    @flow("twice")
    async def twice(ctx):
        return [await ctx.receive("go"), await ctx.receive("go")]

    async with fleet.runtime("owner", [twice]) as owner, fleet.runtime("other", [twice], owned=()) as other:
        await owner.start(twice, execution_id="x")
        await until(lambda: owner._engine.parked_runs)
        await other.recover_abandoned("x")
        await until(lambda: fleet.log.index.row("x").status == Kind.EXECUTION_SUSPENDED)
        await owner.send("x", "go", 1)
        await owner.send("x", "go", 2)
        assert await owner.handle("x").result(10) == [1, 2]
