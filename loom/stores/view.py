"""Committed streams as the judge sees them, and as a transaction changes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from loom.schemas.envelope import Envelope
    from loom.stores.ops import Effect
    from loom.stores.rows import StreamRow


class View(Protocol):
    """What the judge reads: streams as of some moment."""

    def row(self, stream_id: str) -> StreamRow | None:
        """Row of a stream, None where nothing is known of it. The caller does not change it."""
        ...

    def event_ids(self, stream_id: str, first: int, last: int) -> list[str]:
        """Ids of the events still there with ``first <= sequence <= last``, in order."""
        ...

    def events(self, stream_id: str, from_sequence: int, limit: int) -> list[Envelope]:
        """Events still there from ``from_sequence`` on, in order, at most ``limit``."""
        ...

    def snapshot_sequence(self, execution_id: str) -> int:
        """Sequence of the snapshot kept for an execution, -1 where there is none."""
        ...


class Index(View, Protocol):
    """Committed state of the streams of a shard."""

    def apply(self, effects: Iterable[Effect]) -> None:
        """Take the effects of a transaction that committed, in the order in which they were accepted."""
        ...
