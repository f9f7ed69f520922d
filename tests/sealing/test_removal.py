"""Purging histories and deleting chains: what goes, what stays, who may, and what a crash leaves (docs/adr/0036)."""

from __future__ import annotations

import pytest
from mixed import OPERATOR, SECRET, SENSITIVE, seen, two_halves
from test_quarantine import CHAIN, Chain, hold, kinds
from test_quarantine_chains import rest, rotates

from loom import (
    ExecutionAlreadyExistsError,
    ExecutionDeniedError,
    ExecutionNotFinishedError,
    InvalidInputError,
    PayloadShreddedError,
    Principal,
)
from loom.ids import inbox_stream, quarantine_stream
from loom.runtime import removal
from loom.schemas.envelope import Kind
from loom.stores.contracts import WakeRow
from loom.stores.keys.memory import MemoryKeyStore
from loom.stores.sealing.encrypting import EncryptingEventStore
from loom.testing.runtime import until

OWNER = Principal("alice", {"tenant": 1})


@pytest.fixture
async def chain():
    chain = Chain(rotates)
    await chain.started()
    return chain


async def held_and_cancelled(chain):
    """An execution that ended while a message was held, and whose copy nobody freed."""
    for n in range(3):
        await chain.send("t", f"m{n}", f"m{n}")
    async with chain.node("raw") as node:
        await hold(node)
        truncate = node._engine.events.truncate

        async def lost(*_):
            return None

        node._engine.events.truncate = lost
        await node.cancel(CHAIN, "enough")
        node._engine.events.truncate = truncate
    assert len(chain.copies()) == 1


def left(chain):
    """Streams that hold anything at rest."""
    return sorted(s for s, raw in chain.mixed.resting().items() if raw)


async def rotated(chain=None):
    """A chain of two executions, both ended, with a message taken by each."""
    chain = chain or Chain(rotates)
    async with chain.node("raw", owns=True) as node:
        await node.start(rotates, 1, execution_id=CHAIN, subject="s")
        await rest(node)
        await chain.send("t", "a", "a", sealed=False)
        await until(lambda: kinds(chain)[-1] == Kind.EXECUTION_CONTINUED, "the switch")
        heir = chain.log()[-1].data["successorId"]
        await rest(node, heir)
        await chain.send("u", "b", "b", sealed=False)
        await node.handle(CHAIN, rotates).result(5)
    return chain, heir


# Purging ------------------------------------------------------------------------------------------------------------


async def test_a_purge_leaves_how_it_began_and_ended_and_takes_what_was_held(chain):
    await held_and_cancelled(chain)
    before = chain.log()
    async with chain.node("raw") as node:
        planned = await node.purge_history(CHAIN, principal=OPERATOR, dry_run=True)
        assert planned.dry_run
        assert chain.log() == before
        done = await node.purge_history(CHAIN, reason="closed", principal=OPERATOR)
        assert (done.streams, done.events) == (planned.streams, planned.events)
        assert set(done.streams) == {CHAIN, inbox_stream(CHAIN, "t"), quarantine_stream(CHAIN)}
        assert left(chain) == [CHAIN]
        log = chain.log()
        assert [e.type for e in log] == [
            Kind.EXECUTION_STARTED,
            Kind.EXECUTION_CANCELLED,
            Kind.EXECUTION_PURGED,
        ]
        assert log[-1].data == {
            "scope": "history",
            "through": log[1].sequence - 1,
            "operator": {"actor": "olga"},
            "reason": "closed",
        }
        assert log[-1].metadata["actor"] == "olga"
        # It reads as what it is, and a repeat does nothing.
        assert await node.status(CHAIN) == "cancelled"
        assert (await node.load_state(CHAIN)).reason == "enough"
        again = await node.purge_history(CHAIN, principal=OPERATOR)
        assert (again.events, chain.log()) == (0, log)


