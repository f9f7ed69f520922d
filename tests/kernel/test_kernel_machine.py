import asyncio
import contextlib
import gc
import warnings
import weakref

import pytest
from kernel_support import Driver, consumed, event, keys, machine, resumed, started, step

from loom.errors import (
    FlowDivergedError,
    FlowStuckError,
    FlowSuspended,
    NotDeterministicError,
    SealedPayloadUnreadableError,
    StepFailedError,
)
from loom.kernel import (
    Abandon,
    Complete,
    ContinueAsNew,
    Fail,
    RecordDecision,
    RetryPolicy,
    RunStep,
    Wait,
    flow,
    timer,
)
from loom.schemas.envelope import Kind


def charge(amount):
    return amount


def ship(box):
    return box


@flow("one")
async def one(ctx, x: int):
    return await ctx.run(charge, x)


def test_a_step_goes_out_and_its_result_comes_in():
    m = machine(one, 5)
    (command,) = m.start()
    assert (command.site_id, command.name, command.args, command.attempt) == ("0:0", "charge", (5,), 1)
    assert m.running_sites == ("0:0",)
    assert not m.is_done
    assert m.apply(step(1, "0:0", "charge", 7)) == [Complete(7)]
    assert m.is_done
    assert m.outcome == Complete(7)
    assert m.running_sites == ()


def test_start_happens_once():
    m = machine(one, 5)
    assert len(m.start()) == 1
    assert m.start() == []


def test_events_that_bring_no_result_are_ignored():
    m = machine(one, 5)
    m.start()
    for kind in (
        Kind.EXECUTION_STARTED,
        Kind.EXECUTION_SUSPENDED,
        Kind.EXECUTION_RECOVERED,
        Kind.EXECUTION_DENIED,
        Kind.OUTCOME_RECORDED,
        Kind.ERASURE_PENDING,
        Kind.PAYLOAD_SHREDDED,
        Kind.INBOX_QUARANTINED,
        Kind.DECISION_RECORDED,
        "SOMETHING_LATER",
    ):
        assert m.apply(event(1, kind, siteId="0:9")) == []
    assert m.apply(event(1, Kind.MESSAGE_CONSUMED, topic="t", reason="duplicate", payload=None)) == []
    assert m.apply(event(1, Kind.EXECUTION_RESUMED, siteId="0:0", arm=0, kind="inbox")) == []
    assert m.running_sites == ("0:0",)
    assert m.logical_ms == m.info.started_at


def test_logical_time_is_that_of_the_event_that_entered():
    seen = []

    @flow("times")
    async def times(ctx):
        seen.append((ctx.logical_time.timestamp(), asyncio.get_running_loop().time()))
        await ctx.run(charge, 1)
        seen.append((ctx.logical_time.timestamp(), asyncio.get_running_loop().time()))
        await ctx.run(charge, 2)
        seen.append((ctx.logical_time.timestamp(), asyncio.get_running_loop().time()))

    m = machine(times)
    m.start()
    m.apply(step(1, "0:0", "charge", at=m.info.started_at + 4_000))
    m.apply(step(9, "0:1", "charge"))  # an earlier stamp never turns time back
    base = m.info.started_at / 1000
    assert seen == [(base, base), (base + 4, base + 4), (base + 4, base + 4)]


def test_scopes_follow_tasks_and_call_order():
    @flow("scopes")
    async def scopes(ctx):
        async def chain(n):
            await ctx.run(charge, n)
            await asyncio.gather(ctx.run(ship, n), ctx.run(ship, n))

        await ctx.run(charge, 0)
        await asyncio.gather(chain(1), chain(2))
        await ctx.run(charge, 3)

    d = Driver(scopes)
    d.answer("0:0")
    assert list(d.pending) == ["0.0:0", "0.1:0"]
    d.answer("0.1:0")
    assert list(d.pending) == ["0.0:0", "0.1.0:0", "0.1.1:0"]
    d.answer("0.0:0")
    assert list(d.pending) == ["0.1.0:0", "0.1.1:0", "0.0.0:0", "0.0.1:0"]
    for site in list(d.pending):
        d.answer(site)
    assert list(d.pending) == ["0:1"]
    d.answer("0:1")
    assert d.end == Complete(None)


