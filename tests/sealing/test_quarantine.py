"""The quarantine on nodes that can, and cannot, open what is held (system.md 4; seed, D9)."""

from __future__ import annotations

import pytest
from mixed import OPERATOR, Fleet, Trouble

from loom import (
    ExecutionDeniedError,
    InboxDiscardRefusedError,
    InboxQuarantineRefusedError,
    InvalidInputError,
    Principal,
    QuarantineHeldError,
    SealedPayloadUnreadableError,
    flow,
    receive,
)
from loom.ids import dedupe_key, inbox_stream, quarantine_stream
from loom.kernel.state import to_json
from loom.runtime import facts
from loom.schemas.codec import decode_envelope
from loom.schemas.envelope import Kind
from loom.stores.contracts import StreamAppend
from loom.stores.keys.memory import MemoryKeyStore
from loom.stores.sealing.encrypting import EncryptingEventStore
from loom.testing.runtime import until, until_parked, until_rows

CHAIN = "chain"


@flow("listens")
async def listens(ctx):
    """Takes three messages of either topic; the payloads are what it saw, in order."""
    seen = []
    for _ in range(3):
        got = await ctx.select(receive("t"), receive("u"))
        seen.append(got.value)
    return seen


class Chain:
    """One chain on a log of which nodes of several kinds have a part."""

    def __init__(self, *flows):
        self.flows = flows
        self.mixed = Fleet()
        self.mixed.other = None

    def node(self, kind, *, owns=False, trouble=None, **settings):
        fleet = self.mixed.fleet
        events = self.mixed.stored(kind, fleet.store(None if owns else ()))
        options = trouble.options if trouble is not None else {}
        return fleet.runtime(
            kind.replace(" ", "-"),
            [listens, *self.flows],
            events=events,
            settings={"access": {"operators": ("olga",)}, **settings},
            **options,
        )

    async def started(self, kind="raw", flow=listens):
        """A parked execution of which nothing in the log is sealed."""
        async with self.node(kind, owns=True) as node:
            await node.start(flow, None, execution_id=CHAIN, subject="s")
            await until_parked(node, CHAIN)
        await self.prepared()

    async def prepared(self):
        await MemoryKeyStore(self.mixed.keys).ensure("s")
        await self.mixed.prepare("s")

    async def send(self, topic, payload, message_id, *, sealed=True, sender=None):
        if (
            not sealed
        ):  # as it came before the log bore a marker: a node without keys may send no more after that
            event = facts.message(
                topic,
                payload,
                message_id=message_id,
                sender=sender,
                event_id=dedupe_key(sender, message_id),
                metadata=facts.STAMP,
            )
            await self.mixed.fleet.store(None).append(StreamAppend(inbox_stream(CHAIN, topic), (event,)))
            return
        async with self.node("capable") as client:
            await client.send(CHAIN, topic, payload, message_id=message_id, sender=sender)

    def stream(self, stream_id):
        return [decode_envelope(raw) for raw in self.mixed.resting(stream_id).get(stream_id, ())]

    def log(self):
        return self.stream(CHAIN)

    def copies(self):
        """What rests in the quarantine stream beside its anchor."""
        return [e for e in self.stream(quarantine_stream(CHAIN)) if e.sequence]


@pytest.fixture
async def chain():
    chain = Chain()
    await chain.started()
    return chain


def kinds(chain):
    return [e.type for e in chain.log()]


async def hold(node, topic="t", **options):
    return await node.quarantine_inbox(CHAIN, topic, principal=OPERATOR, **options)


async def release(node, message_id, topic="t", **options):
    return await node.release_inbox(CHAIN, topic, message_id, principal=OPERATOR, **options)


# Holding ------------------------------------------------------------------------------------------------------------


