"""A fleet in which some nodes can open a sealed log and some cannot (system.md 1 and 2; the seed's D1 to D8)."""

from __future__ import annotations

import asyncio

import pytest
from mixed import (
    ALICE,
    KINDS,
    SECRET,
    Fleet,
    Trouble,
    denied,
    seen,
    start,
    two_halves,
)

from loom import (
    ExecutionDeniedError,
    InboxMessageRefusedError,
    PlaintextCheckpointError,
    SealedPayloadUnreadableError,
)
from loom.errors import PayloadShreddedError
from loom.ids import inbox_stream
from loom.operator import is_sealed_unreadable
from loom.schemas.envelope import EVENT_SCHEMA, Kind, NewEvent
from loom.stores.contracts import StreamAppend
from loom.stores.keys.memory import MemoryKeyStore
from loom.stores.memory.snapshot_store import MemorySnapshotStore
from loom.stores.sealing.encrypting import EncryptingEventStore
from loom.stores.sealing.snapshots import EncryptingSnapshotStore
from loom.testing.runtime import until, until_parked, until_rows


@pytest.fixture
def mixed():
    seen.clear()
    return Fleet()


# -- nobody corrupts, and a capable node carries on ----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_a_node_that_cannot_open_leaves_the_log_and_a_capable_one_completes(mixed, kind):
    await start(mixed)
    log_before = mixed.resting("sealed")
    trouble = Trouble()
    async with mixed.node("capable") as client, mixed.node(kind, owns=True, trouble=trouble) as node:
        await client.send("sealed", "go", "-2", principal=ALICE)  # its payload is sealed by the client
        await until(lambda: any(about == "sealed" for _, about in trouble.errors), "a refusal")
        with pytest.raises((ExecutionDeniedError, SealedPayloadUnreadableError)):
            await node.notify_inbox("sealed")
        assert is_sealed_unreadable(trouble.errors[0][0])
        assert "sealed" not in node._engine.runs
        await until_rows(node._engine.wakes, "sealed", "refusal")
        assert "sealed" in node._engine.backoff.snapshot()
    assert mixed.resting("sealed") == log_before
    assert seen == []
    async with mixed.node("capable", owns=True) as capable:
        await until(lambda: Kind.MESSAGE_CONSUMED in _kinds(mixed), "the delivery")
        await until_parked(capable, "sealed")
        await capable.resume("sealed", "approve", "-3", principal=ALICE)
        assert await capable.handle("sealed", two_halves).result(5) == f"{SECRET}-1-2-3"
        history = await capable.history("sealed", principal=ALICE)
    assert "__loomEnc" not in repr(history)
    assert {e.metadata.get("node", "capable").split(":")[0] for e in history} == {"capable"}
    assert SECRET.encode() not in b"".join(raw for events in mixed.resting().values() for raw in events)
    assert seen == ["-2"]


def _kinds(mixed, execution_id="sealed"):
    from loom.schemas.codec import decode_envelope

    return [decode_envelope(raw).type for raw in mixed.resting(execution_id).get(execution_id, ())]


@pytest.mark.parametrize("kind", ["raw", "no keys", "other keys"])
async def test_a_sealed_message_of_an_open_log_is_the_guards_business(mixed, kind):
    """Nothing in the owner's log is sealed, only the message is: the flow waits on, and is told nothing."""
    mixed_paths = mixed.stored
    async with mixed.node("raw", owns=True) as plain:
        await plain.start(two_halves, "open", execution_id="open", subject="s")
        await until_parked(plain, "open")
    await MemoryKeyStore(mixed.keys).ensure("s")
    await mixed.prepare("s")
    sealing = EncryptingEventStore.over(mixed.fleet.store(()), MemoryKeyStore(mixed.keys))
    data = {"topic": "go", "payload": SECRET, "messageId": "m"}
    trouble = Trouble()
    before = mixed.resting("open")
    async with mixed.node(kind, owns=True, trouble=trouble) as node:
        await sealing.append(
            StreamAppend(inbox_stream("open", "go"), (NewEvent("m", Kind.INBOX_MESSAGE, data),))
        )
        await until(lambda: any(about == "open" for _, about in trouble.errors), "a refusal")
        error = next(error for error, about in trouble.errors if about == "open")
        assert type(error) is SealedPayloadUnreadableError
        assert (error.execution_id, error.message_id, error.topic) == ("open", "m", "go")
        assert not error.unverifiable
        with pytest.raises(SealedPayloadUnreadableError):
            await node.notify_inbox("open")
        await until_rows(node._engine.wakes, "open", "refusal")
        assert await node.status("open") == "suspended"
    assert mixed.resting("open") == before
    mixed.stored = mixed_paths
    async with mixed.node("capable", owns=True) as capable:
        await until(lambda: "open" in capable._engine.parked_runs and seen == [SECRET], "the delivery")
        await capable.resume("open", "approve", "!")
        assert await capable.handle("open", two_halves).result(5) == f"open-1{SECRET}!"


