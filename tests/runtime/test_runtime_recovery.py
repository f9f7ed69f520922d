"""A node dies at any point, and another carries on."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from runtime_support import FaultyStore, add, kinds, of_kind, picture

from loom import LoomError, RedriveExhaustedError, flow, receive, timer
from loom.errors import UnreachableError
from loom.schemas.envelope import TERMINAL_KINDS, Kind
from loom.testing.clock import VirtualClock
from loom.testing.runtime import MemoryFleet, crash, until, until_parked


@flow("small")
async def small(ctx, n):
    return await ctx.run(add, n, 1)


@flow("whole")
async def whole(ctx, n):
    """Steps, one after the other and at once, a message, a timer, a child, a decision."""
    first = await ctx.run(add, n, 1)
    pair = await asyncio.gather(ctx.run(add, first, 1), ctx.run(add, first, 2))
    drawn = ctx.uuid()
    message = await ctx.receive("go")
    arm = await ctx.select(receive("never"), timer(0.03))
    child = await (await ctx.start_child(small, message))
    assert drawn
    return [pair, message, arm.kind, child]


EXPECTED = [[3, 4], 10, "timer", 11]


def check(history):
    sites = Counter(e.data["siteId"] for e in of_kind(history, Kind.STEP_COMPLETED))
    assert set(sites.values()) == {1}, sites
    assert len([e for e in history if e.data.get("topic") == "go" and not e.data.get("reason")]) == 1
    assert [e.sequence for e in history] == list(range(len(history)))
    assert sum(e.type in TERMINAL_KINDS for e in history) == 1


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("point", range(7))
async def test_a_crash_at_any_append_loses_and_doubles_nothing(trouble, when, point):
    fleet = MemoryFleet(ttl_ms=600)
    events = FaultyStore(fleet.store())
    dying = asyncio.Event()
    seen = 0

    async def count(appends):
        nonlocal seen
        seen += 1
        if seen > point:
            dying.set()
            await asyncio.Event().wait()

    setattr(events, when, count)
    victim = fleet.runtime("victim", [whole, small], events=events)
    await victim.open()
    async with fleet.client() as client:
        start = asyncio.ensure_future(victim.start(whole, 1, execution_id="x"))
        await asyncio.wait({start, asyncio.ensure_future(dying.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            await client.send("x", "go", 10, message_id="m")
            await asyncio.wait_for(dying.wait(), 5)
        await crash(victim)
        start.cancel()
        async with fleet.runtime("heir", [whole, small], **trouble.options) as heir:
            if not fleet.log.index.row("x"):
                await client.start("whole", 1, execution_id="x")
            await client.send("x", "go", 10, message_id="m")
            try:
                assert await heir.handle("x").result(20) == EXPECTED
            except LoomError as error:
                raise AssertionError(f"{error}\n{picture(fleet, [heir])}\n{trouble.warnings}") from error
            check(await heir.history("x"))
    assert trouble.errors == []


async def test_an_attempt_counts_on_after_a_restart(fleet):
    from loom import RetryPolicy, StepFailedError

    tries = []

    async def broken():
        tries.append(1)
        raise OSError("down")

    @flow("retries")
    async def retries(ctx):
        try:
            await ctx.run(broken, retry=RetryPolicy(attempts=4, first_ms=150, factor=1))
        except StepFailedError:
            return len(tries)

    victim = fleet.runtime("victim", [retries])
    await victim.open()
    handle = await victim.start(retries)
    await until(lambda: len(tries) == 2)
    await asyncio.sleep(0)
    await crash(victim)
    async with fleet.runtime("heir", [retries]) as heir:
        await heir.handle(handle.execution_id).result(10)
        failed = of_kind(await heir.history(handle.execution_id), Kind.STEP_FAILED)
        assert [e.data["attempt"] for e in failed] == [1, 2, 3, 4]


async def test_a_live_driver_is_left_alone(fleet):
    hold = asyncio.Event()

    @flow("held")
    async def held(ctx):
        await ctx.run(hold.wait)
        return "done"

    async with fleet.runtime("one", [held], owned=()) as one, fleet.runtime("two", [held]) as two:
        # The driver does not write the shard: it was given the execution by hand.
        await two.start(held, execution_id="x")
        assert await one.recover_abandoned("x") == ["x"]
        assert await two.recover_abandoned() == []
        await until(
            lambda: "x" not in two._engine.runs, "two to find out"
        ) if "x" in two._engine.runs else None
        assert await two.recover_abandoned() == []
        hold.set()
        assert await one.handle("x").result(5) == "done"
        nodes = {e.metadata.get("node") for e in (await one.history("x"))[1:]}
        assert two.node not in nodes


async def test_a_clean_stop_lets_others_take_over_at_once(fleet):
    hold = asyncio.Event()

    @flow("held")
    async def held(ctx):
        await ctx.run(hold.wait)
        return "done"

    async with fleet.runtime("one", [held]) as one:
        await one.start(held, execution_id="x")
    slow = MemoryFleet(ttl_ms=600_000)
    slow.log, slow.leases, slow.wakes = fleet.log, fleet.leases, fleet.wakes
    async with slow.runtime("two", [held]) as two:
        await until(lambda: "x" in two._engine.runs)
        hold.set()
        assert await two.handle("x").result(5) == "done"
        recovered = of_kind(await two.history("x"), Kind.EXECUTION_RECOVERED)[0]
        assert recovered.data["evidence"] == "presence expired"
        assert recovered.data["previousNode"] == one.node


async def test_an_emptied_lease_store_is_no_evidence_for_one_ttl(fleet):
    hold = asyncio.Event()

    @flow("held")
    async def held(ctx):
        await ctx.run(hold.wait)
        return "done"

    victim = fleet.runtime("victim", [held])
    await victim.open()
    await victim.start(held, execution_id="x")
    await crash(victim)
    async with fleet.runtime("heir", [held]) as heir:
        fleet.leases.flush()
        await until(lambda: heir._presence._epoch == fleet.leases.epoch, "the heir to see it")
        assert heir._presence.emptied
        assert await heir.recover_abandoned() == []
        hold.set()
        assert await heir.handle("x").result(10) == "done"
        recovered = of_kind(await heir.history("x"), Kind.EXECUTION_RECOVERED)[0]
        assert recovered.data["evidence"] == "presence absent"


async def test_flushed_wake_rows_come_back_and_each_timer_fires_once():
    fleet = MemoryFleet(clock=VirtualClock())

    @flow("sleeps")
    async def sleeps(ctx):
        await ctx.sleep(hours=1)
        return "awake"

    async with fleet.runtime("node", [sleeps]) as runtime:
        handles = [await runtime.start(sleeps) for _ in range(50)]
        await until(lambda: len(runtime._engine.parked_runs) == 50)
        fleet.wakes.flush()
        assert await runtime.rebuild_wakes() == 50
        fleet.clock.advance(3_600_000)
        assert {await handle.result(10) for handle in handles} == {"awake"}
        for handle in handles:
            assert kinds(await runtime.history(handle.execution_id)).count(Kind.EXECUTION_RESUMED) == 1


async def test_rows_lost_with_the_leases_are_rebuilt_without_being_asked():
    fleet = MemoryFleet(clock=VirtualClock(), ttl_ms=600)

    @flow("sleeps")
    async def sleeps(ctx):
        await ctx.sleep(hours=1)
        return "awake"

    async with fleet.runtime("node", [sleeps], settings={"max_resident": 0}) as runtime:
        handle = await runtime.start(sleeps)
        await until(lambda: not runtime._engine.runs)
        fleet.wakes.flush()
        fleet.leases.flush()
        await until(lambda: fleet.wakes.slots, "the row to come back")
        fleet.clock.advance(3_600_000)
        assert await handle.result(10) == "awake"


async def test_a_parked_execution_wakes_on_another_node(fleet):
    @flow("waits")
    async def waits(ctx):
        return await ctx.receive("go")

    victim = fleet.runtime("victim", [waits])
    await victim.open()
    handle = await victim.start(waits)
    await until(lambda: victim._engine.parked_runs)
    await crash(victim)
    async with fleet.client() as client:
        await client.send(handle.execution_id, "go", 1)  # while nobody listens
        async with fleet.runtime("heir", [waits]) as heir:
            assert await heir.handle(handle.execution_id).result(10) == 1


async def test_a_cancel_of_a_child_that_nobody_heard_is_done_at_takeover(fleet):
    @flow("waits")
    async def waits(ctx):
        await ctx.receive("go")

    @flow("parent")
    async def parent(ctx):
        await (await ctx.start_child(waits, execution_id="kid"))

    victim = fleet.runtime("victim", [waits, parent])
    await victim.open()
    await victim.start(parent, execution_id="mum")
    await until(lambda: len(victim._engine.parked_runs) == 2)
    await crash(victim)
    async with fleet.client() as client:
        await client.cancel("mum", "enough")
        async with fleet.runtime("heir", [waits, parent]) as heir:
            await until(lambda: fleet.log.index.row("kid").finished)
            assert await heir.status("kid") == "cancelled"


async def test_recovery_without_progress_ends_after_a_while(trouble):
    fleet = MemoryFleet(ttl_ms=200)
    hold = asyncio.Event()

    @flow("deadly")
    async def deadly(ctx):
        await ctx.run(hold.wait)

    settings = {"max_recoveries": 2}
    victim = fleet.runtime("victim-0", [deadly], settings=settings)
    await victim.open()
    await victim.start(deadly, execution_id="x")
    for n in range(1, 3):
        await crash(victim)
        victim = fleet.runtime(f"victim-{n}", [deadly], settings=settings)
        await victim.open()
        await until(lambda: "x" in victim._engine.runs, "the takeover")
    await crash(victim)
    async with fleet.runtime("last", [deadly], settings=settings, **trouble.options) as last:
        await until(lambda: trouble.errors, "the report")
        assert isinstance(trouble.errors[0][0], RedriveExhaustedError)
        assert "x" not in last._engine.runs
        hold.set()
        await last.recover_abandoned("x")
        assert await last.handle("x").result(5) is None


async def test_a_host_s_own_evidence_must_agree(fleet):
    hold, allowed = asyncio.Event(), asyncio.Event()

    @flow("held")
    async def held(ctx):
        await ctx.run(hold.wait)
        return "done"

    async def is_abandoned(execution_id):
        return allowed.is_set()

    victim = fleet.runtime("victim", [held])
    await victim.open()
    await victim.start(held, execution_id="x")
    await crash(victim)
    expired = lambda: all(
        p.expires_at <= fleet.clock() for n, p in fleet.leases.present.items() if "victim" in n
    )  # noqa: E731
    async with fleet.runtime("heir", [held], is_abandoned=is_abandoned) as heir:
        await until(expired)
        assert await heir.recover_abandoned() == []
        allowed.set()
        hold.set()
        assert await heir.handle("x").result(10) == "done"


async def test_a_shard_that_moves_takes_its_parked_executions_along(fleet):
    @flow("waits")
    async def waits(ctx):
        return [await ctx.receive("go"), await ctx.receive("go")]

    first, second = fleet.store(), fleet.store(())
    async with (
        fleet.runtime("one", [waits], events=first) as one,
        fleet.runtime("two", [waits], events=second) as two,
    ):
        handle = await one.start(waits)
        await until(lambda: one._engine.parked_runs)
        waiting = asyncio.ensure_future(handle.result(10))
        await asyncio.sleep(0)
        await one.send(handle.execution_id, "go", 1)
        await until(lambda: one._engine.parked_runs and one._engine.runs[handle.execution_id].state.cursors)
        first.assign(())
        second.assign(range(fleet.partitions))
        await until(lambda: not one._engine.runs)
        await one.send(handle.execution_id, "go", 2)
        assert await waiting == [1, 2]
        nodes = [e.metadata.get("node") for e in await two.history(handle.execution_id)]
        assert nodes[-1] == two.node


async def test_a_run_goes_on_when_its_shard_moves_away(fleet):
    hold = asyncio.Event()

    @flow("held")
    async def held(ctx):
        await ctx.run(hold.wait)
        return await ctx.receive("go")

    first, second = fleet.store(), fleet.store(())
    async with (
        fleet.runtime("one", [held], events=first) as one,
        fleet.runtime("two", [held], events=second) as two,
    ):
        handle = await one.start(held)
        first.assign(())
        second.assign(range(fleet.partitions))
        await until(lambda: two._engine.owns(handle.execution_id))
        hold.set()
        await until(lambda: fleet.log.index.row(handle.execution_id).status == Kind.EXECUTION_SUSPENDED)
        await one.send(handle.execution_id, "go", 1)
        assert await handle.result(10) == 1
        assert Kind.EXECUTION_RECOVERED not in kinds(await two.history(handle.execution_id))


async def test_lost_rows_are_rebuilt_where_there_are_no_leases():
    fleet = MemoryFleet(clock=VirtualClock())

    @flow("sleeps")
    async def sleeps(ctx):
        await ctx.sleep(hours=1)
        return "awake"

    runtime = fleet.runtime("node", [sleeps], settings={"max_resident": 0, "leases": {"enabled": False}})
    runtime._given["leases"] = None
    async with runtime:
        handle = await runtime.start(sleeps)
        await until(lambda: not runtime._engine.runs and fleet.wakes.slots)
        await until(lambda: runtime._timers._epoch is not None)
        fleet.wakes.flush()
        await until(lambda: fleet.wakes.slots, "the row to come back")
        fleet.clock.advance(3_600_000)
        assert await handle.result(10) == "awake"


async def test_what_a_node_dropped_is_not_lost_if_it_is_doubted_when_it_looks(fleet):
    """It drove it last, so nobody else will; and it owns no shard whose walk would find it."""
    hold = asyncio.Event()

    @flow("held")
    async def held(ctx):
        return await ctx.run(hold.wait)

    async with fleet.runtime("owner", [held], owned=[]) as other, fleet.client() as client:
        async with fleet.runtime("node", [held]) as node:
            handle = await client.start("held", execution_id="x")
            await until(lambda: "x" in node._engine.runs, "the run")
            node._engine.owning._inner.assign(())
            run = node._engine.runs["x"]
            alive, node._engine.alive = node._engine.alive, lambda: False
            node._engine.orphaned(run, LoomError("doubted"))
            await node._recovery._look("x", own=True)
            assert node._recovery._unsettled == {"x": True}
            node._engine.alive = alive
            await until(lambda: "x" in node._engine.runs, "the run again")
            hold.set()
            assert await handle.result(10) is True
        assert not other._engine.runs


class AwayStore(FaultyStore):
    """Reads that decide fail while it is ``away``."""

    away = False

    async def info(self, stream_id):
        if self.away:
            raise UnreachableError("the log", "nowhere", "bootstrap")
        return await self._inner.info(stream_id)


async def test_what_a_node_dropped_is_not_lost_with_its_shard(fleet):
    """The walk of its shard could not judge it; then the shard moves, and still nobody else will take it."""
    hold = asyncio.Event()

    @flow("held")
    async def held(ctx):
        return await ctx.run(hold.wait)

    store = AwayStore(fleet.store())
    async with fleet.runtime("owner", [held], owned=[]) as other, fleet.client() as client:
        async with fleet.runtime("node", [held], events=store) as node:
            handle = await client.start("held", execution_id="x")
            await until(lambda: "x" in node._engine.runs, "the run")
            store.away = True
            node._engine.orphaned(node._engine.runs["x"], LoomError("doubted"))
            node._recovery.everything()
            await until(lambda: not node._recovery._walking, "the walk to end")
            store._inner.assign(())
            assert node._recovery._unsettled == {"x": True}
            store.away = False
            await until(lambda: "x" in node._engine.runs, "the run again")
            hold.set()
            assert await handle.result(10) is True
        assert not other._engine.runs


async def test_a_beat_that_comes_back_late_lets_go_of_what_was_held_back(fleet):
    hold = asyncio.Event()

    @flow("late")
    async def late(ctx):
        await ctx.receive("go")
        return await ctx.run(hold.wait)

    async with fleet.runtime("node", [late]) as node:
        handle = await node.start(late)
        await until_parked(node, handle.execution_id)
        presence = node._presence
        presence._stands = (-1e9, -1e9, -1e9)  # as after a beat whose answer takes longer than the row lasts
        run = node._engine.runs[handle.execution_id]
        assert not node._engine.live()
        await presence._beat()
        assert node._engine.live()
        assert node._engine.runs.get(handle.execution_id) is not run, "it was doubted, so it is taken anew"
        await node.send(handle.execution_id, "go", 1)
        hold.set()
        assert await handle.result(10) is True


async def test_a_run_that_came_while_the_node_was_doubted_goes_on_once_it_is_not(fleet):
    @flow("works")
    async def works(ctx):
        return await ctx.run(add, 1, 2)

    async with fleet.runtime("node", [works]) as node:
        alive = node._engine.alive
        take_up = node._engine.driving.begin

        def doubted(*args):  # between the append of the start and the run
            node._engine.alive = lambda: False
            return take_up(*args)

        node._engine.driving.begin = doubted
        handle = await node.start(works)
        run = node._engine.runs[handle.execution_id]
        assert run.steps.busy == 1
        node._engine.alive = alive
        node._regained()
        assert await handle.result(5) == 3
