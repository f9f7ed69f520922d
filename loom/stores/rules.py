"""The rules of the judge, one function per kind of write: what it does to a stream, when it is a repeat, when refused.

Pure: each reads a view through a ``Draft`` and leaves its changes there. ``on_staged`` of a refusal means at this level
that it is not *lasting*: a later append could still turn it (an expected head that is not there yet).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

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
from loom.stores.contracts import NO_EVENTS, Appended, StreamAppend
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
from loom.stores.rows import RECENT_IDS, StreamRow, deleted_row, new_row, observation_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from loom.stores.view import View

UNKNOWN_PLACE: Final = -1
"""``Appended.first`` of a repeated message whose id has left the window of recent ids."""


class Draft:
    """The changes of one op, kept apart until all of it is accepted."""

    __slots__ = ("_read", "effects", "rows", "view")

    def __init__(self, view: View) -> None:
        self.view = view
        self.rows: dict[str, StreamRow] = {}
        self.effects: list[Effect] = []
        self._read: dict[str, StreamRow | None] = {}

    def row(self, stream_id: str) -> StreamRow | None:
        """Row of a stream with the op's own changes; not to be changed."""
        row = self.rows.get(stream_id)
        if row is not None:
            return row
        if stream_id not in self._read:
            self._read[stream_id] = self.view.row(stream_id)
        return self._read[stream_id]

    def own(self, stream_id: str) -> StreamRow:
        """The op's own row of the stream, to be changed."""
        row = self.rows.get(stream_id)
        if row is None:
            base = self.row(stream_id)
            row = self.rows[stream_id] = new_row(stream_id) if base is None else base.copy()
        return row


def decide(draft: Draft, op: WriteOp, now_ms: int) -> Verdict:
    """Decide one op; ``draft`` holds its changes if it is accepted."""
    return _RULES[type(op)](draft, op, now_ms)


def streams_of(op: WriteOp) -> tuple[str, ...]:
    """Streams whose state the verdict on ``op`` can rest on."""
    if isinstance(op, AppendOps):
        streams = [append.stream_id for append in op.appends]
        return tuple(dict.fromkeys([*streams, *map(routing_id, streams)]))
    if isinstance(op, CopyPrefix):
        return (op.source, op.target)
    if isinstance(op, SaveSnapshot):
        return (op.snapshot.execution_id,)
    if isinstance(op, DeleteSnapshot):
        return (op.execution_id,)
    return () if isinstance(op, Tick) else (op.stream_id,)


def _refused(error: LoomError, *, lasting: bool = True) -> Rejected:
    return Rejected(error, on_staged=not lasting)


def _append_all(draft: Draft, op: AppendOps, now_ms: int) -> Verdict:
    results: list[Appended | None] = []
    proven = False
    for append in op.appends:
        found = _repeat_of(draft, append)
        results.append(found)
        if found is not None and (append.expected_head is not None or append.observation is not None):
            proven = True
    for place, append in enumerate(op.appends):
        if results[place] is not None:
            continue
        if append.expected_head is None and append.observation is None and (proven or draft.rows):
            # A guarded append found in place proves that all of the op had committed, also a message whose id has
            # left the window since. And one op may carry the same message twice.
            results[place] = _unguarded_repeat(draft, append, proven=proven)
            if results[place] is not None:
                continue
        refusal = _refusal(draft, append)
        if refusal is not None:
            return refusal
        results[place] = _put(draft, append, now_ms)
    return Accepted(draft.effects, results) if draft.effects else Repeated(results)


def _repeat_of(draft: Draft, append: StreamAppend) -> Appended | None:
    """Where the append already stands, None where it does not."""
    stream_id, count = append.stream_id, len(append.events)
    row = draft.row(stream_id)
    if row is None or row.head == NO_EVENTS or not count:
        return None
    first = _place_of(draft, append, row)
    if first is None:
        return None
    if append.expected_head is not None or append.observation is not None:
        last = first + count - 1
        if last > row.head or draft.view.event_ids(stream_id, first, last) != [e.id for e in append.events]:
            return None
    return Appended(stream_id, first, first + count - 1, row.timestamp, repeated=True)


def _place_of(draft: Draft, append: StreamAppend, row: StreamRow) -> int | None:
    """Sequence at which the first event would stand if the append had been made before; None where it was not."""
    seen = append.observation
    if seen is not None:
        return seen.head + 1 if seen.anchor == (None if seen.head == NO_EVENTS else row.anchor) else None
    if append.expected_head is not None:
        return append.expected_head + 1 if append.expected_head >= NO_EVENTS else None
    return _recent_place(draft, append.stream_id, row, append.events[0].id)


