"""Schedules as their users meet them: on a virtual clock, over crashes, by name."""

import asyncio
import datetime as dt

import pytest
from runtime_support import FaultyStore, has, kinds, of_kind

from loom import (
    Context,
    ExecutionAlreadyExistsError,
    ExecutionDeniedError,
    ExecutionFinishedError,
    ExecutionNotFoundError,
    InvalidIdError,
    Principal,
    Schedule,
    StorageWriteError,
    flow,
)
from loom.runtime.schedules.flow import TURNS
from loom.schemas.envelope import Kind
from loom.testing.clock import VirtualClock
from loom.testing.runtime import MemoryFleet, crash, until

HOUR = dt.timedelta(hours=1)


@flow("job")
async def job(ctx: Context, minutes: int) -> int:
    if minutes:
        await ctx.sleep(minutes=minutes)
    return minutes


@flow("broken")
async def broken(ctx: Context) -> None:
    raise ValueError("no luck")


def hourly(minutes=0, **settings):
    return Schedule(flow=job, input=minutes, every=HOUR, **settings)


async def told(node, name, until=lambda _view: True):
    """Its view, once what it was told has come through."""
    async with asyncio.timeout(10):
        while True:
            await node.settle()
            view = await node.schedules.describe(name)
            if until(view):
                return view
            await asyncio.sleep(0.005)


async def test_each_instant_starts_one_execution_by_a_known_id(skipping):
    await skipping.schedules.create("nightly", hourly())
    await skipping.skip(hours=3)
    view = await told(skipping, "nightly")
    assert (view.status, view.fired, view.skipped, view.missed) == ("active", 3, 0, 0)
    assert [one["id"] for one in view.recent] == [
        "nightly@20231114T230000Z",
        "nightly@20231115T000000Z",
        "nightly@20231115T010000Z",
    ]
    for one in view.recent:
        assert await skipping.handle(one["id"]).result(1) == 0


async def test_cron_in_a_zone(skipping):
    await skipping.schedules.create(
        "report", Schedule(flow=job, input=0, cron="30 2 * * *", time_zone="Europe/Berlin")
    )
    await skipping.skip(days=2)
    view = await told(skipping, "report")
    assert [one["id"] for one in view.recent] == ["report@20231115T013000Z", "report@20231116T013000Z"]


async def test_a_trigger_with_one_request_fires_once(skipping):
    await skipping.schedules.create("nightly", hourly(5), paused=True)
    ids = [await skipping.schedules.trigger("nightly", request_id="r1") for _ in range(3)]
    assert set(ids) == {"nightly+r1"}
    view = await told(skipping, "nightly", lambda view: view.fired)
    assert (view.fired, view.skipped, view.running) == (1, 0, ("nightly+r1",))
    assert (view.status, view.next_at) == ("paused", None)


async def test_cancel_other_ends_the_predecessor(skipping):
    await skipping.schedules.create("nightly", hourly(90, overlap="cancel_other"))
    await skipping.skip(hours=2)
    view = await told(skipping, "nightly")
    assert [one["status"] for one in view.recent] == ["cancelled", "running"]
    assert await skipping.status(view.recent[0]["id"]) == "cancelled"
    assert await skipping.status(view.recent[1]["id"]) == "suspended"


async def test_an_execution_that_fails_is_known_to_have(skipping):
    await skipping.schedules.create("nightly", Schedule(flow=broken, every=HOUR))
    await skipping.skip(hours=1)
    assert (await told(skipping, "nightly")).recent[0]["status"] == "failed"


async def test_a_start_whose_id_is_taken_is_skipped(skipping):
    await skipping.start(job, 0, execution_id="nightly@20231114T230000Z")
    await skipping.schedules.create("nightly", hourly())
    await skipping.skip(hours=2)
    view = await told(skipping, "nightly")
    assert [one["status"] for one in view.recent] == ["refused", "completed"]
    assert (view.fired, view.skipped) == (1, 1)


async def test_its_log_stays_short_and_what_runs_stays_known(skipping):
    await skipping.schedules.create("nightly", hourly(150))
    await skipping.skip(hours=TURNS * 2 + 1)
    view = await told(skipping, "nightly")
    head = await skipping.follow_to_head("schedule@nightly")
    assert head != "schedule@nightly"
    assert len(await skipping.history("schedule@nightly")) < 6 * TURNS
    assert view.fired + view.skipped == TURNS * 2 + 1
    assert [one["status"] for one in view.recent[:-1]] == ["completed"] * (len(view.recent) - 1)


async def test_an_update_takes_over(skipping):
    await skipping.schedules.create("nightly", hourly(30))
    await skipping.skip(hours=1)
    await skipping.schedules.update("nightly", Schedule(flow=job, input=0, every=HOUR / 2))
    view = await told(skipping, "nightly", lambda view: view.schedule.every == HOUR / 2)
    assert view.running == ("nightly@20231114T230000Z",)
    await skipping.skip(hours=1)
    assert (await told(skipping, "nightly")).running == ()


