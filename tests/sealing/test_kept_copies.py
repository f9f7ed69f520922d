"""Copies that were left behind, and who still needs them: a look from any node, whoever drives (system.md 4.7)."""

from __future__ import annotations

import pytest
from mixed import OPERATOR
from test_quarantine import CHAIN, Chain, hold, kinds, listens, release

from loom.ids import dedupe_key, quarantine_stream
from loom.kernel.quarantine import anchor_event, copy_event
from loom.schemas.envelope import Kind
from loom.stores.contracts import StreamAppend
from loom.testing.runtime import until, until_parked


@pytest.fixture
async def chain():
    chain = Chain()
    await chain.started()
    return chain


async def orphan(chain, message_id):
    """A copy whose fact never came, as a store without transactions over streams leaves it behind."""
    store = chain.mixed.fleet.store(())
    (stored,) = [e for e in chain.stream(f"__loom_inbox__:{CHAIN}:t") if e.data["messageId"] == message_id]
    copy = copy_event(CHAIN, dedupe_key(None, message_id), "t", stored)
    fresh = not chain.stream(quarantine_stream(CHAIN))
    events = (anchor_event(CHAIN), copy) if fresh else (copy,)
    await store.append(StreamAppend(quarantine_stream(CHAIN), events))


async def test_a_live_copy_and_one_in_flight_stay_and_an_orphan_behind_the_cursor_goes(chain):
    for n in (1, 2):
        await chain.send("t", f"m{n}", f"m{n}")
    await orphan(chain, "m1")
    async with chain.node("raw") as node:
        looked = await node.look_after_copies(CHAIN)
        assert (looked.copies, looked.held) == (1, ()), "its fact may be on its way"
        await node.discard_inbox(CHAIN, "t", principal=OPERATOR)
        assert (await node.look_after_copies(CHAIN)).copies == 0
        assert chain.copies() == []
        await hold(node)
        looked = await node.look_after_copies(CHAIN)
        assert looked.copies == len(chain.copies()) == 1
        assert [(r["message_id"], r["awaits"]) for r in looked.awaiting] == [("m2", "a capable node")]
    async with chain.node("capable") as capable:
        looked = await capable.look_after_copies(CHAIN)
        assert [r["awaits"] for r in looked.held] == ["delivery"]
        assert looked.awaiting == ()


async def test_what_a_node_left_behind_when_it_died_is_freed_by_another(chain):
    await chain.send("t", "m1", "m1")
    async with chain.node("raw") as node:
        await hold(node)
        trimmed = node._engine.events.truncate

        async def dies(*_):
            raise ConnectionError

        node._engine.events.truncate = dies
        with pytest.raises(ConnectionError):
            await release(node, "m1", disposition="discard")
        node._engine.events.truncate = trimmed
        assert [e.data["messageId"] for e in chain.copies()] == ["m1"]
        assert (await node.look_after_copies(CHAIN)).copies == 0
    assert chain.copies() == []
    assert [e.sequence for e in chain.stream(quarantine_stream(CHAIN))] == [0]


async def test_an_ended_chain_keeps_no_copy_even_where_its_log_cannot_be_opened(chain):
    await chain.send("t", "m1", "m1")
    await chain.send("u", "u1", "u1")
    async with chain.node("raw") as node:
        await hold(node)
    async with chain.node("capable", owns=True, inbox_auto_release=False) as capable:
        await until(lambda: Kind.MESSAGE_CONSUMED in kinds(chain), "a sealed delivery")
        await until_parked(capable, CHAIN)
    async with chain.node("raw") as node, chain.node("capable") as capable:
        closed = await node.look_after_copies(CHAIN)
        assert (closed.closed, closed.copies, closed.held) == (True, 1, ())
        assert len(chain.copies()) == 1
        before = capable._engine.events.truncate

        async def lost(*_):
            return None

        capable._engine.events.truncate = lost
        await capable.cancel(CHAIN)
        capable._engine.events.truncate = before
        assert len(chain.copies()) == 1, "whoever ended it did not free them"
        assert (await node.look_after_copies(CHAIN)).copies == 0
    assert chain.copies() == []


async def test_a_chain_that_is_gone_keeps_no_quarantine_stream(chain):
    await chain.send("t", "m1", "m1")
    async with chain.node("raw") as node:
        await hold(node)
        await chain.mixed.fleet.store(()).delete(CHAIN)
        assert (await node.look_after_copies(CHAIN)).copies == 0
        assert (await node.look_after_copies("never")).copies == 0
    assert chain.stream(quarantine_stream(CHAIN)) == []


async def test_a_cycle_through_looks_leaves_the_state_as_if_nothing_had_been_held(chain):
    await chain.send("t", "m1", "m1")
    async with chain.node("raw") as node:
        await hold(node)
        await node.look_after_copies(CHAIN)
    for n in (2, 3):
        await chain.send("t", f"m{n}", f"m{n}")
    async with chain.node("capable", owns=True) as capable:
        assert await capable.handle(CHAIN, listens).result(5) == ["m1", "m2", "m3"]
        assert (await capable.look_after_copies(CHAIN)).copies == 0
        assert (await capable.load_state(CHAIN)).quarantined == {}
