"""Erasure of a subject: intent, destruction, tombstone; what a retry may say, and from where (the seed's D7, rounds 4 to 6)."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from mixed import ALICE, KINDS, OPERATOR, SECRET, SENSITIVE, Fleet, Trouble, seen, start, two_halves

from loom import (
    ExecutionDeniedError,
    ExecutionFinishedError,
    KeyUnavailableError,
    PayloadShreddedError,
    Principal,
    ShredIncompleteError,
    StorageWriteError,
    SubjectNotFoundError,
    flow,
)
from loom.errors import UNKNOWN_OWNER_REASON
from loom.ids import inbox_stream
from loom.operator import is_sealed_unreadable
from loom.schemas.codec import decode_envelope
from loom.schemas.envelope import EVENT_SCHEMA, Kind, NewEvent
from loom.stores.contracts import NO_EVENTS, StreamAppend
from loom.stores.keys.memory import MemoryKeyStore
from loom.stores.memory.event_store import MemoryEventStore
from loom.stores.sealing.encrypting import EncryptingEventStore
from loom.stores.sealing.shred import KeyEnd, SubjectRecords
from loom.testing.runtime import until, until_parked


@pytest.fixture
def mixed():
    seen.clear()
    return Fleet()


def kinds(mixed, execution_id="sealed"):
    return [decode_envelope(raw).type for raw in mixed.resting(execution_id).get(execution_id, ())]


def control(mixed, execution_id="sealed"):
    return [k for k in kinds(mixed, execution_id) if k in {Kind.ERASURE_PENDING, Kind.PAYLOAD_SHREDDED}]


async def key_stands(mixed, subject="s"):
    return await MemoryKeyStore(mixed.keys).get(subject) is not None


# -- the order -------------------------------------------------------------------------------------------------------


async def test_intent_destruction_tombstone_and_the_end_of_what_ran(mixed):
    await start(mixed)
    async with mixed.node("capable", owns=True) as node:
        await node.start(two_halves, SECRET, execution_id="second", subject="s")
        await node.start(two_halves, SECRET, execution_id="other", subject="else")
        await until_parked(node, "second")
        await until_parked(node, "other")
        before = mixed.fleet.log.index.row("second").head
        planned = await node.erase_subject("s", dry_run=True, principal=OPERATOR)
        assert (sorted(planned.executions), planned.tombstoned) == (["sealed", "second"], planned.executions)
        assert planned.dry_run
        assert await key_stands(mixed)
        report = await node.erase_subject("s", principal=OPERATOR, reason="asked for")
        assert sorted(report.executions) == sorted(report.tombstoned) == sorted(report.cancelled)
        assert report.key == "destroyed"
    events = [decode_envelope(raw) for raw in mixed.resting("second")["second"]]
    tail = events[before + 1 :]
    assert [e.type for e in tail] == [
        Kind.ERASURE_PENDING,
        Kind.PAYLOAD_SHREDDED,
        Kind.EXECUTION_CANCELLED,
    ]
    assert [e.data for e in tail[:2]] == [{"subjectId": "s", "reason": "asked for"}] * 2
    assert {e.metadata["actor"] for e in tail} == {"olga"}
    assert not await key_stands(mixed)
    assert await MemoryKeyStore(mixed.keys).was_destroyed("s")
    assert await key_stands(mixed, "else")
    assert control(mixed, "other") == []
    assert mixed.fleet.log.index.row("other").status == Kind.EXECUTION_SUSPENDED


async def test_every_intent_is_durable_before_the_key_dies_and_no_tombstone_is(mixed):
    await two_sealed(mixed)
    seen_then = []

    class Watching(MemoryKeyStore):
        async def destroy(self, subject):
            seen_then.append([control(mixed, log) for log in ("sealed", "sealed2")])
            return await super().destroy(subject)

    await SubjectRecords(mixed.stored("capable", mixed.fleet.store(())), Watching(mixed.keys)).shred("s")
    assert seen_then[0] == [[Kind.ERASURE_PENDING]] * 2


async def test_a_repeat_writes_nothing_and_says_what_is(mixed):
    await start(mixed)
    async with mixed.node("capable", owns=True) as node:
        first = await node.erase_subject("s")
        assert first.tombstoned == ("sealed",)
        before = mixed.resting()
        again = await node.erase_subject("s")
        assert (again.tombstoned, again.cancelled, again.key) == ((), (), "gone before")
    for kind in KINDS:
        async with mixed.node(kind) as node:  # the tombstone is in the log: whoever reads it may say so
            report = await node.shred_subject("s")
            assert (report.tombstoned, report.executions) == ((), ("sealed",)), kind
    assert mixed.resting() == before


async def test_a_shredded_execution_that_waits_is_cancelled_without_being_opened(mixed):
    await start(mixed, principal=None)
    async with mixed.node("capable", owns=True) as node:
        report = await node.shred_subject("s")
        assert report.cancelled == ()
        assert mixed.fleet.log.index.row("sealed").status == Kind.EXECUTION_SUSPENDED
        with pytest.raises(PayloadShreddedError):
            await node.load_state("sealed")
        with pytest.raises(ExecutionDeniedError) as caught:
            await node.cancel("sealed", principal=Principal("mallory"))
        assert not is_sealed_unreadable(caught.value)
        await node.cancel("sealed", "no use")
        assert kinds(mixed)[-1] == Kind.EXECUTION_CANCELLED
        with pytest.raises(ExecutionFinishedError):
            await node.cancel("sealed")
        assert await node._engine.wakes.rows_of("sealed") == []


async def test_a_log_that_was_started_while_the_key_died_gets_its_tombstone(mixed):
    await start(mixed)
    events = mixed.stored("capable", mixed.fleet.store(()))

    class Late(MemoryKeyStore):
        async def destroy(self, subject):
            data = {"workflow": "two-halves", "input": SECRET, "chainId": "late", "subject": subject}
            first = NewEvent("l0", Kind.EXECUTION_STARTED, data, {"schema": EVENT_SCHEMA})
            await events.append(StreamAppend("late", (first,), expected_head=NO_EVENTS, fence=1))
            return await super().destroy(subject)

    done = await SubjectRecords(events, Late(mixed.keys)).shred("s")
    assert sorted(done.written) == ["late", "sealed"]
    assert control(mixed, "late") == [Kind.ERASURE_PENDING, Kind.PAYLOAD_SHREDDED]


async def test_a_subject_that_was_never_sealed_is_left_alone(mixed):
    async with mixed.node("raw", owns=True) as node:
        await node.start(two_halves, "open", execution_id="open", subject="nobody")
        await until_parked(node, "open")
    before = mixed.resting()
    for kind in ("capable", "no keys", "raw"):
        async with mixed.node(kind) as node:
            report = await node.erase_subject("nobody")
            assert (report.executions, report.tombstoned, report.key) == (
                ("open",),
                (),
                KeyEnd.NOTHING.value,
            )
            with pytest.raises(SubjectNotFoundError):
                await node.erase_subject("missing")
    assert mixed.resting() == before


# -- crash at each point, retry from everywhere ----------------------------------------------------------------------


class CrashedError(Exception):
    """The process died here."""


class DyingKeys(MemoryKeyStore):
    """A process that dies around the destruction."""

    def __init__(self, table, when):
        super().__init__(table)
        self.when = when

    async def destroy(self, subject):
        if self.when == "before destroy" or (self.when == "between keys" and subject != "s"):
            raise CrashedError
        gone = await super().destroy(subject)
        if self.when == "after destroy":
            raise CrashedError
        return gone


class DyingEvents(MemoryEventStore):
    """A process that dies at the n-th control record of a kind, before it is written."""

    kind, left = "", 0

    async def append_many(self, appends, *, deadline_ms=None):
        for append in appends:
            if append.events[0].type == self.kind:
                if self.left == 0:
                    raise CrashedError
                self.left -= 1
        return await super().append_many(appends, deadline_ms=deadline_ms)


POINTS = {
    "before the first intent": (Kind.ERASURE_PENDING, 0, ""),
    "between two intents": (Kind.ERASURE_PENDING, 1, ""),
    "between intent and destruction": ("", 0, "before destroy"),
    "between two keys": ("", 0, "between keys"),
    "between destruction and tombstone": ("", 0, "after destroy"),
    "before the first tombstone": (Kind.PAYLOAD_SHREDDED, 0, ""),
    "between two tombstones": (Kind.PAYLOAD_SHREDDED, 1, ""),
}
DESTROYED = {
    "between two keys",
    "between destruction and tombstone",
    "before the first tombstone",
    "between two tombstones",
}


async def crash(mixed, point):
    kind, left, when = POINTS[point]
    inner = DyingEvents(mixed.fleet.log, owned=())
    inner.kind, inner.left = kind, left
    keys = DyingKeys(mixed.keys, when)
    events = EncryptingEventStore.over(inner, keys, SENSITIVE)
    with pytest.raises(CrashedError):
        await SubjectRecords(events, keys).shred("s")
    await inner.close()


async def two_sealed(mixed):
    await start(mixed)
    async with mixed.node("capable", owns=True) as node:
        await node.start(two_halves, SECRET, execution_id="sealed2", subject="s", principal=ALICE)
        await until_parked(node, "sealed2")
    await MemoryKeyStore(mixed.keys).ensure("sealed")  # of a message that came before the start
    await mixed.prepare("s")


async def test_a_retry_after_the_last_tombstone_ends_what_still_runs(mixed):
    await two_sealed(mixed)
    done = await SubjectRecords(
        mixed.stored("capable", mixed.fleet.store(())), MemoryKeyStore(mixed.keys)
    ).shred("s")
    assert sorted(done.written) == ["sealed", "sealed2"]
    async with mixed.node("capable") as node:
        report = await node.erase_subject("s")
        assert (report.tombstoned, sorted(report.cancelled)) == ((), ["sealed", "sealed2"])
    assert not await key_stands(mixed, "sealed")


@pytest.mark.parametrize("point", POINTS)
async def test_a_retry_from_a_capable_node_completes(mixed, point):
    await two_sealed(mixed)
    await crash(mixed, point)
    assert await key_stands(mixed) == (point not in DESTROYED)
    async with mixed.node("capable") as node:
        report = await node.erase_subject("s")
        assert sorted(report.executions) == ["sealed", "sealed2"]
    for log in ("sealed", "sealed2"):
        assert control(mixed, log) == [Kind.ERASURE_PENDING, Kind.PAYLOAD_SHREDDED]
    for name in ("s", "sealed"):
        assert await MemoryKeyStore(mixed.keys).was_destroyed(name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("point", POINTS)
async def test_a_retry_from_a_node_that_cannot_know_writes_and_destroys_nothing(mixed, point, kind):
    await two_sealed(mixed)
    await crash(mixed, point)
    before, standing = mixed.resting(), await key_stands(mixed)
    other = await MemoryKeyStore(mixed.other).get("s")
    trouble = Trouble()
    async with mixed.node(kind, trouble=trouble) as node:
        refused = (KeyUnavailableError, ExecutionDeniedError)
        # What two of them do not open is not only a matter of keys: there not even an assertion helps.
        forced = ("key-destroyed-elsewhere", None) if kind in {"raw", "poorer"} else (None,)
        for force in forced:
            for verb in (node.shred_subject, node.erase_subject, node.export_subject):
                with pytest.raises(refused) as caught:
                    await verb("s", force=force)
                assert not isinstance(caught.value, PayloadShreddedError)
    assert mixed.resting() == before
    assert await key_stands(mixed) == standing
    assert await MemoryKeyStore(mixed.other).get("s") == other
    assert not await MemoryKeyStore(mixed.other).was_destroyed("s")


@pytest.mark.parametrize("kind", ["no keys", "other keys"])
async def test_the_operators_assertion_counts_only_beside_the_intent(mixed, kind):
    await two_sealed(mixed)
    before = mixed.resting()
    async with mixed.node(kind) as node:
        for verb in (node.shred_subject, node.erase_subject, node.export_subject):
            with pytest.raises(KeyUnavailableError):
                await verb("s", force="key-destroyed-elsewhere")
    assert mixed.resting() == before
    await crash(mixed, "between two intents")
    before = mixed.resting()
    async with mixed.node(kind) as node:  # one of two logs has no intent
        with pytest.raises(KeyUnavailableError):
            await node.erase_subject("s", force="key-destroyed-elsewhere")
    assert mixed.resting() == before
    await crash(mixed, "between destruction and tombstone")
    async with mixed.node(kind) as node:
        export = await node.export_subject("s", force="key-destroyed-elsewhere")
        assert {stream.erased for stream in export.streams} == {True}
        assert SECRET not in repr(export)
        report = await node.erase_subject("s", force="key-destroyed-elsewhere")
        assert sorted(report.tombstoned) == ["sealed", "sealed2"]
    for log in ("sealed", "sealed2"):
        assert control(mixed, log) == [Kind.ERASURE_PENDING, Kind.PAYLOAD_SHREDDED]


async def test_a_destruction_out_of_hand_is_no_erasure(mixed):
    """The key was destroyed by whoever has the key store, without an intent in the log."""
    await start(mixed)
    await MemoryKeyStore(mixed.keys).destroy("s")
    before = mixed.resting()
    async with mixed.node("capable") as node:
        for force in (None, "key-destroyed-elsewhere"):
            with pytest.raises(KeyUnavailableError):
                await node.erase_subject("s", force=force)
            with pytest.raises(KeyUnavailableError):
                await node.export_subject("s", force=force)
    assert mixed.resting() == before


async def test_an_intent_on_a_log_in_which_nothing_is_sealed_is_no_proof(mixed):
    data = {"workflow": "two-halves", "input": None, "chainId": "plain", "subject": "p"}
    first = NewEvent("p0", Kind.EXECUTION_STARTED, data, {"schema": EVENT_SCHEMA})
    intent = NewEvent("p1", Kind.ERASURE_PENDING, {"subjectId": "p"}, {"schema": EVENT_SCHEMA})
    await mixed.fleet.store(()).append(
        StreamAppend("plain", (first, intent), expected_head=NO_EVENTS, fence=1)
    )
    before = mixed.resting()
    async with mixed.node("no keys") as node:
        with pytest.raises(KeyUnavailableError):
            await node.shred_subject("p")
    assert mixed.resting() == before


async def test_a_storage_failure_after_the_destruction_says_what_is_left(mixed):
    await two_sealed(mixed)

    class Failing(DyingEvents):
        async def append_many(self, appends, *, deadline_ms=None):
            try:
                return await super().append_many(appends, deadline_ms=deadline_ms)
            except CrashedError:
                raise StorageWriteError("x", "the disk is full") from None

    inner = Failing(mixed.fleet.log, owned=())
    inner.kind, inner.left = Kind.PAYLOAD_SHREDDED, 1
    async with mixed.fleet.runtime("n", [two_halves], events=mixed.stored("capable", inner)) as node:
        with pytest.raises(ShredIncompleteError) as caught:
            await node.erase_subject("s")
    assert (caught.value.done, caught.value.of, caught.value.retryable) == (1, 2, True)


async def test_two_at_once_say_it_once(mixed):
    await two_sealed(mixed)
    async with mixed.node("capable") as one, mixed.node("capable") as other:
        await asyncio.gather(one.erase_subject("s"), other.erase_subject("s"))
    for log in ("sealed", "sealed2"):
        assert control(mixed, log) == [Kind.ERASURE_PENDING, Kind.PAYLOAD_SHREDDED]


# -- warm caches -----------------------------------------------------------------------------------------------------


async def test_every_node_forgets_within_a_second(mixed):
    """Caches are warm on the owner, on a node that hears nothing of the log, and in a resident run."""
    async with mixed.node("capable", owns=True) as owner, mixed.node("capable") as far:
        await owner.start(two_halves, SECRET, execution_id="sealed", subject="s", principal=ALICE)
        await until_parked(owner, "sealed")
        for node in (owner, far):
            await node.send("sealed", "unread", "x", principal=ALICE)
            assert await node._engine.first_of("sealed") is not None
        follow = far.follow("sealed", principal=ALICE)
        await anext(follow)
        async with mixed.node("capable") as third:
            loop = asyncio.get_running_loop()
            await third.shred_subject("s")
            erased_at = loop.time()
        await until(lambda: "sealed" not in owner._engine.runs, "the run to leave memory")
        for node, verb in itertools.product(
            (owner, far),
            (
                lambda n: n.load_state("sealed", principal=ALICE),
                lambda n: n.history("sealed", principal=ALICE),
                lambda n: n.send("sealed", "go", "y", principal=ALICE),
            ),
        ):
            async with asyncio.timeout_at(erased_at + 1):
                while True:
                    try:
                        await verb(node)
                    except PayloadShreddedError:
                        break
                    await asyncio.sleep(0.02)
        for node in (owner, far):
            await until(lambda node=node: node._engine._firsts.get("sealed") is None, "the cache to forget")
        assert loop.time() < erased_at + 1
        with pytest.raises(PayloadShreddedError):
            async for _ in follow:
                pass


async def test_a_live_subscription_leaves_out_what_was_erased(mixed):
    await start(mixed)
    dropped = []
    reader = EncryptingEventStore.over(
        mixed.fleet.store(()), MemoryKeyStore(mixed.keys), SENSITIVE, on_dropped=dropped.append
    )
    got = []

    async def read():
        async for envelope in reader.subscribe("sealed", 0):
            got.append(envelope)

    async with mixed.node("capable") as node:
        await node.shred_subject("s")
        task = asyncio.create_task(read())
        await until(lambda: any(e.type == Kind.PAYLOAD_SHREDDED for e in got), "the tombstone")
        task.cancel()
    assert "__loomEnc" not in repr(got)
    assert SECRET not in repr(got)
    assert dropped[0].code == "sealed-event-dropped"


async def test_a_run_that_another_node_erases_under_stops(mixed):
    """A node that does not own the shard drives it, and hears nothing: its next append ends it, not goes on beside it."""
    entered, leave = asyncio.Event(), asyncio.Event()

    async def slow():
        entered.set()
        await leave.wait()
        return "done"

    @flow("slow")
    async def slow_flow(ctx, start):
        return await ctx.run(slow)

    events = EncryptingEventStore.over(mixed.fleet.store(), MemoryKeyStore(mixed.keys), {})
    async with mixed.fleet.runtime("driver", [slow_flow], events=events) as driver:
        await driver.start(slow_flow, 1, execution_id="busy", subject="s", principal=ALICE)
        await entered.wait()
        driver._engine.events._inner._inner._listener = None  # as on a node that is told nothing of the shard
        async with mixed.node("capable") as other:
            report = await other.shred_subject("s")
            assert report.tombstoned == ("busy",)
        leave.set()
        await until(lambda: "busy" not in driver._engine.runs, "the run to end")
    assert kinds(mixed, "busy")[-1] == Kind.PAYLOAD_SHREDDED


# -- who may ---------------------------------------------------------------------------------------------------------


async def test_operators_and_owners_of_everything_may(mixed):
    await start(mixed, principal=Principal("alice"))
    before = mixed.resting()
    for kind in ("capable", *KINDS):
        async with mixed.node(kind) as node:
            for who in (Principal("mallory"), Principal("mallory", {"tenant": "x"})):
                for verb in (node.shred_subject, node.erase_subject, node.export_subject):
                    for subject in ("s", "missing"):
                        with pytest.raises(ExecutionDeniedError) as caught:
                            await verb(subject, principal=who)
                        error = caught.value
                        assert (error.reason, error.execution_id) == (UNKNOWN_OWNER_REASON, subject)
    async with mixed.node(
        "no keys"
    ) as node:  # an owner is told no more than a denial, an operator is told why
        with pytest.raises(ExecutionDeniedError):
            await node.erase_subject("s", principal=Principal("alice"))
        with pytest.raises(KeyUnavailableError):
            await node.erase_subject("s", principal=OPERATOR)
    assert mixed.resting() == before
    async with mixed.node("capable") as node:
        report = await node.erase_subject("s", principal=Principal("alice"))
        assert report.tombstoned == ("sealed",)


# -- export ----------------------------------------------------------------------------------------------------------


async def test_an_export_holds_everything_opened_and_after_the_erasure_nothing(mixed):
    await start(mixed)
    async with mixed.node("capable", owns=True) as node:
        await node.send("sealed", "go", SECRET, principal=ALICE)
        await node.send("sealed", "later", SECRET, principal=ALICE)
        await until(lambda: seen == [SECRET], "the delivery")
        await until_parked(node, "sealed")
        export = await node.export_subject("s", principal=OPERATOR)
        assert export.executions == ("sealed",)
        names = [stream.stream_id for stream in export.streams]
        assert names == ["sealed", inbox_stream("sealed", "go"), inbox_stream("sealed", "later")]
        assert "__loomEnc" not in repr(export)
        assert repr(export).count(SECRET) >= 3
        assert not any(stream.erased for stream in export.streams)
        await node.erase_subject("s", principal=OPERATOR)
        after = await node.export_subject("s", principal=OPERATOR)
    assert all(stream.erased for stream in after.streams)
    assert SECRET not in repr(after)
    assert "__loomEnc" not in repr(after)
