"""Replies to other nodes: nobody's open transaction hides one, and none is missed."""

from __future__ import annotations

import asyncio
import uuid

import pytest
from confluent_kafka import Producer
from writers import foreign_producer

from loom.schemas.codec import Codec
from loom.schemas.records import AppendReply
from loom.stores.kafka.deadline import Deadline
from loom.stores.kafka.replies import ReplyReader
from loom.testing.conformance.event_store.support import started
from loom.testing.proxy import Api
from stores import StoreBench, timed

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def bench(kafka_bootstrap, topic_prefix, tmp_path):
    bench = StoreBench(kafka_bootstrap, topic_prefix, tmp_path)
    yield bench
    await bench.close()


async def test_no_open_transaction_of_another_hides_a_reply(bench):
    await bench.owner()
    client = await bench.client()
    other = foreign_producer(bench.bootstrap, "foreign-" + bench.prefix)
    other.begin_transaction()
    for partition in range(bench.partitions):
        other.produce(bench.catalogue.replies, b"open", b"another", partition=partition)
    other.flush(10)
    with timed(12):  # the transaction outlives it
        await client.append(started(bench.chain()), deadline_ms=12_000)
    other.abort_transaction(10)


async def test_what_is_answered_right_after_the_start_is_heard(proxied_broker, proxy, tmp_path):
    bench = StoreBench(proxied_broker.bootstrap, f"t{uuid.uuid4().hex[:12]}.", tmp_path)
    codec, heard = Codec(), asyncio.Queue()
    reader = ReplyReader(
        f"127.0.0.1:{proxy.port}",
        {},
        topic=bench.catalogue.replies,
        partition=0,
        requester="asker",
        codec=codec,
        deliver=lambda replies: [heard.put_nowait(reply.request_id) for reply in replies],
    )
    producer = Producer({"bootstrap.servers": bench.bootstrap, "linger.ms": 0})
    # whoever asked for the end only now would be told of one behind the reply
    proxy.delay(Api.LIST_OFFSETS, 500, times=1_000)

    def begin(loop):
        reader.start(loop, Deadline.after(10_000))
        producer.produce(bench.catalogue.replies, codec.encode(AppendReply("r1")), b"asker", partition=0)
        producer.flush(10)

    try:
        await asyncio.to_thread(begin, asyncio.get_running_loop())
        assert await asyncio.wait_for(heard.get(), 20) == "r1"
    finally:
        proxy.clear()
        assert await asyncio.to_thread(reader.close, Deadline.after(10_000))
