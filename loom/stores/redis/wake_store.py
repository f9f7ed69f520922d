"""Wake rows on Redis, one hash tag per shard of the log (kafka.md "Redis", system.md 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from loom.ids import IdSource, ulid
from loom.stores.contracts import WakeRow
from loom.stores.redis import scripts
from loom.stores.redis.connection import RedisConnection
from loom.stores.wake_rules import check_kinds, check_same_execution
from loom.topics.partitioner import partition_of

if TYPE_CHECKING:
    from collections.abc import Sequence

ROWS_PER_CALL: Final = 500
"""How many rows one script writes at most: a script holds up every other client of the server."""


class RedisWakeStore:
    """Alarms of a cluster, sharded as the log is: a row lies in the partition of its execution.

    Every call is one script per shard. Repeating a call whose answer was lost doubles nothing. Errors of every
    method: those of ``RedisConnection.call``; a call not answered in time may have been applied.
    """

    def __init__(
        self, url: str, prefix: str, *, partitions: int, timeout_ms: int = 1000, ids: IdSource = ulid
    ) -> None:
        """Prepare the store; nothing is connected yet. ``partitions`` is the log's number."""
        self.connection = RedisConnection(url, prefix, timeout_ms=timeout_ms, ids=ids)
        self._partitions = partitions
        names = ("rows", "due", "refused", "ids")
        self._keys = [
            [self.connection.key(f"wakes.{shard}", name) for name in names] for shard in range(partitions)
        ]

    async def schedule(self, rows: Sequence[WakeRow]) -> None:
        """See :meth:`loom.stores.contracts.WakeStore.schedule`."""
        check_kinds(rows)
        shards: dict[int, list[WakeRow]] = {}
        for row in rows:
            shards.setdefault(self._shard(row.execution_id), []).append(row)
        for shard, members in shards.items():
            for start in range(0, len(members), ROWS_PER_CALL):
                args = [word for row in members[start : start + ROWS_PER_CALL] for word in _words(row)]
                await self.connection.call(scripts.WAKE_SCHEDULE, self._keys[shard], args)

    async def due(
        self, now: int, limit: int, *, shards: frozenset[int], refused: bool = True
    ) -> list[WakeRow]:
        """See :meth:`loom.stores.contracts.WakeStore.due`."""
        rows: list[WakeRow] = []
        for shard in sorted(shards):
            args = [now, limit, int(refused)]
            rows += _rows(await self.connection.call(scripts.WAKE_DUE, self._keys[shard], args))
        return sorted(rows, key=lambda row: (row.wake_at, row.execution_id))[:limit]

    async def refusals(self, now: int, limit: int, *, shard: int, offset: int = 0) -> list[WakeRow]:
        """See :meth:`loom.stores.contracts.WakeStore.refusals`."""
        args: list[str | int] = [now, offset, limit]
        return _rows(await self.connection.call(scripts.WAKE_REFUSALS, self._keys[shard], args))

    async def claim(self, row: WakeRow, owner: str, ttl_ms: int) -> bool:
        """See :meth:`loom.stores.contracts.WakeStore.claim`."""
        args: list[str | int] = [_member(row.execution_id, row.wake_at), row.wake_at, owner, ttl_ms]
        return bool(await self._call(scripts.WAKE_CLAIM, row.execution_id, args))

    async def complete(self, execution_id: str, wake_at: int) -> bool:
        """See :meth:`loom.stores.contracts.WakeStore.complete`."""
        args: list[str | int] = [_member(execution_id, wake_at), wake_at]
        return bool(await self._call(scripts.WAKE_COMPLETE, execution_id, args))

    async def move(self, execution_id: str, wake_at: int, row: WakeRow) -> bool:
        """See :meth:`loom.stores.contracts.WakeStore.move`."""
        check_kinds([row])
        check_same_execution(execution_id, row)
        args: list[str | int] = [_member(execution_id, wake_at), *_words(row)]
        return bool(await self._call(scripts.WAKE_MOVE, execution_id, args))

    async def rows_of(self, execution_id: str) -> list[WakeRow]:
        """See :meth:`loom.stores.contracts.WakeStore.rows_of`."""
        rows = _rows(await self._call(scripts.WAKE_ROWS_OF, execution_id, [execution_id]))
        return sorted(rows, key=lambda row: row.wake_at)

    async def clear(self, execution_id: str) -> int:
        """See :meth:`loom.stores.contracts.WakeStore.clear`."""
        return int(await self._call(scripts.WAKE_CLEAR, execution_id, [execution_id]))

    async def count(self) -> int:
        """See :meth:`loom.stores.contracts.WakeStore.count`."""
        total = 0
        for keys in self._keys:
            total += int(await self.connection.command("HLEN", keys[0]))
        return total

    async def epoch(self) -> str:
        """See :meth:`loom.stores.contracts.WakeStore.epoch`; also another after the server process was replaced."""
        return await self.connection.epoch("wakes")

    async def close(self) -> None:
        """See :meth:`loom.stores.contracts.WakeStore.close`."""
        await self.connection.close()

    def _shard(self, execution_id: str) -> int:
        return partition_of(execution_id, self._partitions)

    async def _call(self, script: scripts.Script, execution_id: str, args: Sequence[str | int]) -> Any:
        return await self.connection.call(script, self._keys[self._shard(execution_id)], args)


def _member(execution_id: str, wake_at: int) -> str:
    return f"{execution_id}:{wake_at}"


def _words(row: WakeRow) -> tuple[str | int, ...]:
    return (_member(row.execution_id, row.wake_at), row.wake_at, row.kind, row.head, row.holds)


def _rows(answer: Sequence[Any]) -> list[WakeRow]:
    rows = []
    for member, kind, head, holds in answer:
        execution_id, wake_at = member.rsplit(":", 1)
        rows.append(WakeRow(execution_id, int(wake_at), kind, int(head), int(holds)))
    return rows
