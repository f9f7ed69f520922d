"""The single writer of a partition (kafka.md, "Conditional append").

Kafka has no compare-and-set. loom gets one from a writer that is alone by Kafka's own fence: whoever initialised the
partition's transactional id last is the writer. Who *should* write is the opinion of a consumer group; who *does* is
decided by the producer's epoch. A wrong opinion may cost time, never data.

One thread per partition runs tenures: fence, read the partition to its end, serve; fenced or poisoned, again.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from loom.errors import NotOwnerError, StorageWriteError, StoreError
from loom.schemas.records import SchemaNote
from loom.schemas.table import packaged
from loom.stores.kafka.committer import Committer
from loom.stores.kafka.deadline import Deadline
from loom.stores.kafka.debts import Debts
from loom.stores.kafka.group_commit import GroupCommit
from loom.stores.kafka.health import StableWatch
from loom.stores.kafka.keeper import CheckpointState, IndexKeeper
from loom.stores.kafka.pending import Decider, Pending
from loom.stores.kafka.publish import PublishTargets
from loom.stores.kafka.reader import Ends, LogReader
from loom.stores.kafka.records import Records
from loom.stores.kafka.takeover import Takeover
from loom.stores.kafka.tenure import StopError, TenureEnd, Tenures
from loom.stores.kafka.transaction import Limits
from loom.stores.kafka.unended import Unended
from loom.stores.kafka.writer_types import (
    CommittedOp,
    CommittedTransaction,
    StopReason,
    WriterHealth,
    WriterSettings,
    WriterState,
)

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from confluent_kafka.admin import AdminClient

    from loom.errors import LoomError
    from loom.schemas.codec import Codec
    from loom.stores.contracts import Clock
    from loom.stores.index import StreamIndex
    from loom.stores.kafka.lanes import Lane
    from loom.stores.kafka.transaction import Transaction
    from loom.stores.ops import WriteOp

__all__ = [
    "CommittedOp",
    "CommittedTransaction",
    "PartitionWriter",
    "StopReason",
    "WriterHealth",
    "WriterSettings",
    "WriterState",
]

_log = logging.getLogger("loom.kafka.writer")

SLICE_MS: Final = 500
"""Longest wait of a takeover between two looks at whether to stop, and at deadlines that passed."""
STEP_DOWN_MS: Final = 5_000
"""How long a superseded writer reads, to say what became of its last transaction."""
LATE_S: Final = 0.5
_WRITTEN: Final = (
    "loom.Envelope",
    "loom.StreamMark",
    "loom.PartitionMark",
    "loom.Snapshot",
    "loom.AppendRequest",
)
"""Schemas of the records that a writer writes."""


class PartitionWriter:
    """The writer of one partition: one thread, one tenure at a time.

    ``confirm_ownership`` is asked after a rival fenced this writer: True if this node still is the partition's owner in
    the consumer group (a synchronous offset commit at the current generation succeeds). ``on_committed`` gets what each
    transaction made durable, ``on_state`` every change of state; both run on the writer's thread and must not block.
    SERVING is told again after a tenure in which something unknown was found in the log: what is readable may be more
    than ``on_committed`` ever said.
    """

    def __init__(
        self,
        partition: int,
        settings: WriterSettings,
        *,
        index: StreamIndex,
        codec: Codec,
        admin: AdminClient,
        confirm_ownership: Callable[[], bool],
        on_committed: Callable[[CommittedTransaction], None],
        on_state: Callable[[PartitionWriter, WriterState], None],
        clock: Clock,
    ) -> None:
        """Prepare a writer; nothing happens before ``start``. ``admin`` is lent, and asked until the writer has stopped."""
        self.partition = partition
        self.error: LoomError | None = None
        """Why it stopped, where that was an error."""
        self.stop_reason: StopReason | None = None
        self.settings, self._codec, self._index = settings, codec, index
        self._on_committed, self._on_state, self._clock = on_committed, on_state, clock
        catalogue = settings.catalogue
        ends = Ends(admin, partition, settings.bootstrap)
        self._takeover = self._make_takeover(ends, index)
        self._debts = Debts(settings.compaction_lag_ms)
        self._watch = StableWatch(ends, self._takeover.topics, settings.stuck_after_ms)
        self._committer = Committer(str(partition))
        self._keeper = IndexKeeper(index, str(partition), self._sweep)
        self._group = GroupCommit(
            partition=partition,
            index=index,
            records=Records(codec, catalogue, partition, settings.node, clock),
            targets=PublishTargets(admin, settings.publish_topics, settings.max_record_bytes),
            limits=Limits(
                settings.max_ops, settings.max_bytes, settings.max_request_bytes, settings.max_record_bytes
            ),
            takeover=self._takeover,
            debts=self._debts,
            clock=clock,
            commit_deadline_ms=settings.commit_deadline_ms,
            committed=self._committed,
            notes=_notes(codec),
            committer=self._committer,
        )
        self._state = WriterState.STARTING
        self._ended = TenureEnd.POISONED
        """How the last tenure that served ended."""
        self._asked_to_stop: StopReason | None = None
        self._wake = threading.Event()
        self._tenures = Tenures(
            partition=partition,
            settings=settings,
            takeover=self._takeover,
            ends=ends,
            confirm=confirm_ownership,
            look_up=self._look_up,
            step_back=self._step_back,
            pause=self._wake.wait,
            clock=clock,
            make_unended=lambda make_lane: self._make_unended(admin, make_lane),
        )
        self._thread = threading.Thread(target=self._run, name=f"loom-writer-{partition}", daemon=True)

    def _make_takeover(self, ends: Ends, index: StreamIndex) -> Takeover:
        return Takeover(
            partition=self.partition,
            catalogue=self.settings.catalogue,
            codec=self._codec,
            index=index,
            ends=ends,
            make_reader=lambda: self._make_reader(self.partition),
        )

    def _make_unended(self, admin: AdminClient, make_lane: Callable[[int], Lane]) -> Unended:
        return Unended(
            partition=self.partition,
            takeover=self._takeover,
            row=self._index.row,
            ends_of=lambda partition: Ends(admin, partition, self.settings.bootstrap),
            make_reader=lambda partition: self._make_reader(partition, committed=False),
            make_lane=make_lane,
        )

    def _make_reader(self, partition: int, *, committed: bool = True) -> LogReader:
        return LogReader(
            self.settings.bootstrap,
            self.settings.kafka,
            partition,
            f"{self.settings.node}-takeover-{self.partition}",
            timeout_ms=self.settings.transaction_timeout_ms,
            committed=committed,
        )

    # -- any thread ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread and its first takeover."""
        self._thread.start()

    def stop(self, deadline_ms: int) -> bool:
        """Finish the transaction in flight and end; True once the thread has ended, False if the deadline came first.

        Requests that wait are answered with ``NotOwnerError``.
        """
        self._ask_to_stop(StopReason.REVOKED)
        self._thread.join(deadline_ms / 1000)
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """The partition is lost: begin nothing more. Does not wait; a commit under way reports its true outcome."""
        self._ask_to_stop(StopReason.LOST)

    def submit(
        self, op: WriteOp, *, origin: str | None, deadline: float, loop: asyncio.AbstractEventLoop
    ) -> asyncio.Future[Any]:
        """Queue a write; call it on ``loop``'s thread. ``deadline`` is on ``time.monotonic``.

        The future gets the op's result, or: an error of the judge (``WrongHeadError``, ...); ``NotOwnerError``
        (not written: ask the owner); ``StorageWriteError`` or ``PayloadTooLargeError`` (not written);
        ``OutcomeUnknownError`` (settle by event id). A future that is cancelled while its op waits is not written.
        It is answered within a second after ``deadline``, whatever the brokers do.
        """
        pending = Pending(op, deadline, origin, loop.create_future(), loop)
        if self._has_stopped():
            pending.fail(NotOwnerError(self.partition))
        elif self._group.waiting.length() >= self.settings.max_waiting:
            problem = f"{self.settings.max_waiting} requests wait for partition {self.partition}"
            pending.fail(StorageWriteError(pending.stream_id, problem))
        else:
            self._group.waiting.put(pending)
            if self._has_stopped():  # it stopped meanwhile, and may not have seen this one
                pending.fail(NotOwnerError(self.partition))
        assert pending.future is not None
        return pending.future

    def submit_remote(
        self, op: WriteOp, *, source: str, offset: int, reply: Callable[[Any, Exception | None], None]
    ) -> None:
        """Queue a request consumed from ``source`` (``appends`` or ``commands``) at ``offset``; offsets only rise.

        It is applied once: the highest applied offset of the source is recorded in the partition's own mark in the same
        transaction, also for a refused one, and ``reply(result, error)`` runs on the writer's thread after that commit.
        An offset already applied is never applied again: ``reply`` gets the repeat, a refusal, or ``OutcomeUnknownError``.
        A writer that stops does not call ``reply``: the next owner reads the request again.
        """
        self._group.waiting.put(Pending(op, math.inf, source=source, offset=offset, reply=reply))

    def skip_remote(self, *, source: str, offset: int) -> None:
        """Record that an unusable request (it went to ``dead``) at ``offset`` is done with."""
        self._group.waiting.put(Pending(None, math.inf, source=source, offset=offset))

    def decide(self, *, deadline: float, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Resolve once a transaction of this tenure has been committed that was sent after this call.

        Reads that decide wait for it: a superseded writer would answer from stale memory (kafka.md, Reading). If
        nothing is queued, a tick is committed. Fails with ``NotOwnerError`` if the writer stops first, or cannot commit
        before ``deadline``.
        """
        budget_ms = max(0, int((deadline - time.monotonic()) * 1000))
        decider = Decider(loop.create_future(), loop, deadline, budget_ms)
        self._group.waiting.put(decider)
        if self._has_stopped():
            decider.future.set_exception(NotOwnerError(self.partition))
        return decider.future

    def read(self, stream_id: str, from_sequence: int, limit: int) -> list[bytes]:
        """Encoded envelopes as committed, in order. Raises ``NotOwnerError`` unless serving, ``StreamBrokenError``."""
        if self._state is not WriterState.SERVING:
            raise NotOwnerError(self.partition)
        return self._index.encoded(stream_id, from_sequence, limit)

    def applied(self, source: str) -> int:
        """Highest offset of ``source`` that the log says is applied; -1 for none. Known once serving."""
        return self._takeover.applied.get(source, -1)

    @property
    def state(self) -> WriterState:
        """Where the writer stands now."""
        return self._state

    @property
    def tenure(self) -> int:
        """How many tenures this writer began to serve; 0 before the first."""
        return self._tenures.number

    @property
    def saturation(self) -> float:
        """Waiting requests as a part of what one transaction takes; at 1.0 and above the writer is saturated."""
        return self._group.waiting.length() / self.settings.max_ops

    def health(self) -> WriterHealth:
        """How the writer is."""
        return WriterHealth(
            self.partition,
            self._state,
            self._tenures.number,
            self._group.waiting.length(),
            self._watch.stuck,
            tuple(self._takeover.broken.values()),
        )

    def _has_stopped(self) -> bool:
        return self._state is WriterState.STOPPED

    def _ask_to_stop(self, reason: StopReason) -> None:
        self._asked_to_stop = self._asked_to_stop or reason
        self._wake.set()
        self._group.waiting.wake()

    # -- the writer's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._keeper.start()
            self._committer.start()
            self._change(WriterState.TAKING_OVER)
            while self._take(self._ended):
                self._ended = self._group.serve(
                    self._tenures.lanes, lambda: self._asked_to_stop is not None, self._idle
                )
        except Exception as error:  # noqa: BLE001 - whatever it is: the writer stops, and says why
            self.stop_reason = StopReason.FAILED
            self.error = error if isinstance(error, StoreError) else None
            _log.exception("partition %d: its writer failed", self.partition)
        finally:
            self._finish()

    def _finish(self) -> None:
        """Answer everything, let the clients go, and say so."""
        try:
            if self._group.waiting.unsettled:
                self._read_what_became()
            self._tenures.close()
            self._committer.stop()
            self._keeper.stop()
        finally:
            self._change(WriterState.STOPPED)
            self._group.waiting.close()

    def _read_what_became(self) -> None:
        """Say what became of the last transaction; a rival's fence has decided it for good."""
        try:
            self._takeover.read(Deadline.after(STEP_DOWN_MS), lambda: None)
        except StoreError as error:
            _log.warning(
                "partition %d: what became of its last transaction is not known: %s", self.partition, error
            )
        else:
            self._group.waiting.settle(fenced=self._ended is TenureEnd.FENCED)

    def _take(self, after: TenureEnd) -> bool:
        """Begin a tenure after the last one ended so; False to stop (``stop_reason`` says why)."""
        self._keeper.yields = True
        try:
            self._tenures.begin(after)
        except StopError as stop:
            self.stop_reason, self.error = stop.reason, stop.error
            _log.info("partition %d: its writer stops: %s", self.partition, stop)
            return False
        finally:
            self._keeper.yields = False
        takeover = self._takeover
        self._group.waiting.reread()
        self._debts.restore(takeover.owed)
        self._debts.rediscover(takeover.tombstones, takeover.appended)
        takeover.forget()
        if self._state is not WriterState.SERVING or takeover.found:
            self._change(WriterState.SERVING)
        return True

    def _step_back(self) -> None:
        """Nothing is served until a tenure begins."""
        if self._state is WriterState.SERVING:
            self._change(WriterState.TAKING_OVER)

    def _look_up(self) -> None:
        """Between two waits of a takeover: stop if told to, and answer what waited too long."""
        if self._asked_to_stop is not None:
            raise StopError(self._asked_to_stop)
        self._group.waiting.intake()
        self._group.waiting.expire()

    def _idle(self) -> None:
        """Between two transactions."""
        self._watch.look()
        if self._keeper.wants and self._takeover.marked and not self._takeover.broken:
            takeover = self._takeover
            self._keeper.offer(
                CheckpointState(
                    dict(takeover.positions),
                    self._tenures.identity,
                    takeover.beside(self._debts.owed),
                    self._clock(),
                )
            )

    def _sweep(self) -> None:
        """On the keeper's thread: answer what is past its deadline while this thread waits for the brokers."""
        self._group.waiting.answers.sweep(LATE_S)

    def _committed(self, transaction: Transaction) -> None:
        ops = tuple(
            CommittedOp(tuple(verdict.effects), pending.origin)
            for pending, verdict in transaction.accepted
            if verdict.effects
        )
        if ops:
            self._on_committed(
                CommittedTransaction(self.partition, self._tenures.number, ops, transaction.ends)
            )

    def _change(self, state: WriterState) -> None:
        self._state = state
        self._on_state(self, state)


def _notes(codec: Codec) -> dict[str, SchemaNote]:
    """Schemas that a writer keeps with its log, by fingerprint."""
    registered = {schema.fingerprint: number for number, schema in codec.table.bound_ids().items()}
    schemas = (packaged()[name] for name in _WRITTEN)
    return {
        s.fingerprint.hex(): SchemaNote(s.fingerprint.hex(), s.text, registered.get(s.fingerprint))
        for s in schemas
    }
