"""The encrypting event store keeps the contract of the store that it wraps."""

import pytest
from benches import SealedBench

from loom.stores.contracts import EventStore, OwningEventStore
from loom.stores.memory.event_store import MemoryEventStore
from loom.stores.sealing.encrypting import EncryptingEventStore, EncryptingOwningEventStore
from loom.testing.conformance.event_store import EventStoreConformance, OwningEventStoreConformance

EVERYTHING = {
    "EXECUTION_STARTED": ["input", "workflow"],
    "STEP_COMPLETED": ["output", "value", "text"],
    "DECISION_RECORDED": ["n"],
    "EXECUTION_COMPLETED": ["*"],
    "OUTCOME_RECORDED": ["*"],
}


@pytest.fixture
async def bench():
    bench = SealedBench(EVERYTHING)
    yield bench
    await bench.close()


class TestEncryptingEventStore(EventStoreConformance, OwningEventStoreConformance):
    async def test_metadata_comes_back(self, bench):
        """Events without a marker get one; those with a foreign marker rest as they are, so nothing of theirs is open to us."""
        bench.sensitive = {}
        await super().test_metadata_comes_back(bench)


async def test_it_is_what_the_inner_store_is(bench):
    owning = await bench.open()
    assert type(owning) is EncryptingOwningEventStore
    assert isinstance(owning, OwningEventStore)
    plain = EncryptingEventStore.over(_Plain(MemoryEventStore(bench.log)), bench.keys)
    assert type(plain) is EncryptingEventStore
    assert isinstance(plain, EventStore)
    assert not isinstance(plain, OwningEventStore)


class _Plain:
    """A store of no shards."""

    def __init__(self, inner):
        for name in dir(EventStore):
            if not name.startswith("_"):
                setattr(self, name, getattr(inner, name))
