"""Writers on the session's broker, and a broker behind a proxy that hurts it."""

from __future__ import annotations

import gc
import uuid

import pytest
import pytest_asyncio
from writers import Process, Writers, create_log

from loom.errors import ServiceMissingError
from loom.testing import services
from loom.testing.proxy import KafkaProxy


@pytest.fixture
def no_garbage_collection():
    """Whatever only the garbage collector frees stays until the test has ended."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def writers(kafka_bootstrap, topic_prefix, tmp_path):
    """Makes writers of a fresh log of one partition; they are stopped when the test has ended."""
    create_log(kafka_bootstrap, topic_prefix)
    made = Writers(kafka_bootstrap, topic_prefix, tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def proxied_broker(kafka_version):
    """A broker, and the port at which it sends clients of its second listener to the proxy."""
    (port,) = services.free_ports(1)
    try:
        broker = services.kafka(kafka_version, embedded=False, proxy_ports=[port])
    except ServiceMissingError as missing:
        pytest.skip(str(missing))
    with broker:
        services.warm_up(broker.bootstrap)
        yield broker


@pytest.fixture
def proxy(proxied_broker):
    """The proxy before that broker; rules last for one test."""
    listener = proxied_broker.listeners[0]
    with KafkaProxy(listener.advertised_port, ("127.0.0.1", listener.port)) as running:
        yield running


@pytest.fixture
def hurt(proxied_broker, proxy, tmp_path):
    """Makes writers that reach the broker through the proxy, with short timeouts; ``hurt.bootstrap`` is the way around."""
    prefix = f"t{uuid.uuid4().hex[:12]}."
    create_log(proxied_broker.bootstrap, prefix)
    made = Writers(
        f"127.0.0.1:{proxy.port}",
        prefix,
        tmp_path,
        transaction_timeout_ms=3_000,
        commit_deadline_ms=1_500,
    )
    made.direct = proxied_broker.bootstrap
    yield made
    proxy.clear()
    made.close()


@pytest_asyncio.fixture
async def start_process(tmp_path):
    """Start processes with one writer each."""
    started = []

    async def start(**asked):
        process = await Process.start(folder=str(tmp_path), **asked)
        started.append(process)
        return process

    yield start
    for process in started:
        await process.close()
