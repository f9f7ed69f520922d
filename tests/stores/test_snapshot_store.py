"""The snapshot contract in memory; the Kafka store runs the same suite with its own fixture."""

import pytest

from loom.errors import InvalidInputError
from loom.stores.contracts import Snapshot, SnapshotStore
from loom.stores.memory.snapshot_store import MemorySnapshotStore, SnapshotTable
from loom.testing.conformance.snapshot_store import SnapshotStoreConformance


class MemoryBench:
    def __init__(self):
        self.table = SnapshotTable()

    def open(self):
        return MemorySnapshotStore(self.table)


class TestMemory(SnapshotStoreConformance):
    @pytest.fixture
    def bench(self):
        return MemoryBench()


def _deep():
    value = []
    for _ in range(200_000):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, float("nan"), _deep()], ids=["object", "set", "nan", "deep"]
)
async def test_a_state_that_is_no_json_is_refused_and_the_standing_one_kept(value):
    store = MemoryBench().open()
    assert isinstance(store, SnapshotStore)
    await store.save(Snapshot("e", 1, {"a": 1}))
    with pytest.raises(InvalidInputError, match="snapshot of 'e'"):
        await store.save(Snapshot("e", 2, {"a": value}))
    assert (await store.load_latest("e")).sequence == 1
