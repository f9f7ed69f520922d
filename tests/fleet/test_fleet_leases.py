"""Workers that stand still, and a Redis that does: nobody superseded writes, no step is begun after a takeover."""

import asyncio

import pytest
from conftest import TTL_MS
from fleet_support import RedisLink, stubborn

from loom.schemas.envelope import Kind

TTL_S = TTL_MS / 1000


async def begun(fleet, handles, step="first"):
    """Wait until every execution has begun a step."""
    async with asyncio.timeout(60):
        while True:
            seen = fleet.effects()
            if all((handle.execution_id, step) in seen for handle in handles):
                return
            await asyncio.sleep(0.05)


async def started(fleet, client, *, executions, seconds, north=None):
    fleet.start_worker("north", env=north)
    fleet.start_worker("south")
    async with asyncio.timeout(60):
        while not (fleet.is_up("north") and fleet.is_up("south")):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    handles = [await stubborn(lambda: client.start("slow", seconds)) for _ in range(executions)]
    await begun(fleet, handles)
    return handles


async def judge(fleet, client, handles):
    """Everything ended once; what was taken over was gone on with by its heir alone. Returns how many were."""
    assert [await handle.result(timeout=120) for handle in handles] == ["second"] * len(handles)
    taken, effects = 0, fleet.effects()
    for handle in handles:
        log = await stubborn(lambda handle=handle: client.history(handle.execution_id))
        assert [event.sequence for event in log] == list(range(len(log)))
        assert sum(event.type == Kind.EXECUTION_COMPLETED for event in log) == 1
        recovered = [event for event in log if event.type == Kind.EXECUTION_RECOVERED]
        taken += bool(recovered)
        if recovered:
            heir = recovered[-1].metadata["node"]
            after = log[recovered[-1].sequence + 1 :]
            assert {event.metadata.get("node", heir) for event in after} == {heir}
            assert effects[handle.execution_id, "second"] == [heir.partition(":")[0]]
        assert len(effects[handle.execution_id, "second"]) == 1
        assert len(effects[handle.execution_id, "first"]) <= 1 + len(recovered)
    return taken


async def stopped_past_its_ttl(fleet, *, executions, seconds, stalls):
    async with fleet.client() as client:
        handles = await started(fleet, client, executions=executions, seconds=seconds)
        for _ in range(stalls):
            worker = fleet.workers["north"]
            worker.pause()
            try:
                await asyncio.sleep(seconds + 3 * TTL_S)
            finally:
                worker.resume()
        taken = await judge(fleet, client, handles)
        mine = [
            owner for (_, step), names in fleet.effects().items() if step == "first" for owner in names[:1]
        ]
        assert taken >= (1 if "north" in mine else 0), fleet.tails()


@pytest.mark.timeout(200)
async def test_a_worker_that_stood_still_past_its_ttl_goes_on_with_nothing(fleet):
    await stopped_past_its_ttl(fleet, executions=8, seconds=3 * TTL_S, stalls=1)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("goes", "comes"), [("pause", "resume"), ("terminate", "start")], ids=["stands_still", "is_down"]
)
async def test_a_redis_that_is_away_for_two_ttls_stops_runs_and_loses_none(fleet, private_redis, goes, comes):
    async with fleet.client() as client:
        handles = await started(fleet, client, executions=8, seconds=4 * TTL_S)
        getattr(private_redis, goes)()
        try:
            await asyncio.sleep(2 * TTL_S)
        finally:
            getattr(private_redis, comes)()
        await judge(fleet, client, handles)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", ["cut", pytest.param("mute", marks=pytest.mark.soak)])
async def test_a_worker_without_redis_stops_what_it_drives_and_loses_none(fleet, private_redis, how):
    """It owns its partitions all the while: it stops by itself, before its rows could be seen to have lapsed."""
    async with RedisLink(private_redis.url) as link, fleet.client() as client:
        handles = await started(
            fleet, client, executions=8, seconds=4 * TTL_S, north={"LOOM_REDIS_URL": link.url}
        )
        link.become(how)
        await asyncio.sleep(TTL_S)
        known = len(fleet.ledger())
        await asyncio.sleep(2 * TTL_S)
        assert [row for row in fleet.ledger()[known:] if row["token"] == "north"] == []
        link.become("open")
        await judge(fleet, client, handles)


@pytest.mark.timeout(200)
async def test_a_redis_that_is_restarted_with_its_data_is_outlived(fleet, private_redis):
    async with fleet.client() as client:
        handles = await started(fleet, client, executions=8, seconds=3 * TTL_S)
        private_redis.restart()
        await judge(fleet, client, handles)


@pytest.mark.soak
@pytest.mark.timeout(1_800)
async def test_two_hundred_executions_with_long_steps_under_stalls(fleet):
    await stopped_past_its_ttl(fleet, executions=200, seconds=20, stalls=3)
