"""The verbs: what they do, and what they refuse."""

from __future__ import annotations

import asyncio

import pydantic
import pytest
from runtime_support import add, kinds, of_kind

from loom import (
    DeadlineExceededError,
    ExecutionAlreadyExistsError,
    ExecutionDeniedError,
    ExecutionFinishedError,
    ExecutionNotFoundError,
    FlowCancelledError,
    InboxDiscardRefusedError,
    InvalidIdError,
    InvalidInputError,
    Principal,
    StaleFenceError,
    UnknownFlowError,
    flow,
)
from loom.schemas.envelope import Kind
from loom.testing.runtime import until, until_parked


class Order(pydantic.BaseModel):
    total: int


@flow("order")
async def order(ctx, request: Order):
    return request.total


order.fn.__annotations__["request"] = Order


@flow("adds-then-waits")
async def adds_then_waits(ctx, n):
    first = await ctx.run(add, n, 1)
    second = await ctx.run(add, first, 1)
    return second + await ctx.receive("go")


# -- start -------------------------------------------------------------------------------------------------------


async def test_start_returns_once_the_first_event_is_durable(runtime):
    handle = await runtime.start(
        order, Order(total=1), execution_id="o-1", subject="s", principal=Principal("al")
    )
    assert handle.execution_id == "o-1"
    first = (await runtime.history("o-1"))[0]
    assert first.data == {
        "workflow": "order",
        "input": {"total": 1},
        "chainId": "o-1",
        "subject": "s",
        "principal": {"actor": "al"},
    }
    assert first.metadata["actor"] == "al"


@pytest.mark.parametrize(
    ("flow_or_name", "given", "chosen", "error"),
    [
        ("nowhere", None, None, UnknownFlowError),
        (order, {"total": "many"}, None, InvalidInputError),
        (order, object(), None, InvalidInputError),
        (order, {"total": 1, "x": "y" * 600_000}, None, InvalidInputError),
        (order, {"total": 1}, "__loom_x", InvalidIdError),
        (order, {"total": 1}, "a:b", InvalidIdError),
        (order, {"total": 1}, "", InvalidIdError),
    ],
)
async def test_start_refuses_what_cannot_be(runtime, flow_or_name, given, chosen, error):
    with pytest.raises(error):
        await runtime.start(flow_or_name, given, execution_id=chosen)
    assert runtime._engine.runs == {}


async def test_a_taken_id_is_refused_whoever_asks(fleet):
    async with fleet.runtime("node", [order]) as runtime, fleet.client() as client:
        await runtime.start(order, {"total": 1}, execution_id="taken")
        for node in (runtime, client):
            with pytest.raises(ExecutionAlreadyExistsError):
                await node.start("order", {"total": 2}, execution_id="taken", principal=Principal("mallory"))


async def test_a_client_starts_by_name_and_a_node_drives(fleet):
    async with fleet.runtime("node", [order]) as runtime, fleet.client() as client:
        handle = await client.start("order", {"total": 3})
        assert await handle.result(5) == 3
        history = await client.history(handle.execution_id)
        assert "node" not in history[0].metadata
        assert history[1].metadata["node"] == runtime.node


async def test_a_client_that_knows_the_flow_checks_the_input_and_types_the_result(fleet):
    async with fleet.runtime("node", [order]), fleet.client() as client:
        with pytest.raises(InvalidInputError):
            await client.start(order, {"total": "many"})
        assert await (await client.start(order, Order(total=4))).result(5) == 4


async def test_a_result_that_does_not_come_in_time(runtime):
    handle = await runtime.start(adds_then_waits, 1)
    with pytest.raises(DeadlineExceededError):
        await handle.result(0.05)
    await runtime.send(handle.execution_id, "go", 1)
    assert await handle.result(5) == 4
    assert await runtime.handle(handle.execution_id).result(5) == 4


async def test_what_does_not_exist_is_not_found(runtime):
    calls = [
        runtime.send("nobody", "go", 1),
        runtime.resume("nobody", "gate", 1),
        runtime.cancel("nobody"),
        runtime.load_state("nobody"),
        runtime.query("nobody"),
        runtime.history("nobody"),
        runtime.status("nobody"),
        runtime.parked_at_sequence("nobody"),
        runtime.follow_to_head("nobody"),
        runtime.acquire_fence("nobody"),
        runtime.fork("nobody"),
        runtime.record_outcome("nobody", 1),
        runtime.recover_abandoned("nobody"),
        runtime.notify_inbox("nobody"),
        runtime.expire_inbox("nobody", "go", older_than_ms=1),
        runtime.handle("nobody").result(5),
        runtime.handle("nobody").status(),
    ]
    for call in calls:
        with pytest.raises(ExecutionNotFoundError):
            await call