@pytest.mark.parametrize("kind", ["capable", "raw"])
async def test_a_forged_envelope_is_sent_from_nowhere(mixed, kind):
    async with mixed.node(kind, owns=True) as node:
        await node.start(two_halves, "open", execution_id="open", subject="s")
        await until_parked(node, "open")
        before = mixed.resting()
        for forged in ({"__loomEnc": "loom/aes-256-gcm", "ct": "x"}, [{"deep": {"$shredded": True}}]):
            with pytest.raises(InboxMessageRefusedError):
                await node.send("open", "go", forged)
        assert mixed.resting() == before


async def test_a_client_without_keys_that_waits_for_the_end_is_refused_not_left_waiting(mixed):
    await start(mixed)
    async with mixed.node("capable", owns=True) as capable, mixed.node("no keys") as client:
        waiting = asyncio.ensure_future(client.handle("sealed").result(10))
        await asyncio.sleep(0)
        await capable.send("sealed", "go", "-2", principal=ALICE)
        with pytest.raises(ExecutionDeniedError):
            await waiting
        await until_parked(capable, "sealed")


async def test_an_erased_execution_says_erased(mixed):
    await start(mixed)
    await MemoryKeyStore(mixed.keys).destroy("s")
    async with mixed.node("capable") as node:
        await denied(lambda node=node: node.load_state("sealed", principal=ALICE))
        head = mixed.fleet.log.index.row("sealed").head
        tombstone = NewEvent("t", Kind.PAYLOAD_SHREDDED, {"subjectId": "s"}, {"schema": EVENT_SCHEMA})
        await mixed.fleet.store(()).append(StreamAppend("sealed", (tombstone,), expected_head=head))
        with pytest.raises(PayloadShreddedError):
            await node.load_state("sealed", principal=ALICE)
    async with mixed.node("no keys") as node:
        with pytest.raises(PayloadShreddedError):
            await node.load_state("sealed", principal=ALICE)
    async with mixed.node("raw") as node:
        await denied(lambda node=node: node.load_state("sealed", principal=ALICE))


# -- stores of a node ----------------------------------------------------------------------------------------------


async def test_a_node_with_keys_seals(mixed):
    keys = MemoryKeyStore(mixed.keys)
    settings = {"sealing": {"sensitive": {"EXECUTION_STARTED": ["input"]}}}
    async with mixed.fleet.runtime("n", [two_halves], keys=keys, settings=settings) as node:
        await node.start(two_halves, SECRET, execution_id="x", principal=ALICE)
        await until_parked(node, "x")
        assert (await node.load_state("x", principal=ALICE)).input == SECRET
        assert isinstance(node.stores.snapshots, EncryptingSnapshotStore)
    first = mixed.resting("x")["x"][0]
    assert SECRET.encode() not in first
    assert b"__loomEnc" in first


async def test_settings_alone_make_a_node_seal():
    from loom import Config, Runtime

    config = Config(storage="memory", node_id="n", sealing={"keys": "memory"})
    async with Runtime(config, flows=[two_halves]) as node:
        await node.start(two_halves, "x", execution_id="x", principal=ALICE)
        await until_parked(node, "x")
        assert node._engine.events.sealing_capability().covers
        assert node.stores.snapshots.seals_whole_state
        (first,) = await node._engine.events._inner.read_at_rest("x", 0, 1)
        assert SECRET not in repr(first)


def test_plaintext_checkpoints_are_refused_when_a_runtime_is_made(mixed):
    from loom import Config, Runtime

    events = mixed.stored("capable", mixed.fleet.store(()))
    config = Config(storage="memory", node_id="n")
    foreign = EncryptingSnapshotStore(MemorySnapshotStore(), MemoryKeyStore())
    for snapshots, reason in ((MemorySnapshotStore(), "not-sealed"), (foreign, "keys-not-shared")):
        with pytest.raises(PlaintextCheckpointError) as caught:
            Runtime(config, events=events, snapshots=snapshots)
        assert caught.value.reason == reason
    allowed = Config(storage="memory", node_id="n", sealing={"allow_plaintext_checkpoints": True})
    Runtime(allowed, events=events, snapshots=MemorySnapshotStore())
    Runtime(config, events=events, snapshots=EncryptingSnapshotStore(MemorySnapshotStore(), events.keys))


async def test_plaintext_checkpoints_are_refused_when_keys_come_late(mixed):
    from loom import Config, Runtime

    config = Config(storage="memory", node_id="n", sealing={"keys": "memory"})
    node = Runtime(config, snapshots=MemorySnapshotStore())
    with pytest.raises(PlaintextCheckpointError):
        await node.open()
