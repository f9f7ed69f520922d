import asyncio
import dataclasses
import datetime as dt
import functools
from typing import TYPE_CHECKING

import pydantic
import pytest
from kernel_support import STARTED_AT, Driver, consumed, machine, started, step

from loom.errors import (
    ChildFailedError,
    ConfigError,
    InboxMessageRefusedError,
    InvalidIdError,
    InvalidInputError,
)
from loom.kernel import (
    NO_RETRY,
    Complete,
    ContinueAsNew,
    Fail,
    PublishRecord,
    RetryPolicy,
    RunStep,
    SendMessage,
    StartChild,
    Wait,
    child,
    flow,
    gate,
    receive,
    timer,
)

if TYPE_CHECKING:
    from decimal import Decimal


class Item(pydantic.BaseModel):
    name: str
    price: int


@dataclasses.dataclass
class Point:
    x: int
    y: int


def price(name) -> Item:
    return Item(name=name, price=1)


async def price_later(name) -> list[Item]:
    return [price(name)]


def plain(x):
    return x


def unresolvable(x) -> "Decimal":
    return x


def run_flow(fn, value=None):
    return Driver(flow("body")(fn), value)


# Steps ---------------------------------------------------------------------------------------------------------------


def test_step_options():
    async def body(ctx):
        await ctx.run(plain, 1, 2, retry=NO_RETRY, timeout=2.5, name="renamed", extra=3)

    (command,) = run_flow(body).pending.values()
    assert isinstance(command, RunStep)
    assert (command.name, command.args, command.kwargs) == ("renamed", (1, 2), {"extra": 3})
    assert (command.retry, command.timeout_ms) == (NO_RETRY, 2500)


def test_step_defaults_and_names():
    class Callable:
        def __call__(self):
            return 1

    async def body(ctx):
        await asyncio.gather(
            ctx.run(functools.partial(plain, 1), timeout=dt.timedelta(minutes=1)),
            ctx.run(Callable()),
            ctx.run(lambda: 1),
        )

    commands = list(run_flow(body).pending.values())
    assert [c.name for c in commands] == ["plain", "Callable", "<lambda>"]
    assert [c.timeout_ms for c in commands] == [60_000, None, None]
    assert commands[0].retry == RetryPolicy()


def test_a_result_becomes_what_the_step_is_annotated_with():
    async def body(ctx):
        one = await ctx.run(price, "a")
        many = await ctx.run(price_later, "b")
        return [type(one).__name__, one.price, type(many[0]).__name__]

    d = run_flow(body)
    d.answer("0:0", {"name": "a", "price": 3})
    d.answer("0:1", [{"name": "b", "price": 4}])
    assert d.end == Complete(["Item", 3, "Item"])


def test_a_recorded_result_that_does_not_fit_raises_without_its_bytes():
    async def body(ctx):
        try:
            await ctx.run(price, "a")
        except InvalidInputError as error:
            return str(error)

    d = run_flow(body)
    d.answer("0:0", {"name": "secret", "price": "topsecret"})
    assert "price (int_parsing)" in d.end.output
    assert "secret" not in d.end.output


def test_a_step_whose_annotation_is_unknown_at_run_time_says_so():
    async def body(ctx):
        await ctx.run(unresolvable, 1)

    assert run_flow(body).end.error_type == ConfigError.__name__


def test_the_flow_may_change_what_it_is_given():
    async def body(ctx):
        value = await ctx.run(plain, 1)
        value["list"].append(1)
        message = await ctx.receive("t")
        message["x"] = 1
        ctx_value = ctx.info.input
        return [value, message, ctx_value]

    result, payload = {"list": []}, {}
    d = run_flow(body)
    d.answer("0:0", result)
    d.answer("0:1", payload)
    assert d.end.output[:2] == [{"list": [1]}, {"x": 1}]
    assert (result, payload) == ({"list": []}, {})


# Waits ---------------------------------------------------------------------------------------------------------------


