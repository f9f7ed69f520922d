"""Every write of every event store is decided here, without I/O (docs/architecture.md, "Stores").

A store forms a transaction: it makes a ``Staged`` over its ``Index``, hands it one ``WriteOp`` after another, and gets
a verdict on each. What was accepted is staged and seen by the ops after it. When the transaction has committed, the
store gives ``staged.effects`` to ``Index.apply``; when it aborted, it drops the ``Staged`` and judges the ops again.

Sizes are judged by whoever encodes: the ``admit`` hook gets the effects of an op before they are staged, may encode them
(``PutEvent.encoded``) and refuses the op by raising a ``LoomError``, say ``PayloadTooLargeError``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from loom.errors import (
    ExecutionAlreadyExistsError,
    ExecutionNotFoundError,
    InboxFullError,
    InvalidInputError,
    LoomError,
    StaleFenceError,
    WrongHeadError,
)
from loom.ids import inbox_topic, routing_id
from loom.schemas.envelope import Envelope
from loom.stores.contracts import NO_EVENTS, Appended, Snapshot, StreamAppend
from loom.stores.ops import (
    Accepted,
    AcquireFence,
    AppendOps,
    CopyPrefix,
    Delete,
    DeleteSnapshot,
    DropEvent,
    DropSnapshot,
    Effect,
    PutEvent,
    PutMark,
    PutSnapshot,
    Rejected,
    Repeated,
    SaveSnapshot,
    SendOut,
    Tick,
    Truncate,
    Verdict,
    WriteOp,
)
from loom.stores.rows import RECENT_IDS, Index, StreamRow, View, new_row, observation_of

__all__ = [
    "RECENT_IDS",
    "Accepted",
    "AcquireFence",
    "AppendOps",
    "CopyPrefix",
    "Delete",
    "DeleteSnapshot",
    "DropEvent",
    "DropSnapshot",
    "Effect",
    "Index",
    "PutEvent",
    "PutMark",
    "PutSnapshot",
    "Rejected",
    "Repeated",
    "SaveSnapshot",
    "SendOut",
    "Staged",
    "StreamRow",
    "Tick",
    "Truncate",
    "Verdict",
    "View",
    "WriteOp",
    "new_row",
]

Admit = Callable[[list[Effect]], None]

_UNKNOWN_PLACE: Final = -1


class Staged:
    """One transaction being formed: the state of ``base`` plus what was accepted so far.

    ``base`` is an index, or another ``Staged`` whose transaction is not settled yet. ``on_staged`` of a verdict says
    that it would not stand on committed state alone. Not thread-safe; ``base`` must not change meanwhile.
    """

    __slots__ = ("_admit", "_base", "_events", "_root", "_rows", "_snapshots", "effects")

    def __init__(self, base: View, admit: Admit | None = None) -> None:
        self._base = base
        self._root: View = base._root if isinstance(base, Staged) else base  # noqa: SLF001 - of the same class
        self._admit = admit
        self._rows: dict[str, StreamRow] = {}
        self._events: dict[str, list[Envelope]] = {}
        self._snapshots: dict[str, int] = {}
        self.effects: list[Effect] = []

    def judge(self, op: WriteOp, now_ms: int) -> Verdict:
        """Decide ``op`` as of everything accepted so far; stage it if it is accepted.

        ``now_ms`` becomes the timestamp of its events, unless the stream is already later.
        """
        draft = _Draft(self)
        verdict = _decide(draft, op, now_ms)
        if isinstance(verdict, Accepted):
            if self._admit is not None:
                try:
                    self._admit(verdict.effects)
                except LoomError as refused:
                    return Rejected(refused)
            self._stage(draft)
            return verdict
        settled = _decide(_Draft(self._root), op, now_ms)
        if _stands(settled, verdict):
            return settled
        verdict.on_staged = True
        return verdict

    def discard(self) -> None:
        """Forget everything staged (the transaction aborted)."""
        self._rows.clear()
        self._events.clear()
        self._snapshots.clear()
        self.effects = []

    def row(self, stream_id: str) -> StreamRow | None:
        """As ``Index.row``, with what is staged."""
        row = self._rows.get(stream_id)
        return self._base.row(stream_id) if row is None else row

    def event_ids(self, stream_id: str, first: int, last: int) -> list[str]:
        """As ``Index.event_ids``, with what is staged."""
        return [e.id for e in self.events(stream_id, first, last - first + 1) if e.sequence <= last]

    def events(self, stream_id: str, from_sequence: int, limit: int) -> list[Envelope]:
        """As ``Index.events``, with what is staged."""
        row = self._rows.get(stream_id)
        if row is None:
            return self._base.events(stream_id, from_sequence, limit)
        if not row.exists or limit <= 0:
            return []
        lowest = max(from_sequence, row.first)
        found = self._base.events(stream_id, 0, 1) if from_sequence <= 0 else []
        found += self._base.events(stream_id, lowest, limit)
        known = found[-1].sequence if found else NO_EVENTS
        for event in self._events.get(stream_id, ()):
            if event.sequence > known and (event.sequence >= lowest or event.sequence == 0 >= from_sequence):
                found.append(event)
        return found[:limit]

    def snapshot_sequence(self, execution_id: str) -> int:
        """As ``Index.snapshot_sequence``, with what is staged."""
        found = self._snapshots.get(execution_id)
        return self._base.snapshot_sequence(execution_id) if found is None else found

    def _stage(self, draft: _Draft) -> None:
        self._rows.update(draft.rows)
        self.effects += draft.effects
        for effect in draft.effects:
            if type(effect) is PutEvent:
                self._events.setdefault(effect.envelope.stream_id, []).append(effect.envelope)
            elif type(effect) is PutSnapshot:
                self._snapshots[effect.snapshot.execution_id] = effect.snapshot.sequence
            elif type(effect) is DropSnapshot:
                self._snapshots[effect.execution_id] = NO_EVENTS


class _Draft:
    """The changes of one op, kept apart until all of it is accepted."""

    __slots__ = ("effects", "rows", "view")

    def __init__(self, view: View) -> None:
        self.view = view
        self.rows: dict[str, StreamRow] = {}
        self.effects: list[Effect] = []

    def row(self, stream_id: str) -> StreamRow | None:
        row = self.rows.get(stream_id)
        return self.view.row(stream_id) if row is None else row

    def own(self, stream_id: str) -> StreamRow:
        """The op's own row of the stream, to be changed."""
        row = self.rows.get(stream_id)
        if row is None:
            base = self.view.row(stream_id)
            row = self.rows[stream_id] = new_row(stream_id) if base is None else base.copy()
        return row


