"""Logs of which only a part is sealed: any stream with a marker that this node cannot open is refused, wherever it stands
(system.md 2.3; the seed's D7: a stream is sealed if any of its envelopes is)."""

from __future__ import annotations

import pytest
from mixed import KINDS, OPERATOR, OPERATORS_OWN, SECRET, Fleet, Trouble, denied, seen, two_halves, verbs

from loom import ExecutionDeniedError, Principal, SealedPayloadUnreadableError
from loom.errors import UNKNOWN_OWNER_REASON
from loom.operator import is_sealed_unreadable, sealed_detail_of
from loom.schemas.envelope import EVENT_SCHEMA, Kind, NewEvent
from loom.stores.contracts import NO_EVENTS, StreamAppend
from loom.stores.keys.memory import MemoryKeyStore
from loom.stores.sealing.encrypting import EncryptingEventStore

DARK = ["raw", "poorer", "no keys"]
ALICE = Principal("alice")
STAMP = {"schema": EVENT_SCHEMA, "node": "n:1"}
WAITS = {"waits": [{"siteId": "0:1", "arms": []}]}


@pytest.fixture
def mixed():
    seen.clear()
    return Fleet()


def begun(execution_id, chain_id=None, **more):
    data = {
        "workflow": "two-halves",
        "input": 1,
        "chainId": chain_id or execution_id,
        "subject": "s",
        "principal": {"actor": "alice"},
        **more,
    }
    return NewEvent(f"{execution_id}-0", Kind.EXECUTION_STARTED, data, STAMP)


def stepped(execution_id):
    data = {"siteId": "0:0", "name": "add", "output": SECRET, "attempt": 1}
    return NewEvent(f"{execution_id}-1", Kind.STEP_COMPLETED, data, STAMP)


async def write(mixed, execution_id, *events):
    """Append as a node does that seals nothing but what steps return."""
    store = EncryptingEventStore.over(
        mixed.fleet.store(()), MemoryKeyStore(mixed.keys), {Kind.STEP_COMPLETED: ("output",)}
    )
    await store.append(StreamAppend(execution_id, events, expected_head=NO_EVENTS, fence=1))


async def late(mixed, execution_id="late"):
    """First and last event are in the clear; what lies between is not."""
    park = NewEvent("e2", Kind.EXECUTION_SUSPENDED, WAITS)
    await write(mixed, execution_id, begun(execution_id), stepped(execution_id), park)


def untouched(mixed, *ids):
    return mixed.resting(*ids), [mixed.fleet.log.index.row(i).copy() for i in ids]


@pytest.mark.parametrize("kind", DARK)
async def test_every_verb_is_refused_before_anything_is_used_and_before_a_fence(mixed, kind):
    await late(mixed)
    before = untouched(mixed, "late")
    async with mixed.node(kind) as node:
        for verb in verbs(node, "late", ALICE):
            error = await denied(verbs(node, "late", OPERATOR if verb in OPERATORS_OWN else ALICE)[verb])
            assert is_sealed_unreadable(error) or verb in OPERATORS_OWN, verb
            assert error.reason == UNKNOWN_OWNER_REASON, verb
            if is_sealed_unreadable(error):
                assert sealed_detail_of(error).sequence == 1, verb
    assert untouched(mixed, "late") == before


@pytest.mark.parametrize("kind", DARK)
async def test_a_log_of_several_pages_is_judged_to_its_end(mixed, kind, monkeypatch):
    monkeypatch.setattr("loom.runtime.reading.PAGE", 1)
    await test_every_verb_is_refused_before_anything_is_used_and_before_a_fence(mixed, kind)


@pytest.mark.parametrize("kind", DARK)
async def test_whoever_follows_gets_nothing_of_it(mixed, kind):
    await late(mixed)
    got = []
    async with mixed.node(kind) as node:
        with pytest.raises(ExecutionDeniedError):
            async for event in node.follow("late", principal=ALICE):
                got.append(event)  # noqa: PERF401 - what came before it raised
    assert got == []


