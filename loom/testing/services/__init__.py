"""Real parts for tests, demo and ``loom dev``: a broker and a Redis, started here and ended for certain.

::

    from loom.testing import services

    with services.kafka() as broker, services.redis() as store:
        services.warm_up(broker.bootstrap)
        ...                      # broker.bootstrap, store.url
        broker.kill()            # as a crash would
        broker.restart()         # same port, same log

    with services.find_or_start() as parts:   # LOOM_BOOTSTRAP and LOOM_REDIS_URL, where they are set
        print("; ".join(parts.notes))

No process started here outlives the one that started it, however that one ends.
"""

from __future__ import annotations

from loom.testing.services.broker import KAFKA_VERSION, TEST_PROPERTIES, KafkaService, Listener, kafka
from loom.testing.services.find import Services, find_or_start, warm_up
from loom.testing.services.ports import free_port, free_ports
from loom.testing.services.process import OwnedProcess
from loom.testing.services.redis_server import RedisService, redis

__all__ = [
    "KAFKA_VERSION",
    "TEST_PROPERTIES",
    "KafkaService",
    "Listener",
    "OwnedProcess",
    "RedisService",
    "Services",
    "find_or_start",
    "free_port",
    "free_ports",
    "kafka",
    "redis",
    "warm_up",
]
