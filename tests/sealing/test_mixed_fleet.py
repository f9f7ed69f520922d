"""A fleet in which some nodes can open a sealed log and some cannot (system.md 1 and 2; the seed's D1 to D8)."""

from __future__ import annotations

import asyncio
import traceback

import pytest
from test_guarded import _faces

from loom import (
    ExecutionDeniedError,
    PlaintextCheckpointError,
    Principal,
    SealedPayloadUnreadableError,
    execution_access_policy,
    flow,
)
from loom.errors import UNKNOWN_OWNER_REASON, PayloadShreddedError, SealedStreamUnreadableError
from loom.ids import inbox_stream
from loom.operator import is_sealed_unreadable, sealed_detail_of
from loom.schemas.envelope import EVENT_SCHEMA, Kind, NewEvent
from loom.stores.contracts import NO_EVENTS, StreamAppend
from loom.stores.keys.memory import KeyTable, MemoryKeyStore
from loom.stores.memory.snapshot_store import MemorySnapshotStore
from loom.stores.sealing.encrypting import EncryptingEventStore
from loom.stores.sealing.snapshots import EncryptingSnapshotStore
from loom.testing.runtime import MemoryFleet, until

SECRET = "planted-plaintext-7Q"
SENSITIVE = {
    Kind.EXECUTION_STARTED: ("input",),
    Kind.STEP_COMPLETED: ("output",),
    Kind.EXECUTION_COMPLETED: ("output",),
}
ALICE = Principal("alice", {"tenant": SECRET})
OPERATOR = Principal("olga")
SHARDS = 4


async def add(a, b):
    return a + b


@flow("two-halves")
async def two_halves(ctx, start):
    first = await ctx.run(add, start, "-1")
    word = await ctx.receive("go")
    seen.append(word)
    second = await ctx.run(add, first, word)
    answer = await ctx.gate("approve")
    return second + answer


seen: list = []


class Trouble:
    def __init__(self):
        self.errors, self.storage, self.denied = [], [], []

    @property
    def options(self):
        return {
            "on_error": lambda error, about: self.errors.append((error, about)),
            "on_storage_error": lambda error, about: self.storage.append((error, about)),
            "on_execution_denied": lambda request, reason: self.denied.append((request, reason)),
        }


class Fleet:
    """Nodes of four kinds on one log. ``owns`` says whether a node writes the shards, and so drives."""

    def __init__(self):
        self.fleet = MemoryFleet(partitions=SHARDS, ttl_ms=600)
        self.keys = KeyTable()

    def node(self, kind, *, owns=False, trouble=None, operators=("olga",), **options):
        inner = self.fleet.store(None if owns else ())
        events = self.stored(kind, inner)
        settings = {"access": {"operators": operators}}
        more = trouble.options if trouble is not None else {}
        name = kind.replace(" ", "-")
        return self.fleet.runtime(name, [two_halves], events=events, settings=settings, **more, **options)

    def stored(self, kind, inner):
        if kind == "raw":
            return inner
        keys = {"capable": self.keys, "poorer": self.keys}.get(kind, KeyTable())
        if kind == "other keys":
            keys = self.other
        return EncryptingEventStore.over(inner, MemoryKeyStore(keys), {} if kind == "poorer" else SENSITIVE)

    async def prepare(self, subject):
        """Keys of another making for the same subject."""
        self.other = KeyTable()
        await MemoryKeyStore(self.other).ensure(subject)

    def resting(self, *streams):
        index = self.fleet.log.index
        return {
            s: [raw for _, raw in index._events[s].values()]
            for s in index._events
            if not streams or s in streams
        }


KINDS = ["raw", "poorer", "no keys", "other keys"]


@pytest.fixture
def mixed():
    seen.clear()
    return Fleet()


async def _parked(runtime, execution_id):
    await until(lambda: execution_id in runtime._engine.parked_runs, "the park")


async def _start(mixed, execution_id="sealed", principal=ALICE):
    async with mixed.node("capable", owns=True) as capable:
        await capable.start(two_halves, SECRET, execution_id=execution_id, subject="s", principal=principal)
        await _parked(capable, execution_id)
    await mixed.prepare("s")


