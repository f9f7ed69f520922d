"""What a writer is told, and what it tells: settings, states, and what was committed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from loom.topics.catalogue import COMPACTION_LAG_MS, DELETE_RETENTION_MS, Catalogue

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loom.errors import StreamBrokenError
    from loom.stores.kafka.health import StuckOffset
    from loom.stores.ops import Effect


class WriterState(Enum):
    """Where a writer stands. It moves ``STARTING -> TAKING_OVER <-> SERVING -> STOPPED``; STOPPED is final."""

    STARTING = "starting"
    TAKING_OVER = "taking_over"
    SERVING = "serving"
    STOPPED = "stopped"


class StopReason(Enum):
    """Why a writer stopped. All but REVOKED and LOST mean that ownership should leave the group and join again."""

    REVOKED = "revoked"
    """``stop`` was called: the transaction in flight was finished."""
    LOST = "lost"
    """``abandon`` was called: nothing new was begun."""
    FENCED = "fenced"
    """Another writer fenced this one and ``confirm_ownership`` did not confirm this one."""
    CONTENDED = "contended"
    """Two owners fenced each other more often than ``max_retakes``; this one gave way."""
    INCOMPLETE = "incomplete"
    """The partition could not be fenced and read to its end within ``takeover_deadline_ms``."""
    MISMATCH = "mismatch"
    """The partition was made with another number of partitions; see ``PartitionWriter.error``."""
    FAILED = "failed"
    """A fault of loom's own; see ``PartitionWriter.error``."""


@dataclass(frozen=True, slots=True)
class WriterSettings:
    """Bounds of a writer. Times are milliseconds, sizes bytes.

    ``commit_deadline_ms`` < ``transaction_timeout_ms`` (which is also the client's socket timeout): a commit that the
    client sent twice is then always noticed before the call returns (the poison rule).
    """

    bootstrap: str
    topic_prefix: str
    partitions: int
    node: str
    kafka: Mapping[str, Any] = field(default_factory=dict)
    """Any librdkafka property (TLS, SASL) for every client of the writer."""
    lanes: int = 2
    """Transactional ids that it uses in turn, by the rule of :class:`loom.stores.kafka.lanes.Lanes`."""
    max_ops: int = 1000
    """Requests in one transaction."""
    max_bytes: int = 800_000
    """Encoded bytes in one transaction; a single larger request gets a transaction of its own."""
    max_request_bytes: int = 16_000_000
    """A request above this is ``PayloadTooLargeError``."""
    max_record_bytes: int = 1_000_000
    """A record above this is ``PayloadTooLargeError``; not above the broker's ``message.max.bytes``."""
    max_waiting: int = 20_000
    """Requests that may wait for a transaction; more are refused with ``StorageWriteError``."""
    transaction_timeout_ms: int = 10_000
    commit_deadline_ms: int = 8_000
    takeover_deadline_ms: int = 60_000
    """Bound of one takeover, retries included; past it the writer stops with ``INCOMPLETE``."""
    max_retakes: int = 6
    """Tenures lost to a rival in a row (each served for less than ``settled_ms``) before the writer gives way."""
    settled_ms: int = 30_000
    compaction_lag_ms: int = COMPACTION_LAG_MS
    """``max.compaction.lag.ms`` of the log topics: how long after a deletion the tick record is due."""
    checkpoint_max_age_ms: int = DELETE_RETENTION_MS // 2
    """Half of ``delete.retention.ms``: an older checkpoint may have missed tombstones."""
    stuck_after_ms: int = 10_000
    """How long a stable offset may stay below the end before ``health`` names it; above ``transaction_timeout_ms``."""
    publish_topics: frozenset[str] = frozenset()
    """Topics that ``ctx.publish`` may write to."""

    def __post_init__(self) -> None:
        if not 0 < self.commit_deadline_ms < self.transaction_timeout_ms:
            raise ValueError(
                "commit_deadline_ms is not below transaction_timeout_ms: a commit sent twice could go unnoticed"
            )

    @property
    def catalogue(self) -> Catalogue:
        """Names of the topics."""
        return Catalogue(self.topic_prefix, self.partitions)


@dataclass(frozen=True, slots=True)
class CommittedOp:
    """One write that became durable: the op's effects and the label of the handle that asked (None: another node)."""

    effects: tuple[Effect, ...]
    origin: str | None


@dataclass(frozen=True, slots=True)
class CommittedTransaction:
    """What one transaction made durable. ``offsets`` has the last offset written per topic."""

    partition: int
    tenure: int
    ops: tuple[CommittedOp, ...]
    offsets: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class WriterHealth:
    """A writer as an operator sees it. ``broken`` are streams that were stopped, ``stuck`` topics with a stuck end."""

    partition: int
    state: WriterState
    tenure: int
    waiting: int
    stuck: tuple[StuckOffset, ...]
    broken: tuple[StreamBrokenError, ...]
