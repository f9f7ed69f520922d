"""Whether what was read of a partition is whole: gaps and torn batches (kafka.md, "Conditional append", last point).

A stream's sequences have no gaps but what was trimmed, and a batch is there from its first event to its last. What
breaks this is judged again on fresh marks, since only sequences from ``first`` on count; if it stands, that stream is
broken. It is never passed over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from loom.errors import StreamBrokenError
from loom.stores.contracts import NO_EVENTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from loom.stores.event_run import EventRun
    from loom.stores.rows import StreamRow

_DELETED: Final = 2**63
"""Lowest sequence still there of a stream that is gone."""


class Continuity:
    """Watches one reading: marks first, then events in log order.

    ``row`` gives the index's row of a stream; it is not asked for what was there before the reading if that is ``whole``,
    since then nothing was.
    """

    def __init__(self, row: Callable[[str], StreamRow | None], *, whole: bool) -> None:
        self._row, self._whole = row, whole
        self._last: dict[str, int] = {}
        self._held: dict[str, int] = {}
        self._limits: dict[str, int] = {}
        # of a batch under way: the position that follows, and its size
        self._next: dict[str, tuple[int, int]] = {}
        self._missing: dict[str, tuple[int, int, str]] = {}

    def before_mark(self, stream_id: str) -> None:
        """Note up to where the index held a stream before the mark that is about to be loaded."""
        if stream_id not in self._held:
            self._held[stream_id] = self._held_before(stream_id)

    def mark(self, stream_id: str, row: StreamRow) -> None:
        """Take what a mark says of where a stream begins."""
        self._limits[stream_id] = _DELETED if row.deleted else row.first

    def events(self, run: EventRun) -> None:
        """Take the next events of a stream."""
        stream_id = run.stream_id
        limit = self._limits.get(stream_id, 0)
        known = self._last.get(stream_id)
        last = self._held_before(stream_id) if known is None else known
        sequence = max(last + 1, run.first)
        if sequence < run.end:
            if sequence > last + 1 and (sequence > limit or last == NO_EVENTS):
                self._note(stream_id, last + 1, sequence - 1, "events before a later one are missing")
            follows = self._next.pop(stream_id, None)
            for position, size in run.batches[sequence - run.first :]:
                if follows is not None and follows != (position, size):
                    self._note(stream_id, sequence, sequence, "the batch before it is not whole")
                follows = (position + 1, size) if position + 1 < size else None
                sequence += 1
            self._last[stream_id] = run.end - 1
            if follows is not None:
                self._next[stream_id] = follows

    def end(self) -> bool:
        """Everything was read; note what is missing at the ends. True if all is whole."""
        for stream_id, (position, size) in self._next.items():
            last = self._last[stream_id]
            self._note(stream_id, last + 1, last + size - position, "its last batch is not whole")
        for stream_id, held in self._held.items():
            row = self._row(stream_id)
            last = self._last.get(stream_id, held)
            if row is not None and row.exists and row.first <= row.head and last < row.head:
                self._note(stream_id, last + 1, row.head, "events below its mark are missing")
        return not self._missing

    def broken(self) -> dict[str, StreamBrokenError]:
        """Streams of which something is missing by the marks as they are now."""
        return {
            stream_id: StreamBrokenError(stream_id, first, problem)
            for stream_id, (first, last, problem) in self._missing.items()
            if self._counts(stream_id, first, last)
        }

    def _counts(self, stream_id: str, first: int, last: int) -> bool:
        row = self._row(stream_id)
        if row is None:
            return True
        return not row.deleted and (first == 0 or last >= row.first)

    def _held_before(self, stream_id: str) -> int:
        """Head up to which the index held the stream before this reading."""
        if self._whole:
            return NO_EVENTS
        held = self._held.get(stream_id)
        if held is None:
            row = self._row(stream_id)
            held = NO_EVENTS if row is None else row.head
        return held

    def _note(self, stream_id: str, first: int, last: int, problem: str) -> None:
        self._missing.setdefault(stream_id, (first, last, problem))
