"""Flows that cannot go on: they back off, are told, leave their logs alone, and their neighbours progress."""

from __future__ import annotations

import asyncio

import pytest
from runtime_support import add, kinds

from loom import FlowDivergedError, FlowStuckError, InvalidInputError, UnknownFlowError, flow
from loom.errors import SealedPayloadUnreadableError
from loom.ids import inbox_stream
from loom.runtime.backoff import MAX_TRACKED, Backoff
from loom.runtime.facts import message
from loom.schemas.envelope import Kind, NewEvent
from loom.stores.contracts import StreamAppend
from loom.testing.clock import VirtualClock
from loom.testing.replay import replay
from loom.testing.runtime import crash, until, until_parked, until_rows


@flow("changing")
async def old_code(ctx):
    await ctx.run(add, 1, 1)
    return await ctx.receive("go")


@flow("changing")
async def new_code(ctx):
    await ctx.run(add, 1, 1, name="renamed")
    return await ctx.receive("go")


@flow("changing")
async def patched_code(ctx):
    if ctx.patched("rename"):
        await ctx.run(add, 1, 1, name="renamed")
    else:
        await ctx.run(add, 1, 1)
    return await ctx.receive("go")


@flow("neighbour")
async def neighbour(ctx):
    return await ctx.receive("go")


async def leave_parked(fleet, *flows):
    node = fleet.runtime("first", flows)
    await node.open()
    for definition in flows:
        await node.start(definition, execution_id=definition.name)
    await until(lambda: len(node._engine.parked_runs) == len(flows))
    await crash(node)


async def test_a_diverged_flow_leaves_its_log_and_neighbours_alone(fleet, trouble):
    await leave_parked(fleet, old_code, neighbour)
    async with fleet.runtime("node", [new_code, neighbour], **trouble.options) as runtime:
        before = await runtime.history("changing")
        for execution_id in ("changing", "neighbour"):
            await runtime.send(execution_id, "go", 1)
        assert await runtime.handle("neighbour").result(5) == 1
        await until(lambda: trouble.errors)
        error, about = trouble.errors[0]
        assert isinstance(error, FlowDivergedError)
        assert about == "changing"
        assert (error.sequence, "renamed" in str(error)) == (1, True)
        assert await runtime.history("changing") == before
        assert "changing" in runtime._engine.backoff.snapshot()
        with pytest.raises(FlowDivergedError):
            waiting = asyncio.ensure_future(runtime.handle("changing").result(5))
            await asyncio.sleep(0.01)
            runtime._engine.backoff.cleared("changing")
            await runtime.notify_inbox("changing")
            await waiting
    async with fleet.runtime("fixed", [old_code]) as fixed:
        assert await fixed.handle("changing").result(10) == 1


async def test_changed_code_guarded_by_patched_goes_on(fleet, trouble):
    await leave_parked(fleet, old_code)
    async with fleet.runtime("node", [patched_code], **trouble.options) as runtime:
        await runtime.send("changing", "go", 1)
        assert await runtime.handle("changing").result(5) == 1
        fresh = await runtime.start(patched_code)
        await runtime.send(fresh.execution_id, "go", 2)
        assert await fresh.result(5) == 2
        assert Kind.DECISION_RECORDED in kinds(await runtime.history(fresh.execution_id))
    assert trouble.errors == []


async def test_a_flow_that_is_not_known_here_waits_for_a_node_that_knows_it(fleet, trouble):
    await leave_parked(fleet, old_code, neighbour)
    async with fleet.client() as client:
        await client.send("changing", "go", 1)
        async with fleet.runtime("node", [neighbour], **trouble.options) as runtime:
            await until(lambda: trouble.errors)
            assert isinstance(trouble.errors[0][0], UnknownFlowError)
            await runtime.send("neighbour", "go", 1)
            assert await runtime.handle("neighbour").result(5) == 1
        async with fleet.runtime("other", [old_code]) as other:
            assert await other.handle("changing").result(10) == 1