def test_racing_chains_keep_their_ids_whoever_is_first():
    @flow("race")
    async def race(ctx):
        async def chain(fn):
            for n in range(3):
                await ctx.run(fn, n)

        async with asyncio.TaskGroup() as group:
            group.create_task(chain(charge))
            group.create_task(chain(ship))

    orders = [["0.0", "0.1"] * 3, ["0.1"] * 3 + ["0.0"] * 3, ["0.0", "0.1", "0.1", "0.0", "0.0", "0.1"]]
    for order in orders:
        d = Driver(race)
        for scope in order:
            site = next(s for s in d.pending if s.startswith(scope))
            assert d.pending[site].name == ("charge" if scope == "0.0" else "ship")
            d.answer(site)
        assert d.end == Complete(None)


def test_results_enter_one_at_a_time():
    order = []

    @flow("orderly")
    async def orderly(ctx):
        async def one_of(n):
            await ctx.run(charge, n)
            order.append(n)
            await asyncio.sleep(0)
            order.append(n)

        await asyncio.gather(one_of(0), one_of(1))

    m = machine(orderly)
    m.start()
    m.replay([step(1, "0.1:0", "charge"), step(2, "0.0:0", "charge")])
    assert order == [1, 1, 0, 0]


def test_a_failed_step_raises_in_the_flow_with_what_was_recorded():
    @flow("failing")
    async def failing(ctx):
        try:
            await ctx.run(charge, 1)
        except StepFailedError as error:
            return [error.step, error.error_type, error.error_message]

    d = Driver(failing)
    d.fail("0:0", "CardDeclined", "no funds")
    assert d.end == Complete(["charge", "CardDeclined", "no funds"])


def test_a_failed_attempt_is_the_drivers_business():
    d = Driver(one, 5)
    d.fail("0:0", final=False, retryAt=1234)
    assert d.end is None
    assert d.machine.apply(step(9, "0:0", "charge", 1)) == [Complete(1)]


def test_errors_of_a_flow_are_recorded_capped():
    @flow("raises")
    async def raises(ctx, text: str):
        raise ValueError(text)

    (fail,) = machine(raises, "x" * 5000).start()
    assert (fail.error_type, len(fail.message)) == ("ValueError", 2000)
    (fail,) = machine(raises, "ok").start()
    assert fail == Fail("ValueError", "ok", {})


def test_an_error_whose_text_fails_is_recorded_all_the_same():
    class OddError(Exception):
        def __str__(self):
            raise RuntimeError

    @flow("odd")
    async def odd(ctx):
        raise OddError

    assert machine(odd).start() == [Fail("OddError", "", {})]


def test_a_group_of_errors_names_its_leaves():
    @flow("group")
    async def group(ctx):
        async def bad(n):
            raise KeyError(n)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(bad(1))
            tasks.create_task(bad(2))

    (fail,) = machine(group).start()
    assert fail.error_type == "ExceptionGroup"
    assert fail.details == {
        "errors": [{"type": "KeyError", "message": "1"}, {"type": "KeyError", "message": "2"}]
    }


def test_what_a_flow_returns_must_be_json():
    @flow("odd_result")
    async def odd_result(ctx):
        return {1, 2}

    (fail,) = machine(odd_result).start()
    assert fail.error_type == "InvalidInputError"
    assert "result of flow 'odd_result'" in fail.message


def test_an_input_that_no_longer_fits_fails_without_its_bytes():
    (fail,) = machine(one, "secret text").start()
    assert fail.error_type == "InvalidInputError"
    assert "secret" not in fail.message


def test_system_exit_in_a_flow_ends_the_flow_only():
    @flow("exits")
    async def exits(ctx):
        raise SystemExit(3)

    (fail,) = machine(exits).start()
    assert fail.error_type == "SystemExit"


def test_a_flow_that_cancels_itself_fails():
    @flow("self_cancel")
    async def self_cancel(ctx):
        asyncio.current_task().cancel()
        await ctx.run(charge, 1)

    assert [c.error_type for c in machine(self_cancel).start()] == ["CancelledError"]


