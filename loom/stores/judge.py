"""Every write of every event store is decided here, without I/O (docs/architecture.md, "Stores").

A store forms a transaction: it makes a ``Staged`` over its ``Index``, hands it one ``WriteOp`` after another, and gets
a verdict on each. What was accepted is staged and seen by the ops after it. When the transaction has committed, the
store gives ``staged.effects`` to ``Index.apply``; when it aborted, it drops the ``Staged`` and judges the ops again.

Sizes are judged by whoever encodes: the ``admit`` hook gets the effects of an op before they are staged, may encode them
(``PutEvent.encoded``) and refuses the op by raising a ``LoomError``, say ``PayloadTooLargeError``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from loom.errors import LoomError
from loom.stores.contracts import NO_EVENTS
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
from loom.stores.rows import RECENT_IDS, StreamRow, new_row
from loom.stores.rules import UNKNOWN_PLACE, Draft, decide, streams_of
from loom.stores.view import Index, View

if TYPE_CHECKING:
    from loom.schemas.envelope import Envelope

__all__ = [
    "RECENT_IDS",
    "UNKNOWN_PLACE",
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


class Staged:
    """One transaction being formed: the state of ``base`` plus what was accepted so far.

    ``base`` is an index, or another ``Staged`` whose transaction is not settled yet. ``on_staged`` of a verdict says
    that it would not stand on committed state alone. Not thread-safe; ``base`` must not change meanwhile.
    """

    __slots__ = ("_base", "_events", "_root", "_rows", "_snapshots", "effects")

    def __init__(self, base: View) -> None:
        self._base = base
        self._root: View = base._root if isinstance(base, Staged) else base  # noqa: SLF001 - of the same class
        self._rows: dict[str, StreamRow] = {}
        self._events: dict[str, list[Envelope]] = {}
        self._snapshots: dict[str, int] = {}
        self.effects: list[Effect] = []

    def judge(self, op: WriteOp, now_ms: int, admit: Admit | None = None) -> Verdict:
        """Decide ``op`` as of everything accepted so far; stage it if it is accepted, and ``admit`` does not refuse it.

        ``now_ms`` becomes the timestamp of its events, unless the stream is already later.
        """
        draft = Draft(self)
        try:
            verdict = decide(draft, op, now_ms)
        except LoomError as unreadable:  # a stream that the index has stopped
            return Rejected(unreadable)
        if isinstance(verdict, Accepted):
            if admit is not None:
                try:
                    admit(verdict.effects)
                except LoomError as refused:
                    return Rejected(refused)
            self._stage(draft)
            return verdict
        if not any(self._holds(stream_id) for stream_id in streams_of(op)):
            verdict.on_staged = False
            return verdict
        settled = decide(Draft(self._root), op, now_ms)
        if type(settled) is type(verdict) and _stands(settled, verdict):
            return settled
        verdict.on_staged = True
        return verdict

    def rebase(self, base: View) -> None:
        """Rest on ``base`` from now on: the transaction below has committed, and ``base`` holds its effects."""
        self._base = base

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

    def _holds(self, stream_id: str) -> bool:
        """Whether anything of the stream is staged, here or in a transaction below that is not settled."""
        if stream_id in self._rows or stream_id in self._snapshots:
            return True
        return isinstance(self._base, Staged) and self._base._holds(stream_id)  # noqa: SLF001 - of the same class

    def _stage(self, draft: Draft) -> None:
        self._rows.update(draft.rows)
        self.effects += draft.effects
        for effect in draft.effects:
            if type(effect) is PutEvent:
                self._events.setdefault(effect.envelope.stream_id, []).append(effect.envelope)
            elif type(effect) is PutSnapshot:
                self._snapshots[effect.snapshot.execution_id] = effect.snapshot.sequence
            elif type(effect) is DropSnapshot:
                self._snapshots[effect.execution_id] = NO_EVENTS


def _stands(settled: Verdict, verdict: Verdict) -> bool:
    """Whether the verdict of committed state alone, of the same type, holds whatever becomes of the transaction."""
    if isinstance(settled, Rejected) and isinstance(verdict, Rejected):
        return type(settled.error) is type(verdict.error) and not settled.on_staged
    return True
