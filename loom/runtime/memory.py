"""Stores in memory for ``storage="memory"``: one process, nothing kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loom.runtime.factory import Stores
from loom.stores.memory.event_store import MemoryEventStore
from loom.stores.memory.lease_store import LeaseTable, MemoryLeaseStore
from loom.stores.memory.log import MemoryLog
from loom.stores.memory.snapshot_store import MemorySnapshotStore, SnapshotTable
from loom.stores.memory.wake_store import MemoryWakeStore, WakeTable

if TYPE_CHECKING:
    from loom.config import Config
    from loom.stores.contracts import Clock


def open_stores(config: Config, clock: Clock) -> Stores:
    """Fresh stores in memory."""
    log = MemoryLog(clock, shards=config.partitions)
    return Stores(
        MemoryEventStore(log),
        MemorySnapshotStore(SnapshotTable()),
        MemoryLeaseStore(LeaseTable(clock)) if config.leases.enabled else None,
        MemoryWakeStore(WakeTable(clock, config.partitions)),
    )