def _recent_place(draft: Draft, stream_id: str, row: StreamRow, event_id: str) -> int | None:
    if row.recent is not None:
        return row.recent.get(event_id)
    first = max(row.first, row.head - RECENT_IDS + 1)
    ids = draft.view.event_ids(stream_id, first, row.head)
    if event_id in ids:
        return first + ids.index(event_id)
    return 0 if event_id == row.anchor else None


def _unguarded_repeat(draft: Draft, append: StreamAppend, *, proven: bool) -> Appended | None:
    found = _repeat_of(draft, append)
    if found is None and proven:
        row = draft.row(append.stream_id) or new_row(append.stream_id)
        return Appended(append.stream_id, UNKNOWN_PLACE, row.head, row.timestamp, repeated=True)
    return found


def _refusal(draft: Draft, append: StreamAppend) -> Rejected | None:
    """Why the append cannot be made now."""
    stream_id, expected, seen = append.stream_id, append.expected_head, append.observation
    if not append.events or (expected is not None and seen is not None):
        return _refused(
            InvalidInputError("append", "it has no events or two guards", "give one guard and an event")
        )
    row = draft.row(stream_id) or new_row(stream_id)
    if row.deleted and (expected == NO_EVENTS if expected is not None else seen in {None, row.observation()}):
        return _refused(ExecutionAlreadyExistsError(stream_id))
    fence = append.fence
    if fence is not None and fence != row.fence and not (fence == 1 and row.head == NO_EVENTS):
        # A token above the current one was never given out; only the append of sequence 0 brings the first.
        return _refused(StaleFenceError(stream_id, fence, row.fence), lasting=fence < row.fence)
    misplaced = _misplaced(draft, append, row)
    if misplaced is not None or append.backlog_cap is None:
        return misplaced
    return _full(append, row, append.backlog_cap)


def _misplaced(draft: Draft, append: StreamAppend, row: StreamRow) -> Rejected | None:
    """Why the stream is not where the append takes it to be."""
    stream_id, expected, seen = append.stream_id, append.expected_head, append.observation
    if seen is not None:
        return None if seen == row.observation() else _wrong_head(stream_id, seen.head, seen.fence, row)
    if expected is not None:
        if expected != row.head:
            return _wrong_head(stream_id, expected, row.fence, row)
        stands = row.recent is not None and append.events[0].id in row.recent
        return _refused(WrongHeadError(stream_id, expected, row.head)) if stands else None
    if row.head == NO_EVENTS and _is_orphan(draft, stream_id):
        return _refused(ExecutionNotFoundError(routing_id(stream_id)))
    return None


def _is_orphan(draft: Draft, stream_id: str) -> bool:
    """Whether a stream would be founded beside a log that was deleted: nobody would ever read, or remove, it."""
    chain_id = routing_id(stream_id)
    log = None if chain_id == stream_id else draft.row(chain_id)
    return log is not None and log.deleted


def _full(append: StreamAppend, row: StreamRow, cap: int) -> Rejected | None:
    stream_id, waiting = append.stream_id, row.waiting
    if waiting + len(append.events) <= cap:
        return None
    return _refused(InboxFullError(routing_id(stream_id), inbox_topic(stream_id) or "", waiting, cap))


def _wrong_head(stream_id: str, head: int, fence: int, row: StreamRow) -> Rejected:
    """Refusal of a head and fence that are not the stream's; lasting once the stream has gone past them."""
    lasting = row.deleted or row.head > head or row.fence > fence
    return _refused(WrongHeadError(stream_id, head, row.head), lasting=lasting)


def _put(draft: Draft, append: StreamAppend, now_ms: int) -> Appended:
    stream_id, size, fence = append.stream_id, len(append.events), append.fence
    row, effects = draft.own(stream_id), draft.effects
    first = sequence = row.head + 1
    timestamp = max(now_ms, row.timestamp)
    for e in append.events:
        envelope = Envelope(e.id, stream_id, sequence, e.type, timestamp, e.data, e.metadata)
        effects.append(PutEvent(envelope, sequence - first, size, fence))
        row.take(envelope, fence)
        sequence += 1
    if append.consumed:
        last = effects[-1]
        assert isinstance(last, PutEvent)
        last.consumed = append.consumed
        for inbox, position in append.consumed:
            draft.own(inbox).consume(position)
    for outgoing in append.outgoing:
        effects.append(SendOut(outgoing, stream_id, row.head))
    return Appended(stream_id, first, row.head, timestamp)


def _acquire_fence(draft: Draft, op: AcquireFence, _now_ms: int) -> Verdict:
    row, seen = draft.row(op.stream_id), op.observation
    current = observation_of(row)
    if seen is not None and current != seen:
        if row is not None and _is_ours(row, op):
            return Repeated(row.fence)
        return _wrong_head(op.stream_id, seen.head, seen.fence, row or new_row(op.stream_id))
    if row is None or not row.exists:
        return _refused(ExecutionNotFoundError(op.stream_id), lasting=row is not None and row.deleted)
    own = draft.own(op.stream_id)
    own.fence += 1
    own.fence_owner = op.owner
    draft.effects.append(PutMark(op.stream_id, own))
    return Accepted(draft.effects, own.fence)


