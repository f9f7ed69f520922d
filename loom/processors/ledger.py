"""Which delivered offsets are settled: what an agent's consumer may commit. Pure; one partition per ledger.

It counts what was delivered, so a hole in the offsets (control records, aborted data, trimmed keys) needs no
bookkeeping, and the next offset is never past a record that is still at work, in whatever order records are settled.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet


class Ledger:
    """Offsets delivered and not yet committable, in order. As long as what is at work, never longer."""

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def oldest(self) -> int | None:
        """The offset that holds the commit back, None if nothing does."""
        return self._open[0] if self._open else None

    def delivered(self, offset: int) -> None:
        """Note a delivery. One at or below an earlier offset says that the consumer went back: later ones are void."""
        while self._open and self._open[-1] >= offset:
            self._open.pop()
        self._open.append(offset)

    def settle(self, acked: AbstractSet[int]) -> list[int]:
        """Take every leading offset that is in ``acked`` off the ledger; the last one plus one may be committed."""
        settled = []
        while self._open and self._open[0] in acked:
            settled.append(self._open.popleft())
        return settled
