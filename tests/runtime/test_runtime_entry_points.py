"""Every way in which a run comes to drive, and whether it holds a lease before (seed, S7g; docs/adr/0030).

A way that is not in the table fails the first test; one that is there and forgets its lease fails the others.
"""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest
from runtime_support import FaultyStore, Trouble, has, of_kind

import loom.runtime
from loom import LeaseHeldError, StartLeaseHeldError, flow
from loom.schemas.envelope import Kind
from loom.stores.memory.lease_store import MemoryLeaseStore
from loom.testing.runtime import MemoryFleet, crash, until

DRIVING = {"register", "unpark"}
"""What makes a run drive: it becomes one of the node's, or goes on where it was parked."""

TABLE = {
    "driving.py:begin": "a start, and a continue-as-new: lazy; leased before by claims.py where it is not",
    "driving.py:_adopt": "a takeover, from `take` and `recover`: eager, but for a start that nobody touched",
    "run.py:foreign": "an answer of a verb at rest in memory: lazy, under the fence that the run has",
    "waiting.py:_deliver": "a wake at rest in memory: lazy, `may_wake` asks first",
    "waiting.py:answer_gate": "an answer at rest in memory: lazy, `enter_if_asked` asks first",
}


def calls_in(function):
    return {
        node.func.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }


