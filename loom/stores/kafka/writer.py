"""The single writer of a partition (kafka.md, "Conditional append").

Kafka has no compare-and-set. loom gets one from a writer that is alone by Kafka's own fence: whoever initialised the
partition's transactional id last is the writer. Who *should* write is the opinion of a consumer group; who *does* is
decided by the producer's epoch. A wrong opinion may cost time, never data.

One thread per partition runs tenures: fence, read the partition to its end, serve; fenced or poisoned, again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


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
    """The partition could not be read to its end within ``takeover_deadline_ms``."""
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
    lanes: int = 1
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
    compaction_lag_ms: int = 86_400_000
    """``max.compaction.lag.ms`` of the log topics: how long after a deletion the tick record is due."""
    publish_topics: frozenset[str] = frozenset()
    """Topics that ``ctx.publish`` may write to."""


class PartitionWriter:
    """The writer of one partition: one thread, one tenure at a time.

    ``confirm_ownership`` is asked after a rival fenced this writer: True if this node still is the partition's owner in
    the consumer group (a synchronous offset commit at the current generation succeeds). ``on_committed`` gets what each
    transaction made durable, ``on_state`` every change of state; both run on the writer's thread and must not block.
    """

    def __init__(
        self,
        partition: int,
        settings: WriterSettings,
        *,
        index: Any,
        codec: Any,
        confirm_ownership: Callable[[], bool],
        on_committed: Callable[[CommittedTransaction], None],
        on_state: Callable[[PartitionWriter, WriterState], None],
        clock: Callable[[], int],
    ) -> None:
        """Prepare a writer; nothing happens before ``start``."""

    def start(self) -> None:
        """Start the thread and its first takeover."""

    def stop(self, deadline_ms: int) -> bool:
        """Finish the transaction in flight and end; True once the thread has ended, False if the deadline came first.

        Requests that wait are answered with ``NotOwnerError``.
        """
        raise NotImplementedError

    def abandon(self) -> None:
        """The partition is lost: begin nothing more. Does not wait; a commit under way reports its true outcome."""

    def submit(
        self, op: Any, *, origin: str | None, deadline: float, loop: asyncio.AbstractEventLoop
    ) -> asyncio.Future[Any]:
        """Queue a write; call it on ``loop``'s thread. ``deadline`` is on ``time.monotonic``.

        The future gets the op's result, or: an error of the judge (``WrongHeadError``, ...); ``NotOwnerError``
        (not written: ask the owner); ``StorageWriteError`` or ``PayloadTooLargeError`` (not written);
        ``OutcomeUnknownError`` (settle by event id). A future that is cancelled while its op waits is not written.
        """
        raise NotImplementedError

    def submit_remote(
        self, op: Any, *, source: str, offset: int, reply: Callable[[Any, Exception | None], None]
    ) -> None:
        """Queue a request consumed from ``source`` (``appends`` or ``commands``) at ``offset``.

        It is applied once: the highest applied offset of the source is recorded in the partition's own mark in the same
        transaction, also for a refused one, and ``reply(result, error)`` runs on the writer's thread after that commit.
        An offset already applied is never applied again: if its events stand, ``reply`` gets the repeat, else nothing.
        A writer that stops does not call ``reply``: the next owner reads the request again.
        """

    def skip_remote(self, *, source: str, offset: int) -> None:
        """Record that an unusable request (it went to ``dead``) at ``offset`` is done with."""

    def decide(self, *, deadline: float, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Resolve once a transaction of this tenure has been committed that was sent after this call.

        Reads that decide wait for it: a superseded writer would answer from stale memory (kafka.md, Reading). If
        nothing is queued, a tick is committed. Fails with ``NotOwnerError`` if the writer stops first.
        """
        raise NotImplementedError

    def read(self, stream_id: str, from_sequence: int, limit: int) -> list[bytes]:
        """Encoded envelopes as committed, in order. Raises ``NotOwnerError`` unless serving, ``StreamBrokenError``."""
        raise NotImplementedError

    def applied(self, source: str) -> int:
        """Highest offset of ``source`` that the log says is applied; -1 for none. Known once serving."""
        raise NotImplementedError

    @property
    def state(self) -> WriterState:
        """Where the writer stands now."""
        raise NotImplementedError

    @property
    def tenure(self) -> int:
        """How many tenures this writer began; 0 before the first."""
        raise NotImplementedError

    @property
    def saturation(self) -> float:
        """Waiting requests as a part of what one transaction takes; at 1.0 and above the writer is saturated."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class CommittedOp:
    """One write that became durable: the op's effects and the label of the handle that asked (None: another node)."""

    effects: tuple[Any, ...]
    origin: str | None


@dataclass(frozen=True, slots=True)
class CommittedTransaction:
    """What one transaction made durable. ``offsets`` has the last offset written per topic."""

    partition: int
    tenure: int
    ops: tuple[CommittedOp, ...]
    offsets: Mapping[str, int]