@pytest.mark.parametrize("at", range(3))
async def test_a_purge_that_breaks_off_is_finished_by_a_repeat_and_told_once(chain, at):
    await held_and_cancelled(chain)
    async with chain.node("raw") as node:
        calls, events = 0, node._engine.events

        def failing(method):
            async def call(*args):
                nonlocal calls
                calls += 1
                if calls > at:
                    raise ConnectionError
                return await method(*args)

            return call

        for name in ("truncate", "delete"):
            setattr(events, name, failing(getattr(events, name)))
        with pytest.raises(ConnectionError):
            await node.purge_history(CHAIN, reason="why", principal=OPERATOR)
        assert chain.log()[-1].type == Kind.EXECUTION_PURGED
    async with chain.node("raw") as node:
        await node.purge_history(CHAIN, reason="again", principal=OPERATOR)
    assert kinds(chain) == [Kind.EXECUTION_STARTED, Kind.EXECUTION_CANCELLED, Kind.EXECUTION_PURGED]
    assert left(chain) == [CHAIN]


async def test_a_purge_of_what_went_on_as_new_leaves_its_chain_reachable():
    chain = Chain(rotates)
    async with chain.node("raw", owns=True) as node:
        await node.start(rotates, 1, execution_id=CHAIN, subject="s")
        await rest(node)
        await chain.send("t", "a", "a", sealed=False)
        await until(lambda: kinds(chain)[-1] == Kind.EXECUTION_CONTINUED, "the switch")
        heir = chain.log()[-1].data["successorId"]
        await rest(node, heir)
        await node.purge_history(CHAIN, principal=OPERATOR)
        assert kinds(chain) == [Kind.EXECUTION_STARTED, Kind.EXECUTION_CONTINUED, Kind.EXECUTION_PURGED]
        assert inbox_stream(CHAIN, "t") in left(chain), "its chain lives"
        assert await node.follow_to_head(CHAIN) == heir
        await node.send(CHAIN, "u", "b", message_id="b")
        assert await node.handle(CHAIN, rotates).result(5) == "b"


@pytest.mark.parametrize("verb", ["purge_history", "delete_chain"])
async def test_what_has_not_ended_is_not_removed_and_only_operators_remove(chain, verb):
    await chain.send("t", "m1", "m1")
    async with chain.node("raw") as node:
        await hold(node)
        before = chain.mixed.resting()
        for about in (CHAIN, "nothing-here"):
            for caller in (None, OWNER, Principal("mallory")):
                with pytest.raises(ExecutionDeniedError) as told:
                    await getattr(node, verb)(about, principal=caller)
                assert about in str(told.value)
        with pytest.raises(ExecutionNotFinishedError, match="suspended"):
            await getattr(node, verb)(CHAIN, principal=OPERATOR)
        with pytest.raises(InvalidInputError):
            await getattr(node, verb)(CHAIN, principal=OPERATOR, reason="r" * 257)
        assert chain.mixed.resting() == before


async def test_a_purge_of_what_went_on_as_new_leaves_what_it_holds():
    chain = Chain(rotates)
    async with chain.node("raw", owns=True) as node:
        await node.start(rotates, 1, execution_id=CHAIN, subject="s")
        await rest(node)
        await chain.prepared()
        await chain.send("t", "m1", "m1")
        await hold(node)
        await chain.send("u", 1, "u1", sealed=False)
        await until(lambda: kinds(chain)[-1] == Kind.EXECUTION_CONTINUED, "the switch")
        await rest(node, chain.log()[-1].data["successorId"])
        await node.purge_history(CHAIN, principal=OPERATOR)
        assert len(chain.copies()) == 1
        assert [(r["message_id"], r["held_by"]) for r in await node.inbox(CHAIN)][:1] == [("m1", None)]
    async with chain.node("capable", owns=True) as capable:
        assert await capable.handle(CHAIN, rotates).result(5) == "m1"


# Deleting -----------------------------------------------------------------------------------------------------------