def functions():
    for file in sorted(Path(loom.runtime.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{file.name}:{node.name}", calls_in(node)


def test_the_table_names_every_entry_point():
    assert {name for name, calls in functions() if calls & DRIVING} == set(TABLE)


def test_whoever_takes_a_fence_to_drive_enters_first():
    by_name = dict(functions())
    assert "_enter" in by_name["driving.py:take"]
    assert "_enter" in by_name["driving.py:recover"]
    takers = {name for name, calls in by_name.items() if "_adopt" in calls}
    assert takers == {"driving.py:take", "driving.py:recover"}
    assert {n for n, calls in by_name.items() if "begin" in calls} == {
        "verbs.py:start",
        "driving.py:begin",  # the run's own
        "driving.py:continued",
    }
    assert "may_wake" in by_name["waiting.py:settle"]
    assert "enter_if_asked" in by_name["answers.py:_answer_here"]


@flow("held")
async def held(ctx, hold):
    return await ctx.run(HOLDS[hold].wait)


@flow("waits")
async def waits(ctx):
    message = await ctx.receive("go")
    await ctx.run(HOLDS["after"].wait)
    return message


@flow("chain")
async def chain(ctx, n):
    if n:
        ctx.continue_as_new(n - 1)
    await ctx.run(HOLDS["chain"].wait)
    return "end"


HOLDS = {}


@pytest.fixture(params=["lazy", "eager"])
def mode(request):
    HOLDS.clear()
    HOLDS.update({name: asyncio.Event() for name in ("a", "b", "after", "chain")})
    return request.param


@pytest.fixture
def fleet():
    return MemoryFleet(ttl_ms=3_000)


def node(fleet, mode, name="node", **options):
    leases = {"ttl_ms": 3_000, "acquire": mode}
    settings = {"leases": leases, **options.pop("settings", {})}
    return fleet.runtime(name, [held, waits, chain], settings=settings, **options)


async def test_a_fresh_start_costs_no_row_if_lazy_and_has_one_before_it_exists_if_eager(fleet, mode):
    async with node(fleet, mode) as runtime:
        handle = await runtime.start(held, "a")
        await until(lambda: runtime._engine.runs[handle.execution_id].steps.working)
        owners = [row.owner for row in fleet.leases.rows.values()]
        assert owners == ([] if mode == "lazy" else [runtime.node])
        HOLDS["a"].set()
        await handle.result(5)
        assert not fleet.leases.rows  # given back before the handle answers


async def test_a_run_past_its_grace_is_leased_in_both(fleet, mode):
    async with node(fleet, mode) as runtime:
        handle = await runtime.start(held, "a")
        await until(lambda: handle.execution_id in fleet.leases.rows)
        HOLDS["a"].set()
        await handle.result(5)
        assert not fleet.leases.rows


async def test_a_takeover_is_leased_before_its_fence_in_both(fleet, mode):
    victim = node(fleet, mode, "victim")
    await victim.open()
    await victim.start(held, "a", execution_id="x")
    await crash(victim)
    async with node(fleet, mode, "heir") as heir:
        await until(lambda: "x" in heir._engine.runs)
        assert fleet.leases.rows["x"].owner == heir.node
        HOLDS["a"].set()
        await heir.handle("x").result(5)
        assert len(of_kind(await heir.history("x"), Kind.EXECUTION_RECOVERED)) == 1


async def test_a_wake_of_what_is_not_in_memory_is_leased_in_both(fleet, mode):
    async with node(fleet, mode, settings={"max_resident": 0}) as runtime:
        await runtime.start(waits, execution_id="x")
        await until(lambda: fleet.log.index.row("x").status == Kind.EXECUTION_SUSPENDED)
        await until(lambda: not runtime._engine.runs and not fleet.leases.rows)
        await runtime.send("x", "go", 1)
        await until(lambda: "x" in runtime._engine.runs and runtime._engine.runs["x"].steps.working)
        assert fleet.leases.rows["x"].owner == runtime.node
        HOLDS["after"].set()
        assert await runtime.handle("x").result(5) == 1


async def test_a_wake_at_rest_in_memory_is_leased_first_only_if_eager(fleet, mode):
    async with node(fleet, mode) as runtime:
        await runtime.start(waits, execution_id="x")
        await until(lambda: runtime._engine.parked_runs)
        await until(lambda: not fleet.leases.rows)
        await runtime.send("x", "go", 1)
        await until(lambda: runtime._engine.runs["x"].steps.working)
        assert bool(fleet.leases.rows) == (mode == "eager")
        HOLDS["after"].set()
        assert await runtime.handle("x").result(5) == 1


async def test_a_continue_as_new_is_leased_before_it_exists_in_both(fleet, mode):
    async with node(fleet, mode) as runtime:
        handle = await runtime.start(chain, 1)
        await until(lambda: fleet.log.index.row(handle.execution_id).finished)
        last = (await runtime.history(handle.execution_id))[-1]
        assert fleet.leases.rows[last.data["successorId"]].owner == runtime.node
        HOLDS["chain"].set()
        assert await handle.result(5) == "end"
        assert not fleet.leases.rows


async def test_a_claim_that_is_lost_before_there_is_a_run_leaves_none_that_never_acts(mode):
    """The lease store is emptied while a first event is on its way."""
    fleet = MemoryFleet(ttl_ms=600)
    store = FaultyStore(fleet.store())
    emptied = 0
    leases = {"ttl_ms": 600, "acquire": mode}
    async with fleet.runtime("node", [chain], events=store, settings={"leases": leases}) as runtime:
        keeper = runtime._engine.leasing.keeper

        async def empty(appends):
            nonlocal emptied
            begins = appends[0].expected_head == -1 or has(appends, Kind.EXECUTION_CONTINUED)
            if begins and not keeper.held <= set(runtime._engine.runs):
                emptied += 1
                fleet.leases.flush()
                await until(lambda: keeper.held <= set(runtime._engine.runs), "the loss to be seen")

        store.before = empty
        handle = await runtime.start(chain, 1)
        HOLDS["chain"].set()
        assert await handle.result(10) == "end"
    assert emptied >= 1


async def test_a_park_that_a_slow_release_left_leased_is_taken_on_the_fence_s_proof(fleet, mode):
    victim = node(fleet, mode, "victim")
    await victim.open()
    await victim.start(waits, execution_id="x")
    await until(lambda: victim._engine.parked_runs)
    await crash(victim)
    await MemoryLeaseStore(fleet.leases).acquire("x", victim.node, 600_000)
    async with node(fleet, mode, "heir") as heir:
        await heir.send("x", "go", 1)
        HOLDS["after"].set()
        assert await heir.handle("x").result(5) == 1


async def test_resume_as_and_restore_stand_down_on_a_leased_execution(fleet, mode):
    async with node(fleet, mode, "driver") as driver, node(fleet, mode, "other", owned=()) as other:
        handle = await driver.start(held, "a", execution_id="x")
        await until(lambda: "x" in fleet.leases.rows)
        state = await other.load_state("x")
        for call in (
            lambda: other.resume_as("x", held),
            lambda: other.recover_abandoned("x"),
            lambda: other.restore_from_state("x", state),
        ):
            with pytest.raises(LeaseHeldError):
                await call()
        HOLDS["a"].set()
        await handle.result(5)
        assert not of_kind(await driver.history("x"), Kind.EXECUTION_RECOVERED)


async def test_an_eager_start_on_a_ghost_lease_is_told_to_try_again(fleet):
    await MemoryLeaseStore(fleet.leases).acquire("x", "ghost:1", 600)
    HOLDS["a"] = asyncio.Event()
    HOLDS["a"].set()
    async with node(fleet, "eager") as runtime:
        with pytest.raises(StartLeaseHeldError):
            await runtime.start(held, "a", execution_id="x")
        assert fleet.log.index.row("x") is None
        await until(lambda: fleet.leases.lease("x").expired)
        handle = await runtime.start(held, "a", execution_id="x")
        await handle.result(5)


async def test_a_ghost_row_under_a_caller_chosen_start(fleet):
    """Lazily it is found at the grace: the run yields, and its expiry lets the execution be taken up again."""
    HOLDS["a"] = asyncio.Event()
    trouble = Trouble()
    await MemoryLeaseStore(fleet.leases).acquire("x", "ghost:1", 2_000)
    async with node(fleet, "lazy", **trouble.options) as runtime:
        handle = await runtime.start(held, "a", execution_id="x")
        await until(lambda: "x" not in runtime._engine.runs)
        assert any("taken over" in message for message, _ in trouble.warnings)
        await until(lambda: "x" in runtime._engine.runs)
        HOLDS["a"].set()
        await handle.result(5)
