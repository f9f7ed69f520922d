"""Waits: receive, select, gates, timers, parks and what wakes them."""

from __future__ import annotations

import asyncio

import pydantic
import pytest
from runtime_support import add, kinds, of_kind

from loom import (
    ExecutionFinishedError,
    GateNotOpenError,
    InboxFullError,
    InboxMessageRefusedError,
    Runtime,
    flow,
    gate,
    receive,
    timer,
)
from loom.ids import inbox_stream
from loom.schemas.envelope import Kind
from loom.stores.memory.wake_store import MemoryWakeStore
from loom.testing.runtime import until, until_parked


@flow("receiver")
async def receiver(ctx, count):
    return [await ctx.receive("go") for _ in range(count)]


async def parks(runtime, execution_id, count):
    async with asyncio.timeout(10):
        while len(of_kind(await runtime.history(execution_id), Kind.EXECUTION_SUSPENDED)) < count:
            await asyncio.sleep(0.01)
    await until_parked(runtime, execution_id)


async def test_a_message_wakes_a_parked_flow_in_one_batch(runtime):
    handle = await runtime.start(receiver, 1)
    await until_parked(runtime, handle.execution_id)
    assert await handle.status() == "suspended"
    await runtime.send(handle.execution_id, "go", {"n": 1}, message_id="m1")
    assert await handle.result(5) == [{"n": 1}]
    history = await runtime.history(handle.execution_id)
    assert kinds(history)[1:] == [
        Kind.EXECUTION_SUSPENDED,
        Kind.MESSAGE_CONSUMED,
        Kind.EXECUTION_RESUMED,
        Kind.EXECUTION_COMPLETED,
    ]
    assert history[2].data["payload"] == {"n": 1}
    assert history[3].data["kind"] == "inbox"


async def test_messages_sent_before_the_receive_are_taken_without_a_park(runtime):
    @flow("late")
    async def late(ctx):
        await ctx.run(hold.wait)
        return [await ctx.receive("go"), await ctx.receive("go")]

    hold = asyncio.Event()
    handle = await runtime.start(late)
    for n in (1, 2):
        await runtime.send(handle.execution_id, "go", n)
    hold.set()
    assert await handle.result(5) == [1, 2]
    assert Kind.EXECUTION_SUSPENDED not in kinds(await runtime.history(handle.execution_id))


async def test_topics_keep_their_own_order(runtime):
    @flow("two-topics")
    async def two_topics(ctx):
        return [await ctx.receive("b"), await ctx.receive("a"), await ctx.receive("b")]

    handle = await runtime.start(two_topics)
    for topic, payload in (("a", 1), ("b", 2), ("b", 3)):
        await runtime.send(handle.execution_id, topic, payload)
    assert await handle.result(5) == [2, 1, 3]


async def test_a_repeated_message_is_delivered_once(runtime):
    handle = await runtime.start(receiver, 2)
    for message_id, payload in (("m1", 1), ("m1", 1), ("m2", 2), ("m1", 1)):
        await runtime.send(handle.execution_id, "go", payload, message_id=message_id, sender="wms")
    assert await handle.result(5) == [1, 2]


async def test_a_duplicate_past_the_store_s_window_is_passed_over_in_the_log(fleet):
    async with fleet.runtime("node", [receiver]) as runtime:
        handle = await runtime.start(receiver, 301)
        for n in range(300):
            await runtime.send(handle.execution_id, "go", n, message_id=f"m{n}")
        await runtime.send(handle.execution_id, "go", 0, message_id="m0")  # the store knows the last 256
        await runtime.send(handle.execution_id, "go", "end", message_id="end")
        assert (await handle.result(10))[-1] == "end"
        passed = [
            e for e in await runtime.history(handle.execution_id) if e.data.get("reason") == "duplicate"
        ]
        assert len(passed) == 1
        assert passed[0].data["payload"] is None


async def test_select_takes_the_first_arm_that_can_be_answered(runtime):
    @flow("selects")
    async def selects(ctx):
        first = await ctx.select(receive("cancel"), receive("ship"), timer(days=3))
        return [first.index, first.kind, first.value]

    handle = await runtime.start(selects)
    await until_parked(runtime, handle.execution_id)
    await runtime.send(handle.execution_id, "ship", "x")
    assert await handle.result(5) == [1, "inbox", "x"]
    await until(lambda: not runtime._engine.wakes._table.slots, "the timer's row to go")


async def test_a_live_wait_is_answered_while_a_step_runs(runtime):
    @flow("live")
    async def live(ctx):
        task = asyncio.ensure_future(ctx.run(hold.wait))
        message = await ctx.receive("go")
        hold.set()
        await task
        return message

    hold = asyncio.Event()
    handle = await runtime.start(live)
    await runtime.send(handle.execution_id, "go", "now")
    assert await handle.result(5) == "now"
    assert Kind.EXECUTION_SUSPENDED not in kinds(await runtime.history(handle.execution_id))


