"""What a store says at start when something is not as it should be, and that it ends for certain."""

from __future__ import annotations

import threading
import time

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions

from loom.config import Config
from loom.errors import (
    ConfigError,
    DeadlineExceededError,
    NodeFencedError,
    OutcomeUnknownError,
    StoreClosedError,
    TopicsError,
    UnreachableError,
)
from loom.stores.contracts import LeaseStore, SnapshotStore, WakeStore
from loom.stores.kafka import open_stores
from loom.testing.conformance.event_store.support import started
from loom.testing.services import free_ports
from stores import StoreBench, kafka_clients, timed, until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def bench(kafka_bootstrap, topic_prefix, tmp_path):
    bench = StoreBench(kafka_bootstrap, topic_prefix, tmp_path)
    yield bench
    await bench.close()


def threads():
    return {t for t in threading.enumerate() if t.name.startswith("loom-")}


async def test_missing_topics_are_named(bench):
    store = bench.make("n", owns=False, topic_prefix="nothing-here.")
    with pytest.raises(TopicsError) as caught:
        await store.open()
    assert "nothing-here." in str(caught.value)
    assert caught.value.exit_status == 2
    assert not threads()


async def test_another_number_of_partitions_is_refused(bench):
    store = bench.make("n", owns=True, partitions=3)
    with pytest.raises(TopicsError) as caught:
        await store.open()
    assert "3" in str(caught.value)
    assert not threads()


async def test_a_log_made_with_another_number_is_refused_by_its_owner(bench):
    owner = await bench.owner()
    await owner.append(started(bench.chain()))
    await owner.close()
    admin = AdminClient({"bootstrap.servers": bench.bootstrap})
    names = [topic.name for topic in bench.catalogue.topics()]
    for grown in admin.create_partitions([NewPartitions(name, 3) for name in names]).values():
        grown.result(20)

    told = []
    store = bench.make("n", owns=True, partitions=3)
    store._on_fatal = told.append
    await store.open()
    await until(lambda: told)

    assert isinstance(told[0], TopicsError)
    assert isinstance(store.failure, TopicsError)


@pytest.mark.parametrize("owns", [True, False])
async def test_brokers_that_do_not_answer_are_named_within_seconds(bench, owns):
    (port,) = free_ports(1)
    store = bench.make("n", owns=owns, bootstrap=f"127.0.0.1:{port}")
    with timed(8), pytest.raises(UnreachableError) as caught:
        await store.open()
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert caught.value.setting == "bootstrap"
    assert caught.value.exit_status == 3
    await store.close()
    assert not threads()


async def test_without_an_owner_a_write_is_unknown_and_a_read_is_late(bench):
    client = await bench.client(deadline_ms=1_000)
    with timed(3), pytest.raises(OutcomeUnknownError):  # its copy waits, and an owner may come yet
        await client.append(started(bench.chain()))
    with timed(3), pytest.raises(DeadlineExceededError):
        await client.observe(bench.chain())


async def test_a_closed_store_refuses_and_closing_again_does_nothing(bench):
    owner = await bench.owner()
    client = await bench.client()
    for store in (client, owner):
        with timed(10):
            await store.close()
        await store.close()
        with pytest.raises(StoreClosedError):
            await store.append(started(bench.chain()))
    assert not threads()


async def test_no_client_outlives_its_store_or_its_tenure(bench, no_garbage_collection):
    before = kafka_clients()
    owner, client = await bench.owner(), await bench.client()
    chain = bench.chain()
    follows = client.subscribe(chain)
    await client.append(started(chain, fence=None))
    assert (await anext(follows)).sequence == 0
    serving = kafka_clients()
    for _ in range(3):
        bench.fence(0)
        await owner.acquire_fence(chain, "owner")  # by a tenure of its own
    await until(lambda: kafka_clients() <= serving)
    await follows.aclose()
    await client.close()
    await owner.close()
    await until(lambda: kafka_clients() <= before)


async def test_two_processes_with_one_node_id_are_told_apart(bench, tmp_path):
    told = []
    first = await bench.owner("same")
    first._on_fatal = told.append
    with pytest.raises(ConfigError, match="another process"):
        await bench.make("same", owns=True).open()  # on one machine by the folder
    second = bench.make("same", owns=True, data_dir=tmp_path / "other")
    await second.open()  # on two by the group
    await until(lambda: told)
    assert isinstance(told[0], NodeFencedError)
    assert isinstance(first.failure, NodeFencedError)
    await until(lambda: len(second.owned()) == bench.partitions)
    await first.append(started(bench.chain()))  # it asks the owner now


async def test_stores_from_settings(bench, redis_url, redis_prefix):
    config = Config(
        bootstrap=bench.bootstrap,
        redis_url=redis_url,
        topic_prefix=bench.prefix,
        partitions=bench.partitions,
        data_dir=bench.folder,
        node_id="node",
    )
    stores = await open_stores(config, clock=lambda: time.time_ns() // 1_000_000, drives=True, node="node:1")
    bench.stores.append(stores.events)
    assert isinstance(stores.snapshots, SnapshotStore)
    assert isinstance(stores.leases, LeaseStore)
    assert isinstance(stores.wakes, WakeStore)
    await until(lambda: len(stores.events.owned()) == bench.partitions)
    assert stores.events.shard_of(stores.events.mint_id()) in stores.events.owned()
    for store in (stores.leases, stores.wakes):
        await store.close()


async def test_settings_that_cannot_work(bench, monkeypatch):
    monkeypatch.delenv("LOOM_BOOTSTRAP", raising=False)
    monkeypatch.delenv("LOOM_REDIS_URL", raising=False)
    with pytest.raises(ConfigError, match="bootstrap"):
        await open_stores(Config(topic_prefix=bench.prefix, partitions=2), clock=lambda: 0, drives=False)
    (port,) = free_ports(1)
    config = Config(
        bootstrap=bench.bootstrap,
        topic_prefix=bench.prefix,
        partitions=2,
        redis_url=f"redis://127.0.0.1:{port}",
    )
    with pytest.raises(UnreachableError) as caught:
        await open_stores(config, clock=lambda: 0, drives=False)
    assert caught.value.setting == "redis_url"