def _verbs(runtime, execution_id, principal):
    async def follow():
        return [e async for e in runtime.follow(execution_id, principal=principal)]

    return {
        "send": lambda: runtime.send(execution_id, "go", 1, principal=principal),
        "resume": lambda: runtime.resume(execution_id, "approve", 1, principal=principal),
        "cancel": lambda: runtime.cancel(execution_id, principal=principal),
        "load_state": lambda: runtime.load_state(execution_id, principal=principal),
        "query": lambda: runtime.query(execution_id, principal=principal),
        "status": lambda: runtime.status(execution_id, principal=principal),
        "history": lambda: runtime.history(execution_id, principal=principal),
        "follow": follow,
        "parked_at_sequence": lambda: runtime.parked_at_sequence(execution_id, principal=principal),
        "follow_to_head": lambda: runtime.follow_to_head(execution_id, principal=principal),
        "inbox": lambda: runtime.inbox(execution_id, principal=principal),
        "fork": lambda: runtime.fork(execution_id, principal=principal),
        "record_outcome": lambda: runtime.record_outcome(execution_id, 1, principal=principal),
        "acquire_fence": lambda: runtime.acquire_fence(execution_id, principal=principal),
        "notify": lambda: runtime.notify_inbox(execution_id, principal=principal),
        "expire": lambda: runtime.expire_inbox(execution_id, "go", older_than_ms=1, principal=principal),
        "recover": lambda: runtime.recover(execution_id, principal=principal),
        "recover_abandoned": lambda: runtime.recover_abandoned(execution_id, principal=principal),
        "resume_as": lambda: runtime.resume_as(execution_id, two_halves, principal=principal),
        "discard": lambda: runtime.discard_inbox(execution_id, "go", principal=principal),
    }


async def _denied(call):
    with pytest.raises(ExecutionDeniedError) as caught:
        await call()
    return caught.value


async def _ownerless(mixed, execution_id="ownerless"):
    """An execution that exists and whose owner nobody knows."""
    data = {"workflow": "two-halves", "input": 1, "chainId": execution_id}
    first = NewEvent("o0", Kind.EXECUTION_STARTED, data, {"schema": EVENT_SCHEMA, "node": "n:1"})
    park = NewEvent(
        "o1", Kind.EXECUTION_SUSPENDED, {"waits": [{"siteId": "0:1", "arms": []}]}, {"schema": EVENT_SCHEMA}
    )
    await mixed.fleet.store(()).append(
        StreamAppend(execution_id, (first, park), expected_head=NO_EVENTS, fence=1)
    )


# -- equality of refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "who", [ALICE, Principal("mallory"), OPERATOR], ids=["owner", "stranger", "operator"]
)
async def test_a_refusal_equals_that_of_an_ownerless_execution(mixed, kind, who):
    await _start(mixed)
    await _ownerless(mixed)
    before = mixed.resting("sealed", inbox_stream("sealed", "go"))
    row = mixed.fleet.log.index.row("sealed").copy()
    trouble = Trouble()
    async with mixed.node(
        kind, trouble=trouble, authorizer=execution_access_policy(operators=["olga"])
    ) as node:
        ordinary = _verbs(node, "ownerless", who)
        for verb, call in _verbs(node, "sealed", who).items():
            error = await _denied(call)
            if verb == "discard" and who == OPERATOR:
                # To an operator an ordinary one is not denied; the refusal has the wording of an unknown owner.
                assert error.reason == UNKNOWN_OWNER_REASON
                continue
            plain = await _denied(ordinary[verb])
            assert type(plain) is ExecutionDeniedError
            ours, theirs = _faces(error), _faces(plain)
            for face in ours:
                mine = repr(ours[face]).replace("sealed", "ownerless")
                if face == "pickle":
                    continue
                assert mine == repr(theirs[face]), (verb, face)
            assert error.__context__ is None
            assert error.__cause__ is None
            if error.reason == UNKNOWN_OWNER_REASON:
                assert isinstance(error, SealedStreamUnreadableError)
    assert mixed.resting("sealed", inbox_stream("sealed", "go")) == before
    assert mixed.fleet.log.index.row("sealed") == row
    told = [
        (request.op, request.workflow, reason)
        for request, reason in trouble.denied
        if request.execution_id == "sealed"
    ]
    assert {workflow for _, workflow, _ in told} == {""}
    assert "query" not in {op for op, _, _ in told}
    ordinary = [(r.op, reason) for r, reason in trouble.denied if r.execution_id == "ownerless"]
    skipped = [("discard", UNKNOWN_OWNER_REASON)] if who == OPERATOR else []
    assert [(op, reason) for op, _, reason in told if (op, reason) not in skipped] == ordinary


