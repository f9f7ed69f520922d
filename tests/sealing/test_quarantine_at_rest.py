"""The verbs on nodes that cannot open the owner's log, its checkpoint or its messages (system.md 4.9; seed, S5b)."""

from __future__ import annotations

import pytest
from mixed import OPERATOR
from test_quarantine import CHAIN, Chain, hold, kinds, refused, release

from loom import (
    ExecutionDeniedError,
    InboxQuarantineRefusedError,
    PayloadShreddedError,
    Principal,
    QuarantineHeldError,
    SealedPayloadUnreadableError,
)
from loom.errors import SealedStreamUnreadableError
from loom.ids import dedupe_key
from loom.operator import sealed_detail_of
from loom.schemas.envelope import EVENT_SCHEMA, Kind, NewEvent
from loom.stores.at_rest import AtRestView, is_opaque
from loom.stores.contracts import Snapshot, StreamAppend
from loom.stores.guarded import GuardedEventStore
from loom.stores.keys.memory import KeyTable, MemoryKeyStore
from loom.stores.sealing.cipher import CIPHER
from loom.stores.sealing.encrypting import EncryptingEventStore
from loom.testing.runtime import until, until_parked

SEALED = {"__loomEnc": CIPHER, "kid": "k", "iv": "i", "ct": "c"}
SEAL = {"v": 1, "cipher": CIPHER, "covers": ["MESSAGE_CONSUMED.payload"]}
INCAPABLE = ("raw", "no keys", "other keys")


class Opaque(Chain):
    """A chain in whose log a delivered payload rests sealed."""

    async def delivered(self):
        await self.started()
        await self.send("u", "u0", "u0")
        async with self.node("capable", owns=True) as node:
            await until(
                lambda: kinds(self).count(Kind.EXECUTION_SUSPENDED) == 2, "the delivery, and the park"
            )
            await until_parked(node, CHAIN)
        assert any("seal" in e.metadata for e in self.log())

    async def append(self, kind, data, **metadata):
        store = self.mixed.fleet.store(())
        seen = await store.observe(CHAIN)
        event = NewEvent(f"x{seen.head}", kind, data, {"schema": EVENT_SCHEMA, **metadata})
        await store.append(StreamAppend(CHAIN, (event,), observation=seen))


@pytest.fixture
async def opaque():
    chain = Opaque()
    await chain.delivered()
    return chain


# The table: verb, capability, head ------------------------------------------------------------------------------------

CAPABILITIES = ("capable", "raw", "no keys", "other keys")
OUTCOMES = {
    # What stands at the head of the topic; then, per verb, what each capability gets. One word stands for all four.
    "nothing": {"hold": "invalid", "release": "invalid", "drop": "invalid", "discard": "0", "notify": "False"},
    "plain": {"hold": "not-sealed", "release": "invalid", "drop": "invalid", "discard": "1", "notify": "True"},
    "sealed": {
        "hold": "done not-sealed sealed sealed",
        "release": "invalid",
        "drop": "invalid",
        "discard": "1",
        "notify": "sealed",
    },
    "held": {"hold": "invalid", "release": "sealed", "drop": "True", "discard": "0", "notify": "held"},
    "released": {"hold": "invalid", "release": "False", "drop": "invalid", "discard": "0", "notify": "sealed"},
}  # fmt: skip
OUTCOMES["sealed"]["hold"] = "not-sealed done sealed sealed"
BY_CAPABLE = {
    ("sealed", "notify"): "True",
    ("held", "notify"): "True",
    ("released", "notify"): "True",
    ("held", "release"): "True",
}
READS_THE_LOG = ("discard", "notify")
"""Verbs that are refused like any other on a log that cannot be opened: they may not step over anything."""


def expected(verb, capability, head, log):
    if log == "opaque" and capability != "capable" and verb in READS_THE_LOG:
        return "denied"
    words = OUTCOMES[head][verb].split()
    if capability == "capable" and (head, verb) in BY_CAPABLE:
        return BY_CAPABLE[head, verb]
    return words[0] if len(words) == 1 else words[CAPABILITIES.index(capability)]


async def prepare(chain, head):
    if head == "nothing":
        return
    await chain.send("t", "m1", "m1", sealed=head != "plain")
    if head in {"held", "released"}:
        async with chain.node("raw") as node:
            await hold(node)
    if head == "released":
        async with chain.node("capable", inbox_auto_release=False) as node:
            await release(node, "m1")


