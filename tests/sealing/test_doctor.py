"""What ``loom doctor`` finds about sealing (system.md 3.4 and 8.2)."""

from __future__ import annotations

import pytest
from mixed import SECRET, SENSITIVE, Fleet, Trouble, two_halves

from loom.errors import PlaintextCheckpointError
from loom.stores.keys.memory import MemoryKeyStore
from loom.stores.memory.snapshot_store import MemorySnapshotStore
from loom.stores.sealing.checkpoints import check_checkpoints
from loom.stores.sealing.doctor import SealingDoctor, covers_of
from loom.stores.sealing.encrypting import EncryptingEventStore
from loom.stores.sealing.snapshots import EncryptingSnapshotStore
from loom.stores.sharded import ShardedEventStore
from loom.testing.runtime import until


@pytest.fixture
def mixed():
    return Fleet()


def codes(found):
    return {finding.code: finding.severity for finding in found}


def test_the_doctor_and_the_kernel_judge_alike(mixed):
    events = mixed.stored("capable", mixed.fleet.store(()))
    plain = MemorySnapshotStore()
    stores = {
        "plain": plain,
        "static paths": EncryptingSnapshotStore(plain, events.keys, sensitive=["input"]),
        "other keys": EncryptingSnapshotStore(plain, MemoryKeyStore()),
        "sealed": EncryptingSnapshotStore(plain, events.keys),
        "none": None,
    }
    code = "snapshot-plaintext-under-encrypting-events"
    for name, snapshots in stores.items():
        found = codes(SealingDoctor(events, snapshots).stores())
        try:
            check_checkpoints(events, snapshots)
        except PlaintextCheckpointError:
            assert found[code] == "error", name
            allowed = codes(SealingDoctor(events, snapshots, allow_plaintext=True).stores())
            assert allowed[code] == "info", name
        else:
            assert code not in found, name
        assert ("snapshot-static-paths" in found) == (name == "static paths")
        assert found["commands-rest-as-written"] == "info"
    assert SealingDoctor(mixed.fleet.store(()), plain).stores() == []


def test_shards_that_differ_are_told(mixed):
    shards = ShardedEventStore(
        [mixed.stored("capable", mixed.fleet.store(())), mixed.stored("poorer", mixed.fleet.store(()))]
    )
    assert codes(SealingDoctor(shards, None).stores()) == {"shards-differ": "error"}
    assert covers_of(shards) == ()


async def test_every_finding_says_what_would_do(mixed):
    events = mixed.stored("capable", mixed.fleet.store(()))
    found = SealingDoctor(events, MemorySnapshotStore()).stores()
    found += await SealingDoctor(events, None).coverage({"a": ("X.y",), "b": ()}, ["missing"])
    assert len(found) >= 4
    assert all(finding.problem and finding.remedy for finding in found)


async def test_what_no_live_node_opens_is_named_until_one_can(mixed):
    await mixed.prepare("s")
    events = EncryptingEventStore.over(mixed.fleet.store(()), MemoryKeyStore(mixed.keys), SENSITIVE)
    trouble = Trouble()
    async with mixed.node("poorer", owns=True, trouble=trouble) as poorer:
        async with mixed.node("capable") as client:
            client.flows.add(two_halves)
            await client.start(two_halves, SECRET, execution_id="sealed", subject="s")
        await until(lambda: ("sealed", 0) in mixed.fleet.wakes.slots, "the refusal")
        rows = await poorer.stores.leases.present()
        fleet = {row.node: row.covers for row in rows if row.node == poorer.node}
        assert list(fleet.values()) == [covers_of(poorer.stores.events)]
        found = await SealingDoctor(events, None).coverage(fleet, ["sealed"])
        assert codes(found) == {"sealed-nobody-opens": "error"}
        assert "sealed" in found[0].problem
        assert "EXECUTION_STARTED.input" in found[0].problem
        assert SECRET not in repr(found)
        more = fleet | {"capable:1": covers_of(events)}
        found = await SealingDoctor(events, None).coverage(more, ["sealed"])
        assert codes(found) == {"fleet-covers-differ": "warning", "sealed-waits-for-a-key": "warning"}
        assert poorer.node in found[0].problem
        seen = await poorer.findings()
        assert codes(seen)["commands-rest-as-written"] == "info"


async def test_a_client_asks_for_its_fleet(mixed):
    await mixed.prepare("s")
    async with mixed.node("raw", owns=True) as raw:
        async with mixed.node("capable") as client:
            await client.start(two_halves, SECRET, execution_id="sealed", subject="s")
            await until(lambda: ("sealed", 0) in mixed.fleet.wakes.slots, "the refusal")
        found = await raw.findings()
    assert codes(found)["sealed-nobody-opens"] == "error"
