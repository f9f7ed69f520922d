"""How loom talks to librdkafka: settings of its clients, what their errors mean, and what they say in their log.

A rule of kafka.md stands behind every setting here that a user may not change.
"""

from __future__ import annotations

import logging
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import KafkaError, KafkaException

from loom.errors import BrokerError, StoreError, TopicsError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient

LOST_ANSWER_MS: Final = 10_000
"""How long a client that only reads waits for an answer before it asks again; librdkafka's own minute is a takeover's."""
LOG_KEPT: Final = 64
"""How many lines of one client are kept for a report."""


class Fault(Enum):
    """What an error of a transactional call asks for (pitfalls.md, "Client facts")."""

    REPEAT = "repeat"
    """The same call again."""
    ABORT = "abort"
    """The transaction must be aborted; nothing of it is written."""
    FENCED = "fenced"
    """Another producer has the transactional id now, or the broker ended a transaction that outlived its timeout."""
    REFUSED = "refused"
    """``produce`` did not take the record: it is too large, or the client's queue is full."""
    FATAL = "fatal"
    """Anything else: the producer is not used again."""


def _codes(*names: str) -> frozenset[int]:
    return frozenset(getattr(KafkaError, name) for name in names)


_FENCED: Final = _codes(
    "_FENCED",
    "PRODUCER_FENCED",
    "INVALID_PRODUCER_EPOCH",
    "INVALID_PRODUCER_ID_MAPPING",
    "INVALID_TXN_STATE",
)
_REFUSED: Final = _codes("_QUEUE_FULL", "MSG_SIZE_TOO_LARGE")
_UNREACHABLE: Final = _codes(
    "_TRANSPORT",
    "_ALL_BROKERS_DOWN",
    "_TIMED_OUT",
    "_TIMED_OUT_QUEUE",
    "_MSG_TIMED_OUT",
    "_RESOLVE",
    "_SSL",
    "_AUTHENTICATION",
    "_WAIT_COORD",
    "_NOENT",  # no leader is known: what an admin client says when nobody answers it
    "_DESTROY",
    "FENCED_LEADER_EPOCH",
    "UNKNOWN_LEADER_EPOCH",
    "OFFSET_NOT_AVAILABLE",
    "REQUEST_TIMED_OUT",
    "NETWORK_EXCEPTION",
    "BROKER_NOT_AVAILABLE",
    "LEADER_NOT_AVAILABLE",
    "NOT_LEADER_FOR_PARTITION",
    "REPLICA_NOT_AVAILABLE",
    "NOT_ENOUGH_REPLICAS",
    "NOT_ENOUGH_REPLICAS_AFTER_APPEND",
    "COORDINATOR_NOT_AVAILABLE",
    "COORDINATOR_LOAD_IN_PROGRESS",
    "NOT_COORDINATOR",
    "SASL_AUTHENTICATION_FAILED",
)
_TOPICS: Final = _codes(
    "_UNKNOWN_TOPIC",
    "_UNKNOWN_PARTITION",
    "UNKNOWN_TOPIC_OR_PART",
    "UNKNOWN_TOPIC_ID",
    "TOPIC_AUTHORIZATION_FAILED",
    "TOPIC_EXCEPTION",
    "INCONSISTENT_TOPIC_ID",
)


def kafka_error(raised: BaseException) -> KafkaError | None:
    """Return the client's error inside ``raised``, None where it holds none."""
    found = raised.args[0] if isinstance(raised, KafkaException) and raised.args else None
    return found if isinstance(found, KafkaError) else None


def classify(raised: BaseException) -> Fault:
    """Say what an exception of a transactional call asks for; what is not known is FATAL."""
    if isinstance(raised, BufferError):
        return Fault.REFUSED
    error = kafka_error(raised)
    if error is None:
        return Fault.FATAL
    asked = (
        (error.code() in _FENCED, Fault.FENCED),
        (error.fatal(), Fault.FATAL),
        (error.txn_requires_abort(), Fault.ABORT),
        (error.retriable(), Fault.REPEAT),
        (error.code() in _REFUSED, Fault.REFUSED),
    )
    return next((fault for holds, fault in asked if holds), Fault.FATAL)


def name_of(raised: BaseException) -> str:
    """Short name of an error for messages and logs; never the text of a foreign one, which may quote a payload."""
    error = kafka_error(raised)
    return type(raised).__name__ if error is None else str(error.name())


def let_go(client: Producer | AdminClient) -> None:
    """End a client, its threads and its connections, whoever still refers to it; idempotent.

    Not from a callback of the client's, and never a lane: what a producer holds is flushed first, and its transaction
    aborted.
    """
    client.__exit__(None, None, None)


def store_error(raised: BaseException, doing: str, bootstrap: str) -> StoreError:
    """Translate an exception of a Kafka client into an error of loom's tree.

    Args:
        raised: what the client raised.
        doing: what was tried, as in "cannot <doing>".
        bootstrap: address of the brokers, to name in the message.
    """
    error = kafka_error(raised)
    code = None if error is None else error.code()
    if code in _UNREACHABLE:
        return UnreachableError("Kafka", bootstrap, "bootstrap", name_of(raised))
    if code in _TOPICS:
        return TopicsError(
            (f"cannot {doing}: {name_of(raised)}",), "run `loom topics check`, and check topic_prefix"
        )
    return BrokerError(doing, name_of(raised))


