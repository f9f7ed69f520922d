"""Whether a subject was erased: only a tombstone in the log, or folded into its snapshot, says so (system.md 2.6)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from loom.kernel.guard import is_sealed_envelope
from loom.schemas.envelope import Envelope, Json, Kind
from loom.stores.sealing.marker import SEAL

if TYPE_CHECKING:
    from loom.stores.contracts import EventStore, Snapshot, SnapshotStore

MAX_FOUND: Final = 16_384
PAGE: Final = 1000
SHREDDED: Final = "shredded"
"""Key, in the seal record of a snapshot's metadata, of the subjects whose tombstones are folded into it."""


def erases(envelope: Envelope, subject: str) -> bool:
    """Whether an event is the tombstone of a subject."""
    data = envelope.data
    return envelope.type == Kind.PAYLOAD_SHREDDED and data.get("subjectId", data.get("subject")) == subject


def folded(snapshot: Snapshot, subject: str) -> bool:
    """Whether a snapshot, sealed or not, records the tombstone of a subject."""
    record = snapshot.metadata.get(SEAL)
    if isinstance(record, Mapping) and subject in _names(record.get(SHREDDED)):
        return True
    if is_sealed_envelope(snapshot.state):
        return False
    variables = snapshot.state.get("variables")
    return isinstance(variables, Mapping) and subject in _names(variables.get("_shredded"))


def _names(value: Json) -> tuple[str, ...]:
    return tuple(value) if isinstance(value, list | tuple | Mapping) else ()


class Tombstones:
    """Looks for tombstones at rest. A found one is remembered; that there is none never is: it may come any moment."""

    def __init__(self, events: EventStore, snapshots: SnapshotStore | None = None) -> None:
        self._events = events
        self._snapshots = snapshots
        self._found: OrderedDict[tuple[str, str], None] = OrderedDict()

    async def stands(self, stream_id: str, subject: str) -> bool:
        """Whether the log of ``stream_id`` holds the tombstone of ``subject``; reads all of it if it must.

        Raises:
            StoreError: it cannot be read now.
        """
        key = (stream_id, subject)
        if key in self._found:
            self._found.move_to_end(key)
            return True
        if not await self._search(stream_id, subject):
            return False
        self._found[key] = None
        if len(self._found) > MAX_FOUND:
            self._found.popitem(last=False)
        return True

    async def _search(self, stream_id: str, subject: str) -> bool:
        last = await self._events.read_last(stream_id)
        if last is None:
            return False
        if erases(last, subject):
            return True
        start = 0
        while page := await self._events.read(stream_id, start, PAGE):
            if any(erases(envelope, subject) for envelope in page):
                return True
            start = page[-1].sequence + 1
            if start > last.sequence:
                break
        if self._snapshots is None:
            return False
        snapshot = await self._snapshots.load_latest(stream_id)
        return snapshot is not None and folded(snapshot, subject)
