"""Topics, producers and waits for the tests of the processors."""

from __future__ import annotations

import asyncio
import time

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from loom.config import Config
from loom.topics.catalogue import Catalogue

WAIT_S = 30.0


class Bench:
    """One prefix on one broker."""

    def __init__(self, bootstrap, prefix, partitions=2):
        self.bootstrap = bootstrap
        self.catalogue = Catalogue(prefix, partitions)
        self.config = Config(bootstrap=bootstrap, topic_prefix=prefix, partitions=partitions, node_id="n1")
        self.admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})

    def make(self, *names):
        topics = [NewTopic(self.catalogue.prefix + name, self.catalogue.partitions, 1) for name in names]
        for made in self.admin.create_topics(topics).values():
            made.result(30)

    def producer(self, transactional_id=None, **more):
        settings = {"bootstrap.servers": self.bootstrap, "linger.ms": 0, "log_level": 0, **more}
        if transactional_id is not None:
            settings["transactional.id"] = self.catalogue.prefix + transactional_id
        producer = Producer(settings)
        if transactional_id is not None:
            producer.init_transactions(30)
        return producer

    def send(self, topic, partition, *records):
        """Produce ``(key, value, headers)`` and wait until they are there."""
        producer = self.producer()
        for key, value, headers in records:
            producer.produce(topic, value, key, partition=partition, headers=list(headers))
        assert producer.flush(WAIT_S) == 0

    def committed(self, group, topic, partition):
        """The committed offset of a group, -1001 where there is none."""
        asked = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, partition)])
        answer = next(iter(self.admin.list_consumer_group_offsets([asked]).values())).result(30)
        return answer.topic_partitions[0].offset

    def read_all(self, topic, *, committed=True):
        """Every record that stands in a topic now."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": "unused",
                "isolation.level": "read_committed" if committed else "read_uncommitted",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "enable.partition.eof": True,
                "log_level": 0,
            }
        )
        partitions = [TopicPartition(topic, number, 0) for number in range(self.catalogue.partitions)]
        consumer.assign(partitions)
        found, ended, deadline = [], set(), time.monotonic() + WAIT_S
        while len(ended) < len(partitions) and time.monotonic() < deadline:
            message = consumer.poll(0.2)
            if message is None:
                continue
            if message.error() is not None:
                ended.add(message.partition())
                continue
            found.append(message)
        consumer.close()
        assert len(ended) == len(partitions), "the topic could not be read to its end"
        return found

    def member(self, role):
        """A consumer that has joined a group, for its metadata."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": self.catalogue.group(role),
                "enable.auto.commit": False,
                "log_level": 0,
            }
        )
        joined = []
        consumer.subscribe([self.catalogue.executions], on_assign=lambda *_: joined.append(1))
        deadline = time.monotonic() + WAIT_S
        while not joined:
            assert time.monotonic() < deadline, "the group was not joined"
            consumer.poll(0.1)
        return consumer

    def end(self, topic, partition):
        consumer = Consumer({"bootstrap.servers": self.bootstrap, "group.id": "unused", "log_level": 0})
        _, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), 30)
        consumer.close()
        return high


def wait_until(holds, what, timeout_s=WAIT_S):
    """Return once ``holds()`` does, or fail."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


async def until(holds, what, timeout_s=WAIT_S):
    """As wait_until, leaving the loop to others."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.01)
