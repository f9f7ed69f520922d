"""Leases and presence rows on Redis, judged by the server's clock (kafka.md "Redis", system.md 6)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from loom.errors import DecodeError, LeaseStoreTimeoutError
from loom.ids import IdSource, ulid
from loom.stores.contracts import Lease, Presence
from loom.stores.redis import scripts
from loom.stores.redis.connection import MIN_TIMEOUT_MS, RedisConnection

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loom.schemas.envelope import Json

IDS_PER_CALL: Final = 1000
"""How many rows one script touches at most: a script holds up every other client of the server."""

MAX_STORE_TIMEOUT_MS: Final = 1000
"""No lease call waits longer, or than a sixth of the TTL: beyond it the holder fences itself (clauses.md, leases)."""

_PART: Final = "leases"


def _timed_out(what: str, bound_ms: int) -> LeaseStoreTimeoutError:
    return LeaseStoreTimeoutError(
        f"{what} was not answered within {bound_ms} ms; it may have been done, repeat it"
    )


class RedisLeaseStore:
    """Leases of a cluster. Rows have no key expiry: an expired row is evidence, and stays until taken or collected.

    Every call is one script per 1,000 ids, harmless when repeated with the same owner, and bounded by ``timeout_ms``
    and, where it carries a TTL, by a sixth of it. Errors of every method: those of ``RedisConnection.call``, with
    ``LeaseStoreTimeoutError`` for a call not answered in time (it may have been applied).
    """

    scope = "cluster"

    def __init__(
        self,
        url: str,
        prefix: str,
        *,
        timeout_ms: int = MAX_STORE_TIMEOUT_MS,
        floor_ms: int = MIN_TIMEOUT_MS,
        ids: IdSource = ulid,
    ) -> None:
        """Prepare the store; nothing is connected yet. ``timeout_ms`` is capped at 1 s, ``floor_ms`` bounds it below."""
        self.connection = RedisConnection(
            url,
            prefix,
            timeout_ms=min(timeout_ms, MAX_STORE_TIMEOUT_MS),
            floor_ms=floor_ms,
            ids=ids,
            timed_out=_timed_out,
        )
        key = self.connection.key
        self._keys = [key(_PART, "rows"), key(_PART, "expiry"), key(_PART, "lapsed")]
        self._present = [key(_PART, "present")]

    async def acquire(self, execution_id: str, owner: str, ttl_ms: int) -> Lease | None:
        """See :meth:`loom.stores.contracts.LeaseStore.acquire`."""
        for row in await self._leased(scripts.LEASE_ACQUIRE, [owner, ttl_ms, execution_id], ttl_ms):
            return Lease(execution_id, owner, int(row[1]), int(row[2]), expired=False)
        return None

    async def acquire_many(self, execution_ids: Sequence[str], owner: str, ttl_ms: int) -> set[str]:
        """See :meth:`loom.stores.contracts.LeaseStore.acquire_many`."""
        held: set[str] = set()
        for ids in _chunks(execution_ids):
            held.update(
                row[0] for row in await self._leased(scripts.LEASE_ACQUIRE, [owner, ttl_ms, *ids], ttl_ms)
            )
        return held

    async def renew_many(self, execution_ids: Sequence[str], owner: str, ttl_ms: int) -> set[str]:
        """See :meth:`loom.stores.contracts.LeaseStore.renew_many`."""
        held: set[str] = set()
        for ids in _chunks(execution_ids):
            held.update(await self._leased(scripts.LEASE_RENEW, [owner, ttl_ms, *ids], ttl_ms))
        return held

    async def release_many(self, execution_ids: Sequence[str], owner: str) -> set[str]:
        """See :meth:`loom.stores.contracts.LeaseStore.release_many`."""
        released: set[str] = set()
        for ids in _chunks(execution_ids):
            released.update(await self._leased(scripts.LEASE_RELEASE, [owner, *ids]))
        return released

    async def steal(self, execution_id: str, owner: str, ttl_ms: int) -> Lease:
        """See :meth:`loom.stores.contracts.LeaseStore.steal`."""
        since, till = await self._leased(scripts.LEASE_STEAL, [owner, ttl_ms, execution_id], ttl_ms)
        return Lease(execution_id, owner, int(since), int(till), expired=False)

    async def get(self, execution_id: str) -> Lease | None:
        """See :meth:`loom.stores.contracts.LeaseStore.get`."""
        row = await self._leased(scripts.LEASE_GET, [execution_id])
        return None if row is None else Lease(execution_id, row[0], int(row[1]), int(row[2]), bool(row[3]))

    async def expired(self, limit: int, after: str = "") -> list[Lease]:
        """See :meth:`loom.stores.contracts.LeaseStore.expired`."""
        while True:
            moved, rows = await self._leased(scripts.LEASE_EXPIRED, [after, limit, IDS_PER_CALL])
            if moved < IDS_PER_CALL:  # else more have expired than one script may sort in
                return [Lease(row[0], row[1], int(row[2]), int(row[3]), expired=True) for row in rows]

    async def held(self, limit: int) -> list[Lease]:
        """See :meth:`loom.stores.contracts.LeaseStore.held`; at most 1,000."""
        rows = await self._leased(scripts.LEASE_HELD, [min(limit, IDS_PER_CALL)])
        leases = [Lease(row[0], row[1], int(row[2]), int(row[3]), bool(row[4])) for row in rows]
        return sorted(leases, key=lambda lease: (lease.expires_at, lease.execution_id))[:limit]

    async def count(self) -> int:
        """See :meth:`loom.stores.contracts.LeaseStore.count`."""
        return int(await self.connection.command("HLEN", self._keys[0]))

    async def now(self) -> int:
        """See :meth:`loom.stores.contracts.LeaseStore.now`."""
        return int(await self.connection.call(scripts.CLOCK, self._keys, []))

    async def beat(
        self, node: str, ttl_ms: int, covers: Sequence[str] = (), details: dict[str, Json] | None = None
    ) -> Presence:
        """See :meth:`loom.stores.contracts.LeaseStore.beat`."""
        body = json.dumps({"covers": list(covers), "details": details or {}}, separators=(",", ":"))
        call = self.connection.call
        till = await call(
            scripts.PRESENCE_BEAT, self._present, [node, ttl_ms, body], timeout_ms=_bound(ttl_ms)
        )
        return Presence(node, int(till), expired=False, covers=tuple(covers), details=dict(details or {}))

    async def presence(self, nodes: Sequence[str]) -> dict[str, Presence]:
        """See :meth:`loom.stores.contracts.LeaseStore.presence`."""
        found: dict[str, Presence] = {}
        for chunk in _chunks(nodes):
            rows = await self.connection.call(scripts.PRESENCE_GET, self._present, chunk)
            found.update((row[0], _presence(row)) for row in rows)
        return found

    async def present(self) -> list[Presence]:
        """See :meth:`loom.stores.contracts.LeaseStore.present`."""
        rows = await self.connection.call(scripts.PRESENCE_ALL, self._present, [])
        return sorted((_presence(row) for row in rows), key=lambda row: row.node)

    async def leave(self, node: str) -> None:
        """See :meth:`loom.stores.contracts.LeaseStore.leave`."""
        await self.connection.call(scripts.PRESENCE_LEAVE, self._present, [node])

    async def forget_node(self, node: str) -> None:
        """See :meth:`loom.stores.contracts.LeaseStore.forget_node`."""
        await self.connection.command("HDEL", self._present[0], node)

    async def epoch(self) -> str:
        """See :meth:`loom.stores.contracts.LeaseStore.epoch`; also another after the server process was replaced."""
        return await self.connection.epoch(_PART)

    async def close(self) -> None:
        """See :meth:`loom.stores.contracts.LeaseStore.close`."""
        await self.connection.close()

    async def _leased(
        self, script: scripts.Script, args: Sequence[str | int], ttl_ms: int | None = None
    ) -> Any:
        bound = None if ttl_ms is None else _bound(ttl_ms)
        return await self.connection.call(script, self._keys, args, timeout_ms=bound)


def _bound(ttl_ms: int) -> int:
    return min(ttl_ms // 6, MAX_STORE_TIMEOUT_MS)


def _chunks(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), IDS_PER_CALL):
        yield ids[start : start + IDS_PER_CALL]


def _presence(row: Sequence[Any]) -> Presence:
    try:
        body = json.loads(row[3])
        return Presence(row[0], int(row[1]), bool(row[2]), tuple(body["covers"]), body["details"])
    except (ValueError, KeyError, TypeError) as error:
        raise DecodeError(f"presence row of {row[0][:64]!r}", type(error).__name__) from None
