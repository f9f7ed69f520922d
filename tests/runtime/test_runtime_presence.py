"""Evidence of life: a node that cannot show its own stops, and takes up again what nobody else took."""

from __future__ import annotations

import asyncio
import time

from runtime_support import add, kinds, of_kind

from loom import Config, UnreachableError, flow
from loom.kernel.evidence import Evidence
from loom.runtime.evidence import EvidenceReader
from loom.runtime.presence import PresenceKeeper
from loom.runtime.signals import Signals
from loom.runtime.surroundings import Surroundings
from loom.schemas.envelope import Kind
from loom.stores.memory.lease_store import MemoryLeaseStore
from loom.testing.runtime import MemoryFleet, until


class Outage(MemoryLeaseStore):
    """A lease store that a test can take away."""

    away = False

    async def beat(self, *args, **kwargs):
        self._check()
        return await super().beat(*args, **kwargs)

    async def presence(self, nodes):
        self._check()
        return await super().presence(nodes)

    def _check(self):
        if self.away:
            raise UnreachableError("Redis", "nowhere", "redis_url")


async def test_a_lapsed_node_stops_its_runs_and_regains_them(trouble):
    fleet = MemoryFleet(ttl_ms=600)
    began, hold = [], asyncio.Event()

    async def effect():
        began.append(1)
        await hold.wait()
        return "done"

    @flow("held")
    async def held(ctx):
        return await ctx.run(effect)

    runtime = fleet.runtime("node", [held], **trouble.options)
    leases = Outage(fleet.leases)
    runtime._given["leases"] = leases
    async with runtime:
        handle = await runtime.start(held)
        await until(lambda: began)
        leases.away = True
        await until(lambda: not runtime._engine.runs, "the runs to stop")
        assert runtime._engine.live() is False
        late = await runtime.start(held)  # what is started now waits in the log
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(began) == 1
        assert "node" not in (await runtime.history(late.execution_id))[0].metadata
        leases.away = False
        hold.set()
        assert await handle.result(10) == "done"
        assert await late.result(10) == "done"
        recovered = of_kind(await runtime.history(handle.execution_id), Kind.EXECUTION_RECOVERED)
        assert [e.data["evidence"] for e in recovered] == ["own"]


async def test_evidence_that_cannot_be_read_is_none(trouble):
    fleet = MemoryFleet(ttl_ms=400)
    hold = asyncio.Event()

    @flow("held")
    async def held(ctx):
        await ctx.run(hold.wait)
        return await ctx.run(add, 1, 1)

    from loom.testing.runtime import crash

    victim = fleet.runtime("victim", [held])
    await victim.open()
    await victim.start(held, execution_id="x")
    await crash(victim)
    heir = fleet.runtime("heir", [held], **trouble.options)
    leases = Outage(fleet.leases)
    heir._given["leases"] = leases
    async with heir:
        leases.presence = None  # answers nothing that can be used
        await until(
            lambda: all(
                p.expires_at <= fleet.clock() for n, p in fleet.leases.present.items() if "victim" in n
            )
        )
        del leases.presence
        leases.away = True
        assert await heir.recover_abandoned() == []
        assert kinds(await heir.history("x")) == [Kind.EXECUTION_STARTED]
        leases.away = False
        hold.set()
        assert await heir.handle("x").result(10) == 2


async def test_a_process_that_stood_still_finds_out_before_it_acts():
    fleet = MemoryFleet(ttl_ms=600)
    told, stood_still = [], [0.0]
    keeper = PresenceKeeper(
        MemoryLeaseStore(fleet.leases),
        "n:1",
        600,
        signals=Signals(),
        details={},
        on_lapsed=lambda: told.append("lapsed"),
        on_regained=lambda: told.append("regained"),
        on_emptied=lambda: told.append("emptied"),
        surroundings=Surroundings(monotonic=lambda: time.monotonic() + stood_still[0]),
    )
    await keeper.start()
    assert keeper.is_live()
    assert told == ["regained"]
    stood_still[0] = 10.0
    assert not keeper.is_live()
    await until(lambda: told == ["regained", "lapsed", "regained"])
    await keeper.stop()
    assert (await keeper._leases.presence(["n:1"]))["n:1"].expired


async def test_evidence_of_others():
    fleet = MemoryFleet(ttl_ms=300)
    store = MemoryLeaseStore(fleet.leases)
    await store.beat("live:1", 60_000)
    await store.beat("dead:1", 60_000)
    await store.leave("dead:1")
    keeper = PresenceKeeper(
        store,
        "n:1",
        300,
        signals=Signals(),
        details={},
        on_lapsed=list,
        on_regained=list,
        on_emptied=list,
    )
    await keeper.start()
    reader = EvidenceReader(store, keeper, "n:1")
    found = {node: (await reader.of("x", node))[0] for node in ("live:1", "dead:1", "gone:1")}
    assert found == {"live:1": Evidence.LIVE, "dead:1": Evidence.EXPIRED, "gone:1": Evidence.QUIET}
    await until(lambda: not keeper.emptied)
    assert (await reader.of("x", "gone:1"))[0] is Evidence.EXPIRED
    fleet.leases.flush()
    assert (await reader.of("x", "gone:1"))[0] is Evidence.QUIET
    await keeper.stop()


async def test_nodes_announce_their_flows(fleet):
    @flow("mine")
    async def mine(ctx):
        return 1

    async with fleet.runtime("node", [mine]) as runtime:
        (row,) = await runtime._engine.leases.present()
        assert row.node == runtime.node
        assert row.details["flows"] == ["mine", "loom.schedule"]
        assert row.details["ttlMs"] == runtime.config.presence_ms


def test_presence_defaults_to_the_lease_s_ttl():
    assert Config(leases={"ttl_ms": 2000}).presence_ms == 2000
    assert Config(leases={"ttl_ms": 2000}, presence_ttl_ms=900).presence_ms == 900