def test_receive_validates_and_consumes_all_the_same():
    async def body(ctx):
        try:
            await ctx.receive("item", Item)
        except InvalidInputError as error:
            problem = str(error)
        item = await ctx.receive("item", model=Item)
        return [problem, item.name]

    d = run_flow(body)
    d.answer("0:0", {"name": "hidden", "price": None})
    d.answer("0:1", {"name": "b", "price": 2})
    assert d.end.output[1] == "b"
    assert "hidden" not in d.end.output[0]
    again = machine(d.flow, seed=5)
    assert again.replay(d.history) == [d.end]


def test_select_tells_which_arm():
    async def body(ctx):
        seen = []
        for _ in range(3):
            arm = await ctx.select(
                receive("cancel"), receive("ship", model=Item), timer(days=3), gate("boss", model=bool)
            )
            seen.append(
                [
                    arm.index,
                    arm.kind,
                    arm.topic,
                    arm.gate,
                    arm.value if arm.kind != "inbox" else arm.value.price,
                ]
            )
        return seen

    d = run_flow(body)
    (wait,) = d.pending.values()
    assert isinstance(wait, Wait)
    assert [a.kind for a in wait.arms] == ["inbox", "inbox", "timer", "gate"]
    assert wait.arms[2].wake_at == STARTED_AT + 3 * 24 * 3600 * 1000
    d.answer("0:0", {"name": "a", "price": 3}, arm=1)
    d.answer("0:1", None, arm=2)
    d.answer("0:2", True, arm=3)
    assert d.end == Complete(
        [[1, "inbox", "ship", None, 3], [2, "timer", None, None, None], [3, "gate", None, "boss", True]]
    )


def test_timers_take_seconds_units_and_instants():
    at = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)

    async def body(ctx):
        await ctx.select(
            timer(1.5), timer(dt.timedelta(minutes=1)), timer(hours=1, milliseconds=5), timer(at=at)
        )

    (wait,) = run_flow(body).pending.values()
    assert [a.wake_at - STARTED_AT for a in wait.arms[:3]] == [1500, 60_000, 3_600_005]
    assert wait.arms[3].wake_at == at.timestamp() * 1000
    with pytest.raises(InvalidInputError, match="time zone"):
        timer(at=at.replace(tzinfo=None))


def test_sleep_of_nothing_only_yields():
    async def body(ctx):
        order = []

        async def other():
            order.append("other")

        task = asyncio.create_task(other())
        await ctx.sleep(0)
        order.append("me")
        await task
        await ctx.sleep(-5)
        await ctx.sleep(seconds=1)
        return order

    d = run_flow(body)
    assert list(d.pending) == ["0:0"]
    d.answer("0:0")
    assert d.end == Complete(["other", "me"])


def test_gate():
    async def body(ctx):
        return [await ctx.gate("boss"), (await ctx.gate("clerk", model=Item)).price]

    d = run_flow(body)
    d.answer("0:0", {"ok": True})
    d.answer("0:1", {"name": "x", "price": 9})
    assert d.end == Complete([{"ok": True}, 9])


def test_reserved_and_empty_names_are_refused():
    for make in (lambda: receive("__loom_child__:x"), lambda: receive(""), lambda: gate("")):
        with pytest.raises(InvalidInputError):
            make()

    async def body(ctx):
        problems = 0
        for call in (
            lambda: ctx.receive("__loom_x"),
            lambda: ctx.send("e2", "__loom_x", 1),
            ctx.select,
            lambda: ctx.publish("", None, 1),
        ):
            try:
                await call()
            except InvalidInputError:
                problems += 1
        try:
            await ctx.send("bad id", "t", 1)
        except InvalidIdError:
            problems += 1
        return problems

    assert run_flow(body).end == Complete(5)


# Other executions ----------------------------------------------------------------------------------------------------


@flow("kid")
async def kid(ctx, item: Item) -> Item:
    return item


def test_a_child_is_started_and_its_result_read_as_often_as_wanted():
    async def body(ctx):
        handle = await ctx.start_child(
            kid, Item(name="a", price=1), execution_id="kid-1", cancel_with_parent=False
        )
        results = [await handle.result(), await handle]
        return [handle.id, handle.workflow, repr(handle), *[r.price for r in results]]

    d = run_flow(body)
    (command,) = d.pending.values()
    assert command == StartChild("0:0", "kid", {"name": "a", "price": 1}, "kid-1", cancel_with_parent=False)
    d.answer("0:0")
    (wait,) = d.pending.values()
    assert [(a.kind, a.topic, a.child_id) for a in wait.arms] == [("child", "__loom_child__:kid-1", "kid-1")]
    d.answer("0:1", {"status": "completed", "output": {"name": "a", "price": 2}})
    assert d.end == Complete(["kid-1", "kid", "<child 'kid' kid-1>", 2, 2])