def _decide(draft: _Draft, op: WriteOp, now_ms: int) -> Verdict:
    match op:
        case AppendOps():
            return _append_all(draft, op.appends, now_ms)
        case AcquireFence():
            return _acquire_fence(draft, op)
        case Truncate():
            return _truncate(draft, op)
        case Delete():
            return _delete(draft, op.stream_id)
        case CopyPrefix():
            return _copy_prefix(draft, op)
        case SaveSnapshot():
            return _save_snapshot(draft, op.snapshot)
        case DeleteSnapshot():
            if draft.view.snapshot_sequence(op.execution_id) == NO_EVENTS:
                return Repeated(None)
            draft.effects.append(DropSnapshot(op.execution_id))
            return Accepted(draft.effects, None)
        case Tick():
            return Accepted(draft.effects, None)


def _stands(settled: Verdict, verdict: Verdict) -> bool:
    """Whether a verdict reached on staged state is the one that committed state alone gives, for good."""
    if isinstance(verdict, Rejected):
        if not isinstance(settled, Rejected) or type(settled.error) is not type(verdict.error):
            return False
        error = settled.error
        # A head that is not there yet may still come to be; one that was passed never comes back.
        return not isinstance(error, WrongHeadError) or error.head > error.expected
    return isinstance(settled, Repeated)