async def test_a_spinning_flow_is_stopped_and_neighbours_progress(fleet, trouble):
    @flow("spins")
    async def spins(ctx):
        await ctx.run(add, 1, 1)
        while True:
            await asyncio.sleep(0)

    async with fleet.runtime("node", [spins, neighbour], **trouble.options) as runtime:
        handle = await runtime.start(spins)
        other = await runtime.start(neighbour)
        await runtime.send(other.execution_id, "go", 1)
        assert await other.result(10) == 1
        with pytest.raises(FlowStuckError):
            await handle.result(10)
        assert await handle.status() == "running"
        await runtime.cancel(handle.execution_id)
        assert await handle.status() == "cancelled"


async def test_a_sealed_head_holds_the_execution_and_nothing_is_written(fleet, trouble):
    """A payload that reached the inbox sealed (by a store of another node): system.md 1.4 and 1.5."""
    async with fleet.runtime("node", [neighbour], **trouble.options) as runtime:
        for park_first in (True, False):
            handle = await runtime.start(neighbour)
            if park_first:
                await until_parked(runtime, handle.execution_id)
            event = message(
                "go",
                {"__loomEnc": "loom/aes-256-gcm"},
                message_id="m1",
                sender=None,
                event_id=f"sealed-{park_first}",
                metadata={},
            )
            await fleet.store(()).append(StreamAppend(inbox_stream(handle.execution_id, "go"), (event,)))
            await until(lambda: any(about == handle.execution_id for _, about in trouble.errors))
            error = next(error for error, about in trouble.errors if about == handle.execution_id)
            assert isinstance(error, SealedPayloadUnreadableError)
            assert "aes" not in str(error)
            await until(lambda: fleet.log.index.row(handle.execution_id).status == Kind.EXECUTION_SUSPENDED)
            await until_rows(runtime._engine.wakes, handle.execution_id, "refusal")
            assert kinds(await runtime.history(handle.execution_id)) == [
                Kind.EXECUTION_STARTED,
                Kind.EXECUTION_SUSPENDED,
            ]


def test_back_off_doubles_is_bounded_and_forgets():
    clock = VirtualClock()
    backoff = Backoff(clock, first_ms=100, max_ms=1000)
    assert [backoff.failed("x") for _ in range(5)] == [100, 200, 400, 800, 1000]
    assert backoff.blocked("x")
    clock.advance(1000)
    assert not backoff.blocked("x")
    backoff.cleared("x")
    assert backoff.failed("x") == 100
    for n in range(2 * MAX_TRACKED):
        backoff.failed(str(n))
    assert len(backoff.snapshot()) == MAX_TRACKED


async def test_replay_of_a_committed_history(fleet):
    async with fleet.runtime("node", [old_code]) as runtime:
        handle = await runtime.start(old_code)
        await until(lambda: runtime._engine.parked_runs)
        parked = await runtime.history(handle.execution_id)
        await runtime.send(handle.execution_id, "go", 1)
        await handle.result(5)
        whole = await runtime.history(handle.execution_id)
    assert replay(old_code, whole) == []
    (wait,) = replay(old_code, parked)
    assert wait.arms[0].topic == "go"
    assert replay(patched_code, whole) == []
    with pytest.raises(FlowDivergedError):
        replay(new_code, whole)
    with pytest.raises(InvalidInputError):
        replay(old_code, whole[1:])


async def test_callbacks_that_raise_change_nothing(fleet):
    def broken(*_args):
        raise RuntimeError("host bug")

    async with fleet.runtime(
        "node", [neighbour], on_error=broken, on_storage_error=broken, on_warn=broken
    ) as runtime:
        seen = NewEvent(
            "x", Kind.EXECUTION_STARTED, {"workflow": "unknown", "input": None, "chainId": "u"}, {}
        )
        await fleet.store(()).append(StreamAppend("u", (seen,), expected_head=-1, fence=1))
        handle = await runtime.start(neighbour)
        await runtime.send(handle.execution_id, "go", 1)
        assert await handle.result(5) == 1