@pytest.mark.parametrize("kind", DARK)
async def test_a_handle_is_refused_too(mixed, kind):
    """It is its process's own, and no policy judges it; what it says of a log is of the log all the same."""
    await late(mixed)
    end = NewEvent("end-2", Kind.EXECUTION_COMPLETED, {"output": "clear"}, STAMP)
    await write(mixed, "end", begun("end"), stepped("end"), end)
    trouble = Trouble()
    async with mixed.node(kind, owns=True, trouble=trouble) as node:
        for execution_id in ("late", "end"):
            for ask, op in (
                (node.handle(execution_id).status, "query"),
                (node.handle(execution_id).result, "load_state"),
            ):
                error = await denied(ask)
                assert is_sealed_unreadable(error)
                assert (error.op, error.execution_id, error.reason) == (
                    op,
                    execution_id,
                    UNKNOWN_OWNER_REASON,
                )
                assert error.__context__ is None
            assert any(is_sealed_unreadable(e) for e, about in trouble.storage if about == execution_id)
    async with mixed.node("capable") as capable:
        assert await capable.handle("end", two_halves).result(5) == "clear"
        assert await capable.handle("late").status() == "suspended"


async def chain(mixed, *beside):
    """Three links: the first and the last are in the clear, the one between holds a sealed step. ``beside`` ends each."""
    follows = {"carried": {"inbox": {"cursors": {}, "dedupe": []}}}

    def on(link, to):
        data = {"successorId": to, "workflow": "two-halves"}
        notes = [
            NewEvent(f"{link}-{kind}", kind, {"op": "send"}, {"schema": EVENT_SCHEMA}) for kind in beside
        ]
        return [NewEvent(f"{link}-9", Kind.EXECUTION_CONTINUED, data, STAMP), *notes]

    await write(mixed, "one", begun("one"), *on("one", "two"))
    two = begun("two", "one", continuedFrom={"executionId": "one", **follows})
    await write(mixed, "two", two, stepped("two"), *on("two", "three"))
    three = begun("three", "one", continuedFrom={"executionId": "two", **follows})
    await write(mixed, "three", three, NewEvent("three-1", Kind.EXECUTION_SUSPENDED, WAITS))


@pytest.mark.parametrize("kind", DARK)
@pytest.mark.parametrize("beside", [(), (Kind.EXECUTION_DENIED,)], ids=["", "behind control records"])
async def test_no_verb_passes_a_link_that_does_not_open(mixed, kind, beside):
    await chain(mixed, *beside)
    ids = ("one", "two", "three")
    before = untouched(mixed, *ids)
    passing = {"send", "resume", "cancel", "follow", "follow_to_head", "inbox", "notify", "expire"}
    async with mixed.node(kind) as node:
        for verb, call in verbs(node, "one", ALICE).items():
            if verb in passing:
                error = await denied(call)
                assert is_sealed_unreadable(error), verb
                assert error.execution_id == "one", verb
                assert sealed_detail_of(error).sequence == 1, verb
        error = await denied(lambda: node.discard_inbox("one", "go", principal=OPERATOR))
        assert is_sealed_unreadable(error)
    assert untouched(mixed, *ids) == before
    async with mixed.node("capable") as capable:
        assert await capable.follow_to_head("one", principal=ALICE) == "three"
        assert await capable.send("one", "go", 1, principal=ALICE)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "other keys"])
async def test_the_open_ends_of_a_chain_are_judged_by_themselves(mixed, kind):
    await chain(mixed)
    async with mixed.node(kind) as node:
        assert await node.follow_to_head("three", principal=ALICE) == "three"
        assert (await node.load_state("one", principal=ALICE)).status == "continued"
        with pytest.raises((ExecutionDeniedError, SealedPayloadUnreadableError)):
            await node.load_state("two", principal=ALICE)