def _append_all(draft: _Draft, appends: tuple[StreamAppend, ...], now_ms: int) -> Verdict:
    results: list[Appended | None] = []
    repeated = False  # a guarded append that stands proves that its whole op had committed
    for append in appends:
        found = _repeat_of(draft, append)
        results.append(found)
        if found is not None and (append.expected_head is not None or append.observation is not None):
            repeated = True
    for place, append in enumerate(appends):
        if results[place] is not None:
            continue
        if repeated and append.expected_head is None and append.observation is None:
            row = draft.row(append.stream_id) or new_row(append.stream_id)
            results[place] = Appended(
                append.stream_id, _UNKNOWN_PLACE, row.head, row.timestamp, repeated=True
            )
            continue
        error = _refusal(draft, append)
        if error is not None:
            return Rejected(error)
        results[place] = _put(draft, append, now_ms)
    if draft.effects:
        return Accepted(draft.effects, results)
    return Repeated(results)


def _repeat_of(draft: _Draft, append: StreamAppend) -> Appended | None:
    """Where the append already stands, None where it does not."""
    row = draft.row(append.stream_id)
    count = len(append.events)
    if row is None or row.head == NO_EVENTS or not count:
        return None
    if append.observation is not None:
        seen = append.observation
        if seen.anchor is not None and seen.anchor != row.anchor:
            return None
        first = seen.head + 1
    elif append.expected_head is not None:
        first = append.expected_head + 1
    else:
        place = _recent_place(draft, append.stream_id, row, append.events[0].id)
        if place is None:
            return None
        return Appended(append.stream_id, place, place + count - 1, row.timestamp, repeated=True)
    last = first + count - 1
    if last > row.head or first < 0:
        return None
    if draft.view.event_ids(append.stream_id, first, last) != [e.id for e in append.events]:
        return None
    return Appended(append.stream_id, first, last, row.timestamp, repeated=True)


def _recent_place(draft: _Draft, stream_id: str, row: StreamRow, event_id: str) -> int | None:
    if row.recent is not None:
        return row.recent.get(event_id)
    first = max(row.first, row.head - RECENT_IDS + 1)
    ids = draft.view.event_ids(stream_id, first, row.head)
    if event_id in ids:
        return first + ids.index(event_id)
    return 0 if event_id == row.anchor else None


def _refusal(draft: _Draft, append: StreamAppend) -> LoomError | None:
    """Why the append cannot be made now."""
    stream_id, row = append.stream_id, draft.row(append.stream_id)
    if not append.events:
        return InvalidInputError("append", "it has no events", "give at least one")
    if row is None:
        if append.fence is not None and append.fence > 1:
            return StaleFenceError(stream_id, append.fence, 0)
        row = new_row(stream_id)
    elif row.deleted:
        return ExecutionAlreadyExistsError(stream_id)
    elif append.fence is not None and append.fence != row.fence:
        # A token above the current one was never given out; only the append of sequence 0 may bring the first.
        if append.fence < row.fence or row.exists:
            return StaleFenceError(stream_id, append.fence, row.fence)
    if append.observation is not None:
        if append.observation != row.observation():
            return WrongHeadError(stream_id, append.observation.head, row.head)
    elif append.expected_head is not None:
        if append.expected_head != row.head:
            return WrongHeadError(stream_id, append.expected_head, row.head)
    if append.backlog_cap is not None and row.waiting + len(append.events) > append.backlog_cap:
        return InboxFullError(
            routing_id(stream_id), inbox_topic(stream_id) or "", row.waiting, append.backlog_cap
        )
    return None


def _put(draft: _Draft, append: StreamAppend, now_ms: int) -> Appended:
    stream_id, size, fence = append.stream_id, len(append.events), append.fence
    row = draft.own(stream_id)
    first = sequence = row.head + 1
    timestamp = max(now_ms, row.timestamp)
    for event in append.events:
        envelope = Envelope(event.id, stream_id, sequence, event.type, timestamp, event.data, event.metadata)
        row.put(sequence, event.id, event.type, timestamp, fence, event.metadata.get("node"))
        draft.effects.append(PutEvent(envelope, sequence - first, size, fence))
        sequence += 1
    if append.consumed:
        last = draft.effects[-1]
        assert isinstance(last, PutEvent)
        last.consumed = append.consumed
        for inbox, position in append.consumed:
            if draft.row(inbox) is not None:
                draft.own(inbox).consume(position)
    for outgoing in append.outgoing:
        draft.effects.append(SendOut(outgoing, stream_id, row.head))
    return Appended(stream_id, first, row.head, timestamp)


