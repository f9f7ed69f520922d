"""Events of a stream as a reading of the log finds them, side by side: an index is built from runs, not from events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from loom.stores.contracts import NO_EVENTS


class Beside(NamedTuple):
    """What not every event has: see ``PutEvent``. ``sealed`` says whether it bears the marker."""

    fence: int | None = None
    node: str | None = None
    consumed: tuple[tuple[str, int], ...] = ()
    sealed: bool = False


@dataclass(slots=True, eq=False)
class EventRun:
    """Events that follow each other without a gap, from ``first`` on.

    ``ids``, ``kinds``, ``batches`` (position in its append, and size of that) and ``values`` (encoded envelopes) are of
    each event, in order; ``timestamp`` is the last one's. ``fence`` is the token that the append of the first one
    carried; ``driven_at`` the sequence of the last one whose append carried any, ``node`` the node that made it.
    ``sealed`` says whether any of them bears the marker.
    """

    stream_id: str
    first: int
    ids: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    batches: list[tuple[int, int]] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)
    timestamp: int = 0
    fence: int | None = None
    driven_at: int = NO_EVENTS
    node: str | None = None
    consumed: tuple[tuple[str, int], ...] = ()
    sealed: bool = False

    @property
    def end(self) -> int:
        """The sequence after the last one."""
        return self.first + len(self.ids)

    def note(self, beside: Beside) -> None:
        """Take what the event that was added last has beside."""
        fence, node, consumed, sealed = beside
        if fence is not None:
            self.driven_at, self.node = self.end - 1, node
            if len(self.ids) == 1:
                self.fence = fence
        if consumed:
            self.consumed += consumed
        if sealed:
            self.sealed = True
