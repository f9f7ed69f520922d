"""What the tests of the Kafka event store share: a log, and stores on it that are closed for certain."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from loom.ids import ulid
from loom.stores.kafka.event_store import KafkaEventStore
from loom.stores.kafka.settings import KafkaSettings
from loom.topics import provisioning
from loom.topics.catalogue import Catalogue
from loom.topics.cluster import Cluster
from loom.topics.partitioner import mint

PATIENCE_S = 40.0


def now_ms():
    return time.time_ns() // 1_000_000


def make_log(bootstrap, prefix, partitions):
    cluster, catalogue = Cluster(bootstrap), Catalogue(prefix, partitions)
    provisioning.apply(cluster, provisioning.plan(cluster, catalogue))
    return catalogue


def drop_log(bootstrap, prefix):
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    mine = [name for name in admin.list_topics(timeout=15).topics if name.startswith(prefix)]
    for deleted in admin.delete_topics(mine, request_timeout=15).values() if mine else ():
        deleted.result(15)


def kafka_clients():
    """How many clients of Kafka this process has: each has one thread of that name."""
    clients = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            clients += (task / "comm").read_text().startswith("rdk:main")
    return clients


async def until(condition, patience_s=PATIENCE_S):
    async with asyncio.timeout(patience_s):
        while not condition():  # noqa: ASYNC110 - the condition lies behind threads and brokers
            await asyncio.sleep(0.01)


class StoreBench:
    """Stores on one log."""

    too_large = 1_100_000

    def __init__(self, bootstrap, prefix, folder, *, partitions=2, **settings):
        self.bootstrap, self.prefix, self.folder, self.partitions = bootstrap, prefix, folder, partitions
        self.settings = {"session_timeout_ms": 6_000} | settings
        self.catalogue = make_log(bootstrap, prefix, partitions)
        self.stores = []

    def make(self, node, *, owns, origin=None, **settings):
        given = {
            "bootstrap": self.bootstrap,
            "node": node,
            "topic_prefix": self.prefix,
            "partitions": self.partitions,
            "data_dir": self.folder,
        }
        store = KafkaEventStore(
            KafkaSettings(**(given | self.settings | settings)), owns=owns, clock=now_ms, origin=origin
        )
        self.stores.append(store)
        return store

    async def owner(self, node="owner", *, partitions=None, **settings):
        """An owner that serves ``partitions`` (default: all)."""
        store = self.make(node, owns=True, **settings)
        await store.open()
        wanted = self.partitions if partitions is None else partitions
        await until(lambda: len(store.owned()) >= wanted)
        return store

    async def client(self, node=None, **settings):
        store = self.make(node or f"client-{ulid()}", owns=False, **settings)
        await store.open()
        return store

    def chain(self, shard=0):
        return mint(shard, self.partitions, ulid)

    def elsewhere(self):
        return self.chain(1)

    async def close(self, since=0):
        closing, self.stores[since:] = self.stores[since:], []
        await asyncio.gather(*(store.close() for store in closing))

    def fence(self, shard):
        """Take the writer's transactional id away, as a rival would, and do nothing with it."""
        producer = Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "transactional.id": self.catalogue.log_transactional_id(shard),
                "log_level": 0,
            }
        )
        producer.init_transactions(20)


@contextmanager
def timed(limit_s):
    began = time.monotonic()
    yield
    assert time.monotonic() - began < limit_s
