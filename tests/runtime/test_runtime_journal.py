"""Write-behind: what may run ahead of the log, and what never does."""

from __future__ import annotations

import asyncio

import pytest
from runtime_support import FaultyStore, add, has, is_step, kinds, of_kind

from loom import flow
from loom.errors import OutcomeUnknownError, PayloadTooLargeError, StorageWriteError, WrongHeadError
from loom.runtime.journal import MAX_BATCH_EVENTS, MAX_BATCH_WEIGHT, Journal
from loom.schemas.envelope import Kind, NewEvent
from loom.stores.contracts import StreamAppend
from loom.testing.runtime import until


async def test_the_flow_runs_ahead_of_its_journal(fleet):
    ran = []
    release = asyncio.Event()

    async def note(n):
        ran.append(n)

    @flow("ahead")
    async def ahead(ctx):
        for n in range(5):
            await ctx.run(note, n)

    async def hold(appends):
        if is_step(appends):
            await release.wait()

    events = FaultyStore(fleet.store())
    events.before = hold
    async with fleet.runtime("node", [ahead], events=events) as runtime:
        handle = await runtime.start(ahead)
        await until(lambda: ran == list(range(5)), "all steps to run")
        assert kinds(await runtime.history(handle.execution_id)) == [Kind.EXECUTION_STARTED]
        release.set()
        await handle.result(5)
        # One append in flight, the rest batched behind it.
        batches = [len(a.events) for appends in events.appended for a in appends]
        assert batches == [1, 1, 5]


async def test_the_flow_body_waits_for_sequence_0(fleet):
    began, release = asyncio.Event(), asyncio.Event()

    @flow("begins")
    async def begins(ctx):
        began.set()

    async def hold(appends):
        await release.wait()

    events = FaultyStore(fleet.store())
    events.after = hold
    async with fleet.runtime("node", [begins], events=events) as runtime:
        starting = asyncio.ensure_future(runtime.start(begins))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not began.is_set()
        release.set()
        await (await starting).result(5)


async def test_a_handle_waits_for_the_end_to_be_durable(fleet):
    release = asyncio.Event()

    @flow("ends")
    async def ends(ctx):
        return 1

    async def hold(appends):
        if has(appends, Kind.EXECUTION_COMPLETED):
            await release.wait()

    events = FaultyStore(fleet.store())
    events.before = hold
    async with fleet.runtime("node", [ends], events=events) as runtime:
        handle = await runtime.start(ends)
        waiting = asyncio.ensure_future(handle.result(5))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        release.set()
        assert await waiting == 1


async def test_no_step_starts_once_the_journal_has_failed(fleet, trouble):
    ran = []

    async def note(n):
        ran.append(n)

    @flow("doomed")
    async def doomed(ctx):
        for n in range(100):
            await ctx.run(note, n)

    failed = asyncio.Event()

    def refuse(appends):
        if is_step(appends):
            failed.set()
            raise WrongHeadError("x", 0, 5)

    asked, answer = asyncio.Event(), asyncio.Event()

    class Slow(FaultyStore):
        async def info(self, stream_id):  # what the run asks to learn who was first
            asked.set()
            await answer.wait()
            return await self._inner.info(stream_id)

    events = Slow(fleet.store())
    events.before = refuse
    async with fleet.runtime("node", [doomed], events=events, **trouble.options) as runtime:
        handle = await runtime.start(doomed, execution_id="x")
        await asked.wait()
        at_failure = len(ran)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(ran) == at_failure
        events.before = None
        answer.set()
        await handle.result(5)


async def test_an_effect_after_a_wake_waits_until_the_wake_is_won(fleet):
    ran, release = [], asyncio.Event()

    async def note():
        ran.append(1)

    @flow("woken")
    async def woken(ctx):
        await ctx.receive("go")
        await ctx.run(note)

    async def hold(appends):
        if has(appends, Kind.MESSAGE_CONSUMED):
            await release.wait()

    events = FaultyStore(fleet.store())
    events.before = hold
    async with fleet.runtime("node", [woken], events=events) as runtime:
        handle = await runtime.start(woken)
        await until(lambda: runtime._engine.parked_runs)
        sent = asyncio.create_task(runtime.send(handle.execution_id, "go", 1))
        await until(lambda: not runtime._engine.parked_runs)
        for _ in range(20):
            await asyncio.sleep(0)
        assert ran == []
        release.set()
        await sent
        await handle.result(5)
        assert ran == [1]


async def test_an_unknown_outcome_is_repeated_unchanged_and_stands_once(fleet, trouble):
    lost = []

    @flow("steps")
    async def steps(ctx):
        return [await ctx.run(add, n, 1) for n in range(3)]

    def lose(appends):
        if len(lost) < 3:
            lost.append([event.id for append in appends for event in append.events])
            raise OutcomeUnknownError(appends[0].stream_id, "the reply was lost")

    events = FaultyStore(fleet.store())
    events.after = lose
    async with fleet.runtime("node", [steps], events=events, **trouble.options) as runtime:
        handle = await runtime.start(steps)
        assert await handle.result(10) == [1, 2, 3]
        history = await runtime.history(handle.execution_id)
        assert [e.sequence for e in history] == list(range(len(history)))
        assert len({e.id for e in history}) == len(history)
    assert len(trouble.storage) >= 1
    assert trouble.errors == []


