"""How an index is built from the records of the log: at a takeover, and again from the last known offset.

Records come in log order per topic; the topics may come one after another or mixed. Reading again what is there already
changes nothing. What the records do not say together is a problem of that stream alone (kafka.md: "A reader that finds a
gap or a torn batch").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loom.errors import StreamBrokenError
from loom.schemas.envelope import TERMINAL_KINDS
from loom.stores.contracts import NO_EVENTS
from loom.stores.rows import SIDE_KINDS, StreamRow, merge_recent

if TYPE_CHECKING:
    from loom.stores.index import StreamIndex
    from loom.stores.index_entry import Entry


class IndexLoader:
    """One reading of a log to its end: ``event``, ``mark``, ``snapshot`` for each record, then ``settle``.

    Tombstones need no call: the mark in their transaction says what is gone.
    """

    def __init__(self, index: StreamIndex) -> None:
        self._index = index
        self._problems: dict[str, StreamBrokenError] = {}
        self._batches: dict[
            str, tuple[int, int]
        ] = {}  # position that comes next, and size, of batches not at their end
        self._holes: dict[
            str, int
        ] = {}  # where a stream goes on although earlier events are missing: trimmed, or broken
        self._headless: dict[str, None] = {}  # streams seen without an event 0
        self._marks: dict[
            str, StreamRow
        ] = {}  # last marks of streams that are trimmed, or end before their mark
        self._moved: dict[str, tuple[int, int]] = {}  # trimmed logs: last events that set status, and node
        self._consumed: dict[str, int] = {}

    def event(
        self,
        stream_id: str,
        sequence: int,
        event_id: str,
        event_type: str,
        *,
        timestamp: int,
        value: bytes,
        position: int = 0,
        size: int = 1,
        fence: int | None = None,
        node: str | None = None,
        consumed: tuple[tuple[str, int], ...] = (),
    ) -> None:
        """Take an event: what its key and headers say (see ``PutEvent``), and its value as it is."""
        index = self._index
        for inbox, place in consumed:
            self._consumed[inbox] = max(place, self._consumed.get(inbox, NO_EVENTS))
        with index.lock:
            entry = index.entry(stream_id)
            row = entry.row
            if row.deleted or 0 < sequence < row.first:
                return
            has_zero = entry.zero is not None or entry.stored > 0
            if has_zero if sequence == 0 else sequence < entry.end:
                known = True
            else:
                known = False
                if sequence > 0:
                    self._follow(stream_id, entry, sequence, position, size, has_zero=has_zero)
                    row = entry.row
                if sequence > row.head:
                    self._note_moves(stream_id, row, sequence, event_type, fence)
                    row.put(sequence, event_id, event_type, timestamp, fence=fence, node=node)
                elif sequence == 0:
                    row.anchor = row.anchor or event_id
                index.take(stream_id, entry, sequence, event_id, value)
                if position + 1 < size:
                    self._batches[stream_id] = position + 1, size
        if known and index.event_ids(stream_id, sequence, sequence) not in ([event_id], []):
            self._problem(stream_id, sequence, "two events stand there")
        if index.overdue:
            index.maintain()

    def _follow(
        self, stream_id: str, entry: Entry, sequence: int, position: int, size: int, *, has_zero: bool
    ) -> None:
        """Check that an event above 0 follows those that are there; note what a mark has yet to explain."""
        if not has_zero:
            self._headless[stream_id] = None
        expected = self._batches.pop(stream_id, None)
        if sequence > max(entry.end, entry.row.first):
            self._holes[stream_id] = sequence
            row = entry.row.copy()
            row.first = sequence
            self._index.replace_row(stream_id, entry, row)
        elif (
            (position, size) != expected
            and (expected is not None or position != 0)
            and sequence != entry.row.first
        ):
            self._problem(stream_id, sequence, "the batch before it is torn")

    def _note_moves(
        self, stream_id: str, row: StreamRow, sequence: int, event_type: str, fence: int | None
    ) -> None:
        if row.first > 1 and row.kind == "executions" and sequence > 0:
            moved, fenced = self._moved.get(stream_id, (NO_EVENTS, NO_EVENTS))
            if event_type not in SIDE_KINDS:
                moved = sequence
            self._moved[stream_id] = moved, fenced if fence is None else sequence

    def mark(self, stream_id: str, mark: StreamRow) -> None:
        """Take a stream's mark."""
        index = self._index
        with index.lock:
            entry = index.entry(stream_id)
            if entry.row.deleted:
                return
            if mark.deleted:
                index.replace_row(stream_id, entry, mark.copy())
                return
            row = _merged(entry.row, mark)
            if entry.row.anchor is not None and mark.anchor not in {None, entry.row.anchor}:
                self._problem(stream_id, 0, "its mark is of another stream of that name")
            index.replace_row(stream_id, entry, row)
            if self._holes.get(stream_id, row.first + 1) <= row.first:
                del self._holes[stream_id]
            if mark.head > row.head or row.first > 1:
                self._marks[stream_id] = mark
        if index.overdue:
            index.maintain()

    def snapshot(self, execution_id: str, sequence: int, data: bytes | None) -> None:
        """Take a snapshot; ``data`` None is its tombstone."""
        with self._index.lock:
            self._index.keep_snapshot(execution_id, NO_EVENTS if data is None else sequence, data)
        if self._index.overdue:
            self._index.maintain()

    def settle(self) -> list[StreamBrokenError]:
        """Bring together what the topics said, once all were read to their ends; return the streams that are broken.

        A broken stream is for the caller to read again, and to stop (``StreamIndex.stop``) if it stays so.
        """
        index = self._index
        with index.lock:
            for inbox, place in self._consumed.items():
                index.consume(inbox, place)
            for stream_id, mark in self._marks.items():
                self._settle_mark(stream_id, index.entry(stream_id), mark)
            for stream_id, sequence in self._holes.items():
                self._problem(stream_id, sequence, "events before it are missing")
            for stream_id in self._headless:
                self._problem(stream_id, 0, "the event is missing")
            for stream_id in self._batches:
                self._problem(stream_id, index.entry(stream_id).row.head + 1, "its last batch is torn")
            broken = [p for s, p in self._problems.items() if not index.entry(s).row.deleted]
        if index.overdue:
            index.maintain()
        return broken

    def _settle_mark(self, stream_id: str, entry: Entry, mark: StreamRow) -> None:
        if entry.row.deleted:
            return
        row = entry.row.copy()
        if row.head < mark.head:
            self._problem(stream_id, max(row.head + 1, row.first), "events up to its mark are missing")
        if not row.exists or (entry.zero is None and entry.stored == 0):
            self._headless[stream_id] = None
        moved, fenced = self._moved.get(stream_id, (NO_EVENTS, NO_EVENTS))
        if row.first > 1 and row.kind == "executions":
            if mark.head >= moved or mark.status in TERMINAL_KINDS:
                row.status = mark.status
            if mark.head >= fenced:
                row.node = mark.node
            self._index.replace_row(stream_id, entry, row)

    def _problem(self, stream_id: str, sequence: int, problem: str) -> None:
        self._problems.setdefault(stream_id, StreamBrokenError(stream_id, sequence, problem))


def _merged(row: StreamRow, mark: StreamRow) -> StreamRow:
    """What a row and a mark of its stream say together, whichever is the later."""
    merged = row.copy()
    merged.first = max(row.first, mark.first)
    if mark.fence > row.fence or (mark.fence == row.fence and row.fence_owner is None):
        merged.fence, merged.fence_owner = mark.fence, mark.fence_owner
    merged.anchor = row.anchor or mark.anchor
    merged.consumed = max(row.consumed, mark.consumed)
    merged.timestamp = max(row.timestamp, mark.timestamp)
    merged.recent = merge_recent(row.recent, mark.recent)
    if mark.head > row.head and mark.first > mark.head:  # nothing but event 0 is left of what the mark saw
        merged.head, merged.status, merged.node = mark.head, mark.status, mark.node
    return merged
