from __future__ import annotations

import pytest
from kafka_bench import Bench

from loom.errors import ServiceMissingError
from loom.testing import services
from loom.testing.proxy import KafkaProxy


@pytest.fixture
def bench(kafka_bootstrap, topic_prefix):
    return Bench(kafka_bootstrap, topic_prefix)


@pytest.fixture(scope="module")
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