@pytest.mark.parametrize("kind", KINDS)
async def test_whatever_the_policy_says_the_refusal_stands(mixed, kind):
    await _start(mixed)
    asked = []

    def failing(request):
        asked.append(request)
        raise RuntimeError("no")

    def allowing(request):
        asked.append(request)

    def wording(request):
        asked.append(request)
        return "come back tomorrow"

    policies = {
        failing: UNKNOWN_OWNER_REASON,
        allowing: UNKNOWN_OWNER_REASON,
        wording: "come back tomorrow",
        execution_access_policy(unknown_owner="allow"): UNKNOWN_OWNER_REASON,
        None: UNKNOWN_OWNER_REASON,
    }
    for policy, reason in policies.items():
        async with mixed.node(kind, authorizer=policy) as node:
            for principal in (ALICE, Principal("mallory"), None):
                asked.clear()
                error = await _denied(lambda node=node, p=principal: node.load_state("sealed", principal=p))
                assert (error.op, error.execution_id, error.reason) == ("load_state", "sealed", reason)
                assert is_sealed_unreadable(error)
                assert len(asked) <= 1
                assert all(r.owner is None and r.workflow == "" for r in asked)


async def test_a_start_on_a_taken_id_says_that_it_is_taken(mixed):
    await _start(mixed)
    before = mixed.resting("sealed")
    for kind in KINDS:
        async with mixed.node(kind) as node:
            with pytest.raises(Exception, match="is taken"):
                await node.start(two_halves, "x", execution_id="sealed", subject="mine")
    assert mixed.resting("sealed") == before


async def test_a_missing_id_answers_as_everywhere(mixed):
    await _start(mixed)
    for kind in ("capable", *KINDS):
        async with mixed.node(kind) as node:
            with pytest.raises(Exception, match="does not exist"):
                await node.load_state("missing", principal=ALICE)
            await _denied(lambda node=node: node.load_state("missing", principal=Principal("bob")))


# -- operators -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("raw", "marker-unopenable"),
        ("poorer", "marker-unopenable"),
        ("no keys", "key-unavailable"),
        ("other keys", "key-unavailable"),
    ],
)
async def test_operators_are_told_why_first_and_every_16th(mixed, kind, reason):
    await _start(mixed)
    trouble = Trouble()
    async with mixed.node(kind, trouble=trouble) as node:
        for _ in range(20):
            await _denied(lambda node=node: node.load_state("sealed", principal=ALICE))
    told = [(error, about) for error, about in trouble.storage if about == "sealed"]
    assert len(told) == 2
    detail = sealed_detail_of(told[0][0])
    assert (detail.reason, detail.sequence) == (reason, 0)
    assert "EXECUTION_STARTED.input" in detail.covers
    for error, _ in told:
        assert SECRET not in repr(error)
        assert SECRET not in "".join(traceback.format_exception(error))


def _frames(error):
    """Everything that the locals of a raised error's frames hold, as a debugger would print them."""
    at, texts = error.__traceback__, []
    while at is not None:
        if "loom" in at.tb_frame.f_code.co_filename.rsplit("tests", 1)[0]:
            texts += [repr(value) for value in at.tb_frame.f_locals.values()]
        at = at.tb_next
    return "\n".join(texts)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_frames_of_a_refusal_tell_nothing(mixed, kind):
    await _start(mixed)
    async with mixed.node(kind) as node:
        error = await _denied(lambda node=node: node.load_state("sealed", principal=ALICE))
    text = _frames(error)
    for word in ("SealedDetail", "marker-unopenable", "key-unavailable", "__loomEnc", "covers"):
        assert word not in text


# -- nobody corrupts, and a capable node carries on ----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_a_node_that_cannot_open_leaves_the_log_and_a_capable_one_completes(mixed, kind):
    await _start(mixed)
    log_before = mixed.resting("sealed")
    trouble = Trouble()
    async with mixed.node("capable") as client, mixed.node(kind, owns=True, trouble=trouble) as node:
        await client.send("sealed", "go", "-2", principal=ALICE)  # its payload is sealed by the client
        await until(lambda: any(about == "sealed" for _, about in trouble.errors), "a refusal")
        with pytest.raises((ExecutionDeniedError, SealedPayloadUnreadableError)):
            await node.notify_inbox("sealed")
        assert is_sealed_unreadable(trouble.errors[0][0])
        assert "sealed" not in node._engine.runs
        rows = await node._engine.wakes.rows_of("sealed")
        assert [row.kind for row in rows] == ["inbox"]
        assert "sealed" in node._engine.backoff.snapshot()
    assert mixed.resting("sealed") == log_before
    assert seen == []
    async with mixed.node("capable", owns=True) as capable:
        await until(lambda: Kind.MESSAGE_CONSUMED in _kinds(mixed), "the delivery")
        await _parked(capable, "sealed")
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
        await _parked(plain, "open")
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
        assert [row.kind for row in await node._engine.wakes.rows_of("open")] == ["inbox"]
        assert await node.status("open") == "suspended"
    assert mixed.resting("open") == before
    mixed.stored = mixed_paths
    async with mixed.node("capable", owns=True) as capable:
        await until(lambda: "open" in capable._engine.parked_runs and seen == [SECRET], "the delivery")
        await capable.resume("open", "approve", "!")
        assert await capable.handle("open", two_halves).result(5) == f"open-1{SECRET}!"