async def test_a_hold_copies_the_message_byte_for_byte_and_says_who_and_why(chain):
    await chain.send("t", "m1", "m1")
    async with chain.node("raw") as node:
        held = await hold(node, reason="no key here")
    (original,) = chain.stream(inbox_stream(CHAIN, "t")) or [None]
    (copy,) = chain.copies()
    assert (held.message_id, held.inbox_seq, held.held_at, held.changed) == ("m1", 0, 1, True)
    assert copy.id == f"quarantine:{CHAIN}:{dedupe_key(None, 'm1')}:0"
    assert (copy.data, copy.metadata["seal"]) == (original.data, original.metadata["seal"])
    assert copy.data["payload"]["__loomEnc"]
    assert copy.metadata["quarantine"] == {"topic": "t", "inboxSeq": 0}
    anchor = chain.stream(quarantine_stream(CHAIN))[0]
    assert (anchor.data, anchor.sequence) == ({"anchor": True}, 0)
    fact = chain.log()[-1]
    assert (fact.type, fact.data["operator"], fact.data["reason"]) == (
        Kind.INBOX_QUARANTINED,
        {"actor": "olga"},
        "no key here",
    )
    assert fact.metadata["actor"] == "olga"


async def test_other_topics_flow_and_a_capable_node_delivers_the_held_message_first(chain):
    await chain.send("t", "m1", "m1")
    await chain.send("t", "m2", "m2")
    trouble = Trouble()
    async with chain.node("raw", owns=True, trouble=trouble) as node:
        await until(lambda: trouble.errors, "a refusal")
        await hold(node)
        await chain.send("u", "u1", "u1", sealed=False)
        await until(lambda: Kind.MESSAGE_CONSUMED in kinds(chain), "the delivery of the other topic")
        await until_parked(node, CHAIN)
        await until(lambda: any(type(e) is QuarantineHeldError for e, _ in trouble.errors), "the signal")
        held = next(e for e, _ in trouble.errors if type(e) is QuarantineHeldError)
        assert (held.topic, held.inbox_seq, held.message_id, held.awaits) == ("t", 0, "m1", "node")
        assert "awaiting a capable node" in str(held)
        with pytest.raises(QuarantineHeldError):
            await (node.notify_inbox(CHAIN) if CHAIN not in node._engine.runs else _drop_and_notify(node))
        await until_rows(node._engine.wakes, CHAIN, "refusal")
    async with chain.node("capable", owns=True) as capable:
        assert await capable.handle(CHAIN, listens).result(5) == ["u1", "m1", "m2"]
        state = await capable.load_state(CHAIN)
        await until(lambda: not chain.copies(), "the copies to be freed")
    assert "_quarantined" not in to_json(state)["variables"]
    facts = [e for e in chain.log() if e.type == Kind.INBOX_RELEASED]
    assert [(f.data["auto"], f.metadata["node"].split(":")[0]) for f in facts] == [(True, "capable")]
    after = chain.log()[facts[0].sequence + 1]
    assert (after.type, after.data["inboxSeq"]) == (Kind.MESSAGE_CONSUMED, 0)


async def test_a_capable_node_that_owns_nothing_releases_what_is_held(chain):
    await chain.send("t", "m1", "m1")
    trouble = Trouble()
    async with chain.node("raw", owns=True, trouble=trouble) as node:
        await until(lambda: trouble.errors, "a refusal")
        await hold(node)
        await until(lambda: any(type(e) is QuarantineHeldError for e, _ in trouble.errors), "the signal")
        async with chain.node("capable"):
            await until(lambda: Kind.INBOX_RELEASED in kinds(chain), "the release", 20)
            await until(lambda: kinds(chain)[-1] == Kind.EXECUTION_SUSPENDED, "the park", 20)
    (released,) = (e for e in chain.log() if e.type == Kind.INBOX_RELEASED)
    assert released.metadata["node"].split(":")[0] == "capable"


async def _drop_and_notify(node):
    node._engine.drop(node._engine.runs[CHAIN])
    await node.notify_inbox(CHAIN)


async def test_a_released_message_is_delivered_by_the_ordinary_rule_where_nodes_release_nothing(chain):
    await chain.send("t", "m1", "m1")
    async with chain.node("raw") as node:
        await hold(node)
    trouble = Trouble()
    async with chain.node("capable", owns=True, trouble=trouble, inbox_auto_release=False) as node:
        with pytest.raises(QuarantineHeldError, match="operator") as caught:
            await node.notify_inbox(CHAIN)
        assert caught.value.awaits == "operator"
        assert await release(node, "m1", reason="now")
        await until(lambda: Kind.MESSAGE_CONSUMED in kinds(chain), "the delivery")
        await until(lambda: not chain.copies(), "the copy to be freed")
    fact = next(e for e in chain.log() if e.type == Kind.INBOX_RELEASED)
    assert (fact.data["operator"], fact.data["disposition"]) == ({"actor": "olga"}, "deliver")
    assert "auto" not in fact.data