def test_everyone_who_waits_for_a_child_learns_of_its_one_end():
    async def body(ctx):
        handle = await ctx.start_child("kid", None)
        first, second, late = await asyncio.gather(
            handle.result(), ctx.select(receive("t"), child(handle)), ctx.select(timer(5), child(handle))
        )
        third = await ctx.select(receive("t"), child(handle))
        return [first, second.index, second.value, late.index, third.value]

    d = run_flow(body)
    d.answer("0:0")
    assert len(d.pending) == 3
    d.answer("0.1:0", {"status": "completed", "output": 7}, arm=1)
    assert d.end == Complete([7, 1, 7, 1, 7])
    again = machine(d.flow, seed=3)
    assert again.replay(d.history) == [d.end]


def test_a_child_that_fails():
    async def body(ctx):
        handle = await ctx.start_child("kid", None)
        try:
            await handle.result()
        except ChildFailedError as error:
            failed = [error.child_id, error.status, error.error_type, error.error_message]
        selected = await ctx.select(child(handle))
        assert selected.error is not None
        with pytest.raises(ChildFailedError):
            _ = selected.value
        return failed

    d = run_flow(body)
    d.answer("0:0")
    d.answer("0:1", {"status": "failed", "error": {"type": "Boom", "message": "no"}})
    assert d.end == Complete(["c0:0", "failed", "Boom", "no"])


def test_a_childs_input_is_checked_before_it_is_asked_for():
    async def body(ctx):
        try:
            await ctx.start_child(kid, {"name": "a"})
        except InvalidInputError:
            await ctx.start_child("anything", {"name": "a"})

    (command,) = run_flow(body).pending.values()
    assert command == StartChild("0:0", "anything", {"name": "a"})


def test_a_start_that_cannot_be_is_a_step_error():
    async def body(ctx):
        await ctx.start_child("kid", None, execution_id="taken")

    d = run_flow(body)
    d.fail("0:0", "ExecutionAlreadyExistsError", "taken")
    assert isinstance(d.end, Fail)
    assert d.end.error_type == "StepFailedError"


def test_send():
    async def body(ctx):
        payload = {"n": [1]}
        task = asyncio.create_task(ctx.send("e2", "t", payload))
        await asyncio.sleep(0)
        payload["n"].append(2)  # too late: what was sent is sent
        return [await task, await ctx.send("e2", "t", Point(1, 2), message_id="mine")]

    d = run_flow(body)
    (command,) = d.pending.values()
    assert command == SendMessage("0.0:0", "e2", "t", {"n": [1]}, "e1/0.0:0")
    d.answer("0.0:0")
    (command,) = d.pending.values()
    assert command == SendMessage("0:0", "e2", "t", {"x": 1, "y": 2}, "mine")
    d.answer("0:0")
    assert d.end == Complete(["e1/0.0:0", "mine"])


@pytest.mark.parametrize("payload", [{"__loomEnc": "x"}, [{"$shredded": True}]])
def test_what_is_dressed_as_sealed_is_not_sent_nor_returned_to_a_parent(payload):
    async def sends(ctx):
        try:
            await ctx.send("e2", "t", payload)
        except InboxMessageRefusedError as error:
            return [error.execution_id, error.topic]

    async def returns(ctx):
        return payload

    assert run_flow(sends).end == Complete(["e2", "t"])
    assert machine(flow("body")(returns)).start() == [Complete(payload)]
    (end,) = machine(flow("body")(returns), parent={"executionId": "p"}).start()
    assert end.error_type == "InboxMessageRefusedError"