async def outcome(node, verb):
    calls = {
        "hold": lambda: hold(node),
        "release": lambda: release(node, "m1"),
        "drop": lambda: release(node, "m1", disposition="discard"),
        "discard": lambda: node.discard_inbox(CHAIN, "t", principal=OPERATOR),
        "notify": lambda: node.notify_inbox(CHAIN),
    }
    try:
        answer = await calls[verb]()
    except InboxQuarantineRefusedError as error:
        return error.reason
    except QuarantineHeldError:
        return "held"
    except SealedPayloadUnreadableError:
        return "sealed"
    except ExecutionDeniedError:
        return "denied"
    return "done" if verb == "hold" else str(answer)


WRITES = {"done", "True", "1"}


@pytest.mark.parametrize("log", ["open", "opaque"])
@pytest.mark.parametrize("head", list(OUTCOMES))
@pytest.mark.parametrize("verb", ["hold", "release", "drop", "discard", "notify"])
async def test_every_verb_on_every_kind_of_node_at_every_head(verb, head, log):
    found, wanted = {}, {}
    for capability in CAPABILITIES:
        chain = Opaque()
        await (chain.started() if log == "open" else chain.delivered())
        await prepare(chain, head)
        before = chain.mixed.resting()
        async with chain.node(capability, inbox_auto_release=True) as node:
            found[capability] = await outcome(node, verb)
            if found[capability] not in WRITES:
                assert chain.mixed.resting() == before, (capability, "a refusal wrote something")
        wanted[capability] = expected(verb, capability, head, log)
    assert found == wanted


# The view -------------------------------------------------------------------------------------------------------------


async def test_an_incapable_node_holds_and_drops_on_a_log_that_it_cannot_open(opaque):
    await opaque.send("t", "m1", "m1")
    async with opaque.node("raw") as node:
        with pytest.raises(ExecutionDeniedError):
            await node.load_state(CHAIN)
        held = await hold(node, message_id="m1")
        assert not (await hold(node, message_id="m1")).changed
        assert await release(node, "m1", disposition="discard")
        assert not await release(node, "m1", disposition="discard")
        assert (held.inbox_seq, held.held_at) == (0, 1)
        for refused_still in (
            lambda: node.load_state(CHAIN),
            lambda: node.inbox(CHAIN),
            lambda: node.notify_inbox(CHAIN),
            lambda: node.fork(CHAIN),
        ):
            with pytest.raises(ExecutionDeniedError):
                await refused_still()
    assert opaque.copies() == []


async def test_no_key_is_asked_for_what_is_stepped_over(opaque):
    await opaque.send("t", "m1", "m1")
    async with opaque.node("raw") as node:
        await hold(node)
    asked = []

    class Counting(MemoryKeyStore):
        async def opening(self, subject):
            asked.append(subject)
            return await super().opening(subject)

    keys = Counting(KeyTable())
    view = GuardedEventStore.over(
        EncryptingEventStore.over(opaque.mixed.fleet.store(()), keys)
    ).quarantine_view()
    assert len(await view.read(CHAIN)) == len(opaque.log())
    assert asked == []


