"""Ends of a partition's topics, and a consumer that reads to them in no group."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import OffsetSpec

from loom.errors import UnreachableError
from loom.stores.kafka.client import LOOKS, LOST_ANSWER_MS, reader_config, store_error

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future

    from confluent_kafka.admin import AdminClient

BATCH: Final = 500
"""Messages taken from the client at once: few enough to be still in the processor's cache when they are let go."""
END_OF_PARTITION: Final[int] = KafkaError._PARTITION_EOF  # noqa: SLF001 - the client's name for it
_POLL_S: Final = 0.01
"""The client waits that long for a batch to fill, so the last one costs it."""
_REQUEST_S: Final = 5.0
_LASTING: Final = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.OFFSET_OUT_OF_RANGE,
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001 - the client's names for them
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
        KafkaError._AUTO_OFFSET_RESET,  # noqa: SLF001
    }
)
"""Errors of a partition that do not go away by themselves."""


class Ends:
    """Offsets of a partition's topics as the brokers know them now."""

    def __init__(self, admin: AdminClient, partition: int, bootstrap: str) -> None:
        self._admin, self._partition, self._bootstrap = admin, partition, bootstrap

    def written(self, topics: Sequence[str]) -> dict[str, int]:
        """Ends of the logs, open transactions included.

        Raises:
            UnreachableError, TopicsError, BrokerError: the brokers do not say.
        """
        return self._answer(topics, IsolationLevel.READ_UNCOMMITTED)

    def stable(self, topics: Sequence[str]) -> dict[str, int]:
        """Ends below which no transaction is open; raises as ``written``."""
        return self._answer(topics, IsolationLevel.READ_COMMITTED)

    def identity(self, topics: Sequence[str], partitions: int) -> dict[str, Any]:
        """What makes this log this log: the cluster, the topics' own ids, and P; raises as ``written``."""
        try:
            described = self._admin.describe_topics(TopicCollection(list(topics)), request_timeout=_REQUEST_S)
            cluster = self._admin.describe_cluster(request_timeout=_REQUEST_S).result(_REQUEST_S + 1)
            ids = {topic: str(found.result(_REQUEST_S + 1).topic_id) for topic, found in described.items()}
        except (KafkaException, TimeoutError) as error:
            raise store_error(error, "look at the topics", self._bootstrap) from None
        return {"cluster": cluster.cluster_id, "topics": ids, "partitions": partitions}

    def ask(self, topics: Sequence[str], level: IsolationLevel) -> dict[str, Future[Any]]:
        """Ask for ends without waiting; each answer has an ``offset``."""
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        wanted = {TopicPartition(topic, self._partition): latest for topic in topics}
        asked = self._admin.list_offsets(wanted, isolation_level=level, request_timeout=_REQUEST_S)
        return {place.topic: future for place, future in asked.items()}

    def _answer(self, topics: Sequence[str], level: IsolationLevel) -> dict[str, int]:
        for last in (False, True):
            try:
                found = {t: int(f.result(_REQUEST_S + 1).offset) for t, f in self.ask(topics, level).items()}
            except (KafkaException, TimeoutError) as error:
                problem = store_error(error, "read the ends of the log", self._bootstrap)
            else:
                if min(found.values()) >= 0:
                    return found
                # what the client gives where it got no answer; as an end it would pass for a log that is read already
                problem = UnreachableError("Kafka", self._bootstrap, "bootstrap", "the ends were not told")
            if not last:
                # it learns of a new leader, or of its new epoch, only when it is told to look
                with contextlib.suppress(KafkaException):
                    self._admin.list_topics(timeout=_REQUEST_S)
        raise problem


class Taken(NamedTuple):
    """Records that came, per topic in log order; and where the stable end of a topic was met, its position.

    That is the next offset to read, whatever control records and aborted data lie before it.
    """

    records: dict[str, list[Any]]
    ends: dict[str, int]

    @property
    def reached(self) -> dict[str, int]:
        """Next offset to read of every topic that got further."""
        upto = {topic: records[-1].offset() + 1 for topic, records in self.records.items()}
        return {topic: max(upto.get(topic, 0), self.ends.get(topic, 0)) for topic in upto | self.ends}


class LogReader:
    """A consumer of one partition of some topics, by default of committed records only; it belongs to no group."""

    def __init__(
        self,
        bootstrap: str,
        kafka: Mapping[str, Any],
        partition: int,
        client_id: str,
        *,
        timeout_ms: int = LOST_ANSWER_MS,
        committed: bool = True,
    ) -> None:
        self._partition, self._bootstrap = partition, bootstrap
        self._warm = False
        self._consumer = Consumer(
            reader_config(bootstrap, kafka, client_id=client_id, timeout_ms=timeout_ms, committed=committed)
        )

    def assign(self, starts: Mapping[str, int]) -> None:
        """Read these topics, each from its offset, and no others."""
        for _ in range(LOOKS if not self._warm else 0):
            with contextlib.suppress(KafkaException):
                self._consumer.list_topics(next(iter(starts)), timeout=_REQUEST_S)
        self._warm = True
        self._consumer.assign([TopicPartition(t, self._partition, at) for t, at in starts.items()])

    def take(self) -> Taken:
        """Take what has come within a moment.

        Raises:
            StoreError: an error that does not go away by itself.
        """
        try:
            messages = self._consumer.consume(BATCH, _POLL_S)
        except KafkaException as raised:
            raise store_error(raised, "read the log", self._bootstrap) from None
        records: dict[str, list[Any]] = {}
        ends: dict[str, int] = {}
        message: Any
        for message in messages:
            error, topic = message.error(), message.topic()
            if error is None:
                if topic in records:
                    records[topic].append(message)
                else:
                    records[topic] = [message]
            elif error.code() == END_OF_PARTITION:
                ends[topic] = message.offset()
            elif error.code() in _LASTING or error.fatal():
                raise store_error(KafkaException(error), "read the log", self._bootstrap)
        return Taken(records, ends)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._consumer.close()