def test_publish():
    async def body(ctx):
        await ctx.publish("orders", "k", {"ä": 1}, headers={"h": "v", "b": b"\x00"})
        await ctx.publish("orders", None, b"raw")

    d = run_flow(body)
    (command,) = d.pending.values()
    assert command == PublishRecord("0:0", "orders", "k", '{"ä":1}'.encode(), (("h", b"v"), ("b", b"\x00")))
    d.answer("0:0")
    (command,) = d.pending.values()
    assert (command.key, command.value) == (None, b"raw")
    d.answer("0:1")
    assert d.end == Complete(None)


def test_continue_as_new_takes_models_names_and_checks():
    async def body(ctx, n: int = 0):
        if n == 1:
            ctx.continue_as_new(Item(name="a", price=1), flow=kid)
        if n == 2:
            ctx.continue_as_new("not a number")
        ctx.continue_as_new(n + 1)

    assert run_flow(body, 1).end == ContinueAsNew("kid", {"name": "a", "price": 1})
    assert run_flow(body, 2).end.error_type == "InvalidInputError"
    assert run_flow(body, 3).end == ContinueAsNew("body", 4)


# What a context knows ------------------------------------------------------------------------------------------------


def test_properties():
    async def body(ctx):
        before = [
            ctx.execution_id,
            ctx.chain_id,
            ctx.workflow,
            ctx.history_length,
            ctx.should_continue_as_new,
        ]
        await ctx.run(plain, 1)
        ctx.random()
        return [*before, ctx.history_length, ctx.is_replaying, ctx.info.started_at]

    d = run_flow(body)
    d.answer("0:0")
    assert d.end == Complete(["e1", "e1", "body", 0, False, 2, False, STARTED_AT])


def test_is_replaying_is_true_only_while_history_goes_on():
    seen = []

    async def body(ctx):
        seen.append(ctx.is_replaying)
        await ctx.run(plain, 1)
        seen.append(ctx.is_replaying)
        await ctx.run(plain, 2)

    m = machine(flow("body")(body))
    m.replay([step(1, "0:0", "plain")])
    assert seen == [True, False]


# Patches -------------------------------------------------------------------------------------------------------------


def make_flows():
    @flow("patchy")
    async def old(ctx):
        await ctx.run(plain, 1)
        await ctx.run(plain, 2)
        await ctx.receive("t")
        return "old"

    @flow("patchy")
    async def new(ctx):
        await ctx.run(plain, 1)
        if ctx.patched("better"):
            await ctx.run(price, 2)
            way = "new"
        else:
            await ctx.run(plain, 2)
            way = "old"
        await ctx.receive("t")
        assert ctx.patched("better") == (way == "new")
        return way

    @flow("patchy")
    async def gone(ctx):
        await ctx.run(plain, 1)
        await ctx.run(price, 2)
        await ctx.receive("t")
        return "new"

    return old, new, gone


def test_an_execution_past_the_patch_keeps_the_old_way():
    old, new, _ = make_flows()
    d = Driver(old)
    d.answer("0:0")
    d.answer("0:1")
    m = machine(new)
    assert [c.site_id for c in m.replay(d.history)] == ["0:2"]
    assert m.apply(consumed(9, "0:2", "t")) == [Complete("old")]


def test_an_execution_before_the_patch_takes_the_new_way_for_good():
    old, new, gone = make_flows()
    before = Driver(old).history
    m = machine(new)
    assert [c.site_id for c in m.replay(before)] == ["0:0"]
    d = Driver(new)
    d.answer("0:0")
    assert d.history[-1].data == {"siteId": "patched:better", "kind": "patched", "value": True}
    d.answer("0:1", {"name": "x", "price": 1})
    d.answer("0:2")
    assert d.end == Complete("new")
    assert machine(new).replay(d.history) == [d.end]
    # Once no old execution is left the call may go: its marks are passed over.
    assert machine(gone).replay(d.history) == [d.end]


def test_the_last_event_of_an_old_log_takes_the_new_way():
    old, new, _ = make_flows()
    d = Driver(old)
    d.answer("0:0")
    commands = machine(new).replay(d.history)
    assert [getattr(c, "kind", getattr(c, "name", None)) for c in commands] == ["patched", "price"]


def test_started_is_not_needed_but_welcome():
    @flow("tiny")
    async def tiny(ctx):
        return 1

    assert machine(tiny).replay([]) == machine(tiny).replay([started(tiny)]) == [Complete(1)]