async def test_a_deleted_chain_leaves_nothing_and_its_ids_are_never_used_again():
    chain, heir = await rotated()
    await chain.prepared()
    async with chain.node("raw", owns=True) as node:
        await node._engine.wakes.schedule([WakeRow(heir, 7, "timer")])
        planned = await node.delete_chain(heir, principal=OPERATOR, dry_run=True)
        done = await node.delete_chain(heir, reason="a test", principal=OPERATOR)
        assert planned.executions == done.executions == (CHAIN, heir)
        assert done.streams[-1] == CHAIN
        assert left(chain) == []
        assert not chain.mixed.fleet.wakes.slots
        for gone in (CHAIN, heir):
            with pytest.raises(ExecutionAlreadyExistsError):
                await node.start(rotates, 0, execution_id=gone)


async def test_a_deleted_chain_takes_its_holds_along(chain):
    await held_and_cancelled(chain)
    async with chain.node("raw") as node:
        await node.delete_chain(CHAIN, principal=OPERATOR)
        assert left(chain) == []
        assert (await node.look_after_copies(CHAIN)).copies == 0


@pytest.mark.parametrize("at", range(8))
async def test_a_deletion_that_breaks_off_anywhere_is_told_by_the_log_and_finished_by_a_repeat(at):
    chain, heir = await rotated()
    await chain.prepared()
    async with chain.node("raw") as node:
        calls = 0

        def failing(method):
            async def call(*args, **options):
                nonlocal calls
                calls += 1
                if calls > at:
                    raise ConnectionError
                return await method(*args, **options)

            return call

        events = node._engine.events
        for name in ("append", "truncate", "delete"):
            setattr(events, name, failing(getattr(events, name)))
        try:
            await node.delete_chain(CHAIN, reason="why", principal=OPERATOR)
        except ConnectionError:
            if left(chain) and at:
                assert chain.log()[-1].data["reason"] == "why", "the log that says it goes last"
        else:
            assert not left(chain)
    async with chain.node("raw") as node:
        if left(chain):
            await node.delete_chain(CHAIN, reason="again", principal=OPERATOR)
        assert left(chain) == []


async def test_a_deletion_is_told_once_however_often_it_is_begun():
    chain, _ = await rotated()
    await chain.prepared()
    async with chain.node("raw") as node:
        delete = node._engine.events.delete

        async def fails(*_):
            raise ConnectionError

        node._engine.events.delete = fails
        for reason in ("first", "second"):
            with pytest.raises(ConnectionError):
                await node.delete_chain(CHAIN, reason=reason, principal=OPERATOR)
        assert [e.data["reason"] for e in chain.log() if e.type == Kind.EXECUTION_PURGED] == ["first"]
        node._engine.events.delete = delete
        await node.delete_chain(CHAIN, principal=OPERATOR)
    assert left(chain) == []


async def test_a_removal_may_take_more_than_a_transaction(chain, monkeypatch):
    await held_and_cancelled(chain)
    monkeypatch.setattr(removal, "SLICE", 1)
    async with chain.node("raw") as node:
        await node.purge_history(CHAIN, principal=OPERATOR)
        assert len(chain.log()) == 3
        await node.delete_chain(CHAIN, principal=OPERATOR)
    assert left(chain) == []


# What cannot be opened ----------------------------------------------------------------------------------------------


async def sealed_end(chain):
    """A finished execution whose log is sealed, for the subject s."""
    async with chain.node("capable", owns=True) as node:
        node.add_flow(two_halves)
        seen.clear()
        handle = await node.start(two_halves, SECRET, execution_id="x", subject="s", principal=OWNER)
        await node.send("x", "go", "-2")
        await until(lambda: seen, "the message")
        await until(lambda: chain.stream("x")[-1].type == Kind.EXECUTION_SUSPENDED, "the gate")
        await node.resume("x", "approve", "-3")
        await handle.result(5)


@pytest.mark.parametrize("verb", ["purge_history", "delete_chain"])
async def test_a_node_that_cannot_open_it_removes_nothing_and_says_no_more_than_a_denial(chain, verb):
    await sealed_end(chain)
    async with chain.node("raw") as node, chain.node("capable") as capable:
        before = chain.mixed.resting()
        with pytest.raises(ExecutionDeniedError):
            await getattr(node, verb)("x", principal=OPERATOR)
        assert chain.mixed.resting() == before
        await getattr(capable, verb)("x", principal=OPERATOR)
    assert len(chain.stream("x")) == (3 if verb == "purge_history" else 0)


