"""Whole states at rest: sealed, bound to their slot, and what becomes of older ones (system.md 3)."""

from dataclasses import replace

import pytest
from benches import SealedBench, fact, started

from loom.errors import (
    ConfigError,
    KeyUnavailableError,
    PayloadShreddedError,
    PlaintextCheckpointError,
    PlaintextSnapshotRefusedError,
    SnapshotUndecryptableError,
)
from loom.kernel.state import ExecutionState, fold, from_json, to_json
from loom.schemas.envelope import Kind
from loom.stores.contracts import Snapshot, SnapshotStore
from loom.stores.keys.memory import KeyTable, MemoryKeyStore
from loom.stores.memory.event_store import MemoryEventStore
from loom.stores.memory.snapshot_store import MemorySnapshotStore, SnapshotTable
from loom.stores.sealing.checkpoints import check_checkpoints, plaintext_reason, seals
from loom.stores.sealing.cipher import seal_value
from loom.stores.sealing.encrypting import EncryptingEventStore
from loom.stores.sealing.snapshots import EncryptingSnapshotStore
from loom.testing.conformance.snapshot_store import SnapshotStoreConformance

SECRET = "planted-plaintext-7Q"
STATE = {
    "subject": "s",
    "chainId": "c",
    "input": {"x": SECRET},
    "variables": {"_waitAnswers": {"0:1": {"payload": SECRET}}},
}


class Bench:
    def __init__(self):
        self.table, self.keys = SnapshotTable(), KeyTable()

    def open(self, **options):
        return EncryptingSnapshotStore(
            MemorySnapshotStore(self.table), MemoryKeyStore(self.keys), **{"seal_state": True} | options
        )

    def raw(self):
        return MemorySnapshotStore(self.table)

    async def row(self):
        return await self.raw().load_latest("e")

    async def put(self, **changes):
        """Replace the row, as somebody who writes the inner store can."""
        row = replace(await self.row(), **changes)
        self.table.rows.clear()
        await self.raw().save(row)

    async def other_key(self):
        """Keys of another making, for the same subject."""
        keys = MemoryKeyStore()
        await keys.ensure("s")
        return EncryptingSnapshotStore(self.raw(), keys)


@pytest.fixture
def bench():
    return Bench()


class TestWholeState(SnapshotStoreConformance):
    @pytest.fixture
    def bench(self):
        return Bench()


class TestStaticPaths(SnapshotStoreConformance):
    @pytest.fixture
    def bench(self):
        bench = Bench()
        opened = bench.open
        bench.open = lambda: opened(seal_state=False, sensitive=["a", "list", "at.*"])
        return bench


# -- at rest -------------------------------------------------------------------------------------------------------


async def test_a_state_rests_as_one_envelope_with_clear_index_fields(bench):
    store = bench.open()
    assert isinstance(store, SnapshotStore)
    await store.save(Snapshot("e", 7, STATE, {"schema": "1.25.0"}))
    row = await bench.row()
    assert (row.execution_id, row.sequence, row.metadata["schema"]) == ("e", 7, "1.25.0")
    assert set(row.state) == {"__loomEnc", "kid", "iv", "ct", "aad"}
    assert row.state["aad"] == "loom-snap-v1"
    assert row.metadata["seal"] == {"cipher": "loom/aes-256-gcm", "subject": "s"}
    assert SECRET not in bench.table.rows["e"][1]
    assert "_waitAnswers" not in bench.table.rows["e"][1]
    assert await bench.open().load_latest("e") == Snapshot("e", 7, STATE, {"schema": "1.25.0"})
    assert await store.load_at_rest("e") == row


async def test_it_is_sealed_under_the_subjects_key(bench):
    await bench.open().save(Snapshot("e", 7, STATE))
    assert (await bench.row()).state["kid"] == (await MemoryKeyStore(bench.keys).get("s")).current.id
    await bench.open().save(Snapshot("f", 7, {"chainId": "c"}))
    assert await MemoryKeyStore(bench.keys).get("c") is not None
    await bench.open().save(Snapshot("g", 7, {}))
    assert await MemoryKeyStore(bench.keys).get("g") is not None


async def test_a_folded_execution_comes_back(bench):
    sealed = SealedBench()
    store, log = await sealed.open(), sealed.chain()
    await store.append(started(log, subject="s", data_in={"x": SECRET}))
    await store.append(fact(log, 0, Kind.STEP_COMPLETED, siteId="0:0", name="n", output=SECRET, attempt=1))
    state = ExecutionState()
    for envelope in await store.read(log):
        fold(state, envelope)
    await bench.open().save(Snapshot(log, state.head, to_json(state)))
    loaded = await bench.open().load_latest(log)
    assert from_json(loaded.state).input == {"x": SECRET}
    assert SECRET not in repr(bench.table.rows)
    await sealed.close()