def producer_config(
    bootstrap: str,
    kafka: Mapping[str, Any],
    *,
    transactional_id: str,
    client_id: str,
    timeout_ms: int,
    max_record_bytes: int,
) -> dict[str, Any]:
    """Settings of a transactional producer; those after ``**kafka`` are not the user's to change."""
    return {
        "linger.ms": 0,
        "compression.type": "lz4",
        "reconnect.backoff.ms": FIRST_RECONNECT_MS,
        "queue.buffering.max.messages": 500_000,
        "queue.buffering.max.kbytes": 131_072,
        "message.max.bytes": max_record_bytes + RECORD_OVERHEAD,
        **kafka,
        "bootstrap.servers": bootstrap,
        "client.id": client_id,
        "transactional.id": transactional_id,
        "enable.idempotence": True,
        "acks": "all",
        # a request that the client would send twice by itself outlives the commit deadline, so it is always noticed
        "transaction.timeout.ms": timeout_ms,
        "socket.timeout.ms": timeout_ms,
        # the Java default, for publishing beside Java producers; loom's own topics are given their partition
        "partitioner": "murmur2_random",
        "retry.backoff.ms": 50,
        "socket.nagle.disable": True,
        # disconnects are told by the log alone: error_cb stays silent
        "log.connection.close": True,
        "log_level": 6,
    }


FIRST_RECONNECT_MS: Final = 10
"""A client moves from the bootstrap address to the broker behind it by a second connection: not after 100 ms."""
LOOKS: Final = 2
"""Metadata requests after which a client knows the brokers, and is no more on its bootstrap connection.

It gives that one up as soon as it knows them; what it had asked on it (its coordinator, an offset) is asked again only
after 500 ms. So a client that shall be quick looks first.
"""
RECORD_OVERHEAD: Final = 4_096
"""Room for key, headers and framing of a record of the largest permitted value."""


def admin_config(
    bootstrap: str, kafka: Mapping[str, Any], *, client_id: str, timeout_ms: int = LOST_ANSWER_MS
) -> dict[str, Any]:
    """Settings of a client that only asks; ``timeout_ms`` bounds the wait for one lost answer."""
    return {
        "reconnect.backoff.ms": FIRST_RECONNECT_MS,
        "log_level": 2,
        **kafka,
        "bootstrap.servers": bootstrap,
        "client.id": client_id,
        "socket.timeout.ms": timeout_ms,
        "socket.nagle.disable": True,
    }


def reader_config(
    bootstrap: str,
    kafka: Mapping[str, Any],
    *,
    client_id: str,
    timeout_ms: int = LOST_ANSWER_MS,
    committed: bool = True,
) -> dict[str, Any]:
    """Settings of a consumer that reads assigned partitions to an end, in no group; ``timeout_ms`` as in ``admin_config``."""
    return {
        "reconnect.backoff.ms": FIRST_RECONNECT_MS,
        "fetch.wait.max.ms": 20,
        "fetch.message.max.bytes": 4_194_304,
        "queued.max.messages.kbytes": 65_536,
        # a client whose queue was full asks for more only after this; its default, a second, is ten times the reading
        "fetch.queue.backoff.ms": 10,
        "log_level": 3,
        **kafka,
        "bootstrap.servers": bootstrap,
        "client.id": client_id,
        "group.id": f"{client_id}-unused",
        "socket.timeout.ms": timeout_ms,
        "isolation.level": "read_committed" if committed else "read_uncommitted",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        # offset 0 is below the start of a log whose head was deleted
        "auto.offset.reset": "earliest",
        "allow.auto.create.topics": False,
        "socket.nagle.disable": True,
    }


class ClientLog(logging.Handler):
    """What one producer says in its log: the only place where it tells of a retry, a timeout or a cut connection.

    Lines arrive while the producer is polled, on the polling thread; ``poll(0)`` brings what is due. A *disturbance* is
    any line of severity INFO or worse that is not known to be harmless: what is not known is not trusted (kafka.md,
    "The poison rule"). A client leaves out a line that it has just logged, so a disturbance counts from the start of the
    producer, not from the start of a transaction.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.INFO)
        self.lines: deque[str] = deque(maxlen=LOG_KEPT)
        self.disturbance: str | None = None
        self.ready = False
        """Set once the producer is initialised: until then it may well ask for its id more than once."""
        # a logger of the client's own, in no registry: it goes when the client goes
        self.logger = logging.Logger(name, logging.INFO)  # noqa: LOG001
        self.logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line of the client."""
        line = record.getMessage()
        self.lines.append(line)
        facility = line.split(" ", 1)[0]
        if self.disturbance is None and not self._harmless(facility, line):
            self.disturbance = facility

    def _harmless(self, facility: str, line: str) -> bool:
        if facility == "CONFWARN" or (facility == "GETPID" and not self.ready):
            return True
        # a broker that cannot be reached has no request of ours: those it had were lost with a line of their own
        return facility == "FAIL" and any(said in line for said in _NOT_CONNECTED)


_NOT_CONNECTED: Final = (": Connect to ", "Failed to resolve")