# -- cancel ------------------------------------------------------------------------------------------------------


async def test_cancel_is_terminal_at_once_and_stops_the_step(runtime):
    begun, stopped = asyncio.Event(), asyncio.Event()

    async def forever():
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    @flow("forever")
    async def forever_flow(ctx):
        await ctx.run(forever)

    handle = await runtime.start(forever_flow)
    await asyncio.wait_for(begun.wait(), 5)
    await runtime.cancel(handle.execution_id, "ordered twice", principal=None)
    assert await handle.status() == "cancelled"
    with pytest.raises(FlowCancelledError, match="ordered twice"):
        await handle.result(5)
    await asyncio.wait_for(stopped.wait(), 5)
    with pytest.raises(ExecutionFinishedError):
        await runtime.cancel(handle.execution_id)
    with pytest.raises(ExecutionFinishedError):
        await runtime.send(handle.execution_id, "go", 1)


async def test_cancel_from_a_client_stops_the_run_of_the_node(fleet):
    stopped = asyncio.Event()

    async def forever():
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    @flow("forever")
    async def forever_flow(ctx):
        await ctx.run(forever)

    async with fleet.runtime("node", [forever_flow]) as runtime, fleet.client() as client:
        handle = await runtime.start(forever_flow)
        await client.cancel(handle.execution_id, "enough")
        with pytest.raises(FlowCancelledError, match="enough"):
            await handle.result(5)
        await asyncio.wait_for(stopped.wait(), 5)
        assert runtime._engine.runs == {}


async def test_a_busy_flow_cannot_outrun_a_cancel(fleet):
    @flow("busy")
    async def busy(ctx):
        while True:
            await ctx.run(add, 1, 1)

    async with fleet.runtime("node", [busy]) as runtime, fleet.client() as client:
        handle = await runtime.start(busy)
        await client.cancel(handle.execution_id)
        with pytest.raises(FlowCancelledError):
            await handle.result(10)


# -- reading -----------------------------------------------------------------------------------------------------


async def test_state_query_and_park_of_a_parked_execution(runtime):
    handle = await runtime.start(adds_then_waits, 1)
    await until_parked(runtime, handle.execution_id)
    state = await runtime.load_state(handle.execution_id)
    assert (state.status, state.workflow, state.steps, state.head) == ("suspended", "adds-then-waits", 2, 3)
    seen = await runtime.query(handle.execution_id)
    assert seen["status"] == "suspended"
    assert seen["waits"][0]["arms"] == [{"kind": "inbox", "topic": "go"}]
    assert await runtime.parked_at_sequence(handle.execution_id) == 3
    await runtime.send(handle.execution_id, "go", 1)
    await handle.result(5)
    assert await runtime.parked_at_sequence(handle.execution_id) is None
    assert await runtime.status(handle.execution_id) == "completed"


async def test_a_sender_that_repeats_itself_is_told_the_same_after_the_end(runtime):
    handle = await runtime.start(adds_then_waits, 1)
    assert await runtime.send(handle.execution_id, "go", 1, message_id="m", sender="s") == "m"
    await handle.result(5)
    assert await runtime.send(handle.execution_id, "go", 1, message_id="m", sender="s") == "m"
    for other in ({"message_id": "m"}, {"message_id": "n", "sender": "s"}, {}):
        with pytest.raises(ExecutionFinishedError):
            await runtime.send(handle.execution_id, "go", 1, **other)


async def test_follow_yields_every_event_until_the_end(fleet):
    async with fleet.runtime("node", [adds_then_waits]) as runtime, fleet.client() as client:
        handle = await runtime.start(adds_then_waits, 1)
        seen = []

        async def follow():
            async for event in client.follow(handle.execution_id):
                seen.append(event.type)

        task = asyncio.create_task(follow())
        await until(lambda: Kind.EXECUTION_SUSPENDED in seen)
        await runtime.send(handle.execution_id, "go", 1)
        await asyncio.wait_for(task, 5)
        assert seen == kinds(await runtime.history(handle.execution_id))


# -- operators ---------------------------------------------------------------------------------------------------


async def test_a_fork_goes_its_own_way_from_a_step(runtime):
    handle = await runtime.start(adds_then_waits, 1)
    await until_parked(runtime, handle.execution_id)
    await runtime.send(handle.execution_id, "go", 10)
    assert await handle.result(5) == 13
    fork = await runtime.fork(handle.execution_id, at_step="0:1", principal=None)
    await until_parked(runtime, fork.execution_id)
    await runtime.send(fork.execution_id, "go", 20)
    assert await fork.result(5) == 23
    history = await runtime.history(fork.execution_id)
    assert history[0].data["chainId"] == fork.execution_id
    assert history[0].data["forkedFrom"] == {"executionId": handle.execution_id, "sequence": 1}
    assert len(of_kind(history, Kind.STEP_COMPLETED)) == 2
    assert await handle.result(5) == 13