async def test_a_refused_write_is_tried_again_with_back_off_and_told(fleet, trouble):
    refused = []

    @flow("steps")
    async def steps(ctx):
        return await ctx.run(add, 1, 1)

    def refuse(appends):
        if is_step(appends) and len(refused) < 4:
            refused.append(1)
            raise StorageWriteError(appends[0].stream_id, "the broker is away")

    events = FaultyStore(fleet.store())
    events.before = refuse
    async with fleet.runtime("node", [steps], events=events, **trouble.options) as runtime:
        assert await (await runtime.start(steps)).result(10) == 2
    assert len(refused) == 4
    assert len(trouble.storage) == 1  # the first, then every 16th


async def test_a_store_that_stays_away_gives_the_execution_up_and_it_is_taken_up_again(fleet, trouble):
    away = asyncio.Event()

    @flow("steps")
    async def steps(ctx):
        return await ctx.run(add, 1, 1)

    def refuse(appends):
        if is_step(appends) and not away.is_set():
            raise StorageWriteError(appends[0].stream_id, "the broker is away")

    events = FaultyStore(fleet.store())
    events.before = refuse
    settings = {"storage_patience_ms": 100, "recovery_interval_ms": 50}
    async with fleet.runtime("node", [steps], events=events, settings=settings, **trouble.options) as runtime:
        handle = await runtime.start(steps)
        await until(lambda: not runtime._engine.runs, "the run to be given up")
        away.set()
        assert await handle.result(10) == 2
        recovered = of_kind(await runtime.history(handle.execution_id), Kind.EXECUTION_RECOVERED)
        assert recovered[-1].data["evidence"] == "own"


async def test_control_records_beside_a_run_do_not_stop_it(fleet):
    hold = asyncio.Event()

    @flow("held")
    async def held(ctx):
        await ctx.run(hold.wait)
        await ctx.run(add, 1, 1)
        return "done"

    async with fleet.runtime(
        "node", [held], owned=()
    ) as runtime:  # hears nothing: it finds out by its append
        handle = await runtime.start(held, execution_id="x")
        async with fleet.runtime("owner", [held]) as owner:
            await until(lambda: "x" in owner._engine.runs)
            store = fleet.store(())
            for n in range(3):
                seen = await store.observe("x")
                event = NewEvent(f"d{n}", Kind.EXECUTION_DENIED, {"op": "cancel"}, {})
                await store.append(StreamAppend("x", (event,), observation=seen))
            hold.set()
            assert await handle.result(10) == "done"
            history = await owner.history("x")
            assert kinds(history).count(Kind.EXECUTION_DENIED) == 3
            assert kinds(history).count(Kind.EXECUTION_RECOVERED) == 0


async def test_a_release_its_delivery_and_the_end_of_the_park_travel_in_one_append(fleet):
    """However the batch would be cut: by its count, or by a log that finds it too large (system.md 4.3)."""
    events = FaultyStore(fleet.store())

    def never_large(appends):
        if len(appends[0].events) > 2 and not has(appends, Kind.INBOX_RELEASED):
            raise PayloadTooLargeError("e", 1, 0)

    async with fleet.runtime("node", [], events=events) as runtime:
        engine = runtime._engine
        start = NewEvent("s", Kind.EXECUTION_STARTED, {"workflow": "w"})
        await engine.events.append(StreamAppend("e", (start,), expected_head=-1, fence=1))
        events.before = never_large
        journal = Journal(
            engine, engine.loop, "e", head=0, fence=1, on_settled=lambda: None, on_failed=lambda _: None
        )
        for n in range(MAX_BATCH_EVENTS - 1):
            journal.push(Kind.DECISION_RECORDED, {"n": n}, {})
        for kind in (Kind.INBOX_RELEASED, Kind.MESSAGE_CONSUMED, Kind.EXECUTION_RESUMED, Kind.STEP_COMPLETED):
            journal.push(kind, {}, {})
        journal.flush()
        await journal.durable()
    together = [[e.type for e in a[0].events] for a in events.appended if has(a, Kind.INBOX_RELEASED)]
    assert len(together) == 1
    place = together[0].index(Kind.INBOX_RELEASED)
    assert together[0][place : place + 3] == [
        Kind.INBOX_RELEASED,
        Kind.MESSAGE_CONSUMED,
        Kind.EXECUTION_RESUMED,
    ]


@pytest.mark.parametrize(
    ("weights", "batches"),
    [
        ([MAX_BATCH_WEIGHT // 2] * 5, [2, 2, 1]),
        ([1, MAX_BATCH_WEIGHT - 1, 1], [3]),  # what is small is not weighed
        ([1, MAX_BATCH_WEIGHT + 1, 1], [1, 1, 1]),  # nothing is too heavy to travel at all
    ],
)
async def test_an_append_is_bounded_by_what_its_events_weigh(fleet, weights, batches):
    events = FaultyStore(fleet.store())
    async with fleet.runtime("node", [], events=events) as runtime:
        engine = runtime._engine
        start = NewEvent("s", Kind.EXECUTION_STARTED, {"workflow": "w"})
        await engine.events.append(StreamAppend("e", (start,), expected_head=-1, fence=1))
        journal = Journal(
            engine, engine.loop, "e", head=0, fence=1, on_settled=lambda: None, on_failed=lambda _: None
        )
        for weight in weights:
            journal.push(Kind.STEP_COMPLETED, {}, {}, weight=weight)
        journal.flush()
        await journal.durable()
        assert [len(append.events) for (append,) in events.appended][1:] == batches