async def test_a_live_timer_fires_while_a_step_runs(runtime):
    @flow("live-timer")
    async def live_timer(ctx):
        task = asyncio.ensure_future(ctx.run(hold.wait))
        await ctx.sleep(0.02)
        hold.set()
        return await task

    hold = asyncio.Event()
    assert await (await runtime.start(live_timer)).result(5) is True


async def test_a_gate_is_answered_by_resume(runtime):
    @flow("gated")
    async def gated(ctx):
        return await ctx.gate("approve")

    handle = await runtime.start(gated)
    with pytest.raises(GateNotOpenError):
        await runtime.resume(handle.execution_id, "other", 1)
    await until_parked(runtime, handle.execution_id)
    await runtime.resume(handle.execution_id, "approve", {"ok": True})
    assert await handle.result(5) == {"ok": True}
    resumed = of_kind(await runtime.history(handle.execution_id), Kind.EXECUTION_RESUMED)
    assert (resumed[0].data["kind"], resumed[0].data["answer"]) == ("gate", {"ok": True})
    with pytest.raises(ExecutionFinishedError):
        await runtime.resume(handle.execution_id, "approve", 1)


async def test_a_gate_is_answered_from_a_client(fleet):
    @flow("gated")
    async def gated(ctx):
        return await ctx.gate("approve")

    async with fleet.runtime("node", [gated]) as runtime, fleet.client() as client:
        handle = await runtime.start(gated)
        await until_parked(runtime, handle.execution_id)
        await client.resume(handle.execution_id, "approve", 5)
        assert await handle.result(5) == 5
        assert await client.handle(handle.execution_id).result(5) == 5


async def test_a_repeated_request_to_answer_is_answered_once(fleet):
    @flow("gated")
    async def gated(ctx):
        return [await ctx.gate("approve"), await ctx.gate("approve")]

    async with fleet.runtime("node", [gated]) as runtime, fleet.client() as client:
        handle = await runtime.start(gated)
        for number, node in enumerate((client, runtime)):
            await parks(runtime, handle.execution_id, number + 1)
            await node.resume(handle.execution_id, "approve", number, request_id=f"r{number}")
        assert await handle.result(5) == [0, 1]
        for node in (client, runtime):
            await node.resume(handle.execution_id, "approve", "again", request_id="r0")
            with pytest.raises(ExecutionFinishedError):
                await node.resume(handle.execution_id, "approve", "again", request_id="other")


async def test_a_copy_of_a_request_that_comes_while_the_flow_goes_on_is_no_answer(runtime):
    @flow("gated")
    async def gated(ctx):
        await ctx.gate("approve")
        return await ctx.receive("go")

    handle = await runtime.start(gated)
    await until_parked(runtime, handle.execution_id)
    await runtime.resume(handle.execution_id, "approve", 1, request_id="r")
    await runtime.resume(handle.execution_id, "approve", 1, request_id="r")
    with pytest.raises(GateNotOpenError):
        await runtime.resume(handle.execution_id, "approve", 1, request_id="other")


async def test_asyncio_timeouts_are_durable_timers(skipping):
    @flow("bounded")
    async def bounded(ctx):
        try:
            async with asyncio.timeout(3600):
                await ctx.receive("never")
        except TimeoutError:
            return "timed out"

    assert await skipping.run(await skipping.start(bounded)) == "timed out"


async def test_time_is_skipped_timer_by_timer(skipping):
    @flow("sleeper")
    async def sleeper(ctx):
        seen = [ctx.now()]
        for days in (30, 1):
            await ctx.sleep(days=days)
            seen.append(ctx.now())
        return [(b - a).total_seconds() for a, b in zip(seen, seen[1:], strict=False)]

    assert await skipping.run(await skipping.start(sleeper)) == [30 * 86400, 86400]


async def test_a_timer_row_stands_before_the_park_and_goes_after_it(skipping):
    @flow("sleeper")
    async def sleeper(ctx):
        await ctx.sleep(hours=1)

    handle = await skipping.start(sleeper)
    await skipping.settle()
    rows = await skipping._engine.wakes.rows_of(handle.execution_id)
    assert [(row.kind, row.wake_at - skipping.time()) for row in rows] == [("timer", 3_600_000)]
    await skipping.skip(minutes=59)
    assert await handle.status() == "suspended"
    await skipping.skip(minutes=1)
    assert await handle.status() == "completed"
    assert await skipping._engine.wakes.rows_of(handle.execution_id) == []


class HeldRows:
    """A wake store whose rows come late."""

    def __init__(self, inner):
        self._inner, self.asked, self.go = inner, asyncio.Event(), asyncio.Event()

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def schedule(self, rows):
        self.asked.set()
        await self.go.wait()
        await self._inner.schedule(rows)


async def test_a_park_waits_for_its_row(fleet):
    @flow("sleeper")
    async def sleeper(ctx):
        await ctx.sleep(hours=1)

    rows = HeldRows(MemoryWakeStore(fleet.wakes))
    async with Runtime(
        fleet.config("node"), flows=[sleeper], events=fleet.store(), wakes=rows, clock=fleet.clock
    ) as runtime:
        handle = await runtime.start(sleeper)
        await rows.asked.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        assert kinds(await runtime.history(handle.execution_id)) == [Kind.EXECUTION_STARTED]
        rows.go.set()
        await until_parked(runtime, handle.execution_id)
        assert kinds(await runtime.history(handle.execution_id))[-1] == Kind.EXECUTION_SUSPENDED


