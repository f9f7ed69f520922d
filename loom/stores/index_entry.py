"""A stream in the memory of an index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from loom.stores.event_run import EventRun
    from loom.stores.index_file import Stored
    from loom.stores.rows import StreamRow

ENTRY_BYTES: Final = 800
"""Estimate of what a stream costs in memory beside its events."""
EVENT_BYTES: Final = 115
"""Estimate of what an event costs beside its encoded value and id."""


class Entry:
    """Row and events of one stream.

    Event 0 is ``zero`` (None: in the file, or not there); ``ids`` and ``values`` hold the events from ``start`` on, up
    to ``end``. What is above 0 and below ``stored`` is in the file, event 0 if ``zero_stored``; ``trim`` says that the file may hold more than the row allows.
    ``bytes`` is an estimate of what the entry costs, ``version`` counts its changes.
    """

    __slots__ = ("bytes", "ids", "row", "start", "stored", "trim", "values", "version", "zero", "zero_stored")

    def __init__(self, row: StreamRow, held: int, *, zero_stored: bool) -> None:
        """Begin with what the file has: the row, the events below ``held``, and event 0 if ``zero_stored``."""
        self.row = row
        self.zero: tuple[str, bytes] | None = None
        self.start = max(1, held)
        self.ids: list[str] = []
        self.values: list[bytes] = []
        self.stored = held
        self.zero_stored = zero_stored
        self.bytes = ENTRY_BYTES
        self.version = 0
        self.trim = False

    @property
    def has_zero(self) -> bool:
        """Whether event 0 is here or in the file."""
        return self.zero is not None or self.zero_stored

    @property
    def end(self) -> int:
        """The sequence after the last event that is here or in the file, or was and is trimmed."""
        end = self.start + len(self.ids)
        return end if end > 1 or self.has_zero else 0

    def add(self, sequence: int, event_id: str, value: bytes) -> int:
        """Take event 0, or the event ``end``; return what it costs. A later one drops those held before it."""
        if sequence == 0:
            self.zero = event_id, value
        else:
            if sequence != self.start + len(self.ids):
                self._leap(sequence)
            self.ids.append(event_id)
            self.values.append(value)
        cost = EVENT_BYTES + len(event_id) + len(value)
        self.bytes += cost
        return cost

    def add_run(self, run: EventRun) -> int:
        """Take those of a run's events that are neither known nor trimmed; return what they cost."""
        before = self.bytes
        known = max(self.end, self.row.first)
        if run.first == 0 and not self.has_zero:
            self.add(0, run.ids[0], run.values[0])
        skip = max(known - run.first, 0)
        ids, values = (run.ids[skip:], run.values[skip:]) if skip else (run.ids, run.values)
        if ids:
            if run.first + skip != self.start + len(self.ids):
                self._leap(run.first + skip)
            self.ids += ids
            self.values += values
            self.bytes += EVENT_BYTES * len(ids) + sum(map(len, ids)) + sum(map(len, values))
        return self.bytes - before

    def _leap(self, sequence: int) -> None:
        """What is before ``sequence`` was trimmed, as a mark yet to be read will say."""
        self._forget(len(self.ids))
        self.start = sequence
        self.trim = True

    def replace(self, row: StreamRow) -> int:
        """Take a new row and drop the events that it says are trimmed or deleted; return what that freed."""
        before = self.bytes
        if row.deleted:
            self.trim = True
            self.zero, self.ids, self.values, self.start, self.stored = None, [], [], 1, 0
            self.zero_stored = False
            self.bytes = ENTRY_BYTES
        elif row.first > self.row.first:
            self.trim = self.trim or self.row.first < self.stored
            self._forget(min(max(0, row.first - self.start), len(self.ids)))
            self.start = max(self.start, row.first)
        self.row = row
        return before - self.bytes

    def tail(self, first: int, last: int) -> list[Stored]:
        """Events above 0 in memory with ``first <= sequence <= last``."""
        low = max(0, first - self.start)
        high = max(low, last - self.start + 1)
        sequences = range(self.start + low, self.start + high)
        return list(zip(sequences, self.ids[low:high], self.values[low:high], strict=False))

    def unstored(self) -> list[Stored]:
        """Events that are not in the file."""
        events = self.tail(self.stored, self.end)
        return events if self.zero is None or self.zero_stored else [(0, *self.zero), *events]

    def _forget(self, count: int) -> None:
        self.bytes -= sum(
            EVENT_BYTES + len(i) + len(v) for i, v in zip(self.ids[:count], self.values, strict=False)
        )
        del self.ids[:count], self.values[:count]