async def test_a_dropped_message_is_gone_and_a_retry_of_it_is_a_duplicate(chain):
    await chain.send("t", "m1", "m1")
    async with chain.node("raw") as node:
        await hold(node)
        assert await release(node, "m1", disposition="discard", reason="bad")
        assert not await release(node, "m1", disposition="discard")
        with pytest.raises(InboxQuarantineRefusedError, match="discard") as caught:
            await release(node, "m1")
        assert caught.value.reason == "invalid"
    assert chain.copies() == []
    await chain.send("t", "m1", "m1b", sealed=False)
    await chain.send("t", "again", "m1", sealed=False)
    for n in range(2):
        await chain.send("u", n, f"u{n}", sealed=False)
    async with chain.node("raw", owns=True) as node:
        assert await node.handle(CHAIN, listens).result(5) == ["m1", 0, 1]


# Refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("principal", [None, Principal("alice"), Principal("mallory", {"t": 1})])
@pytest.mark.parametrize("missing", [False, True])
async def test_only_operators_and_told_before_anything_is_read(chain, principal, missing):
    about = "nothing-here" if missing else CHAIN
    await chain.send("t", "m1", "m1")
    async with chain.node("raw") as node:
        for call in (
            lambda: node.quarantine_inbox(about, "t", principal=principal),
            lambda: node.release_inbox(about, "t", "m1", principal=principal),
            lambda: node.release_inbox(about, "t", "m1", disposition="discard", principal=principal),
        ):
            with pytest.raises(ExecutionDeniedError):
                await call()
    assert Kind.INBOX_QUARANTINED not in kinds(chain)


async def refused(call):
    with pytest.raises(InboxQuarantineRefusedError) as caught:
        await call
    return caught.value.reason


async def test_what_cannot_be_held(chain):
    async with chain.node("raw") as node, chain.node("capable") as capable:
        assert await refused(hold(node)) == "invalid"
        await chain.send("t", "m1", "m1")
        assert await refused(hold(node, message_id="m2")) == "invalid"
        assert await refused(hold(capable)) == "not-sealed"
        await chain.send("u", "open", "u1", sealed=False)
        assert await refused(hold(node, "u")) == "not-sealed"
        with pytest.raises(InvalidInputError):
            await hold(node, reason="r" * 257)
        assert await refused(release(node, "m1")) == "invalid"
        with pytest.raises(InvalidInputError):
            await release(node, "m1", disposition="keep")
    assert kinds(chain)[-1] == Kind.EXECUTION_SUSPENDED
    assert chain.copies() == []


@pytest.mark.parametrize("kind", ["no keys", "other keys"])
async def test_a_redacted_head_is_refused_as_sealed_and_nothing_is_copied(chain, kind):
    await chain.send("t", "m1", "m1")
    async with chain.node(kind) as node:
        with pytest.raises(SealedPayloadUnreadableError):
            await hold(node)
    assert chain.copies() == []
    assert Kind.INBOX_QUARANTINED not in kinds(chain)


async def test_a_hold_with_the_id_of_the_message_is_repeated_and_a_blind_one_holds_the_next(chain):
    for n in (1, 2):
        await chain.send("t", f"m{n}", f"m{n}")
    async with chain.node("raw") as node:
        first = await hold(node, message_id="m1")
        again = await hold(node, message_id="m1")
        assert (again.held_at, again.changed) == (first.held_at, False)
        by_key = await hold(node, message_id=dedupe_key(None, "m1"))
        assert not by_key.changed
        second = await hold(node)
        assert (second.message_id, second.held_at) == ("m2", 2)
        assert await refused(release(node, "m2")) == "invalid"
    assert [e.sequence for e in chain.copies()] == [1, 2]


async def test_releasing_to_deliver_needs_a_node_that_can_open_it(chain):
    await chain.send("t", "m1", "m1")
    async with chain.node("raw") as node, chain.node("no keys") as keyless:
        await hold(node)
        for unable in (node, keyless):
            with pytest.raises(SealedPayloadUnreadableError):
                await release(unable, "m1")
        assert Kind.INBOX_RELEASED not in kinds(chain)
        async with chain.node("capable") as capable:
            assert await release(capable, "m1")
            assert not await release(capable, "m1")
            assert await refused(release(capable, "m1", disposition="discard")) == "invalid"


