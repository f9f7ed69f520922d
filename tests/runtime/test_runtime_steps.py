"""Steps: results, retries, timeouts, concurrency, threads, limits."""

from __future__ import annotations

import asyncio
import threading

import pydantic
import pytest
from runtime_support import add, kinds, of_kind

from loom import NO_RETRY, FlowFailedError, RetryPolicy, StepFailedError, TerminalError, flow
from loom.schemas.envelope import Kind

QUICK = RetryPolicy(attempts=3, first_ms=5, max_ms=5)


async def test_a_step_is_run_journaled_and_its_result_returned(runtime):
    @flow("one")
    async def one(ctx, n: int) -> int:
        return await ctx.run(add, n, 1)

    handle = await runtime.start(one, 41)
    assert await handle.result(5) == 42
    history = await runtime.history(handle.execution_id)
    assert kinds(history) == [Kind.EXECUTION_STARTED, Kind.STEP_COMPLETED, Kind.EXECUTION_COMPLETED]
    step = history[1].data
    assert (step["siteId"], step["name"], step["output"], step["attempt"]) == ("0:0", "add", 42, 1)
    assert {event.metadata["node"] for event in history} == {runtime.node}
    assert {event.metadata["schema"] for event in history} == {"1.25.0"}


async def test_models_go_in_and_come_out(runtime):
    class Order(pydantic.BaseModel):
        total: int

    class Receipt(pydantic.BaseModel):
        paid: int

    async def charge(total: int) -> Receipt:
        return Receipt(paid=total)

    @flow("models")
    async def models(ctx, order: Order) -> Receipt:
        return await ctx.run(charge, order.total)

    models.fn.__annotations__ = {"order": Order, "return": Receipt}
    charge.__annotations__ = {"total": int, "return": Receipt}
    handle = await runtime.start(models, Order(total=7))
    assert await handle.result(5) == Receipt(paid=7)


async def test_a_failed_step_is_retried_and_each_attempt_journaled(runtime):
    attempts = []

    async def flaky():
        attempts.append(1)
        if len(attempts) < 3:
            raise OSError("no route")
        return "ok"

    @flow("flaky")
    async def flaky_flow(ctx):
        return await ctx.run(flaky, retry=QUICK)

    handle = await runtime.start(flaky_flow)
    assert await handle.result(5) == "ok"
    history = await runtime.history(handle.execution_id)
    failed = of_kind(history, Kind.STEP_FAILED)
    assert [(e.data["attempt"], e.data["final"]) for e in failed] == [(1, False), (2, False)]
    assert all(e.data["retryAt"] >= e.data["at"] for e in failed)
    assert of_kind(history, Kind.STEP_COMPLETED)[0].data["attempt"] == 3


async def test_a_step_that_fails_for_good_raises_in_the_flow(runtime):
    async def broken():
        raise ValueError("nothing to be done")

    @flow("broken")
    async def broken_flow(ctx):
        try:
            await ctx.run(broken, retry=QUICK)
        except StepFailedError as error:
            return [error.step, error.error_type, error.error_message]

    handle = await runtime.start(broken_flow)
    assert await handle.result(5) == ["broken", "ValueError", "nothing to be done"]
    failed = of_kind(await runtime.history(handle.execution_id), Kind.STEP_FAILED)
    assert [e.data["final"] for e in failed] == [False, False, True]
    assert "retryAt" not in failed[-1].data


@pytest.mark.parametrize("by", ["class", "policy"])
async def test_a_terminal_error_is_not_retried(runtime, by):
    class Declined(TerminalError if by == "class" else Exception):
        pass

    async def charge():
        raise Declined("card refused")

    @flow("declined")
    async def declined(ctx):
        await ctx.run(charge, retry=RetryPolicy(attempts=5, first_ms=5, terminal=("Declined",)))

    handle = await runtime.start(declined)
    with pytest.raises(FlowFailedError) as caught:
        await handle.result(5)
    assert caught.value.error_type == "StepFailedError"
    assert len(of_kind(await runtime.history(handle.execution_id), Kind.STEP_FAILED)) == 1


async def test_a_step_that_hangs_times_out_and_is_tried_again(runtime):
    began = []

    async def hangs():
        began.append(1)
        if len(began) == 1:
            await asyncio.Event().wait()
        return "late"

    @flow("hangs")
    async def hanging(ctx):
        return await ctx.run(hangs, timeout=0.05, retry=QUICK)

    handle = await runtime.start(hanging)
    assert await handle.result(5) == "late"
    failed = of_kind(await runtime.history(handle.execution_id), Kind.STEP_FAILED)
    assert [e.data["error"]["type"] for e in failed] == ["TimeoutError"]


