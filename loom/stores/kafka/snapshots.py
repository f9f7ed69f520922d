"""Snapshots in the topic ``snapshots``, written by the partition's writer like everything else of a chain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loom.schemas.records import SnapshotRecord
from loom.stores.contracts import Snapshot
from loom.stores.judge import DeleteSnapshot, SaveSnapshot

if TYPE_CHECKING:
    from loom.schemas.codec import Codec
    from loom.stores.kafka.event_store import KafkaEventStore


class KafkaSnapshotStore:
    """See :class:`loom.stores.contracts.SnapshotStore`. It lives as long as the event store it goes through."""

    def __init__(self, events: KafkaEventStore, codec: Codec) -> None:
        self._events = events
        self._codec = codec

    async def save(self, snapshot: Snapshot) -> None:
        """See :meth:`loom.stores.contracts.SnapshotStore.save`."""
        await self._events.write(SaveSnapshot(snapshot), snapshot.execution_id)

    async def load_latest(self, execution_id: str) -> Snapshot | None:
        """See :meth:`loom.stores.contracts.SnapshotStore.load_latest`."""
        raw = await self._events.snapshot(execution_id)
        if raw is None:
            return None
        record = self._codec.decode(raw, SnapshotRecord, "snapshot")
        return Snapshot(record.execution_id, record.sequence, record.state, record.metadata or {})

    async def delete(self, execution_id: str) -> None:
        """See :meth:`loom.stores.contracts.SnapshotStore.delete`."""
        await self._events.write(DeleteSnapshot(execution_id), execution_id)

    async def close(self) -> None:
        """Nothing of its own to release."""
