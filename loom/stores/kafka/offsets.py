"""Which requests of a partition are done with, so that an offset is committed only after everything below it."""

from __future__ import annotations

import threading
from collections import OrderedDict


class OffsetTracker:
    """Offsets that were taken from a partition, and which of them are still open. Thread-safe.

    ``committed`` is the position to begin with: the next offset to read.
    """

    def __init__(self, committed: int) -> None:
        self.start = committed
        """Offsets below are another tenure's."""
        self._lock = threading.Lock()
        self._open: OrderedDict[int, None] = OrderedDict()
        self._next = committed

    def begin(self, offset: int) -> None:
        """Take ``offset``; offsets come in increasing order, with holes."""
        with self._lock:
            self._open[offset] = None
            self._next = max(self._next, offset + 1)

    def done(self, offset: int) -> None:
        """Nothing is owed for ``offset`` any more; once is enough, more often does no harm."""
        with self._lock:
            self._open.pop(offset, None)

    @property
    def position(self) -> int:
        """Where a reader has to begin that shall miss nothing: the lowest open offset, or the next one."""
        with self._lock:
            return next(iter(self._open), self._next)

    @property
    def open(self) -> int:
        """How many offsets are open."""
        with self._lock:
            return len(self._open)
