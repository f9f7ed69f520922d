"""Wake rows in memory: the twin of the Redis store, for tests and the simulation (system.md 5)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from loom.ids import IdSource, ulid
from loom.stores.contracts import Clock, WakeRow
from loom.stores.wake_rules import KIND_RANK, check_kinds, check_same_execution
from loom.topics.partitioner import partition_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_Key = tuple[str, int]


@dataclass(slots=True)
class _Slot:
    row: WakeRow
    claimed_by: str = ""
    claimed_until: int = 0
    asked_again: bool = False  # an inbox or refusal row was scheduled again while its claim stood


@dataclass(slots=True)
class WakeTable:
    """What all handles of one wake store share; ``clock`` is the store's own and judges claims."""

    clock: Clock
    partitions: int
    ids: IdSource = ulid
    slots: dict[_Key, _Slot] = field(default_factory=dict)
    epoch: str = ""

    def __post_init__(self) -> None:
        self.epoch = self.epoch or self.ids()

    def flush(self) -> None:
        """Empty the store, as a Redis that restarts without its data: every row gone, another epoch."""
        self.slots.clear()
        self.epoch = self.ids()

    def claimed(self, slot: _Slot) -> bool:
        """Tell whether a claim stands on the row now."""
        return slot.claimed_until > self.clock()

    def upsert(self, row: WakeRow) -> None:
        """Merge a row into its key: the stronger kind, the higher head, the more holds; any order gives the same."""
        key = (row.execution_id, row.wake_at)
        slot = self.slots.get(key)
        if slot is None:
            self.slots[key] = _Slot(row)
            return
        if row.kind != "timer" and self.claimed(slot):
            slot.asked_again = True
        kind = max(slot.row.kind, row.kind, key=KIND_RANK.__getitem__)
        slot.row = WakeRow(*key, kind, max(slot.row.head, row.head), max(slot.row.holds, row.holds))


class MemoryWakeStore:
    """One node's handle on a :class:`WakeTable`."""

    def __init__(self, table: WakeTable) -> None:
        self._table = table

    async def schedule(self, rows: Sequence[WakeRow]) -> None:
        """See :meth:`loom.stores.contracts.WakeStore.schedule`."""
        check_kinds(rows)
        for row in rows:
            self._table.upsert(row)

    async def due(
        self, now: int, limit: int, *, shards: frozenset[int], refused: bool = True
    ) -> list[WakeRow]:
        """See :meth:`loom.stores.contracts.WakeStore.due`."""
        rows = [row for row in self._due(now, refused=refused) if self._shard(row.execution_id) in shards]
        return sorted(rows, key=lambda row: (row.wake_at, row.execution_id))[:limit]

    async def refusals(self, now: int, limit: int, *, shard: int, offset: int = 0) -> list[WakeRow]:
        """See :meth:`loom.stores.contracts.WakeStore.refusals`."""
        rows = (slot.row for slot in self._table.slots.values() if slot.row.kind == "refusal")
        here = [row for row in rows if row.wake_at <= now and self._shard(row.execution_id) == shard]
        return sorted(here, key=lambda row: (row.wake_at, row.execution_id))[offset : offset + limit]

    async def claim(self, row: WakeRow, owner: str, ttl_ms: int) -> bool:
        """See :meth:`loom.stores.contracts.WakeStore.claim`."""
        slot = self._table.slots.get((row.execution_id, row.wake_at))
        if slot is None or (self._table.claimed(slot) and slot.claimed_by != owner):
            return False
        slot.claimed_by, slot.claimed_until = owner, self._table.clock() + ttl_ms
        return True

    async def complete(self, execution_id: str, wake_at: int) -> bool:
        """See :meth:`loom.stores.contracts.WakeStore.complete`."""
        slot = self._table.slots.get((execution_id, wake_at))
        if slot is None:
            return False
        if slot.asked_again:
            slot.claimed_by, slot.claimed_until, slot.asked_again = "", 0, False
        else:
            del self._table.slots[execution_id, wake_at]
        return True

    async def move(self, execution_id: str, wake_at: int, row: WakeRow) -> bool:
        """See :meth:`loom.stores.contracts.WakeStore.move`."""
        check_kinds([row])
        check_same_execution(execution_id, row)
        slot = self._table.slots.get((execution_id, wake_at))
        if slot is None or (slot.row.kind == "timer" and row.kind != "timer"):
            return False
        del self._table.slots[execution_id, wake_at]
        merged = replace(row, head=max(row.head, slot.row.head), holds=max(row.holds, slot.row.holds))
        self._table.upsert(merged)
        return True

    async def rows_of(self, execution_id: str) -> list[WakeRow]:
        """See :meth:`loom.stores.contracts.WakeStore.rows_of`."""
        rows = (slot.row for key, slot in self._table.slots.items() if key[0] == execution_id)
        return sorted(rows, key=lambda row: row.wake_at)

    async def clear(self, execution_id: str) -> int:
        """See :meth:`loom.stores.contracts.WakeStore.clear`."""
        keys = [key for key in self._table.slots if key[0] == execution_id]
        for key in keys:
            del self._table.slots[key]
        return len(keys)

    async def count(self) -> int:
        """See :meth:`loom.stores.contracts.WakeStore.count`."""
        return len(self._table.slots)

    async def epoch(self) -> str:
        """See :meth:`loom.stores.contracts.WakeStore.epoch`."""
        return self._table.epoch

    async def close(self) -> None:
        """See :meth:`loom.stores.contracts.WakeStore.close`. The table outlives its handles."""

    def _shard(self, execution_id: str) -> int:
        return partition_of(execution_id, self._table.partitions)

    def _due(self, now: int, *, refused: bool) -> Iterator[WakeRow]:
        for slot in self._table.slots.values():
            wanted = refused or slot.row.kind != "refusal"
            if slot.row.wake_at <= now and wanted and not self._table.claimed(slot):
                yield slot.row
