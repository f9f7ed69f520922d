"""What the doctor says of leases, and what `loom leases` makes of the rows."""

import asyncio

import pytest

from loom import flow
from loom.cli.recovery import rows_of
from loom.stores.memory.lease_store import MemoryLeaseStore
from loom.testing.clock import VirtualClock
from loom.testing.runtime import MemoryFleet, crash, until

TTL_MS = 900


@flow("waits")
async def waits(ctx):
    return await ctx.receive("go")


@flow("works")
async def works(ctx):
    return await ctx.run(asyncio.sleep, 3600)


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def fleet(clock):
    return MemoryFleet(clock=clock, ttl_ms=TTL_MS)


async def codes(fleet, **settings):
    async with fleet.client() as client:
        client.config = fleet.config("client", **settings)
        return {finding.code: finding for finding in await client.findings()}


async def test_a_fleet_that_is_well_is_told_its_mode(fleet):
    async with fleet.runtime("north", [waits]) as node:
        await node.start(waits, execution_id="x")
        found = await codes(fleet)
        assert {code: one.severity for code, one in found.items()} == {"leases-lazy": "info"}
        assert "for 300 ms" in found["leases-lazy"].problem
        assert await codes(fleet, leases={"acquire": "eager"}) == {}


async def test_modes_that_prove_nothing_are_told(fleet):
    async with fleet.runtime("north", [waits]):
        assert "leases-disabled" in await codes(fleet, leases={"enabled": False})
        assert "leases-outlive-outages" in await codes(fleet, leases={"on_store_error": "continue"})
        found = {}
        async with fleet.client() as client:
            client.stores.leases.scope = "process"
            found = {finding.code for finding in await client.findings()}
    assert "leases-not-shared" in found


async def test_a_lapsed_lease_is_told_by_what_became_of_its_execution(fleet, clock):
    node = fleet.runtime("north", [works, waits])
    await node.open()
    await node.start(works, execution_id="running")
    await node.start(waits, execution_id="parked")
    ended = await node.start(waits, execution_id="ended")
    await node.send("ended", "go", 1)
    await ended.result(5)
    await until(lambda: fleet.wakes is not None and "parked" in node._engine.runs)
    owner = node.node
    await crash(node)
    leases = MemoryLeaseStore(fleet.leases)
    await leases.acquire_many(["running", "parked", "ended", "never"], owner, TTL_MS)
    await leases.acquire_many(["never too"], "south:1~continue", TTL_MS)
    assert not {"lease-untaken", "lease-void"} & set(await codes(fleet))
    clock.advance(TTL_MS + 2 * TTL_MS)  # lapsed, and somebody may be about to take them
    assert not {"lease-untaken", "lease-void"} & set(await codes(fleet))
    clock.advance(1)
    found = await codes(fleet)
    assert found["lease-untaken"].problem.endswith(": running")
    assert found["lease-untaken"].severity == "warning"
    assert found["lease-void"].problem.endswith(": ended, never")
    assert "no-live-node" in found


async def test_a_lease_of_a_node_that_shows_no_life_is_told(fleet):
    async with fleet.runtime("north", [waits]) as node:
        leases = MemoryLeaseStore(fleet.leases)
        await leases.acquire("x", node.node, TTL_MS)
        await leases.acquire("y", "south:1~ghosts", TTL_MS)
        assert "presence-missing" not in await codes(fleet)
        await leases.acquire("z", "south:1", TTL_MS)
        found = await codes(fleet)
    assert found["presence-missing"].problem.endswith(": south:1")


async def test_clocks_that_differ_from_the_store_s_are_told(fleet, clock):
    leases = MemoryLeaseStore(fleet.leases)
    now = clock()
    for name, skew in (("ahead", 5_000), ("behind", -3_000), ("well", 1_500)):
        await leases.beat(name, TTL_MS, (), {"at": now + skew, "ttlMs": TTL_MS})
    await leases.beat("older release", TTL_MS, (), {})
    async with fleet.client() as client:
        skewed = [finding.problem for finding in await client.findings() if finding.code == "clock-skew"]
        assert [problem.split(":")[0] for problem in skewed] == [
            "the clock of node ahead is 5000 ms ahead of the lease store's",
            "the clock of node behind is 3000 ms behind the lease store's",
        ]
        client._clock = lambda: now - 60_000
        assert "this process is 60000 ms behind" in " ".join(f.problem for f in await client.findings())


async def test_leases_are_shown_by_node(fleet, clock):
    async with fleet.runtime("north", [waits]) as node:
        leases = MemoryLeaseStore(fleet.leases)
        await leases.acquire("x", node.node, TTL_MS)
        await leases.acquire("y", "south:1", TTL_MS * 10)
        clock.advance(TTL_MS)
        north, south = rows_of(await leases.present(), await leases.held(10))
    assert (north["node"], north["flows"]) == (node.node, ["waits", "loom.schedule"])
    assert [(lease["execution_id"], lease["state"]) for lease in north["leases"]] == [("x", "expired")]
    assert (south["node"], south["state"]) == ("south:1", "unknown")
    assert south["leases"][0]["expires_at"] == clock() + 9 * TTL_MS