async def test_a_deleted_name_can_be_used_again_and_its_ids_are_new(skipping):
    await skipping.schedules.create("nightly", hourly(30))
    with pytest.raises(ExecutionAlreadyExistsError):
        await skipping.schedules.create("nightly", hourly())
    await skipping.skip(hours=1)
    await skipping.schedules.delete("nightly")
    assert (await told(skipping, "nightly")).status == "deleted"
    with pytest.raises(ExecutionFinishedError):
        await skipping.schedules.delete("nightly")
    assert await skipping.schedules.list() == []
    for count in (2, 3, 4):
        assert await skipping.schedules.create("nightly", hourly()) == f"schedule@nightly~{count}"
        if count < 4:
            await skipping.schedules.delete("nightly")
    await skipping.skip(hours=1)
    view = await told(skipping, "nightly")
    assert [one["id"] for one in view.recent] == ["nightly~4@20231115T000000Z"]
    assert await skipping.status("nightly@20231114T230000Z") == "completed"
    assert await skipping.schedules.list() == ["nightly"]


async def test_only_who_may_act_on_it_may(skipping):
    alice, mallory = Principal("alice", identity={"sub": "a"}), Principal("mallory", identity={"sub": "m"})
    await skipping.schedules.create("nightly", hourly(30), principal=alice)
    verbs = skipping.schedules
    for call in (verbs.pause, verbs.unpause, verbs.trigger, verbs.delete, verbs.describe):
        with pytest.raises(ExecutionDeniedError):
            await call("nightly", principal=mallory)
    await skipping.skip(hours=1)
    started = (await verbs.describe("nightly", principal=alice)).running[0]
    await skipping.query(started, principal=alice)
    with pytest.raises(ExecutionDeniedError):
        await skipping.query(started, principal=mallory)


async def test_names_are_checked(skipping):
    for name in ("", "a b", "a~2", "a@b", "x" * 121):
        with pytest.raises(InvalidIdError):
            await skipping.schedules.create(name, hourly())
    with pytest.raises(ExecutionNotFoundError):
        await skipping.schedules.describe("nightly")


# -- several nodes -----------------------------------------------------------------------------------------------


async def next_firings(fleet, clock, node, count):
    """Let ``count`` hours pass and see what started in them."""
    for _ in range(count):
        before = (await node.schedules.describe("nightly")).next_at
        clock.advance_to(round(before.timestamp() * 1000))
        node._timers.kick()
        await asyncio.wait_for(moved(node, before), 10)


async def moved(node, before):
    while (await node.schedules.describe("nightly")).next_at == before:
        node._timers.kick()
        await asyncio.sleep(0.01)


def starts(fleet):
    """Executions of the schedule in the log, each with how often it was begun."""
    return {
        stream_id: len(of_kind(fleet.log.index.events(stream_id, 0, 10), Kind.EXECUTION_STARTED))
        for stream_id, row in fleet.log.index.rows().items()
        if row.kind == "executions" and stream_id.startswith("nightly@")
    }


@pytest.mark.parametrize("fate", ["before", "after"])
async def test_a_node_that_dies_at_a_firing_leaves_it_to_the_next_once(fate):
    clock = VirtualClock()
    fleet = MemoryFleet(clock=clock, ttl_ms=600)
    events = FaultyStore(fleet.store())
    first = fleet.runtime("one", [job], events=events)
    await first.open()
    await first.schedules.create("nightly", hourly(overlap="allow"))
    await until(lambda: fleet.wakes.slots)
    died = asyncio.Event()

    async def dies(appends):
        if has(appends, Kind.CHILD_STARTED):
            died.set()
            raise StorageWriteError("append", "the node is dying")

    setattr(events, fate, dies)
    clock.advance(3_600_000)
    first._timers.kick()
    await asyncio.wait_for(died.wait(), 10)
    await crash(first)
    async with fleet.runtime("two", [job]) as second:
        clock.advance(2_000)  # what the dead node had shown of its life has lapsed
        second._recovery.everything()
        async with asyncio.timeout(10):
            while (await second.schedules.describe("nightly")).fired != 1 or not starts(fleet):
                second._recovery.everything()
                await asyncio.sleep(0.02)
        await next_firings(fleet, clock, second, 2)
        await until(lambda: len(starts(fleet)) == 3)
        view = await second.schedules.describe("nightly")
    assert (view.fired, view.missed) == (3, 0)
    assert sorted(starts(fleet)) == [one["id"] for one in view.recent]
    assert set(starts(fleet).values()) == {1}


async def test_whoever_wakes_late_catches_up_by_the_policy():
    clock = VirtualClock()
    fleet = MemoryFleet(clock=clock)
    async with fleet.runtime("one", [job]) as node:
        await node.schedules.create("nightly", hourly(overlap="allow", catch_up=HOUR * 2))
        await until(lambda: fleet.wakes.slots)
    clock.advance(10 * 3_600_000)
    async with fleet.runtime("two", [job]) as node:
        async with asyncio.timeout(10):
            while (await node.schedules.describe("nightly")).missed == 0:
                node._timers.kick()
                await asyncio.sleep(0.01)
        await until(lambda: len(starts(fleet)) == 2)
        view = await node.schedules.describe("nightly")
    assert (view.fired, view.missed) == (2, 8)


async def test_a_client_makes_one_and_a_worker_drives_it():
    clock = VirtualClock()
    fleet = MemoryFleet(clock=clock)
    async with fleet.runtime("one", [job]) as node, fleet.client() as client:
        await client.schedules.create("nightly", Schedule(flow="job", input=0, every=HOUR))
        await until(lambda: fleet.wakes.slots)
        await next_firings(fleet, clock, node, 1)
        view = await client.schedules.describe("nightly")
        assert view.fired == 1
        log = await client.history("schedule@nightly")
    assert kinds(log)[:3] == [Kind.EXECUTION_STARTED, Kind.STEP_COMPLETED, Kind.EXECUTION_SUSPENDED]