async def test_old_messages_expire_unread(fleet):
    async with fleet.runtime("node", [receiver], settings={"inbox_message_ttl_ms": 40}) as runtime:

        @flow("slow-receiver")
        async def slow_receiver(ctx):
            await ctx.run(hold.wait)
            return await ctx.receive("go")

        hold = asyncio.Event()
        handle = await runtime.start(slow_receiver)
        await runtime.send(handle.execution_id, "go", "old")
        sent_at = fleet.clock()
        await until(lambda: fleet.clock() > sent_at + 60, "the message's age")
        await runtime.send(handle.execution_id, "go", "new")
        hold.set()
        assert await handle.result(5) == "new"
        expired = [e for e in await runtime.history(handle.execution_id) if e.data.get("reason") == "expired"]
        assert [e.data["payload"] for e in expired] == [None]


async def test_a_consumed_prefix_is_trimmed(fleet):
    async with fleet.runtime("node", [receiver], settings={"inbox_trim_every": 10}) as runtime:
        handle = await runtime.start(receiver, 35)
        for n in range(35):
            await runtime.send(handle.execution_id, "go", n)
        assert await handle.result(5) == list(range(35))
        stream = inbox_stream(handle.execution_id, "go")
        await until(lambda: fleet.log.index.row(stream).first == 30, "the trim")


class Minted(pydantic.BaseModel):
    """What it is, and what is stored of it, differ."""

    @pydantic.model_serializer
    def stored(self):
        return {"a": {"__loomEnc": "x"}}


@pytest.mark.parametrize(
    ("topic", "payload", "error"),
    [
        ("go", "x" * 70_000, InboxMessageRefusedError),
        ("go", {"a": [{"__loomEnc": "x"}]}, InboxMessageRefusedError),
        ("go", {"a": {"$shredded": True}}, InboxMessageRefusedError),
        ("go", Minted(), InboxMessageRefusedError),
        ("__loom_child__:x", 1, InboxMessageRefusedError),
        ("", 1, InboxMessageRefusedError),
    ],
)
async def test_what_send_refuses_is_never_appended(runtime, topic, payload, error):
    handle = await runtime.start(receiver, 1)
    with pytest.raises(error):
        await runtime.send(handle.execution_id, topic, payload)
    assert runtime._engine.inbox_heads(handle.execution_id) == {}


async def test_a_full_inbox_says_so(fleet):
    async with fleet.runtime("node", [receiver], settings={"inbox_max_backlog": 2}) as runtime:
        handle = await runtime.start(receiver, 1)
        for n in range(3):
            await runtime.send(handle.execution_id, "other", n) if n < 2 else None
        with pytest.raises(InboxFullError):
            await runtime.send(handle.execution_id, "other", 3)
        await runtime.send(handle.execution_id, "go", 1)
        assert await handle.result(5) == [1]


async def test_parked_runs_beyond_the_limit_leave_memory_and_wake_from_their_logs(fleet):
    @flow("adds")
    async def adds(ctx, n):
        first = await ctx.run(add, n, 1)
        return first + await ctx.receive("go")

    async with fleet.runtime("node", [adds], settings={"max_resident": 3}) as runtime:
        handles = [await runtime.start(adds, n) for n in range(10)]
        await until(lambda: len(runtime._engine.runs) == 3, "only three to stay")
        for handle in handles:
            await runtime.send(handle.execution_id, "go", 100)
        assert [await handle.result(5) for handle in handles] == [n + 101 for n in range(10)]
        for handle in handles:
            steps = of_kind(await runtime.history(handle.execution_id), Kind.STEP_COMPLETED)
            assert len(steps) == 1


async def test_a_flow_that_waits_for_nothing_is_parked_and_named(runtime, trouble):
    @flow("stuck")
    async def stuck(ctx):
        await asyncio.Event().wait()

    handle = await runtime.start(stuck)
    await until_parked(runtime, handle.execution_id)
    assert trouble.warnings[0][1] == handle.execution_id
    await runtime.cancel(handle.execution_id)
    assert await handle.status() == "cancelled"


async def test_gates_and_messages_may_be_awaited_at_once(runtime):
    @flow("both")
    async def both(ctx):
        chosen = await ctx.select(gate("approve"), receive("go"))
        other = await ctx.select(gate("approve"), receive("go"))
        return [chosen.kind, other.kind]

    handle = await runtime.start(both)
    await until_parked(runtime, handle.execution_id)
    await runtime.send(handle.execution_id, "go", 1)
    await until_parked(runtime, handle.execution_id)
    await until(lambda: runtime._engine.runs[handle.execution_id].state.cursors, "the first to be taken")
    await runtime.resume(handle.execution_id, "approve", True)
    assert await handle.result(5) == ["inbox", "gate"]