# -- the slot ------------------------------------------------------------------------------------------------------


async def test_a_row_moved_to_another_execution_does_not_open(bench):
    await bench.open().save(Snapshot("e", 7, STATE))
    await bench.put(execution_id="f")
    with pytest.raises(SnapshotUndecryptableError) as caught:
        await bench.open().load_latest("f")
    assert (caught.value.execution_id, caught.value.sequence) == ("f", 7)


async def test_an_older_state_rolled_into_a_newer_slot_does_not_open(bench):
    await bench.open().save(Snapshot("e", 7, STATE))
    await bench.put(sequence=9)
    with pytest.raises(SnapshotUndecryptableError):
        await bench.open().load_latest("e")


@pytest.mark.parametrize("change", ["no aad", "another aad", "ct", "iv", "another field"])
async def test_a_changed_envelope_does_not_open(bench, change):
    await bench.open().save(Snapshot("e", 7, STATE))
    state = dict((await bench.row()).state)
    match change:
        case "no aad":
            del state["aad"]
        case "another aad":
            state["aad"] = "loom-snap-v0"
        case "ct":
            state["ct"] = state["ct"][:-8] + "AAAAAAA="
        case "iv":
            state["iv"] = "AAAAAAAAAAAAAAAA"
        case _:
            state["more"] = "x"
    await bench.put(state=state)
    with pytest.raises((SnapshotUndecryptableError, KeyUnavailableError)) as caught:
        await bench.open().load_latest("e")
    assert isinstance(caught.value, SnapshotUndecryptableError) == (change != "another field")
    assert caught.value.__cause__ is None


async def test_a_field_envelope_in_the_place_of_a_state_does_not_open(bench):
    """The same key seals fields of events: without the binding one could stand in for a state."""
    await bench.open().save(Snapshot("e", 7, STATE))
    key = (await MemoryKeyStore(bench.keys).get("s")).current
    field = seal_value(key, {"forged": True}, b"n" * 12)
    for state in (field, field | {"aad": "loom-snap-v1"}):
        await bench.put(state=state)
        with pytest.raises(SnapshotUndecryptableError):
            await bench.open().load_latest("e")


# -- keys that are not here ----------------------------------------------------------------------------------------


async def test_without_the_key_it_is_unavailable_not_erased(bench):
    await bench.open().save(Snapshot("e", 7, STATE))
    absent = EncryptingSnapshotStore(bench.raw(), MemoryKeyStore())
    for store in (absent, await bench.other_key()):
        with pytest.raises(KeyUnavailableError) as caught:
            await store.load_latest("e")
        assert (caught.value.subject, caught.value.stream_id, caught.value.sequence) == ("s", "e", 7)


async def test_a_destroyed_key_alone_proves_nothing(bench):
    await bench.open().save(Snapshot("e", 7, STATE))
    await MemoryKeyStore(bench.keys).destroy("s")
    with pytest.raises(KeyUnavailableError):
        await bench.open().load_latest("e")
    with pytest.raises(PayloadShreddedError):
        await bench.open().save(Snapshot("e", 8, STATE))


async def test_a_folded_tombstone_proves_it(bench):
    shredded = {**STATE, "variables": {"_shredded": {"s": 5}}}
    await bench.open().save(Snapshot("e", 7, shredded))
    await MemoryKeyStore(bench.keys).destroy("s")
    with pytest.raises(PayloadShreddedError):
        await bench.open().load_latest("e")


async def test_a_tombstone_in_the_log_proves_it(bench):
    sealed = SealedBench()
    log = sealed.chain()
    store = await sealed.open()
    await store.append(started(log, subject="s"))
    snapshots = bench.open(events=sealed.raw())
    await snapshots.save(Snapshot(log, 0, STATE))
    await MemoryKeyStore(bench.keys).destroy("s")
    snapshots.forget_keys("s")
    with pytest.raises(KeyUnavailableError):
        await snapshots.load_latest(log)
    await store.append(fact(log, 0, Kind.PAYLOAD_SHREDDED, subjectId="s"))
    await store.append(fact(log, 1, Kind.EXECUTION_DENIED, op="resume"))
    with pytest.raises(PayloadShreddedError):
        await snapshots.load_latest(log)
    await sealed.close()


async def test_the_log_of_a_compacted_execution_finds_its_tombstone_in_the_snapshot(bench):
    sealed = SealedBench()
    log = sealed.chain()
    node = sealed.node(snapshots=bench.raw())
    await node.append(started(log, subject="s", data_in=SECRET))
    await node.append(fact(log, 0, Kind.PAYLOAD_SHREDDED, subjectId="s"))
    await node.append(fact(log, 1, Kind.EXECUTION_DENIED, op="x"))
    await bench.open().save(Snapshot(log, 2, {**STATE, "variables": {"_shredded": {"s": 1}}}))
    await sealed.keys.destroy("s")
    await MemoryEventStore(sealed.log).truncate(log, 2)
    with pytest.raises(KeyUnavailableError):
        await sealed.node().read(log)
    with pytest.raises(PayloadShreddedError):
        await sealed.node(snapshots=bench.raw()).read(log)
    await sealed.close()