async def test_a_fork_after_a_message_starts_with_an_inbox_of_its_own(runtime):
    @flow("two")
    async def two(ctx):
        return [await ctx.receive("go"), await ctx.receive("go")]

    handle = await runtime.start(two)
    await runtime.send(handle.execution_id, "go", 1)
    await until(lambda: runtime._engine.runs[handle.execution_id].state.cursors.get("go") == 0)
    await until_parked(runtime, handle.execution_id)
    fork = await runtime.fork(handle.execution_id)
    await runtime.send(fork.execution_id, "go", 2)
    assert await fork.result(5) == [1, 2]
    await runtime.send(handle.execution_id, "go", 3)
    assert await handle.result(5) == [1, 3]


@pytest.mark.parametrize("where", [{"at_sequence": 99}, {"at_step": "nowhere"}, {"at_sequence": -1}])
async def test_a_fork_from_nowhere_is_refused(runtime, where):
    handle = await runtime.start(adds_then_waits, 1)
    await until_parked(runtime, handle.execution_id)
    with pytest.raises(InvalidInputError):
        await runtime.fork(handle.execution_id, **where)


async def test_an_outcome_is_noted_after_the_end(runtime):
    handle = await runtime.start(adds_then_waits, 1)
    with pytest.raises(InvalidInputError):
        await runtime.record_outcome(handle.execution_id, "paid")
    await runtime.send(handle.execution_id, "go", 1)
    await handle.result(5)
    await runtime.record_outcome(handle.execution_id, {"paid": True}, principal=None)
    assert (await runtime.load_state(handle.execution_id)).outcome == {"paid": True}
    assert await runtime.handle(handle.execution_id).result(5) == 4


async def test_a_taken_fence_stops_the_driver(fleet, trouble):
    hold = asyncio.Event()

    @flow("held")
    async def held(ctx):
        await ctx.run(hold.wait)
        return "done"

    async with fleet.runtime("node", [held], **trouble.options) as runtime:
        handle = await runtime.start(held)
        token = await runtime.acquire_fence(handle.execution_id)
        assert token == 2
        hold.set()
        await until(lambda: handle.execution_id not in runtime._engine.runs, "the run to stop")
        assert await handle.status() == "running"
        assert kinds(await runtime.history(handle.execution_id)) == [Kind.EXECUTION_STARTED]
        assert await runtime.recover_abandoned(handle.execution_id) == [handle.execution_id]
        assert await handle.result(5) == "done"
    assert not [error for error, _ in trouble.errors if not isinstance(error, StaleFenceError)]


async def test_messages_are_discarded_by_operators_only(fleet):
    settings = {"access": {"operators": ["ops"]}}
    async with fleet.runtime("node", [adds_then_waits], settings=settings) as runtime:
        owner, operator = Principal("owner"), Principal("ops")
        handle = await runtime.start(adds_then_waits, 1, principal=owner)
        await until_parked(runtime, handle.execution_id)
        with pytest.raises(InboxDiscardRefusedError, match="invalid"):
            await runtime.send(handle.execution_id, "other", "poison", message_id="p1")
            await runtime.discard_inbox(handle.execution_id, "other", message_id="p2", principal=operator)
        for denied in (owner, None, Principal("mallory")):
            with pytest.raises(ExecutionDeniedError):
                await runtime.discard_inbox(handle.execution_id, "other", principal=denied)
        assert (
            await runtime.discard_inbox(
                handle.execution_id, "other", message_id="p1", reason="poison", principal=operator
            )
            == 1
        )
        assert await runtime.discard_inbox(handle.execution_id, "other", principal=operator) == 0
        await runtime.send(handle.execution_id, "go", 1)
        assert await handle.result(5) == 4
        gone = [e for e in await runtime.history(handle.execution_id) if e.data.get("reason") == "discarded"]
        assert [(e.data["payload"], e.data["note"], e.metadata["actor"]) for e in gone] == [
            (None, "poison", "ops")
        ]


async def test_a_running_execution_has_nothing_to_discard(fleet):
    hold = asyncio.Event()

    @flow("held")
    async def held(ctx):
        await ctx.run(hold.wait)

    async with fleet.runtime("node", [held], settings={"access": {"operators": ["ops"]}}) as runtime:
        handle = await runtime.start(held)
        with pytest.raises(InboxDiscardRefusedError, match="not-parked"):
            await runtime.discard_inbox(handle.execution_id, "go", principal=Principal("ops"))
        hold.set()
        await handle.result(5)