@pytest.mark.parametrize(
    ("kind", "data", "seal"),
    [
        (Kind.STEP_COMPLETED, {"siteId": "0:9", "name": "x", "output": SEALED}, {**SEAL, "covers": ["STEP_COMPLETED.output"]}),
        (Kind.MESSAGE_CONSUMED, {}, {**SEAL, "covers": ["MESSAGE_CONSUMED.payload", "MESSAGE_CONSUMED.note"]}),
        (Kind.MESSAGE_CONSUMED, {}, {**SEAL, "covers": ["MESSAGE_CONSUMED.payloads"]}),
        (Kind.MESSAGE_CONSUMED, {}, {**SEAL, "covers": []}),
        (Kind.MESSAGE_CONSUMED, {}, {**SEAL, "v": 2}),
        (Kind.MESSAGE_CONSUMED, {}, {**SEAL, "cipher": "other/chacha"}),
        (Kind.MESSAGE_CONSUMED, {"topic": SEALED}, SEAL),
        (Kind.MESSAGE_CONSUMED, {"inboxSeq": SEALED}, SEAL),
        (Kind.MESSAGE_CONSUMED, {"messageId": SEALED}, SEAL),
        (Kind.MESSAGE_CONSUMED, {"siteId": SEALED}, SEAL),
    ],
)  # fmt: skip
async def test_anything_else_that_is_sealed_is_the_ordinary_denial(opaque, kind, data, seal):
    await opaque.send("t", "m1", "m1")
    base = {
        "topic": "v",
        "messageId": dedupe_key(None, "v"),
        "inboxSeq": 0,
        "payload": SEALED,
        "reason": "discarded",
    }
    await opaque.append(kind, {**base, **data} if kind == Kind.MESSAGE_CONSUMED else data, seal=seal)
    trouble = []
    async with opaque.node("raw") as node:
        node._signals._on_storage_error = lambda error, about: trouble.append(error)
        for call in (hold(node), release(node, "m1"), release(node, "m1", disposition="discard")):
            with pytest.raises(SealedStreamUnreadableError) as caught:
                await call
            assert caught.value.op in {"quarantine", "release", "discard"}
    assert sealed_detail_of(trouble[0]).reason == "marker-unopenable"
    assert opaque.copies() == []


def test_payload_and_what_is_below_it_is_stepped_over():
    from loom.schemas.envelope import Envelope

    def event(**seal):
        data = {"topic": "t", "messageId": "k", "inboxSeq": 0, "payload": SEALED}
        return Envelope("e", CHAIN, 3, Kind.MESSAGE_CONSUMED, 0, data, {"seal": {**SEAL, **seal}})

    assert is_opaque(event())
    assert is_opaque(event(covers=["MESSAGE_CONSUMED.payload.a", "MESSAGE_CONSUMED.payload.b.*"]))
    assert not is_opaque(event(covers=["INBOX_MESSAGE.payload"]))


async def test_a_log_that_a_checkpoint_has_gone_ahead_of_is_refused_by_its_reason(opaque):
    await opaque.send("t", "m1", "m1")
    head = opaque.log()[-1].sequence
    async with opaque.node("raw") as node:
        snapshots = node._engine.snapshots
        await snapshots.save(Snapshot(CHAIN, head + 3, SEALED))
        assert await refused(hold(node)) == "checkpoint-unreadable-log-compacted"
        await snapshots.delete(CHAIN)
        await snapshots.save(Snapshot(CHAIN, head, SEALED))
        assert (await hold(node)).message_id == "m1"


async def test_a_log_with_a_gap_is_refused_by_its_reason(opaque):
    await opaque.send("t", "m1", "m1")
    await opaque.mixed.fleet.store(()).truncate(CHAIN, 2)
    async with opaque.node("raw") as node:
        assert await refused(hold(node)) == "checkpoint-unreadable-log-compacted"
    assert opaque.copies() == []


async def test_an_erasure_wins_over_the_view(opaque):
    await opaque.send("t", "m1", "m1")
    await opaque.append(Kind.PAYLOAD_SHREDDED, {"subjectId": "s"})
    async with opaque.node("raw") as node:
        for call in (hold(node), release(node, "m1", disposition="discard")):
            with pytest.raises(PayloadShreddedError):
                await call


async def test_the_caller_is_judged_before_the_log_is_read(opaque):
    await opaque.mixed.fleet.store(()).truncate(CHAIN, 2)
    async with opaque.node("raw") as node:
        for caller in (None, Principal("mallory")):
            with pytest.raises(ExecutionDeniedError):
                await node.quarantine_inbox(CHAIN, "t", principal=caller)


async def test_a_sealed_principal_is_still_the_denial_of_a_sealed_log():
    chain = Chain()
    async with chain.node("capable", owns=True) as node:
        await node.start("listens", None, execution_id=CHAIN, subject="s", principal=Principal("a", {"t": 1}))
        await until_parked(node, CHAIN)
    async with chain.node("raw") as node:
        with pytest.raises(SealedStreamUnreadableError):
            await hold(node)


def test_the_guarded_store_gives_out_no_reads_at_rest():
    assert "read_at_rest" in GuardedEventStore.REFUSED
    for name in ("append", "append_many", "acquire_fence", "subscribe", "truncate", "delete"):
        assert not hasattr(AtRestView, name)