def _acquire_fence(draft: _Draft, op: AcquireFence) -> Verdict:
    row, seen = draft.row(op.stream_id), op.observation
    if seen is not None:
        current = observation_of(row)
        if current != seen:
            ours = row is not None and row.fence == seen.fence + 1 and row.fence_owner == op.owner
            if ours and current.anchor == seen.anchor:
                return Repeated(current.fence)
            return Rejected(WrongHeadError(op.stream_id, seen.head, current.head))
    if row is None or not row.exists:
        return Rejected(ExecutionNotFoundError(op.stream_id))
    own = draft.own(op.stream_id)
    own.fence += 1
    own.fence_owner = op.owner
    draft.effects.append(PutMark(op.stream_id, own))
    return Accepted(draft.effects, own.fence)


def _truncate(draft: _Draft, op: Truncate) -> Verdict:
    row = draft.row(op.stream_id)
    if row is None:
        return Repeated(None)
    first = min(op.before, row.head + 1)
    if first <= row.first:
        return Repeated(None)
    own = draft.own(op.stream_id)
    draft.effects += [DropEvent(op.stream_id, sequence) for sequence in range(own.first, first)]
    own.first = first
    draft.effects.append(PutMark(op.stream_id, own))
    return Accepted(draft.effects, None)


def _delete(draft: _Draft, stream_id: str) -> Verdict:
    row = draft.row(stream_id)
    if row is not None and row.deleted:
        return Repeated(None)
    own = draft.own(stream_id)
    if own.exists:
        draft.effects.append(DropEvent(stream_id, 0))
        draft.effects += [DropEvent(stream_id, sequence) for sequence in range(own.first, own.head + 1)]
    if draft.view.snapshot_sequence(stream_id) != NO_EVENTS:
        draft.effects.append(DropSnapshot(stream_id))
    own.delete()
    draft.effects.append(PutMark(stream_id, own))
    return Accepted(draft.effects, None)


def _copy_prefix(draft: _Draft, op: CopyPrefix) -> Verdict:
    source, target = draft.row(op.source), draft.row(op.target)
    if source is None or not source.exists:
        return Rejected(ExecutionNotFoundError(op.source))
    if not 0 <= op.through <= source.head:
        return Rejected(WrongHeadError(op.source, op.through, source.head))
    if target is not None and target.deleted:
        return Rejected(ExecutionAlreadyExistsError(op.target))
    if target is not None:
        ids = draft.view.event_ids(op.source, 0, op.through)
        if target.head >= op.through and draft.view.event_ids(op.target, 0, op.through) == ids:
            return Repeated(op.through)
        return Rejected(WrongHeadError(op.target, NO_EVENTS, target.head))
    stored = [e for e in draft.view.events(op.source, 0, op.through + 1) if e.sequence <= op.through]
    own = draft.own(op.target)
    for position, e in enumerate(stored):
        copy = Envelope(e.id, op.target, e.sequence, e.type, e.timestamp, e.data, e.metadata)
        own.put(e.sequence, e.id, e.type, e.timestamp, None, None)
        draft.effects.append(PutEvent(copy, position, len(stored)))
    if source.first > 1:  # what was trimmed from the source is missing in the copy, and a mark says so
        own.first, own.head = min(source.first, op.through + 1), op.through
        draft.effects.append(PutMark(op.target, own))
    return Accepted(draft.effects, own.head)


def _save_snapshot(draft: _Draft, snapshot: Snapshot) -> Verdict:
    row = draft.row(snapshot.execution_id)
    if row is not None and row.deleted:
        return Rejected(ExecutionNotFoundError(snapshot.execution_id))
    if snapshot.sequence <= draft.view.snapshot_sequence(snapshot.execution_id):
        return Repeated(None)
    draft.effects.append(PutSnapshot(snapshot))
    return Accepted(draft.effects, None)
