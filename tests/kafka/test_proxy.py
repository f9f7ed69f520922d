"""The proxy that the fault tests trust: each rule does what it says, once, and nothing else is touched."""

from __future__ import annotations

import asyncio
import time
import uuid

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from writers import visible

from loom.testing.proxy import Api, KafkaProxy, Side

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def topic(proxied_broker):
    name = f"t{uuid.uuid4().hex[:12]}"
    admin = AdminClient({"bootstrap.servers": proxied_broker.bootstrap})
    admin.create_topics([NewTopic(name, 1, 1)])[name].result(20)
    return name


def producer(proxy, client="mine", **config):
    address = f"127.0.0.1:{proxy.port}"
    return Producer(
        {"bootstrap.servers": address, "client.id": client, "linger.ms": 0, "log_level": 0, **config}
    )


def send(client, topic, value, seconds=10.0):
    failed = []
    client.produce(topic, value, "k", on_delivery=lambda error, _: failed.append(error))
    return client.flush(seconds) == 0 and [error is None for error in failed] == [True]


def values(proxied_broker, topic):
    return [value.decode() for _, _, value, _ in visible(proxied_broker.bootstrap, topic, committed=False)]


async def test_frames_pass_untouched_and_are_counted(proxied_broker, proxy, topic):
    mine = producer(proxy)
    assert send(mine, topic, "x" * 500_000)
    assert values(proxied_broker, topic) == ["x" * 500_000]
    assert proxy.seen[Api.PRODUCE, "mine"] == 1


async def test_a_held_request_waits_and_goes_on_when_released(proxied_broker, proxy, topic):
    mine = producer(proxy)
    held = proxy.hold(Api.PRODUCE, "mi*")
    mine.produce(topic, "v", "k")
    mine.poll(0)
    assert await asyncio.to_thread(held.caught.wait, 10)
    assert values(proxied_broker, topic) == []
    held.release()
    assert mine.flush(10) == 0
    assert values(proxied_broker, topic) == ["v"]


async def test_a_held_request_arrives_after_its_client_has_gone(proxied_broker, proxy, topic):
    mine = producer(proxy, **{"message.timeout.ms": 500, "socket.timeout.ms": 400, "retries": 0})
    held = proxy.hold(Api.PRODUCE, "mine", hang_up=True)
    assert not send(mine, topic, "late", 5)
    del mine
    assert values(proxied_broker, topic) == []
    held.release()
    assert await asyncio.to_thread(held.passed.wait, 10)
    assert values(proxied_broker, topic) == ["late"]


async def test_a_cut_reply_loses_the_answer_and_not_the_record(proxied_broker, proxy, topic):
    mine = producer(proxy, retries=0)
    lost = proxy.cut(Api.PRODUCE, "mine", Side.REPLY)
    assert not send(mine, topic, "applied")
    assert lost.caught.is_set()
    assert values(proxied_broker, topic) == ["applied"]
    assert send(mine, topic, "next")


async def test_a_cut_request_loses_the_record(proxied_broker, proxy, topic):
    mine = producer(proxy, retries=0)
    proxy.cut(Api.PRODUCE, "mine", Side.REQUEST)
    assert not send(mine, topic, "lost")
    assert values(proxied_broker, topic) == []


async def test_a_dropped_reply_leaves_the_connection(proxied_broker, proxy, topic):
    mine = producer(proxy, retries=0, **{"socket.timeout.ms": 500, "message.timeout.ms": 1_500})
    proxy.drop(Api.PRODUCE, "mine")
    began = time.monotonic()
    assert not send(mine, topic, "applied")
    assert time.monotonic() - began > 0.4
    assert values(proxied_broker, topic) == ["applied"]


async def test_delay_skip_times_and_client_choose_frames(proxied_broker, proxy, topic):
    mine, other = producer(proxy), producer(proxy, "other")
    assert send(mine, topic, "warm")
    late = proxy.delay(Api.PRODUCE, 300, "mine")
    held = proxy.hold(Api.PRODUCE, "mine", skip=1)
    assert send(other, topic, "other")
    assert not late.caught.is_set()
    began = time.monotonic()
    assert send(mine, topic, "late")
    assert time.monotonic() - began > 0.25
    assert not held.caught.is_set()
    began = time.monotonic()
    assert send(mine, topic, "skipped")
    assert time.monotonic() - began < 0.25
    mine.produce(topic, "held", "k")
    mine.poll(0)
    assert await asyncio.to_thread(held.caught.wait, 10)
    proxy.clear()
    assert mine.flush(10) == 0
    assert values(proxied_broker, topic) == ["warm", "other", "late", "skipped", "held"]


async def test_disconnect_closes_what_stands_and_clients_come_back(proxied_broker, proxy, topic):
    mine = producer(proxy)
    assert send(mine, topic, "a")
    proxy.disconnect()
    assert send(mine, topic, "b")
    assert values(proxied_broker, topic) == ["a", "b"]


def test_stop_ends_its_thread_and_frees_its_port(proxied_broker):
    listener = proxied_broker.listeners[0]
    for _ in range(2):
        with KafkaProxy(listener.advertised_port, ("127.0.0.1", listener.port)) as running:
            mine = producer(running)
            assert mine.list_topics(timeout=10).brokers
        with pytest.raises(KafkaException):
            producer(running).list_topics(timeout=0.5)