async def test_two_senders_of_one_id_are_told_apart(chain):
    for sender in ("a", "b"):
        await chain.send("t", sender, "same", sender=sender)
    async with chain.node("raw") as node:
        await hold(node)
        assert await refused(release(node, "same", sender="b", disposition="discard")) == "invalid"
        assert await release(node, "same", sender="a", disposition="discard")
        await hold(node)
        assert await release(node, "same", sender="b", disposition="discard")
        assert await refused(release(node, "same", disposition="discard")) == "invalid"
        assert not await release(node, "same", sender="b", disposition="discard")
        assert not await release(node, dedupe_key("a", "same"), disposition="discard")


async def test_a_running_owner_is_not_parked():
    chain = Chain()

    async def forever():
        await until(lambda: False, within_s=30)

    @flow("works")
    async def works(ctx):
        await ctx.run(forever)

    async with chain.node("capable", owns=True) as node:
        node.add_flow(works)
        await node.start(works, None, execution_id=CHAIN, subject="s")
        await chain.send("t", "m1", "m1")
        async with chain.node("raw") as raw:
            assert await refused(hold(raw)) == "not-parked"


async def test_what_is_kept_is_bounded_and_the_refusal_says_by_what(chain):
    for n in range(4):
        await chain.send("t", n, f"m{n}")
    async with chain.node("raw", quarantine_max=3) as node:
        for _ in range(3):
            await hold(node)
        with pytest.raises(InboxQuarantineRefusedError, match="quarantine_max") as caught:
            await hold(node)
        assert caught.value.reason == "invalid"
        assert await release(node, "m0", disposition="discard")
        assert (await hold(node)).message_id == "m3"
    assert [e.data["messageId"] for e in chain.copies()] == ["m1", "m2", "m3"]


async def test_repeats_ahead_of_the_head_are_passed_in_the_same_transaction(chain):
    await chain.send("u", "plain", "m0", sealed=False)
    async with chain.node("raw", owns=True) as node:
        await until(lambda: kinds(chain).count(Kind.EXECUTION_SUSPENDED) == 2, "the next park")
        await until_parked(node, CHAIN)
    await chain.send("t", "plain", "m0")
    await chain.send("t", "m1", "m1")
    async with chain.node("raw") as node:
        assert (await hold(node)).inbox_seq == 1
    passed, held = chain.log()[-2:]
    assert (passed.data["reason"], passed.data["inboxSeq"], passed.data["payload"]) == ("duplicate", 0, None)
    assert held.data["inboxSeq"] == 1


async def test_a_repeat_of_what_is_held_is_neither_held_nor_discarded(chain):
    await chain.send("t", "m1", "m1")
    await chain.send("u", "m1", "m1")
    await chain.send("t", "m1 again", "m1")
    async with chain.node("raw") as node:
        await hold(node)
        assert await refused(hold(node)) == "invalid"
        assert await refused(hold(node, "u")) == "invalid"
        with pytest.raises(InboxDiscardRefusedError):
            await node.discard_inbox(CHAIN, "u", principal=OPERATOR)
        assert await node.expire_inbox(CHAIN, "u", older_than_ms=-1) == 0


async def test_a_message_delivered_meanwhile_is_dropped_from_its_hold_by_any_node(chain):
    """The same message, sent on two topics: the sealed one is held, the plain one is delivered."""
    await chain.send("t", "m1", "m1")
    async with chain.node("raw", owns=True) as node:
        await hold(node)
        for message_id, payload in (("m1", "plain"), ("u2", 2), ("u3", 3)):
            await chain.send("u", payload, message_id, sealed=False)
        assert await node.handle(CHAIN, listens).result(5) == ["plain", 2, 3]
        await until(lambda: not chain.copies(), "the copy to be freed")
    drop = next(e for e in chain.log() if e.data.get("reason") == "duplicate")
    release = chain.log()[drop.sequence - 1]
    assert (release.type, release.data["auto"], drop.data["payload"]) == (Kind.INBOX_RELEASED, True, None)


