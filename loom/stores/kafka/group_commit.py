"""Group commit: what waits becomes one transaction, and one transaction's answers go out together.

An answer that rests on committed state is given at once; one that rests on something staged waits for that commit, and
is judged again if it does not come (kafka.md, "Group commit"). After a transaction that did not commit for certain, its
requests wait in front until the next tenure has read the log; then each is judged against what is really there.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from loom.errors import (
    OutcomeUnknownError,
    PayloadTooLargeError,
    PublishRefusedError,
    StorageWriteError,
    WrongHeadError,
)
from loom.stores.kafka.client import Fault
from loom.stores.kafka.deadline import Deadline
from loom.stores.kafka.lanes import LaneFault
from loom.stores.kafka.tenure import TenureEnd
from loom.stores.kafka.transaction import ProduceFault, Transaction
from loom.stores.kafka.waiting import Waiting
from loom.stores.ops import Accepted, Rejected, Repeated, Tick

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from loom.schemas.records import SchemaNote
    from loom.stores.contracts import Clock
    from loom.stores.kafka.committer import Committer, Outcome
    from loom.stores.kafka.debts import Debts
    from loom.stores.kafka.lanes import Lane, Lanes
    from loom.stores.kafka.pending import Pending
    from loom.stores.kafka.publish import PublishTargets
    from loom.stores.kafka.records import Records
    from loom.stores.kafka.takeover import Takeover
    from loom.stores.kafka.transaction import Limits
    from loom.stores.ops import Verdict
    from loom.stores.view import Index, View

_log = logging.getLogger("loom.kafka.writer")

TOGETHER: Final = 2
"""Failed transactions after which a request is tried alone, so that one cannot keep others from being written."""
ATTEMPTS: Final = 4
"""Failed transactions after which a request is given up; publishers have two, the second alone."""
IDLE_S: Final = 0.5
_ABORT_MS: Final = 3_000


class GroupCommit:
    """The loop that turns what waits (``waiting``) into transactions, on the writer's thread."""

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
        committer: Committer,
    ) -> None:
        self._partition, self._index, self._records = partition, index, records
        self._targets, self._limits, self._takeover, self._debts = targets, limits, takeover, debts
        self._clock, self._commit_deadline_ms, self._committed = clock, commit_deadline_ms, committed
        self._notes = notes
        self.waiting = Waiting(partition, self._stands)
        self._turn_alone = False
        self._formed: Transaction | None = None
        self._committer = committer

    # -- the loop --------------------------------------------------------------------------------------------

    def serve(self, lanes: Lanes, stopping: Callable[[], bool], idle: Callable[[], None]) -> TenureEnd:
        """Commit what comes until the tenure ends; ``idle`` is called now and then."""
        while True:
            self.waiting.intake(self._patience_s())
            if stopping():
                self._drop_formed()
                return TenureEnd.STOPPED
            idle()
            due = self._debts.due(self._clock())
            if not (self._formed or self.waiting.line or self.waiting.alone or self.waiting.deciders or due):
                continue
            disturbance = lanes.disturbance()
            if disturbance is not None:
                self._drop_formed()
                _log.info("partition %d: the client reports %s: a new tenure", self._partition, disturbance)
                return TenureEnd.POISONED
            transaction = self._form()
            if transaction.members or self.waiting.deciders or due:
                for topic in due:
                    transaction.add(self._records.tick(topic))
                end = self._commit(lanes, transaction)
                if end is not None:
                    return end
            self.waiting.answers.send()

    def _drop_formed(self) -> None:
        """Take back what was formed and not begun."""
        formed, self._formed = self._formed, None
        if formed is not None:
            self._unform(formed)

    def _patience_s(self) -> float:
        if self._formed or self.waiting.line or self.waiting.alone or self.waiting.deciders:
            return 0.0
        next_due = self._debts.next_due()
        if next_due is None:
            return IDLE_S
        return min(IDLE_S, max(0.001, (next_due - self._clock()) / 1000))

    def _form(self) -> Transaction:
        """The next transaction: what was formed beside the last commit, and what has come since."""
        transaction, self._formed = self._formed or self._new(self._index), None
        if self.waiting.alone and not transaction.members and (self._turn_alone or not self.waiting.line):
            self._turn_alone = False
            self._judge(transaction, self.waiting.alone.popleft(), self._clock())
            return transaction
        self._turn_alone = True
        behind: list[Pending] = []
        held_back = any(p.source is not None for p in self.waiting.alone)
        now = self._clock()
        while self.waiting.line and not transaction.full:
            pending = self.waiting.line.popleft()
            if held_back and pending.source is not None:
                behind.append(pending)  # requests of other nodes never overtake each other
            elif not self._judge(transaction, pending, now):
                self.waiting.line.appendleft(pending)
                break
        self.waiting.put_back(behind)
        return transaction

    def _new(self, view: View) -> Transaction:
        return Transaction(view, self._records, self._targets, self._limits)

    def _form_beside(self, commit: Outcome, below: Transaction) -> Transaction:
        """Form the transaction after ``below`` on top of it, until the outcome of its commit is known."""
        waiting, following = self.waiting, self._new(below.staged)
        if waiting.alone:
            following.close()  # what failed before is tried by the rules of ``_form`` only
        while not commit.done:
            waiting.intake(0.0 if waiting.line and not following.full else IDLE_S)
            now = self._clock()
            while waiting.line and not following.full and not commit.done:
                pending = waiting.line.popleft()
                if not self._judge(following, pending, now):
                    waiting.line.appendleft(pending)
                    following.close()
            waiting.answers.send()
        return following

    def _unform(self, following: Transaction) -> None:
        """Put the requests of a transaction that was never begun in front again."""
        self.waiting.put_back(following.members)

    def _judge(self, transaction: Transaction, pending: Pending, now: int) -> bool:
        """Decide a request; False where it has to wait for the next transaction."""
        if self.waiting.gone(pending):
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
            self.waiting.answers.give(pending, None, verdict.error)
        else:
            self.waiting.answers.give(pending, verdict.result)
        return True

    def _stands(self, pending: Pending) -> bool:
        """Whether a request of a transaction that seemed to fail stands in the log all the same; it is answered."""
        if not pending.tried or pending.op is None:
            return False
        verdict = self._new(self._index).judge(pending, self._clock())
        if isinstance(verdict, Repeated):
            self.waiting.answers.give(pending, verdict.result)
        return isinstance(verdict, Repeated)

    def _answer_applied(self, pending: Pending, now: int) -> None:
        """A request that was applied before is not applied again; only its reply was lost."""
        if pending.op is None:
            return
        verdict = self._new(self._index).judge(pending, now)
        if isinstance(pending.op, Tick):
            self.waiting.answers.give(pending, None)
        elif isinstance(verdict, Repeated):
            self.waiting.answers.give(pending, verdict.result)
        elif isinstance(verdict, Rejected):
            self.waiting.answers.give(pending, None, verdict.error)
        else:
            problem = "it was applied, but its events no longer stand there"
            self.waiting.answers.give(pending, None, OutcomeUnknownError(pending.stream_id, problem))

    # -- one transaction -------------------------------------------------------------------------------------

    def _commit(self, lanes: Lanes, transaction: Transaction) -> TenureEnd | None:
        """Write, commit, answer; None while the tenure goes on."""
        notes = self._own_records(transaction)
        lane = lanes.next()
        try:
            lane.begin()
            transaction.produce(lane)
        except ProduceFault as fault:
            return self._refused(lane, transaction, fault)
        except LaneFault as fault:
            return self._failed(lane, transaction, fault)
        self.waiting.intake()
        transaction.deciders, self.waiting.deciders = self.waiting.deciders, []
        deadline = Deadline.after(self._commit_deadline_ms)
        commit = self._committer.begin(lambda: lane.commit(deadline), self.waiting.wake)
        following = self._form_beside(commit, transaction)
        try:
            commit.result()
        except LaneFault as fault:
            self._unform(following)
            return self._failed(lane, transaction, fault)
        lanes.committed()
        disturbance = lanes.disturbance()
        self._settle(transaction, notes)
        if disturbance is not None:
            # it is committed, but perhaps by a request sent twice: the other may end a later transaction
            _log.info("partition %d: the client reports %s: a new tenure", self._partition, disturbance)
            self._unform(following)
            return TenureEnd.POISONED
        if not following.accepted:
            self._unform(following)  # what rested on this commit can be answered now
        else:
            following.staged.rebase(self._index)
            following.reopen()
            self._formed = following
        return None

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
            self.waiting.answers.give(pending, verdict.result)
        for pending, kept in transaction.held:
            if isinstance(kept, Rejected):
                self.waiting.answers.give(pending, None, kept.error)
            else:
                self.waiting.answers.give(pending, kept.result)
        for decider in transaction.deciders:
            self.waiting.answers.decide(decider)
        self.waiting.answers.send()

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
        self.waiting.deciders = transaction.deciders + self.waiting.deciders
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
                self.waiting.alone.append(pending)
            else:
                again.append(pending)
        self.waiting.put_back(again)
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
