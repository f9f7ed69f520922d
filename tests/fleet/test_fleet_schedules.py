"""A schedule on a fleet of two: its driver is killed, and each instant still starts one execution."""

import asyncio
import datetime as dt
from itertools import takewhile

import pytest
from fleet_support import stubborn

from loom import Schedule
from loom.runtime.schedules.policy import firing_id, instants
from loom.schemas.envelope import Kind

SECOND = dt.timedelta(seconds=1)
FIRED_BEFORE, FIRED_AFTER = 3, 6


async def seen(client, condition):
    """Its view, once it is as wanted."""
    async with asyncio.timeout(90):
        while True:
            view = await stubborn(lambda: client.schedules.describe("ticks"))
            if condition(view):
                return view
            await asyncio.sleep(0.1)


@pytest.mark.timeout(200)
async def test_each_instant_starts_one_execution_whoever_is_killed(fleet):
    for name in ("north", "south"):
        fleet.start_worker(name)
    async with fleet.client() as client:
        async with asyncio.timeout(60):
            while not (fleet.is_up("north") and fleet.is_up("south")):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        schedule = Schedule(flow="tick", every=SECOND, overlap="allow")
        await stubborn(lambda: client.schedules.create("ticks", schedule))
        before = await seen(client, lambda view: view.fired >= FIRED_BEFORE)
        head = await stubborn(lambda: client.follow_to_head("schedule@ticks"))
        log = await stubborn(lambda: client.history(head))
        driver = next(e.metadata["node"] for e in reversed(log) if "node" in e.metadata).partition(":")[0]
        fleet.kill(driver)
        await seen(client, lambda view: view.fired >= before.fired + FIRED_AFTER)
        await stubborn(lambda: client.schedules.pause("ticks"))
        view = await seen(client, lambda view: view.status == "paused" and not view.running)
        began = log[0].timestamp
        last = view.recent[-1]["due"]
        due = list(takewhile(lambda at: at <= last, instants(schedule, began)))
        assert (view.missed, view.skipped, view.fired) == (0, 0, len(due)), fleet.tails()
        for at in due:
            execution_id = firing_id("ticks", at)
            history = await stubborn(lambda execution_id=execution_id: client.history(execution_id))
            assert [e.type for e in history].count(Kind.EXECUTION_STARTED) == 1
            assert history[-1].type == Kind.EXECUTION_COMPLETED
    tokens = {execution_id: len(done) for (execution_id, _), done in fleet.effects().items()}
    assert set(tokens) == {firing_id("ticks", at) for at in due}
    assert all(count <= 2 for count in tokens.values())  # a step under way at the kill is done again
