"""Leases and presence rows in memory: the twin of the Redis store, for tests and the simulation (system.md 6)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from loom.ids import IdSource, ulid
from loom.stores.contracts import Clock, Lease, Presence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loom.schemas.envelope import Json


@dataclass(frozen=True, slots=True)
class _Row:
    owner: str
    acquired_at: int
    expires_at: int


@dataclass(slots=True)
class LeaseTable:
    """What all handles of one lease store share; ``clock`` is the store's own, whatever clocks its nodes have."""

    clock: Clock
    ids: IdSource = ulid
    rows: dict[str, _Row] = field(default_factory=dict)
    present: dict[str, Presence] = field(default_factory=dict)
    epoch: str = ""

    def __post_init__(self) -> None:
        self.epoch = self.epoch or self.ids()

    def flush(self) -> None:
        """Empty the store, as a Redis that restarts without its data: every row gone, another epoch."""
        self.rows.clear()
        self.present.clear()
        self.epoch = self.ids()

    def lease(self, execution_id: str) -> Lease | None:
        """Return the row as the contract shows it, judged now."""
        row = self.rows.get(execution_id)
        if row is None:
            return None
        return Lease(execution_id, row.owner, row.acquired_at, row.expires_at, row.expires_at <= self.clock())


class MemoryLeaseStore:
    """One node's handle on a :class:`LeaseTable`. Its scope is ``cluster``: the nodes of a simulation share the table."""

    scope = "cluster"

    def __init__(self, table: LeaseTable) -> None:
        self._table = table

    async def acquire(self, execution_id: str, owner: str, ttl_ms: int) -> Lease | None:
        """See :meth:`loom.stores.contracts.LeaseStore.acquire`."""
        held = await self.acquire_many([execution_id], owner, ttl_ms)
        return self._table.lease(execution_id) if held else None

    async def acquire_many(self, execution_ids: Sequence[str], owner: str, ttl_ms: int) -> set[str]:
        """See :meth:`loom.stores.contracts.LeaseStore.acquire_many`."""
        now, held = self._table.clock(), set()
        for execution_id in execution_ids:
            row = self._table.rows.get(execution_id)
            ours = row is not None and row.owner == owner
            if row is not None and not ours and row.expires_at > now:
                continue
            acquired_at = row.acquired_at if row is not None and ours else now
            self._table.rows[execution_id] = _Row(owner, acquired_at, now + ttl_ms)
            held.add(execution_id)
        return held

    async def renew_many(self, execution_ids: Sequence[str], owner: str, ttl_ms: int) -> set[str]:
        """See :meth:`loom.stores.contracts.LeaseStore.renew_many`."""
        now, held = self._table.clock(), set()
        for execution_id in execution_ids:
            row = self._table.rows.get(execution_id)
            if row is not None and row.owner == owner:
                self._table.rows[execution_id] = replace(row, expires_at=now + ttl_ms)
                held.add(execution_id)
        return held

    async def release_many(self, execution_ids: Sequence[str], owner: str) -> set[str]:
        """See :meth:`loom.stores.contracts.LeaseStore.release_many`."""
        released = set()
        for execution_id in execution_ids:
            row = self._table.rows.get(execution_id)
            if row is not None and row.owner == owner:
                del self._table.rows[execution_id]
                released.add(execution_id)
        return released

    async def steal(self, execution_id: str, owner: str, ttl_ms: int) -> Lease:
        """See :meth:`loom.stores.contracts.LeaseStore.steal`."""
        now, row = self._table.clock(), self._table.rows.get(execution_id)
        acquired_at = row.acquired_at if row is not None and row.owner == owner else now
        self._table.rows[execution_id] = _Row(owner, acquired_at, now + ttl_ms)
        return Lease(execution_id, owner, acquired_at, now + ttl_ms, expired=False)

    async def get(self, execution_id: str) -> Lease | None:
        """See :meth:`loom.stores.contracts.LeaseStore.get`."""
        return self._table.lease(execution_id)

    async def expired(self, limit: int, after: str = "") -> list[Lease]:
        """See :meth:`loom.stores.contracts.LeaseStore.expired`."""
        leases = (self._table.lease(execution_id) for execution_id in sorted(self._table.rows))
        return [lease for lease in leases if lease and lease.expired and lease.execution_id > after][:limit]

    async def held(self, limit: int) -> list[Lease]:
        """See :meth:`loom.stores.contracts.LeaseStore.held`."""
        leases = [lease for row in list(self._table.rows) if (lease := self._table.lease(row)) is not None]
        return sorted(leases, key=lambda lease: (lease.expires_at, lease.execution_id))[:limit]

    async def count(self) -> int:
        """See :meth:`loom.stores.contracts.LeaseStore.count`."""
        return len(self._table.rows)

    async def now(self) -> int:
        """See :meth:`loom.stores.contracts.LeaseStore.now`."""
        return self._table.clock()

    async def beat(
        self, node: str, ttl_ms: int, covers: Sequence[str] = (), details: dict[str, Json] | None = None
    ) -> Presence:
        """See :meth:`loom.stores.contracts.LeaseStore.beat`."""
        row = Presence(
            node,
            self._table.clock() + ttl_ms,
            expired=False,
            covers=tuple(covers),
            details=dict(details or {}),
        )
        self._table.present[node] = row
        return row

    async def presence(self, nodes: Sequence[str]) -> dict[str, Presence]:
        """See :meth:`loom.stores.contracts.LeaseStore.presence`."""
        return {
            node: self._judged(self._table.present[node]) for node in nodes if node in self._table.present
        }

    async def present(self) -> list[Presence]:
        """See :meth:`loom.stores.contracts.LeaseStore.present`."""
        return [self._judged(self._table.present[node]) for node in sorted(self._table.present)]

    async def leave(self, node: str) -> None:
        """See :meth:`loom.stores.contracts.LeaseStore.leave`."""
        row = self._table.present.get(node)
        if row is not None:
            self._table.present[node] = replace(row, expires_at=min(row.expires_at, self._table.clock()))

    async def forget_node(self, node: str) -> None:
        """See :meth:`loom.stores.contracts.LeaseStore.forget_node`."""
        self._table.present.pop(node, None)

    async def epoch(self) -> str:
        """See :meth:`loom.stores.contracts.LeaseStore.epoch`."""
        return self._table.epoch

    async def close(self) -> None:
        """See :meth:`loom.stores.contracts.LeaseStore.close`. The table outlives its handles."""

    def _judged(self, row: Presence) -> Presence:
        return replace(row, expired=row.expires_at <= self._table.clock())
