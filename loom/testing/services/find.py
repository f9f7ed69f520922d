"""What the environment names, else what can be started here."""

from __future__ import annotations

import os
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from loom.testing.services.broker import KAFKA_VERSION, kafka
from loom.testing.services.redis_server import redis

if TYPE_CHECKING:
    from collections.abc import Mapping

_WARM_TIMEOUT_S: Final = 30.0


@dataclass(slots=True)
class Services:
    """A broker and a Redis to use; leaving the context ends those that were started here.

    Attributes:
        bootstrap: of the broker.
        redis_url: of Redis.
        client: what loom's setting ``kafka`` must hold for that broker; ``env`` has it as variables.
        notes: one line each: what is used, and why.
        started: ends what was started here.
    """

    bootstrap: str = ""
    redis_url: str = ""
    client: Mapping[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    started: ExitStack = field(default_factory=ExitStack, repr=False)

    @property
    def env(self) -> dict[str, str]:
        """Variables that point ``loom`` here."""
        found = {"LOOM_BOOTSTRAP": self.bootstrap, "LOOM_REDIS_URL": self.redis_url}
        found |= {f"LOOM_KAFKA__{k.replace('.', '_').upper()}": v for k, v in self.client.items()}
        return {name: value for name, value in found.items() if value or name.startswith("LOOM_KAFKA__")}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End what was started here; what the environment named is left alone."""
        self.started.close()


def find_or_start(
    *, need_kafka: bool = True, need_redis: bool = True, kafka_version: str = KAFKA_VERSION
) -> Services:
    """A broker and a Redis: those of ``LOOM_BOOTSTRAP`` and ``LOOM_REDIS_URL`` where set, else started here.

    Raises:
        ServiceMissingError: something is neither named nor installed.
        ServiceFailedError: something installed does not come up.
    """
    found = Services()
    try:
        if need_kafka:
            found.bootstrap = os.environ.get("LOOM_BOOTSTRAP", "")
            note = f"broker at {found.bootstrap} (LOOM_BOOTSTRAP)"
            if not found.bootstrap:
                broker = found.started.enter_context(kafka(kafka_version))
                found.client = broker.client
                found.bootstrap, note = broker.bootstrap, f"broker at {broker.bootstrap}: {broker.note}"
            found.notes.append(note)
        if need_redis:
            found.redis_url = os.environ.get("LOOM_REDIS_URL", "")
            note = "Redis of LOOM_REDIS_URL"  # the address may hold a password
            if not found.redis_url:
                store = found.started.enter_context(redis())
                found.redis_url, note = store.url, f"Redis at {store.url}: {store.note}"
            found.notes.append(note)
    except BaseException:
        found.stop()
        raise
    return found


def warm_up(bootstrap: str) -> None:
    """Run one transaction, so that the first one measured or timed does not pay for a cold broker.

    Makes a topic of its own and deletes it again.

    Raises:
        KafkaException: the broker refused, or did not answer within 30 s.
    """
    topic = f"loom-warm-up-{uuid.uuid4().hex[:12]}"
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    admin.create_topics([NewTopic(topic, 1, 1)], operation_timeout=_WARM_TIMEOUT_S)[topic].result(
        _WARM_TIMEOUT_S
    )
    producer = Producer(
        {"bootstrap.servers": bootstrap, "transactional.id": topic, "log_level": 0, "linger.ms": 0}
    )
    producer.init_transactions(_WARM_TIMEOUT_S)
    producer.begin_transaction()
    producer.produce(topic, b"warm", b"up")
    producer.commit_transaction(_WARM_TIMEOUT_S)
    admin.delete_topics([topic], operation_timeout=_WARM_TIMEOUT_S)[topic].result(_WARM_TIMEOUT_S)