def test_cancelling_a_task_abandons_what_it_asked():
    @flow("cancels")
    async def cancels(ctx):
        slow = asyncio.create_task(ctx.run(charge, 1))
        await ctx.receive("stop")
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        await ctx.run(ship, 2)

    m = machine(cancels)
    first = keys(m.start())
    assert [k[:2] for k in first] == [("wait", "0:0"), ("step", "0.0:0")]
    commands = m.apply(consumed(1, "0:0", "stop"))
    assert commands[0] == Abandon("0.0:0")
    assert commands[1].site_id == "0:1"
    # The step's end was on its way: it is passed over, and so it is on replay.
    assert m.apply(step(2, "0.0:0", "charge", 1)) == []
    again = machine(cancels)
    assert keys(again.replay([consumed(1, "0:0", "stop"), step(2, "0.0:0", "charge", 1)])) == keys(
        commands[1:]
    )
    with pytest.raises(FlowDivergedError):
        again.apply(step(3, "0.0:0", "other", 1))


def test_what_is_taken_back_at_once_is_never_asked():
    @flow("hasty")
    async def hasty(ctx):
        task = asyncio.create_task(ctx.run(charge, 1))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return await ctx.run(ship, 2)

    m = machine(hasty)
    assert [c.name for c in m.start()] == ["ship"]
    assert m.running_sites == ("0:0",)


def test_continue_as_new_ends_the_flow_even_if_swallowed():
    @flow("rolling")
    async def rolling(ctx, n: int):
        try:
            ctx.continue_as_new(n + 1)
        except BaseException:
            await ctx.run(charge, 1)  # too late: nothing goes out any more

    m = machine(rolling, 1)
    assert m.start() == [ContinueAsNew("rolling", 2)]
    assert m.is_done


def test_continue_as_new_from_a_task_group():
    @flow("rolling_group")
    async def rolling_group(ctx):
        async def roll():
            await ctx.run(charge, 1)
            ctx.continue_as_new({"n": 1}, flow="other")

        async with asyncio.TaskGroup() as group:
            group.create_task(roll())
            group.create_task(ctx.run(ship, 1))

    d = Driver(rolling_group)
    d.answer("0.0:0")
    assert d.end == ContinueAsNew("other", {"n": 1})


def test_a_flow_that_spins_is_stopped():
    @flow("spins")
    async def spins(ctx):
        async def spin():
            asyncio.get_running_loop().call_soon(again)

        def again():
            asyncio.get_running_loop().call_soon(again)

        await spin()
        await ctx.run(charge, 1)

    m = machine(spins)
    with pytest.raises(FlowStuckError, match="e1"):
        m.start()
    assert isinstance(m.latched, FlowStuckError)
    assert m.apply(step(1, "0:0", "charge")) == []
    m.close()


# The latch -----------------------------------------------------------------------------------------------------------


def test_latched_nothing_comes_out_any_more():
    m = machine(one, 5)
    m.start()
    error = RuntimeError("refused")
    m.latch(error)
    m.latch(RuntimeError("later"))
    assert m.latched is error
    assert m.apply(step(1, "0:0", "charge", 7)) == []
    assert m.replay([step(1, "0:0", "charge", 7)]) == []
    assert m.start() == []
    assert not m.is_done


@pytest.mark.parametrize(
    "payload",
    [{"__loomEnc": "loom/aes-256-gcm"}, {"a": [{"b": {"__loomEnc": "x"}}]}, {"$shredded": True}],
)
@pytest.mark.parametrize("live", [True, False])
def test_a_sealed_answer_latches_and_the_flow_never_sees_it(payload, live):
    seen = []

    @flow("swallower")
    async def swallower(ctx):
        while True:
            try:
                seen.append(await ctx.receive("t"))
            except BaseException:
                seen.append("swallowed")
            await ctx.run(charge, 1)

    m = machine(swallower)
    answer = consumed(1, "0:0", "t", payload)
    if live:
        m.start()
    with pytest.raises(SealedPayloadUnreadableError) as caught:
        m.apply(answer) if live else m.replay([answer])
    assert caught.value.recorded
    assert "aes" not in str(caught.value)
    assert m.apply(consumed(2, "0:0", "t", 1)) == []
    m.close()
    assert "swallowed" not in seen or len(seen) == 1


def test_a_flow_cannot_go_on_past_a_latch_inside_a_step():
    @flow("stubborn")
    async def stubborn(ctx):
        for _ in range(3):
            try:
                await ctx.run(charge, 1)
            except BaseException:
                continue

    m = machine(stubborn)
    m.start()
    m.latch(RuntimeError("x"))
    m.close()
    assert m.apply(step(1, "0:0", "charge")) == []


# Closing -------------------------------------------------------------------------------------------------------------


