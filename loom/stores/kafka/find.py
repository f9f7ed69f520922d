"""Which streams belong to a subject: one reading of the whole log, for erasure and export.

Every partition is read to the end captured at the call, executions first: which chains there are decides what of the other
topics is wanted. Values are decoded of first events alone. It costs a reading of the log, and is asked for rarely.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka.admin import AdminClient

from loom.errors import IncompleteReadError
from loom.ids import routing_id
from loom.stores.kafka.client import admin_config
from loom.stores.kafka.deadline import Deadline
from loom.stores.kafka.reader import Ends, LogReader
from loom.stores.kafka.records import TICK_KEY, text_of
from loom.stores.sealing.subjects import is_start, subject_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loom.schemas.codec import Codec
    from loom.stores.kafka.settings import KafkaSettings

SCAN_MS: Final = 1_800_000
"""Bound of a whole reading: a larger log than is read in half an hour wants a budget of its own."""

FIRST_EVENT: Final = "/0"


class SubjectFinder:
    """Reads the log once for one subject. Blocking: for a thread."""

    def __init__(self, settings: KafkaSettings, codec: Codec, *, budget_ms: int = SCAN_MS) -> None:
        self._settings, self._codec, self._budget_ms = settings, codec, budget_ms

    def find(self, subject: str) -> list[str]:
        """Names of every stream of the chains whose first event names ``subject``, logs first.

        Raises:
            IncompleteReadError: an open transaction, or the budget, ended the reading early.
            UnreachableError, TopicsError, BrokerError: the log cannot be read. DecodeError: a first event cannot.
        """
        deadline = Deadline.after(self._budget_ms)
        settings = self._settings
        logs: list[str] = []
        beside: list[str] = []
        asks = admin_config(settings.bootstrap, settings.kafka, client_id=f"{settings.node}-find-admin")
        with AdminClient(asks) as admin:
            for partition in range(settings.partitions):
                ends = Ends(admin, partition, settings.bootstrap)
                with LogReader(
                    settings.bootstrap, settings.kafka, partition, f"{settings.node}-find-{partition}"
                ) as reader:
                    chains = self._chains(subject, partition, ends, reader, deadline)
                    logs += chains
                    beside += self._beside(set(chains.values()), partition, ends, reader, deadline)
        return logs + beside

    def _chains(
        self, subject: str, partition: int, ends: Ends, reader: LogReader, deadline: Deadline
    ) -> dict[str, str]:
        """Chain of each of the subject's executions in a partition."""
        chains: dict[str, str] = {}

        def take(message: Any) -> None:
            key = text_of(message.key())
            if not key.endswith(FIRST_EVENT):
                return
            stream_id = key[: -len(FIRST_EVENT)]
            value = message.value()
            if value is None:
                chains.pop(stream_id, None)
                return
            event = self._codec.decode_envelope(value, message.topic())
            if is_start(stream_id, event) and subject_in(event.data, stream_id) == subject:
                chains[stream_id] = str(event.data.get("chainId") or stream_id)

        self._read([self._settings.catalogue.executions], partition, ends, reader, deadline, take=take)
        return chains

    def _beside(
        self, chains: set[str], partition: int, ends: Ends, reader: LogReader, deadline: Deadline
    ) -> list[str]:
        """Inbox and quarantine streams of chains in a partition."""
        standing: dict[str, set[str]] = {}

        def take(message: Any) -> None:
            key = text_of(message.key())
            if key == TICK_KEY:
                return
            stream_id, _, sequence = key.rpartition("/")
            if routing_id(stream_id) not in chains:
                return
            events = standing.setdefault(stream_id, set())
            if message.value() is None:
                events.discard(sequence)
            else:
                events.add(sequence)

        if chains:
            catalogue = self._settings.catalogue
            self._read([catalogue.inbox, catalogue.quarantine], partition, ends, reader, deadline, take=take)
        return [stream_id for stream_id, events in standing.items() if events]

    def _read(
        self,
        topics: Sequence[str],
        partition: int,
        ends: Ends,
        reader: LogReader,
        deadline: Deadline,
        *,
        take: Callable[[Any], None],
    ) -> None:
        """Give every record up to the end captured now; by position, for the last offset may hold none."""
        behind = {topic: end for topic, end in ends.written(topics).items() if end > 0}
        if not behind:
            return
        reader.assign(dict.fromkeys(behind, 0))
        reached = dict.fromkeys(behind, 0)
        while behind:
            if deadline.passed:
                topic, end = next(iter(behind.items()))
                raise IncompleteReadError(topic, partition, reached[topic], end)
            taken = reader.take()
            for message in chain.from_iterable(taken.records.values()):
                take(message)
            reached |= taken.reached
            behind = {topic: end for topic, end in behind.items() if reached[topic] < end}