async def test_messages_are_expired_by_age(runtime, fleet):
    handle = await runtime.start(adds_then_waits, 1)
    await until_parked(runtime, handle.execution_id)
    await runtime.send(handle.execution_id, "other", 1)
    assert await runtime.expire_inbox(handle.execution_id, "other", older_than_ms=60_000) == 0
    assert await runtime.expire_inbox(handle.execution_id, "other", older_than_ms=-1) == 1
    await runtime.send(handle.execution_id, "go", 1)
    assert await handle.result(5) == 4


async def test_an_execution_goes_on_as_another_flow(fleet, trouble):
    @flow("v1")
    async def v1(ctx):
        await ctx.run(add, 1, 1)
        return await ctx.receive("go")

    @flow("v2")
    async def v2(ctx):
        await ctx.run(add, 1, 1)
        await ctx.run(add, 2, 2)
        return "v2"

    async with fleet.runtime("node", [v1], **trouble.options) as runtime:
        handle = await runtime.start(v1)
        await until_parked(runtime, handle.execution_id)
        again = await runtime.resume_as(handle.execution_id, v2)
        assert await again.result(5) == "v2"
        recovered = of_kind(await runtime.history(handle.execution_id), Kind.EXECUTION_RECOVERED)[0]
        assert (recovered.data["reason"], recovered.data["workflow"]) == ("resume_as", "v2")
    assert trouble.errors == []


async def test_a_kept_state_is_restored_if_the_log_agrees(runtime):
    handle = await runtime.start(adds_then_waits, 1)
    await until_parked(runtime, handle.execution_id)
    state = await runtime.load_state(handle.execution_id)
    forged = await runtime.load_state(handle.execution_id)
    forged.steps = 7
    with pytest.raises(InvalidInputError):
        await runtime.restore_from_state(handle.execution_id, forged)
    again = await runtime.restore_from_state(handle.execution_id, state)
    await runtime.send(handle.execution_id, "go", 1)
    assert await again.result(5) == 4


async def test_an_operator_s_word_has_the_owner_take_over(fleet):
    hold = asyncio.Event()
    began = []

    async def effect():
        began.append(1)
        await hold.wait()
        return "done"

    @flow("held")
    async def held(ctx):
        return await ctx.run(effect)

    async with fleet.runtime("node", [held, adds_then_waits]) as runtime, fleet.client() as client:
        handle = await runtime.start(held)
        await until(lambda: began)
        assert await client.recover(handle.execution_id, reason="host is off", principal=None)
        await until(lambda: len(began) == 2, "the step to be begun anew")
        hold.set()
        assert await handle.result(5) == "done"
        recovered = of_kind(await client.history(handle.execution_id), Kind.EXECUTION_RECOVERED)
        assert [e.data["reason"] for e in recovered] == ["host is off"]
        other = await runtime.start(adds_then_waits, 1)
        await until_parked(runtime, other.execution_id)
        assert await client.recover(other.execution_id) is False
        with pytest.raises(ExecutionFinishedError):
            await client.recover(handle.execution_id)


async def test_what_waits_in_an_inbox_is_listed_without_payloads(fleet):
    async with fleet.runtime("node", [adds_then_waits]) as runtime, fleet.client() as client:
        handle = await runtime.start(adds_then_waits, 1)
        await until_parked(runtime, handle.execution_id)
        await runtime.send(handle.execution_id, "other", {"secret": 1}, message_id="m1", sender="wms")
        rows = await runtime.inbox(handle.execution_id)
        assert [(row["topic"], row["inbox_seq"], row["message_id"], row["sender"]) for row in rows] == [
            ("other", 0, "m1", "wms")
        ]
        assert "secret" not in str(rows)
        assert await client.inbox(handle.execution_id) == rows or rows[0]["age_ms"] < 5000


async def test_a_rebuild_can_be_tried_dry(fleet):
    from loom import ConfigError, timer

    @flow("sleeps")
    async def sleeps(ctx):
        await ctx.select(timer(60))

    async with fleet.runtime("node", [sleeps]) as runtime, fleet.client() as client:
        handle = await runtime.start(sleeps)
        await until_parked(runtime, handle.execution_id)
        fleet.wakes.flush()
        assert await runtime.rebuild_wakes(dry_run=True) == 1
        assert not fleet.wakes.slots
        assert await runtime.rebuild_wakes() == 1
        assert len(fleet.wakes.slots) == 1
        with pytest.raises(ConfigError):
            await client.rebuild_wakes()