async def test_discard_and_expiry_act_behind_the_hold(chain):
    for n in range(3):
        await chain.send("t", n, f"m{n}")
    async with chain.node("raw") as node:
        await hold(node)
        assert await node.discard_inbox(CHAIN, "t", message_id="m1", reason="why", principal=OPERATOR) == 1
        assert await node.expire_inbox(CHAIN, "t", older_than_ms=-1, reason="old") == 1
        state = await node.load_state(CHAIN)
    assert [e["inboxSeq"] for e in state.quarantined["t"]] == [0]
    assert [e.data.get("note") for e in chain.log()[-2:]] == ["why", "old"]


async def test_an_orphaned_copy_is_used_again_and_the_fact_is_still_written(chain):
    """A store without transactions over streams copies first; a crash leaves the copy without its fact."""
    await chain.send("t", "m1", "m1")
    async with chain.node("raw") as node:
        append, engine = node._engine.events.append_many, node._engine
        copies = []

        async def only_the_copy(appends, **options):
            copies.extend(await append(appends[1:], **options))
            raise ConnectionError

        engine.events.append_many = only_the_copy
        with pytest.raises(ConnectionError):
            await hold(node)
        engine.events.append_many = append
        assert (await hold(node)).held_at == 1
    assert len(copies) == len(chain.copies()) == 1


async def test_nothing_is_written_by_a_dry_run(chain):
    await chain.send("t", "m1", "m1")
    before = chain.mixed.resting()
    async with chain.node("raw") as node:
        assert (await hold(node, dry_run=True)).message_id == "m1"
        assert chain.mixed.resting() == before
        await hold(node)
        before = chain.mixed.resting()
        assert await release(node, "m1", disposition="discard", dry_run=True)
    assert chain.mixed.resting() == before


async def test_the_copy_of_a_held_message_is_never_sealed_again(chain):
    await chain.send("t", "m1", "m1")
    store = EncryptingEventStore.over(chain.mixed.fleet.store(()), MemoryKeyStore(chain.mixed.keys))
    async with chain.node("raw") as node:
        await hold(node)
    (copy,) = [e for e in await store.read(quarantine_stream(CHAIN), 0) if e.sequence]
    assert copy.data["payload"] == "m1"


async def test_operators_see_what_is_held_since_when_by_whom_and_awaiting_what(chain):
    for n in range(2):
        await chain.send("t", n, f"m{n}")
    await chain.send("t", "behind", "m2")
    async with chain.node("raw", owns=True) as node:
        await hold(node, reason="why")
        await hold(node)
        rows = [r for r in await node.inbox(CHAIN) if r["topic"] == "t"]
        fleet = [row async for row in node.held()]
        assert [row["held_since"] async for row in node.held([CHAIN])] == [row["held_since"] for row in fleet]
    told = [(r["message_id"], r["state"], r.get("held_by"), r.get("reason"), r.get("awaits")) for r in rows]
    assert told == [
        ("m0", "held", "olga", "why", "a capable node"),
        ("m1", "held", "olga", None, "the one before it"),
        ("m2", "behind a hold", None, None, None),
    ]
    facts = [e for e in chain.log() if e.type == Kind.INBOX_QUARANTINED]
    assert [r["held_since"] for r in rows[:2]] == [f.timestamp for f in facts]
    assert [(r["execution_id"], r["message_id"]) for r in fleet] == [(CHAIN, "m0"), (CHAIN, "m1")]
    async with chain.node("capable", inbox_auto_release=False) as node:
        assert (await node.inbox(CHAIN))[0]["awaits"] == "an operator"


async def test_a_park_in_which_a_message_was_discarded_still_reads_as_a_park(chain):
    """Whoever takes a shard over looks at what is parked, or a hold that was released before would wait for ever."""
    await chain.send("t", "m0", "m0", sealed=False)
    async with chain.node("raw") as node:
        assert await node.discard_inbox(CHAIN, "t", principal=OPERATOR) == 1
        assert kinds(chain)[-1] == Kind.MESSAGE_CONSUMED
        assert await node.status(CHAIN) == "suspended"
        assert (await node._engine.events.info(CHAIN)).status == Kind.EXECUTION_SUSPENDED
