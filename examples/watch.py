"""Follow the executions topic with a plain consumer: what loom wrote, read without loom's runtime.

Committed records only. Each is an event of one execution; its key is ``<execution>/<sequence>``, its value Avro.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, KafkaException, TopicPartition

from loom.schemas.codec import Codec

if TYPE_CHECKING:
    from collections.abc import Callable

    from loom.schemas.envelope import Envelope


class DemoFailedError(Exception):
    """The demo did not show what it promises."""


@dataclass(frozen=True, slots=True)
class Seen:
    """An event, and where in Kafka it stands."""

    event: Envelope
    partition: int
    offset: int
    raw: bytes


def writer_of(event: Envelope) -> str:
    """The name of the node that wrote an event, without the mark that tells its lives apart."""
    return str(event.metadata.get("node", "")).partition(":")[0]


class Watch:
    """The executions topic from its beginning, as far as it has been read."""

    def __init__(self, bootstrap: str, prefix: str) -> None:
        self.executions: dict[str, list[Seen]] = defaultdict(list)
        self._codec = Codec()
        self._topic = f"{prefix}executions"
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "watch",  # never joined: partitions are assigned by hand, nothing is committed
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "log_level": 2,
            }
        )
        partitions = self._consumer.list_topics(self._topic, timeout=15).topics[self._topic].partitions
        self._consumer.assign([TopicPartition(self._topic, number, 0) for number in partitions])

    def close(self) -> None:
        """Leave the broker."""
        self._consumer.close()

    def until(self, what: str, reached: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Read on until ``reached()``.

        Raises:
            TimeoutError: it was not reached in time.
        """
        deadline = time.monotonic() + timeout_s
        while not reached():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not seen within {timeout_s:.0f} s")
            self._read(0.1)

    def kinds(self, execution_id: str) -> list[str]:
        """The kinds of an execution's events, in order."""
        return [seen.event.type for seen in self.executions[execution_id]]

    def node_of(self, execution_id: str) -> str:
        """The name of the node that wrote the last event."""
        return writer_of(self.executions[execution_id][-1].event)

    def _read(self, seconds: float) -> None:
        message = self._consumer.poll(seconds)
        if message is None:
            return
        if message.error() is not None:
            raise KafkaException(message.error())
        value = message.value()
        if value is None:
            return  # a tombstone
        event = self._codec.decode_envelope(value)
        self.executions[event.stream_id].append(
            Seen(event, message.partition() or 0, message.offset() or 0, value)
        )