def _is_ours(row: StreamRow, op: AcquireFence) -> bool:
    """Whether this very acquire was done before: the owner holds the token that it asked for."""
    seen = op.observation
    return (
        seen is not None
        and row.anchor == seen.anchor
        and row.fence == seen.fence + 1
        and row.fence_owner == op.owner
    )


def _truncate(draft: Draft, op: Truncate, _now_ms: int) -> Verdict:
    row = draft.row(op.stream_id)
    if row is None or min(op.before, row.head + 1) <= row.first:
        return Repeated(None)
    own = draft.own(op.stream_id)
    first = min(op.before, own.head + 1)
    draft.effects += [DropEvent(op.stream_id, sequence) for sequence in range(own.first, first)]
    own.first = first
    draft.effects.append(PutMark(op.stream_id, own))
    return Accepted(draft.effects, None)


def _delete(draft: Draft, op: Delete, _now_ms: int) -> Verdict:
    row = draft.row(op.stream_id) or new_row(op.stream_id)
    if row.deleted:
        return Repeated(None)
    if row.exists:
        draft.effects.append(DropEvent(op.stream_id, 0))
        draft.effects += [DropEvent(op.stream_id, sequence) for sequence in range(row.first, row.head + 1)]
    if draft.view.snapshot_sequence(op.stream_id) != NO_EVENTS:
        draft.effects.append(DropSnapshot(op.stream_id))
    gone = draft.rows[op.stream_id] = deleted_row(row)
    draft.effects.append(PutMark(op.stream_id, gone))
    return Accepted(draft.effects, None)


def _copy_prefix(draft: Draft, op: CopyPrefix, _now_ms: int) -> Verdict:
    source, target = draft.row(op.source), draft.row(op.target)
    if source is None or not source.exists:
        return _refused(ExecutionNotFoundError(op.source), lasting=source is not None)
    if not 0 <= op.through <= source.head:
        return _refused(WrongHeadError(op.source, op.through, source.head), lasting=op.through < 0)
    if target is not None and (target.exists or target.deleted):
        return _copied_already(draft, op, target)
    stored = [e for e in draft.view.events(op.source, 0, op.through + 1) if e.sequence <= op.through]
    own = draft.own(op.target)
    for position, e in enumerate(stored):
        copy = Envelope(e.id, op.target, e.sequence, e.type, e.timestamp, e.data, e.metadata)
        own.take(copy, None)
        draft.effects.append(PutEvent(copy, position, len(stored)))
    if source.first > 1:  # what was trimmed from the source is missing in the copy, and a mark says so
        own.first, own.head = min(source.first, op.through + 1), op.through
        draft.effects.append(PutMark(op.target, own))
    return Accepted(draft.effects, own.head)


def _copied_already(draft: Draft, op: CopyPrefix, target: StreamRow) -> Verdict:
    if target.deleted:
        return _refused(ExecutionAlreadyExistsError(op.target))
    ids = draft.view.event_ids(op.source, 0, op.through)
    if target.head >= op.through and draft.view.event_ids(op.target, 0, op.through) == ids:
        return Repeated(op.through)
    return _refused(WrongHeadError(op.target, NO_EVENTS, target.head))


def _save_snapshot(draft: Draft, op: SaveSnapshot, _now_ms: int) -> Verdict:
    snapshot = op.snapshot
    row = draft.row(snapshot.execution_id)
    if row is not None and row.deleted:
        return _refused(ExecutionNotFoundError(snapshot.execution_id))
    if snapshot.sequence < draft.view.snapshot_sequence(snapshot.execution_id):
        return Repeated(None)
    draft.effects.append(PutSnapshot(snapshot))
    return Accepted(draft.effects, None)


def _delete_snapshot(draft: Draft, op: DeleteSnapshot, _now_ms: int) -> Verdict:
    if draft.view.snapshot_sequence(op.execution_id) == NO_EVENTS:
        return Repeated(None)
    draft.effects.append(DropSnapshot(op.execution_id))
    return Accepted(draft.effects, None)


def _tick(draft: Draft, _op: Tick, _now_ms: int) -> Verdict:
    return Accepted(draft.effects, None)


_RULES: Final[dict[type[Any], Callable[[Draft, Any, int], Verdict]]] = {
    AppendOps: _append_all,
    AcquireFence: _acquire_fence,
    Truncate: _truncate,
    Delete: _delete,
    CopyPrefix: _copy_prefix,
    SaveSnapshot: _save_snapshot,
    DeleteSnapshot: _delete_snapshot,
    Tick: _tick,
}
