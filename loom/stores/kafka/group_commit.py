"""Group commit: what waits becomes one transaction, and one transaction's answers go out together.

An answer that rests on committed state is given at once; one that rests on something staged waits for that commit, and
is judged again if it does not come (kafka.md, "Group commit"). After a transaction that did not commit for certain, its
requests wait in front until the next tenure has read the log; then each is judged against what is really there.
"""

from __future__ import annotations

import logging
import queue
from collections import deque
from typing import TYPE_CHECKING, Final

from loom.errors import (
    NotOwnerError,
    OutcomeUnknownError,
    PayloadTooLargeError,
    PublishRefusedError,
    StorageWriteError,
    WrongHeadError,
)
from loom.stores.kafka.client import Fault
from loom.stores.kafka.deadline import Deadline
from loom.stores.kafka.lanes import LaneFault
from loom.stores.kafka.pending import Answers, Decider, Pending
from loom.stores.kafka.tenure import TenureEnd
from loom.stores.kafka.transaction import ProduceFault, Transaction
from loom.stores.ops import Accepted, Rejected, Repeated, Tick

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from loom.errors import LoomError
    from loom.schemas.records import SchemaNote
    from loom.stores.contracts import Clock
    from loom.stores.kafka.debts import Debts
    from loom.stores.kafka.lanes import Lane, Lanes
    from loom.stores.kafka.publish import PublishTargets
    from loom.stores.kafka.records import Records
    from loom.stores.kafka.takeover import Takeover
    from loom.stores.kafka.transaction import Limits
    from loom.stores.ops import Verdict
    from loom.stores.rows import Index

_log = logging.getLogger("loom.kafka.writer")

TOGETHER: Final = 2
"""Failed transactions after which a request is tried alone, so that one cannot keep others from being written."""
ATTEMPTS: Final = 4
"""Failed transactions after which a request is given up; publishers have two, the second alone."""
IDLE_S: Final = 0.5
_ABORT_MS: Final = 3_000