@pytest.mark.parametrize("verb", ["purge_history", "delete_chain"])
async def test_nor_where_only_what_came_later_is_sealed(chain, verb):
    await chain.send("u", "u1", "u1")
    async with chain.node("capable", owns=True) as capable:
        await until(lambda: Kind.MESSAGE_CONSUMED in kinds(chain), "a sealed delivery")
        await rest(capable)
        await capable.cancel(CHAIN)
    before = chain.mixed.resting()
    async with chain.node("raw") as node:
        with pytest.raises(ExecutionDeniedError):
            await getattr(node, verb)(CHAIN, principal=OPERATOR)
    assert chain.mixed.resting() == before


async def test_what_was_erased_stays_erased_through_a_purge_and_can_be_deleted(chain):
    await sealed_end(chain)
    async with chain.node("capable") as capable:
        await capable.erase_subject("s", principal=OPERATOR)
        await capable.purge_history("x", principal=OPERATOR)
        assert {Kind.PAYLOAD_SHREDDED, Kind.EXECUTION_COMPLETED} <= {e.type for e in chain.stream("x")}
        with pytest.raises(PayloadShreddedError):
            await capable.load_state("x", principal=OWNER)
        await capable.delete_chain("x", principal=OPERATOR)
    assert chain.stream("x") == []


async def test_a_held_chain_is_erased_with_its_copies():
    """The copy is sealed under the chain's subject: with the key go original, copy and log."""
    chain = Chain()
    await chain.started()
    await chain.send("t", "m1", "m1")
    async with chain.node("raw") as node:
        await hold(node)
    store = EncryptingEventStore.over(
        chain.mixed.fleet.store(()), MemoryKeyStore(chain.mixed.keys), SENSITIVE
    )
    async with chain.node("capable") as capable:
        report = await capable.erase_subject("s", principal=OPERATOR)
        assert report.cancelled == (CHAIN,)
        await until(lambda: kinds(chain)[-1] in {Kind.EXECUTION_CANCELLED, Kind.PAYLOAD_SHREDDED}, "the end")
        read = [e for e in await store.read(quarantine_stream(CHAIN)) if e.sequence]
        assert [e.data["payload"] for e in read] == [{"$shredded": True}]
        looked = await capable.look_after_copies(CHAIN)
        assert (looked.copies, chain.copies()) == (0, [])


# Retention ----------------------------------------------------------------------------------------------------------


async def test_retention_removes_what_ended_before_whether_or_not_it_opens(chain):
    await sealed_end(chain)
    async with chain.node("raw", owns=True) as node:
        now = node._engine.now
        assert await node.expire_chain(CHAIN, CHAIN, now() + 1) is None, "it waits"
        assert await node.expire_chain("x", "x", 0) is None, "it ended later"
        assert await node.expire_chain("other", "x", now() + 1) is None, "it is another's"
        assert await node.expire_chain("nothing-here", "nothing-here", now() + 1) is None
        done = await node.expire_chain("x", "x", now() + 1)
        assert done.executions == ("x",)
        assert chain.stream("x") == []
        assert chain.log()


@pytest.mark.parametrize("at", range(8))
async def test_a_retention_that_breaks_off_is_finished_by_the_next_sweep(at):
    """A sweep finds a chain by its last execution, so that goes last."""
    chain, heir = await rotated()
    await chain.prepared()
    async with chain.node("raw") as node:
        calls = 0

        def failing(method):
            async def call(*args):
                nonlocal calls
                calls += 1
                if calls > at:
                    raise ConnectionError
                return await method(*args)

            return call

        events = node._engine.events
        for name in ("truncate", "delete"):
            setattr(events, name, failing(getattr(events, name)))
        try:
            await node.expire_chain(CHAIN, heir, node._engine.now() + 1)
        except ConnectionError:
            assert heir in left(chain)
    async with chain.node("raw") as node:
        if heir in left(chain):
            await node.expire_chain(CHAIN, heir, node._engine.now() + 1)
        assert left(chain) == []
