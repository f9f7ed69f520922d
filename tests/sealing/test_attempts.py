"""What cannot be carried on for other reasons than seals is tried so often by all nodes together, then left to an operator."""

from __future__ import annotations

import pytest
from mixed import SECRET, Fleet, Trouble, add, two_halves

from loom import RedriveExhaustedError, flow
from loom.stores.memory.wake_store import MemoryWakeStore
from loom.testing.clock import VirtualClock
from loom.testing.runtime import MemoryFleet, until, until_parked

CAP = 3
LONG_MS = 1_200_000
"""More than any back-off of a node."""


@flow("two-halves")
async def changed(ctx, start):
    """Other code than the log was written by: it diverges wherever it goes on."""
    await ctx.run(add, start, "-1", name="other")
    return await ctx.receive("go")


@flow("something-else")
async def something_else(ctx, start):
    return start


class Stage:
    """An owner that cannot open, nodes beside it that can, and a clock that only the test moves."""

    def __init__(self):
        self.mixed, self.clock = Fleet(), VirtualClock()
        self.mixed.fleet = MemoryFleet(partitions=1, clock=self.clock, ttl_ms=600)
        self.wakes = MemoryWakeStore(self.mixed.fleet.wakes)

    def node(self, name, kind, flows, trouble=None, *, owned=False):
        events = self.mixed.stored(kind, self.mixed.fleet.store(None if owned else ()))
        return self.mixed.fleet.runtime(
            name,
            flows,
            events=events,
            settings={
                "max_redrive_attempts": CAP,
                "presence_ttl_ms": 3_600_000,
                "leases": {"enabled": False},
            },
            **(trouble.options if trouble else {}),
        )

    async def look(self, *nodes):
        """Let back-offs pass, and each node look through the rows once; what the row then counts."""
        self.clock.advance(LONG_MS)
        for node in nodes:
            await node._refusals._round()
            await until(lambda node=node: not node._refusals._acting)
        rows = await self.wakes.rows_of("sealed")
        return [row.holds for row in rows if row.kind == "refusal"]


@pytest.fixture
async def stage():
    """A parked execution whose next message its owner cannot open."""
    stage = Stage()
    async with stage.node("first", "capable", [two_halves], owned=True) as capable:
        await capable.start(two_halves, SECRET, execution_id="sealed", subject="s")
        await until_parked(capable, "sealed")
    async with stage.node("owner", "raw", [two_halves], owned=True), stage.mixed.node("capable") as client:
        await client.send("sealed", "go", "-2")
        await until(lambda: bool(stage.mixed.fleet.wakes.slots), "the row")
        yield stage


def exhausted(trouble):
    return [error for error, _ in trouble.errors if isinstance(error, RedriveExhaustedError)]


async def test_attempts_of_all_nodes_are_counted_in_the_row_and_end(stage):
    north, south = Trouble(), Trouble()
    async with (
        stage.node("north", "capable", [changed], north) as one,
        stage.node("south", "capable", [changed], south) as other,
    ):
        for node in (one, other):
            node._refusals._task.cancel()
        assert await stage.look(one) == [1]
        assert await stage.look(other) == [2]
        assert await stage.look(one) == [CAP]
        assert exhausted(north) == exhausted(south) == []
        tried = len(north.errors)
        for _ in range(3):
            assert await stage.look(one, other) == [CAP]
        assert [error.attempts for error in exhausted(north)] == [CAP]  # first, then every 16th
        assert len(exhausted(south)) == 1
        assert len(north.errors) == tried + 1
    async with stage.mixed.node("capable") as client, stage.node("heir", "capable", [two_halves]) as heir:
        heir._refusals._task.cancel()
        assert await stage.look(heir) == [CAP]
        assert "sealed" not in heir._engine.runs
        await client.recover("sealed")
        looks = [await stage.look(heir) for _ in range(3)]
        assert looks[-1] == []
        assert (await client.status("sealed")) in {"running", "suspended"}
        assert (await client.load_state("sealed")).steps == 2


async def test_who_cannot_open_it_or_does_not_know_its_flow_spends_no_attempt(stage):
    trouble = Trouble()
    async with (
        stage.node("blind", "no keys", [two_halves], trouble) as blind,
        stage.node("stranger", "capable", [something_else], trouble) as stranger,
    ):
        for node in (blind, stranger):
            node._refusals._task.cancel()
        for _ in range(2 * CAP):
            assert await stage.look(blind, stranger) == [0]
    assert trouble.errors
    assert exhausted(trouble) == []


async def test_what_was_given_up_and_has_ended_leaves_no_row(stage):
    async with stage.node("north", "capable", [changed]) as one, stage.mixed.node("capable") as client:
        one._refusals._task.cancel()
        for _ in range(CAP):
            await stage.look(one)
        await client.cancel("sealed")
        looks = [await stage.look(one) for _ in range(3)]  # one that was asked for meanwhile is one more
        assert looks[-1] == []
