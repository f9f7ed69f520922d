"""Topics outside loom that ``ctx.publish`` may write to (kafka.md, "ctx.publish").

A record for them leaves in the transaction of its fact, so a topic that cannot be written would abort everybody's
appends, after seconds each. So each is looked at before anything is staged.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation

from loom.errors import PublishRefusedError
from loom.stores.kafka.client import name_of

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from confluent_kafka.admin import AdminClient

    from loom.stores.kafka.records import Record

LOOKED_AT_FOR_S: Final = 60.0
"""How long what a broker said of a topic is believed."""
REFUSED_FOR_S: Final = 5.0
"""How long a refusal is: so that a topic made meanwhile is found soon."""
_REQUEST_S: Final = 3.0


class PublishTargets:
    """The allow-list, and what the brokers say of its topics. Used on the writer's thread."""

    def __init__(self, admin: AdminClient, allowed: AbstractSet[str], max_record_bytes: int) -> None:
        self._admin, self._allowed, self._max_record_bytes = admin, allowed, max_record_bytes
        self._known: dict[str, tuple[float, str | None]] = {}

    def check(self, record: Record) -> None:
        """Raise unless the record can be written as far as can be told beforehand.

        Raises:
            PublishRefusedError: the topic is not allowed, missing, not ours to write, or the record too large.
        """
        topic = record.topic
        if topic not in self._allowed:
            raise PublishRefusedError(topic, "it is not in the allow-list", "add it to publish_topics")
        if record.size > self._max_record_bytes:
            raise PublishRefusedError(
                topic, f"{record.size} bytes exceed {self._max_record_bytes}", "publish a reference instead"
            )
        problem = self._problem(topic)
        if problem is not None:
            raise PublishRefusedError(topic, problem, "create the topic, or grant this node WRITE on it")

    def forget(self, topic: str) -> None:
        """Look at a topic again before its next record: one to it has failed."""
        self._known.pop(topic, None)

    def _problem(self, topic: str) -> str | None:
        until, problem = self._known.get(topic, (0.0, None))
        if time.monotonic() >= until:
            problem = self._ask(topic)
            lasts = LOOKED_AT_FOR_S if problem is None else REFUSED_FOR_S
            self._known[topic] = (time.monotonic() + lasts, problem)
        return problem

    def _ask(self, topic: str) -> str | None:
        try:
            asked = self._admin.describe_topics(
                TopicCollection([topic]), include_authorized_operations=True, request_timeout=_REQUEST_S
            )
            found = asked[topic].result(_REQUEST_S + 1)
        except (KafkaException, TimeoutError) as error:
            return f"the brokers say {name_of(error)}"
        granted = found.authorized_operations
        if granted and AclOperation.WRITE not in granted and AclOperation.ALL not in granted:
            return "this node may not write to it"
        return None