def test_closing_frees_everything_at_once():
    @flow("parked")
    async def parked(ctx):
        await asyncio.gather(ctx.receive("a"), ctx.run(charge, 1), asyncio.sleep(60))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        m = machine(parked)
        m.start()
        root = weakref.ref(m)
        m.close()
        m.close()
        gc.disable()
        try:
            del m
            assert root() is None
        finally:
            gc.enable()


def test_closing_runs_cleanups_without_letting_them_act():
    log = []

    @flow("cleans")
    async def cleans(ctx):
        try:
            await ctx.receive("never")
        finally:
            log.append("cleanup")
            try:
                await ctx.run(charge, 1)
            except FlowSuspended:
                log.append("refused")
                raise

    m = machine(cleans)
    m.start()
    m.close()
    assert log == ["cleanup", "refused"]


def test_closing_gives_up_on_a_flow_that_will_not_end(recwarn):
    @flow("clings")
    async def clings(ctx):
        for _ in range(6):
            with contextlib.suppress(BaseException):
                await asyncio.Event().wait()

    m = machine(clings)
    m.start()
    m.close()
    del m
    gc.collect()
    assert [str(w.message) for w in recwarn if "never awaited" in str(w.message)] == []


def test_tasks_that_never_ran_are_closed_quietly(recwarn):
    @flow("early")
    async def early(ctx):
        asyncio.create_task(ctx.run(charge, 1))
        return 1

    m = machine(early)
    assert m.start() == [Complete(1)]
    m.close()
    del m
    gc.collect()
    assert not recwarn.list


def test_an_error_that_nobody_looked_at_is_reported():
    @flow("careless")
    async def careless(ctx):
        async def bad():
            raise ValueError("lost")

        asyncio.create_task(bad())
        await ctx.run(charge, 1)

    d = Driver(careless)
    d.answer("0:0")
    assert d.machine.complaints == ("an error of a task was never looked at: ValueError",)


# Decisions -----------------------------------------------------------------------------------------------------------


def test_decisions_are_drawn_once_and_then_recorded():
    @flow("decides")
    async def decides(ctx):
        first = [ctx.now().timestamp(), ctx.random(), ctx.uuid()]
        await ctx.run(charge, 1)
        return first + [ctx.random()]

    d = Driver(decides)
    assert [e.data["kind"] for e in d.history[1:]] == ["now", "random", "uuid"]
    d.answer("0:3")
    fresh = machine(decides, seed=7)
    assert fresh.replay(d.history) == [d.end]
    assert fresh.history_length == d.machine.history_length == 5


def test_a_decision_lost_in_a_crash_is_drawn_again():
    @flow("decides_late")
    async def decides_late(ctx):
        await ctx.run(charge, 1)
        return ctx.random()

    d = Driver(decides_late)
    d.answer("0:0")
    fresh = machine(decides_late, seed=7)
    commands = fresh.replay(d.history[:2])
    assert [type(c) for c in commands] == [RecordDecision, Complete]
    assert commands[0].value == commands[1].output != d.end.output


def test_the_context_is_refused_outside_its_flow():
    held = []

    @flow("leaks")
    async def leaks(ctx):
        held.append(ctx)
        await ctx.run(charge, 1)

    machine(leaks).start()
    with pytest.raises(NotDeterministicError, match="ctx.run"):
        held[0].now()

    async def outside():
        await held[0].run(charge, 2)

    with pytest.raises(NotDeterministicError):
        asyncio.run(outside())


def test_outstanding_after_replay_carries_attempts_and_order():
    @flow("many")
    async def many(ctx):
        await asyncio.gather(
            ctx.run(charge, 1, retry=RetryPolicy(attempts=9)),
            ctx.select(timer(5)),
            ctx.run(ship, 2),
        )

    failed = event(
        3,
        Kind.STEP_FAILED,
        siteId="0.0:0",
        name="charge",
        error={"type": "E", "message": ""},
        attempt=2,
        final=False,
        retryAt=777,
    )
    m = machine(many)
    commands = m.replay([started(many), failed])
    assert [(type(c), c.site_id) for c in commands] == [
        (RunStep, "0.0:0"),
        (Wait, "0.1:0"),
        (RunStep, "0.2:0"),
    ]
    assert (commands[0].attempt, commands[0].not_before, commands[0].retry.attempts) == (3, 777, 9)
    assert m.waiting == (commands[1],)
    assert m.running_sites == ("0.0:0", "0.2:0")
    assert m.apply(resumed(4, "0.1:0", "timer")) == []