# -- older rows ----------------------------------------------------------------------------------------------------


async def test_a_plaintext_row_loads_unless_refused(bench):
    await bench.raw().save(Snapshot("e", 7, STATE))
    assert (await bench.open().load_latest("e")).state == STATE
    with pytest.raises(PlaintextSnapshotRefusedError) as caught:
        await bench.open(legacy_plaintext="refuse").load_latest("e")
    assert caught.value.execution_id == "e"


async def test_in_an_older_row_what_opens_is_opened_and_the_rest_left_as_stored(bench):
    await MemoryKeyStore(bench.keys).ensure("s")
    key = (await MemoryKeyStore(bench.keys).get("s")).current
    ours, more = seal_value(key, SECRET, b"n" * 12), seal_value(key, [1], b"m" * 12)
    foreign = {"__loomEnc": "another", "x": 1}
    lost = {**ours, "kid": "gone"}
    state = {"subject": "s", "a": ours, "deep": [{"b": more}], "foreign": foreign, "lost": lost}
    await bench.raw().save(Snapshot("e", 7, state))
    opened = {"subject": "s", "a": SECRET, "deep": [{"b": [1]}], "foreign": foreign, "lost": lost}
    assert (await bench.open().load_latest("e")).state == opened
    only = await bench.open(legacy_sensitive=["a"]).load_latest("e")
    assert only.state == {**opened, "deep": [{"b": more}]}
    with pytest.raises(PlaintextSnapshotRefusedError):
        await bench.open(legacy_plaintext="refuse").load_latest("e")


async def test_static_paths_seal_and_open_their_parts(bench):
    store = bench.open(seal_state=False, sensitive=["input", "variables.missing.*"])
    assert not store.seals_whole_state
    await store.save(Snapshot("e", 7, STATE))
    row = await bench.row()
    assert row.state["variables"] == STATE["variables"]
    assert "__loomEnc" in row.state["input"]
    assert (await store.load_latest("e")).state == STATE
    absent = EncryptingSnapshotStore(bench.raw(), MemoryKeyStore(), sensitive=["input"])
    with pytest.raises(KeyUnavailableError):
        await absent.load_latest("e")


@pytest.mark.parametrize(
    "options",
    [
        {"seal_state": True, "sensitive": ["a"]},
        {"seal_state": False},
        {"seal_state": False, "sensitive": None},
    ],
)
def test_a_state_is_sealed_in_one_way(bench, options):
    with pytest.raises(ConfigError, match="seal_state"):
        bench.open(**options)


def test_the_default_seals_whole_states(bench):
    assert EncryptingSnapshotStore(bench.raw(), MemoryKeyStore()).seals_whole_state is True


# -- checkpoints beside a sealed log -------------------------------------------------------------------------------


def test_a_checkpoint_rests_sealed_under_shared_keys_or_not_at_all(bench):
    events_keys = MemoryKeyStore(bench.keys)
    events = EncryptingEventStore(object(), events_keys)
    plain = MemoryEventStore(SealedBench().log)
    static = bench.open(seal_state=False, sensitive=["input"])
    foreign = EncryptingSnapshotStore(bench.raw(), MemoryKeyStore())

    class Pretending:
        seals_whole_state = True
        keys = "no key store"

    class Truthy:
        seals_whole_state = "yes"
        keys = events_keys

    assert seals(events)
    assert not seals(plain)
    assert plaintext_reason(events, None) is None
    assert plaintext_reason(events, bench.open()) is None
    assert plaintext_reason(plain, bench.raw()) is None
    assert plaintext_reason(events, bench.raw()) == "not-sealed"
    assert plaintext_reason(events, static) == "not-sealed"
    assert plaintext_reason(events, Truthy()) == "not-sealed"
    assert plaintext_reason(events, foreign) == "keys-not-shared"
    assert plaintext_reason(events, Pretending()) == "keys-not-shared"
    for snapshots, reason in ((bench.raw(), "not-sealed"), (foreign, "keys-not-shared")):
        with pytest.raises(PlaintextCheckpointError) as caught:
            check_checkpoints(events, snapshots)
        assert caught.value.reason == reason
        assert not caught.value.retryable
        assert "seal_state=True" in str(caught.value)
        assert "allow_plaintext_checkpoints" in str(caught.value)
        check_checkpoints(events, snapshots, allow_plaintext=True)
    check_checkpoints(events, bench.open())