async def test_a_step_deaf_to_cancellation_times_out_all_the_same(runtime):
    release = asyncio.Event()

    async def deaf():
        try:
            await release.wait()
        except asyncio.CancelledError:
            await release.wait()
        return "ignored"

    @flow("deaf")
    async def deaf_flow(ctx):
        try:
            return await ctx.run(deaf, timeout=0.02, retry=NO_RETRY)
        except StepFailedError as error:
            return error.error_type

    handle = await runtime.start(deaf_flow)
    assert await handle.result(5) == "TimeoutError"
    release.set()


async def test_steps_run_at_once_and_enter_in_the_order_they_end(runtime):
    gates = [asyncio.Event() for _ in range(3)]

    async def wait_for(n):
        await gates[n].wait()
        return n

    @flow("gathered")
    async def gathered(ctx):
        return await asyncio.gather(*(ctx.run(wait_for, n) for n in range(3)))

    handle = await runtime.start(gathered)
    for n in (2, 0, 1):
        gates[n].set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert await handle.result(5) == [0, 1, 2]
    done = of_kind(await runtime.history(handle.execution_id), Kind.STEP_COMPLETED)
    assert [e.data["output"] for e in done] == [2, 0, 1]


async def test_ordinary_functions_run_on_threads(runtime):
    def where():
        return threading.current_thread().name

    @flow("threaded")
    async def threaded(ctx):
        return await ctx.run(where)

    handle = await runtime.start(threaded)
    assert (await handle.result(5)).startswith("loom-step")


async def test_an_ordinary_function_may_return_an_awaitable(runtime):
    @flow("lambda")
    async def lambda_flow(ctx):
        return await ctx.run(lambda: add(2, 3), name="indirect")

    handle = await runtime.start(lambda_flow)
    assert await handle.result(5) == 5


@pytest.mark.parametrize("result", [object(), {1: 2}, float("nan"), "x" * 3000])
async def test_a_result_that_no_log_takes_fails_the_step_at_once(fleet, result):
    async def give():
        return result

    @flow("unfit")
    async def unfit(ctx):
        try:
            await ctx.run(give)
        except StepFailedError as error:
            return error.error_type

    async with fleet.runtime("node", [unfit], settings={"max_payload_bytes": 2048}) as runtime:
        handle = await runtime.start(unfit)
        assert await handle.result(5) == "InvalidInputError"
        failed = of_kind(await runtime.history(handle.execution_id), Kind.STEP_FAILED)
        assert [e.data["final"] for e in failed] == [True]


async def test_a_step_that_the_flow_gives_up_is_cancelled_and_journals_nothing(runtime):
    cancelled = asyncio.Event()

    async def slow():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    @flow("impatient")
    async def impatient(ctx):
        task = asyncio.ensure_future(ctx.run(slow))
        await ctx.run(add, 1, 1)
        task.cancel()
        return "gone"

    handle = await runtime.start(impatient)
    assert await handle.result(5) == "gone"
    await asyncio.wait_for(cancelled.wait(), 5)
    names = [e.data.get("name") for e in await runtime.history(handle.execution_id)]
    assert "slow" not in names


async def test_a_flow_that_raises_fails_with_type_and_text(runtime):
    @flow("raises")
    async def raises(ctx):
        raise KeyError("no such thing")

    handle = await runtime.start(raises)
    with pytest.raises(FlowFailedError, match="no such thing") as caught:
        await handle.result(5)
    assert caught.value.error_type == "KeyError"


async def test_a_thousand_steps_in_a_row_need_no_round_trip_each(fleet):
    @flow("long")
    async def long(ctx):
        total = 0
        for n in range(1000):
            total = await ctx.run(add, total, n)
        return total

    events = fleet.store()
    async with fleet.runtime("node", [long], events=events) as runtime:
        handle = await runtime.start(long)
        assert await handle.result(30) == sum(range(1000))
        assert (await events.info(handle.execution_id)).head == 1001


async def test_many_steps_at_once_wait_for_a_journal_that_is_behind(fleet):
    @flow("wide")
    async def wide(ctx):
        return sum(await asyncio.gather(*(ctx.run(add, n, 0) for n in range(300))))

    async with fleet.runtime("node", [wide], settings={"journal_max_behind": 8}) as runtime:
        handle = await runtime.start(wide)
        assert await handle.result(30) == sum(range(300))
