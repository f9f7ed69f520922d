"""The encrypting event store on Kafka, keys on Redis: the contract, and no planted plaintext in any topic."""

from __future__ import annotations

import asyncio
import uuid

import pytest
import pytest_asyncio
from confluent_kafka import Consumer, TopicPartition
from redis.asyncio import Redis

from loom.ids import inbox_stream
from loom.schemas.envelope import EVENT_SCHEMA, Kind, NewEvent
from loom.stores.contracts import NO_EVENTS, Outgoing, StreamAppend
from loom.stores.guarded import GuardedEventStore
from loom.stores.keys.redis import RedisKeyStore
from loom.stores.keys.wrapping import random_wrapper
from loom.stores.sealing.encrypting import EncryptingEventStore
from loom.testing.conformance.event_store import EventStoreConformance, OwningEventStoreConformance
from loom.testing.conformance.event_store.inbox import InboxConformance
from loom.testing.conformance.event_store.several import SeveralStreamsConformance
from stores import StoreBench, drop_log

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

SENSITIVE = {"EXECUTION_STARTED": ["input"], "STEP_COMPLETED": ["output", "text"]}
SECRET = "planted-plaintext-7Q"


class Bench(StoreBench):
    """One owner for the module; what a test opens beside it is a client, closed with the test."""

    one = None
    keys = None

    def make(self, node, **options):
        inner = super().make(node, **options)
        self.stores[-1] = wrapped = EncryptingEventStore.over(inner, self.keys, SENSITIVE)
        wrapped.open = inner.open
        return wrapped

    async def open(self):
        if self.first_is_owner and not self.opened:
            self.opened = True
            return self.one
        return await self.client()

    async def own(self, _origin):
        self.opened = True
        return self.one


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sealed(kafka_bootstrap, redis_url, tmp_path_factory):
    prefix = f"t{uuid.uuid4().hex[:12]}."
    bench = Bench(kafka_bootstrap, prefix, tmp_path_factory.mktemp("data"))
    bench.keys = RedisKeyStore(redis_url, prefix, random_wrapper())
    bench.redis_url = redis_url
    bench.one = await bench.owner(origin="a")
    yield bench
    await bench.close()
    await bench.keys.close()
    drop_log(kafka_bootstrap, prefix)
    async with Redis.from_url(redis_url) as admin:
        for key in [key async for key in admin.scan_iter(match=f"*{prefix}*")]:
            await admin.delete(key)


@pytest_asyncio.fixture(loop_scope="module")
async def bench(sealed, request):
    sealed.opened = False
    sealed.first_is_owner = "Client" not in request.node.nodeid
    yield sealed
    await sealed.close(since=1)


class TestOwner(EventStoreConformance, OwningEventStoreConformance):
    async def test_closing_twice_and_beside_others(self, bench):
        bench.first_is_owner = False  # here the owner stays for the other tests
        await EventStoreConformance.test_closing_twice_and_beside_others(self, bench)


class TestClient(SeveralStreamsConformance, InboxConformance):
    pass


def _everything(bootstrap, prefix):
    """Key, value and headers of every record of every topic of the log."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": prefix, "log_level": 0})
    try:
        topics = [t for name, t in consumer.list_topics(timeout=15).topics.items() if name.startswith(prefix)]
        places = [TopicPartition(t.topic, p, 0) for t in topics for p in t.partitions]
        ends = {(p.topic, p.partition): consumer.get_watermark_offsets(p, timeout=15)[1] for p in places}
        consumer.assign(places)
        found, quiet = [], 0
        while quiet < 3:
            message = consumer.poll(1)
            if message is None:
                quiet += 1
            elif not message.error():
                quiet = 0
                found += [message.key() or b"", message.value() or b"", repr(message.headers()).encode()]
        assert sum(ends.values()) > 0
        return found
    finally:
        consumer.close()


async def test_no_planted_plaintext_is_in_any_topic_nor_on_redis(bench):
    owner, client = bench.one, await bench.client()
    log, other = bench.chain(), bench.elsewhere()
    data = {
        "workflow": "w",
        "input": {"x": SECRET},
        "chainId": log,
        "subject": "s",
        "principal": {"actor": "a", "identity": {"t": SECRET}},
    }
    first = NewEvent("e0", Kind.EXECUTION_STARTED, data, {"schema": EVENT_SCHEMA})
    await client.append(StreamAppend(log, (first,), expected_head=NO_EVENTS, fence=1))
    payload = {"topic": "t", "payload": [SECRET], "messageId": "m"}
    message = StreamAppend(inbox_stream(other, "t"), (NewEvent("m", Kind.INBOX_MESSAGE, payload),))
    step = NewEvent("e1", Kind.STEP_COMPLETED, {"output": SECRET})
    await owner.append(
        StreamAppend(log, (step,), expected_head=0, outgoing=(Outgoing("request", "r", other, message),))
    )
    async with asyncio.timeout(30):
        while not (arrived := await client.read(inbox_stream(other, "t"))):  # noqa: ASYNC110 - it lies behind the broker
            await asyncio.sleep(0.02)
    assert arrived[0].data["payload"] == [SECRET]
    assert [e.data.get("output") for e in await GuardedEventStore.over(client).read(log)] == [None, SECRET]
    records = await asyncio.to_thread(_everything, bench.bootstrap, bench.prefix)
    assert any(b"__loomEnc" in record for record in records)
    assert not [record for record in records if SECRET.encode() in record]
    async with Redis.from_url(bench.redis_url) as admin:
        async for key in admin.scan_iter(match=f"*{bench.prefix}*"):
            assert SECRET not in repr(await admin.hgetall(key))