async def test_a_client_without_keys_that_waits_for_the_end_is_refused_not_left_waiting(mixed):
    await _start(mixed)
    async with mixed.node("capable", owns=True) as capable, mixed.node("no keys") as client:
        waiting = asyncio.ensure_future(client.handle("sealed").result(10))
        await asyncio.sleep(0)
        await capable.send("sealed", "go", "-2", principal=ALICE)
        with pytest.raises(ExecutionDeniedError):
            await waiting
        await until(lambda: "sealed" in capable._engine.parked_runs, "the park")


async def test_an_erased_execution_says_erased(mixed):
    await _start(mixed)
    await MemoryKeyStore(mixed.keys).destroy("s")
    async with mixed.node("capable") as node:
        await _denied(lambda node=node: node.load_state("sealed", principal=ALICE))
        head = mixed.fleet.log.index.row("sealed").head
        tombstone = NewEvent("t", Kind.PAYLOAD_SHREDDED, {"subjectId": "s"}, {"schema": EVENT_SCHEMA})
        await mixed.fleet.store(()).append(StreamAppend("sealed", (tombstone,), expected_head=head))
        with pytest.raises(PayloadShreddedError):
            await node.load_state("sealed", principal=ALICE)
    async with mixed.node("no keys") as node:
        with pytest.raises(PayloadShreddedError):
            await node.load_state("sealed", principal=ALICE)
    async with mixed.node("raw") as node:
        await _denied(lambda node=node: node.load_state("sealed", principal=ALICE))


# -- stores of a node ----------------------------------------------------------------------------------------------


async def test_a_node_with_keys_seals(mixed):
    keys = MemoryKeyStore(mixed.keys)
    settings = {"sealing": {"sensitive": {"EXECUTION_STARTED": ["input"]}}}
    async with mixed.fleet.runtime("n", [two_halves], keys=keys, settings=settings) as node:
        await node.start(two_halves, SECRET, execution_id="x", principal=ALICE)
        await _parked(node, "x")
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
        await _parked(node, "x")
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


# -- a log that is sealed only further on --------------------------------------------------------------------------

DARK = {"status", "follow_to_head", "send"}
"""Verbs that read the first and the last event alone; what lies between reaches nothing that they decide."""


@pytest.mark.parametrize("kind", ["raw", "poorer", "no keys"])
async def test_a_log_that_is_sealed_further_on_is_refused_before_its_fence_is_taken(mixed, kind):
    data = {
        "workflow": "two-halves",
        "input": 1,
        "chainId": "late",
        "subject": "s",
        "principal": {"actor": "alice"},
    }
    events = (
        NewEvent("e0", Kind.EXECUTION_STARTED, data, {"schema": EVENT_SCHEMA, "node": "n:1"}),
        NewEvent("e1", Kind.STEP_COMPLETED, {"siteId": "0:0", "name": "add", "output": SECRET, "attempt": 1}),
        NewEvent("e2", Kind.EXECUTION_SUSPENDED, {"waits": [{"siteId": "0:1", "arms": []}]}),
    )
    writer = EncryptingEventStore.over(
        mixed.fleet.store(()), MemoryKeyStore(mixed.keys), {Kind.STEP_COMPLETED: ("output",)}
    )
    await writer.append(StreamAppend("late", events, expected_head=NO_EVENTS, fence=1))
    before, row = mixed.resting("late"), mixed.fleet.log.index.row("late").copy()
    owner = Principal("alice")
    async with mixed.node(kind) as node:
        for verb, call in _verbs(node, "late", owner).items():
            if verb in DARK or verb == "discard":
                continue
            error = await _denied(call)
            assert is_sealed_unreadable(error), verb
            assert sealed_detail_of(error).sequence == 1
            assert error.reason == UNKNOWN_OWNER_REASON
        error = await _denied(lambda: node.discard_inbox("late", "go", principal=OPERATOR))
        assert isinstance(error, ExecutionDeniedError)
    assert mixed.resting("late") == before
    assert mixed.fleet.log.index.row("late") == row