class GroupCommit:
    """The queue of a writer, and the loop that empties it. Only ``put`` and ``length`` are for other threads."""

    def __init__(
        self,
        *,
        partition: int,
        index: Index,
        records: Records,
        targets: PublishTargets,
        limits: Limits,
        takeover: Takeover,
        debts: Debts,
        clock: Clock,
        commit_deadline_ms: int,
        committed: Callable[[Transaction], None],
        notes: Mapping[str, SchemaNote],
    ) -> None:
        self._partition, self._index, self._records = partition, index, records
        self._targets, self._limits, self._takeover, self._debts = targets, limits, takeover, debts
        self._clock, self._commit_deadline_ms, self._committed = clock, commit_deadline_ms, committed
        self._notes = notes
        self._queue: queue.SimpleQueue[Pending | Decider | None] = queue.SimpleQueue()
        self._waiting: deque[Pending] = deque()
        self._alone: deque[Pending] = deque()
        self._deciders: list[Decider] = []
        self._turn_alone = False
        self.answers = Answers()

    # -- the queue -------------------------------------------------------------------------------------------

    def put(self, item: Pending | Decider | None) -> None:
        """Queue a write or a deciding read; None only wakes the writer. From any thread."""
        if item is not None and item.future is not None:
            self.answers.expect(item)
        self._queue.put(item)

    def length(self) -> int:
        """How much waits, roughly. From any thread."""
        return self._queue.qsize() + len(self._waiting) + len(self._alone)

    def intake(self, patience_s: float) -> None:
        """Take what was queued; wait for something up to ``patience_s`` if nothing was."""
        try:
            item = self._queue.get(timeout=patience_s) if patience_s > 0 else self._queue.get_nowait()
            while True:
                if type(item) is Pending:
                    self._waiting.append(item)
                elif type(item) is Decider:
                    self._deciders.append(item)
                item = self._queue.get_nowait()
        except queue.Empty:
            return

    def expire(self) -> None:
        """Answer whatever waited past its deadline, and send the answers."""
        self._waiting = deque(p for p in self._waiting if not self._gone(p))
        self._alone = deque(p for p in self._alone if not self._gone(p))
        self._deciders = [d for d in self._deciders if not d.future.done()]
        self.answers.send()

    def reread(self) -> None:
        """The log was read to its end behind a fence: nothing that waits is unknown any more, it is there or not."""
        for pending in (*self._waiting, *self._alone):
            pending.unknown = False

    def settle_unknown(self, *, fenced: bool) -> None:
        """The log was read to its end: answer what is there. Behind a rival's fence, the rest was not written."""
        if fenced:
            self.reread()
        self._waiting = deque(p for p in self._waiting if not self._stands(p))
        self._alone = deque(p for p in self._alone if not self._stands(p))
        self.answers.send()

    def close(self) -> None:
        """Answer everything that waits: this writer will not write it."""
        self.intake(0)
        for pending in (*self._waiting, *self._alone):
            if pending.source is not None:
                continue  # the next owner reads the request again
            error: LoomError = NotOwnerError(self._partition)
            if pending.unknown:
                error = OutcomeUnknownError(pending.stream_id, "its writer stopped meanwhile")
            self.answers.give(pending, None, error)
        for decider in self._deciders:
            self.answers.decide(decider, NotOwnerError(self._partition))
        self._waiting.clear()
        self._alone.clear()
        self._deciders.clear()
        self.answers.abandon(self._partition)

    @property
    def unsettled(self) -> bool:
        """Whether the outcome of anything that waits is unknown."""
        return any(p.unknown for p in (*self._waiting, *self._alone))

    def _gone(self, pending: Pending) -> bool:
        """Whether a request is no longer to be tried; it is answered."""
        if pending.cancelled:
            self.answers.forget(pending)
            return True
        if not pending.expired:
            return False
        problem = "its deadline passed while it waited for the log"
        if pending.unknown:
            self.answers.give(pending, None, OutcomeUnknownError(pending.stream_id, problem))
        elif not self._stands(pending):
            self.answers.give(pending, None, StorageWriteError(pending.stream_id, problem))
        return True

    def _stands(self, pending: Pending) -> bool:
        """Whether a request of a transaction that seemed to fail stands in the log all the same; it is answered."""
        if not pending.tried or pending.op is None:
            return False
        view = Transaction(self._index, self._records, self._targets, self._limits)
        verdict = view.judge(pending, self._clock())
        if isinstance(verdict, Repeated):
            self.answers.give(pending, verdict.result)
        return isinstance(verdict, Repeated)

    # -- the loop --------------------------------------------------------------------------------------------

    def serve(self, lanes: Lanes, stopping: Callable[[], bool], idle: Callable[[], None]) -> TenureEnd:
        """Commit what comes until the tenure ends; ``idle`` is called now and then."""
        while True:
            self.intake(self._patience_s())
            if stopping():
                return TenureEnd.STOPPED
            idle()
            due = self._debts.due(self._clock())
            if not (self._waiting or self._alone or self._deciders or due):
                continue
            disturbance = lanes.disturbance()
            if disturbance is not None:
                _log.info("partition %d: the client reports %s: a new tenure", self._partition, disturbance)
                return TenureEnd.POISONED
            transaction = self._form()
            if transaction.members or self._deciders or due:
                for topic in due:
                    transaction.add(self._records.tick(topic))
                end = self._commit(lanes, transaction)
                if end is not None:
                    return end
            self.answers.send()

    def _patience_s(self) -> float:
        if self._waiting or self._alone or self._deciders:
            return 0.0
        next_due = self._debts.next_due()
        if next_due is None:
            return IDLE_S
        return min(IDLE_S, max(0.001, (next_due - self._clock()) / 1000))

    def _form(self) -> Transaction:
        transaction = Transaction(self._index, self._records, self._targets, self._limits)
        now = self._clock()
        if self._alone and (self._turn_alone or not self._waiting):
            self._turn_alone = False
            self._judge(transaction, self._alone.popleft(), now)
            return transaction
        self._turn_alone = True
        behind: list[Pending] = []
        held_back = any(p.source is not None for p in self._alone)
        while self._waiting and not transaction.full:
            pending = self._waiting.popleft()
            if held_back and pending.source is not None:
                behind.append(pending)  # requests of other nodes never overtake each other
            elif not self._judge(transaction, pending, now):
                self._waiting.appendleft(pending)
                break
        self._waiting.extendleft(reversed(behind))
        return transaction

    def _judge(self, transaction: Transaction, pending: Pending, now: int) -> bool:
        """Decide a request; False where it has to wait for the next transaction."""
        if self._gone(pending):
            return True
        if pending.source is not None and pending.offset <= self._takeover.applied.get(pending.source, -1):
            self._answer_applied(pending, now)
            return True
        refusal = pending.refusal
        if refusal is not None and self._stands(pending):
            return True
        verdict = Rejected(refusal) if refusal is not None else transaction.judge(pending, now)
        if verdict is None:
            return False
        if isinstance(verdict, Accepted):
            return True
        if verdict.on_staged or pending.source is not None or _knows_more(verdict):
            transaction.hold(pending, verdict)
        elif isinstance(verdict, Rejected):
            self.answers.give(pending, None, verdict.error)
        else:
            self.answers.give(pending, verdict.result)
        return True

    def _answer_applied(self, pending: Pending, now: int) -> None:
        """A request that was applied before is not applied again; only its reply was lost."""
        if pending.op is None:
            return
        verdict = Transaction(self._index, self._records, self._targets, self._limits).judge(pending, now)
        if isinstance(pending.op, Tick):
            self.answers.give(pending, None)
        elif isinstance(verdict, Repeated):
            self.answers.give(pending, verdict.result)
        elif isinstance(verdict, Rejected):
            self.answers.give(pending, None, verdict.error)
        else:
            problem = "it was applied, but its events no longer stand there"
            self.answers.give(pending, None, OutcomeUnknownError(pending.stream_id, problem))

    # -- one transaction -------------------------------------------------------------------------------------

    def _commit(self, lanes: Lanes, transaction: Transaction) -> TenureEnd | None:
        """Write, commit, answer; None while the tenure goes on."""
        notes = self._own_records(transaction)
        lane = lanes.next()
        try:
            lane.begin()
            transaction.produce(lane)
            self.intake(0)
            transaction.deciders, self._deciders = self._deciders, []
            lane.commit(Deadline.after(self._commit_deadline_ms))
        except ProduceFault as fault:
            return self._refused(lane, transaction, fault)
        except LaneFault as fault:
            return self._failed(lane, transaction, fault)
        lanes.committed()
        disturbance = lanes.disturbance()
        self._settle(transaction, notes)
        if disturbance is None:
            return None
        # it is committed, but perhaps by a request sent twice: the other may end a later transaction
        _log.info("partition %d: the client reports %s: a new tenure", self._partition, disturbance)
        return TenureEnd.POISONED

    def _own_records(self, transaction: Transaction) -> Mapping[str, SchemaNote]:
        """Add what the writer says of itself: schemas new to the log, and its mark where that has changed."""
        known = self._takeover.notes
        notes = {fingerprint: note for fingerprint, note in self._notes.items() if fingerprint not in known}
        for note in notes.values():
            transaction.add(self._records.schema_note(note))
        if transaction.offsets or not transaction.records or not self._takeover.marked:
            transaction.add(self._records.partition_mark({**self._takeover.applied, **transaction.offsets}))
        return notes

    def _settle(self, transaction: Transaction, notes: Mapping[str, SchemaNote]) -> None:
        takeover = self._takeover
        takeover.wrote(transaction.ends)
        takeover.applied.update(transaction.offsets)
        takeover.marked = True
        takeover.notes.update(notes)
        self._debts.committed(transaction.written, transaction.deleted, self._clock())
        try:
            self._index.apply(transaction.staged.effects)
            self._committed(transaction)
        finally:  # it is durable, whatever became of it here
            self._answer(transaction)

    def _answer(self, transaction: Transaction) -> None:
        for pending, verdict in transaction.accepted:
            self.answers.give(pending, verdict.result)
        for pending, kept in transaction.held:
            if isinstance(kept, Rejected):
                self.answers.give(pending, None, kept.error)
            else:
                self.answers.give(pending, kept.result)
        for decider in transaction.deciders:
            self.answers.decide(decider)
        self.answers.send()

    def _refused(self, lane: Lane, transaction: Transaction, fault: ProduceFault) -> TenureEnd | None:
        """``produce`` raised: nothing of the transaction may be seen; the culprit is told, the others go again."""
        culprit = fault.pending
        if culprit is not None and fault.code == "MSG_SIZE_TOO_LARGE":
            culprit.refusal = PayloadTooLargeError(
                culprit.stream_id, fault.size, self._limits.max_record_bytes
            )
        elif culprit is not None and fault.fault is None:
            culprit.refusal = StorageWriteError(culprit.stream_id, f"a record is no record ({fault.code})")
        self._requeue(transaction, counts=True, unknown=False, code=fault.code)
        if fault.fault is Fault.FENCED:
            return TenureEnd.FENCED
        if fault.fault not in {Fault.REFUSED, None}:
            return TenureEnd.POISONED
        try:
            lane.abort(Deadline.after(_ABORT_MS))
        except LaneFault as failed:
            return TenureEnd.FENCED if failed.fault is Fault.FENCED else TenureEnd.POISONED
        return None

    def _failed(self, lane: Lane, transaction: Transaction, fault: LaneFault) -> TenureEnd:
        """The commit failed: what was written is read again by the next tenure, whatever the client makes of it."""
        _log.warning("partition %d: %s", self._partition, fault)
        self._deciders = transaction.deciders + self._deciders
        blamed = fault.fault in {Fault.ABORT, Fault.REPEAT}
        self._requeue(transaction, counts=blamed, unknown=True, code=fault.code)
        if fault.fault is Fault.FENCED:
            return TenureEnd.FENCED
        if fault.fault is Fault.ABORT:
            try:
                lane.abort(Deadline.after(_ABORT_MS))
            except LaneFault as failed:
                _log.info("partition %d: %s", self._partition, failed)
        return TenureEnd.DOUBTFUL

    def _requeue(self, transaction: Transaction, *, counts: bool, unknown: bool, code: str) -> None:
        """Put the requests of a transaction that failed in front again; ``counts`` blames them for it."""
        again: list[Pending] = []
        for pending in transaction.members:
            publishes = pending.published
            pending.unknown = unknown
            pending.tried = pending.tried or unknown
            pending.failures += counts or bool(publishes)
            if publishes:
                self._judge_publisher(pending, sorted(publishes), code)
            elif pending.failures > ATTEMPTS and pending.refusal is None:
                pending.refusal = StorageWriteError(
                    pending.stream_id, f"{ATTEMPTS} transactions failed ({code})"
                )
            if pending.refusal is None and (publishes or pending.failures >= TOGETHER):
                self._alone.append(pending)
            else:
                again.append(pending)
        self._waiting.extendleft(reversed(again))
        self._turn_alone = False

    def _judge_publisher(self, pending: Pending, topics: list[str], code: str) -> None:
        for topic in topics:
            self._targets.forget(topic)
        if pending.failures >= TOGETHER and pending.refusal is None:
            pending.refusal = PublishRefusedError(
                topics[0], f"the transaction failed twice, the second time alone ({code})", "check the topic"
            )


def _knows_more(verdict: Verdict) -> bool:
    """Whether the caller saw more of the stream than this writer has: then it is to prove that it is the writer still."""
    error = verdict.error if isinstance(verdict, Rejected) else None
    return isinstance(error, WrongHeadError) and error.expected > error.head
