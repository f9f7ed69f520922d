"""What a simulated node has for stores: the contracts, over a link to the shared ones."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from loom.errors import DeadlineExceededError
from loom.stores.memory.event_store import MemoryEventStore
from loom.stores.memory.wake_store import WakeTable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

    from loom.schemas.envelope import Envelope
    from loom.stores.contracts import (
        Appended,
        CommitListener,
        Committed,
        Observation,
        StreamAppend,
        StreamInfo,
        WakeRow,
    )
    from loom.stores.memory.log import MemoryLog
    from loom.testing.simulation.network import Link


class JudgedWakes(WakeTable):
    """Wake rows in memory; ``judge(before, row, after)`` hears of each row that is written, and of what its key holds then."""

    judge: Callable[[WakeRow | None, WakeRow, WakeRow], None]

    def upsert(self, row: WakeRow) -> None:
        """See :class:`loom.stores.memory.wake_store.WakeTable`."""
        key = (row.execution_id, row.wake_at)
        before = self.slots.get(key)
        held = None if before is None else before.row
        super().upsert(row)
        self.judge(held, row, self.slots[key].row)


class Remote:
    """A store beyond a link whose every method is one call of it."""

    scope = "cluster"

    def __init__(self, inner: Any, link: Link, overhear: Callable[[str], None] | None = None) -> None:
        """``overhear`` is told whatever is asked of the store."""
        self._inner, self._link, self._overhear = inner, link, overhear

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            if self._overhear is not None:
                self._overhear(repr(args))
            return await self._link.call(name, _about(args), partial(method, *args, **kwargs))

        return call

    async def close(self) -> None:
        """The shared store outlives its nodes."""


def _about(args: Sequence[Any]) -> str:
    first = args[0] if args else ""
    return first if isinstance(first, str) else type(first).__name__


class RemoteLog:
    """The log beyond a link. See :class:`loom.stores.contracts.OwningEventStore`.

    What a node serves of it is told by the fleet (``assign``); what it hears of a shard comes in order, behind that.
    """

    def __init__(self, log: MemoryLog, link: Link, on_fence: Callable[[str], None]) -> None:
        self.handle = self._inner = MemoryEventStore(log, owned=())
        log.leave(self._inner)
        self._on_fence = on_fence
        self._log, self._link = log, link
        self._owned: frozenset[int] = frozenset()
        self._listener: CommitListener | None = None

    async def append(self, append: StreamAppend, *, deadline_ms: int | None = None) -> Appended:
        """See the contract."""
        return (await self.append_many([append], deadline_ms=deadline_ms))[0]

    async def append_many(
        self, appends: Sequence[StreamAppend], *, deadline_ms: int | None = None
    ) -> list[Appended]:
        """See the contract."""
        act = partial(self._inner.append_many, list(appends), deadline_ms=deadline_ms)
        result: list[Appended] = await self._link.call("append_many", appends[0].stream_id, act)
        return result

    async def read(self, stream_id: str, from_sequence: int = 0, limit: int = 1000) -> list[Envelope]:
        """See the contract."""
        act = partial(self._inner.read, stream_id, from_sequence, limit)
        found: list[Envelope] = await self._link.call("read", stream_id, act)
        return found

    async def read_last(self, stream_id: str) -> Envelope | None:
        """See the contract."""
        found: Envelope | None = await self._link.call(
            "read_last", stream_id, partial(self._inner.read_last, stream_id)
        )
        return found

    async def observe(self, stream_id: str) -> Observation:
        """See the contract."""
        seen: Observation = await self._link.call(
            "observe", stream_id, partial(self._inner.observe, stream_id)
        )
        return seen

    async def info(self, stream_id: str) -> StreamInfo | None:
        """See the contract."""
        found: StreamInfo | None = await self._link.call(
            "info", stream_id, partial(self._inner.info, stream_id)
        )
        return found

    async def acquire_fence(self, stream_id: str, owner: str) -> int:
        """See the contract."""
        act = partial(self._fenced, stream_id, partial(self._inner.acquire_fence, stream_id, owner))
        token: int = await self._link.call("acquire_fence", stream_id, act)
        return token

    async def acquire_fence_if(self, stream_id: str, observation: Observation, owner: str) -> int:
        """See the contract."""
        take = partial(self._inner.acquire_fence_if, stream_id, observation, owner)
        act = partial(self._fenced, stream_id, take)
        token: int = await self._link.call("acquire_fence_if", stream_id, act)
        return token

    async def _fenced(self, stream_id: str, take: Callable[[], Coroutine[Any, Any, int]]) -> int:
        token = await take()
        self._on_fence(stream_id)
        return token

    async def truncate(self, stream_id: str, before: int) -> None:
        """See the contract."""
        await self._link.call("truncate", stream_id, partial(self._inner.truncate, stream_id, before))

    async def delete(self, stream_id: str) -> None:
        """See the contract."""
        await self._link.call("delete", stream_id, partial(self._inner.delete, stream_id))

    async def copy_prefix(self, source: str, target: str, through: int) -> int:
        """See the contract."""
        act = partial(self._inner.copy_prefix, source, target, through)
        head: int = await self._link.call("copy_prefix", target, act)
        return head

    def subscribe(self, stream_id: str, from_sequence: int = 0) -> AsyncIterator[Envelope]:
        """Nobody follows a log in the simulation: results are read from it."""
        raise DeadlineExceededError(f"subscription to {stream_id} from {from_sequence}", 0)

    async def close(self) -> None:
        """The log outlives its nodes."""

    # Owning -----------------------------------------------------------------------------------------------------------

    def shard_of(self, stream_id: str) -> int:
        """See the contract."""
        return self._log.shard_of(stream_id)

    def owned(self) -> frozenset[int]:
        """What the node was told that it owns; the fleet may have given it to another meanwhile."""
        return self._owned

    def mint_shard(self) -> int | None:
        """See the contract."""
        return min(self._owned, default=None)

    def listen(self, listener: CommitListener) -> None:
        """See the contract."""
        self._listener = listener
        for shard in sorted(self._owned):
            listener.gained(shard)

    def open_logs(self, shard: int, after: str = "", limit: int = 1000) -> list[StreamInfo]:
        """See the contract; of what this node owns no longer it knows nothing."""
        return self._inner.open_logs(shard, after, limit) if shard in self._owned else []

    def inbox_streams(self, chain_id: str) -> list[StreamInfo]:
        """See the contract."""
        return self._inner.inbox_streams(chain_id) if self.shard_of(chain_id) in self._owned else []

    def assigned(self, shards: frozenset[int]) -> None:
        """The node hears which shards it writes now. Called on its loop."""
        before, self._owned = self._owned, shards
        if self._listener is None:
            return
        for shard in sorted(before - shards):
            self._listener.lost(shard)
        for shard in sorted(shards - before):
            self._listener.gained(shard)

    def told(self, batch: list[Committed]) -> None:
        """The node hears what became durable. Called on its loop."""
        ours = [c for c in batch if self.shard_of(c.stream_id) in self._owned]
        if ours and self._listener is not None:
            self._listener.committed(ours)
