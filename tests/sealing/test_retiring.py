"""Drained topics of an inbox are retired; held ones, and those with a backlog, are not."""

from __future__ import annotations

import pytest
from test_quarantine import CHAIN, Chain, hold, listens
from test_quarantine_chains import rest

from loom import flow, receive
from loom.ids import inbox_stream
from loom.kernel.inbox import is_drained
from loom.kernel.state import ExecutionState
from loom.testing.runtime import until


@flow("takes")
async def takes(ctx):
    """Takes all of one topic, then waits on others."""
    for _ in range(4):
        await ctx.receive("t")
    await ctx.select(receive("u"), receive("h"))


def positions(chain, topic):
    return [e.sequence for e in chain.stream(inbox_stream(CHAIN, topic))]


@pytest.fixture
async def chain():
    chain = Chain(takes)
    await chain.started(flow=takes)
    return chain


def test_a_topic_is_drained_once_all_of_it_is_disposed_of_and_nothing_is_held():
    state = ExecutionState(cursors={"t": 3, "h": 3}, quarantined={"h": [{"key": "k"}]})
    assert is_drained(state, "t", 3)
    assert not is_drained(state, "t", 4)
    assert not is_drained(state, "never", 0)
    assert not is_drained(state, "h", 3)


async def test_a_drained_topic_keeps_its_numbering_and_nothing_that_was_consumed(chain):
    for n in range(4):
        await chain.send("t", n, f"m{n}", sealed=False)
    await chain.send("later", 1, "l1", sealed=False)
    async with chain.node("raw", owns=True, recovery_interval_ms=60_000) as node:
        await until(lambda: CHAIN in node._engine.parked_runs and not _waits_on(node, "t"), "the park")
        assert positions(chain, "t") == [0, 1, 2, 3]
        assert await node._retiring.retire() == [inbox_stream(CHAIN, "t")]
        assert positions(chain, "t") == [0], "a store keeps sequence 0 of a stream"
        assert positions(chain, "later") == [0]
        assert await node._retiring.retire() == [], "once"
        await chain.send("t", 4, "m4", sealed=False)
        assert positions(chain, "t") == [0, 4]
        await chain.send("u", 1, "u1", sealed=False)
        await node.handle(CHAIN, takes).result(5)


def _waits_on(node, topic):
    return any(arm["topic"] == topic for wait in node._engine.runs[CHAIN].state.waits for arm in wait["arms"])


async def test_a_held_topic_is_not_retired_and_the_pass_is_made_by_itself():
    chain = Chain()
    await chain.started(flow=listens)
    for n in range(2):
        await chain.send("t", n, f"m{n}")
    async with chain.node("raw") as node:
        for _ in range(2):
            await hold(node)
    for n in range(2):
        await chain.send("u", n, f"u{n}", sealed=False)
    async with chain.node("raw", owns=True, recovery_interval_ms=50) as node:
        await rest(node)
        assert node._engine.runs[CHAIN].state.quarantined["t"]
        row = chain.mixed.fleet.log.index.row(inbox_stream(CHAIN, "t"))
        row.first = 1  # as if the holds had not trimmed what they copied
        await until(lambda: positions(chain, "u") == [0], "the drained topic to be retired")
        assert await node._retiring.retire() == []
        assert row.first == 1
