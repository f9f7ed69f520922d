"""The Kafka event store keeps the contract: as the owner, by request, and while its tenure is taken away."""

from __future__ import annotations

import asyncio
import uuid

import pytest
import pytest_asyncio

from loom.stores.contracts import EventStore, OwningEventStore
from loom.testing.conformance.event_store import EventStoreConformance, OwningEventStoreConformance
from loom.testing.conformance.event_store.appending import AppendConformance
from loom.testing.conformance.event_store.several import SeveralStreamsConformance
from stores import StoreBench, drop_log

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def log_prefix(kafka_bootstrap):
    prefix = f"t{uuid.uuid4().hex[:12]}."
    yield prefix
    drop_log(kafka_bootstrap, prefix)


class Bench(StoreBench):
    """One owner for the module; what a test opens beside it is a client, closed with the test."""

    one = None
    rounds = 0
    first_is_owner = True

    async def open(self):
        if self.first_is_owner and not self.opened:
            self.opened = True
            return self.one
        return await self.client()

    async def own(self, _origin):
        self.opened = True
        return self.one


@pytest.fixture(scope="module")
def owner_bench(kafka_bootstrap, log_prefix, tmp_path_factory):
    return Bench(kafka_bootstrap, log_prefix, tmp_path_factory.mktemp("data"), max_retakes=1_000)


@pytest_asyncio.fixture(loop_scope="module")
async def owned(owner_bench):
    bench = owner_bench
    if bench.one is None:
        bench.one = await bench.owner(origin="a")
    bench.opened = False
    bench.first_is_owner = True
    return bench


@pytest_asyncio.fixture(loop_scope="module", scope="module", autouse=True)
async def _closed(owner_bench):
    yield
    await owner_bench.close()


class TestOwner(EventStoreConformance, OwningEventStoreConformance):
    @pytest_asyncio.fixture(loop_scope="module")
    async def bench(self, owned):
        yield owned
        await owned.close(since=1)

    async def test_closing_twice_and_beside_others(self, bench):
        # Here the owner stays for the other tests; what its end means has tests of its own.
        bench.first_is_owner = False
        await EventStoreConformance.test_closing_twice_and_beside_others(self, bench)


class TestClient(EventStoreConformance):
    @pytest_asyncio.fixture(loop_scope="module")
    async def bench(self, owned):
        owned.first_is_owner = False
        yield owned
        await owned.close(since=1)


class TestFenced(AppendConformance, SeveralStreamsConformance):
    """Every few tests the writer has just been fenced, and does not know it yet: it takes the partition again."""

    @pytest_asyncio.fixture(loop_scope="module")
    async def bench(self, owned):
        owned.rounds += 1
        if owned.rounds % 4 == 1:
            await asyncio.to_thread(owned.fence, 0)
        yield owned
        await owned.close(since=1)


async def test_it_is_what_the_contracts_say(owned):
    assert isinstance(owned.one, EventStore)
    assert isinstance(owned.one, OwningEventStore)
