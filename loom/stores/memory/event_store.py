"""Events in memory: the twin of the Kafka event store, on the same judge, for tests and the simulation."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from loom.errors import InvalidInputError, StorageWriteError
from loom.schemas.codec import decode_envelope
from loom.stores.contracts import Appended, CommitListener, Committed, Observation, StreamAppend, StreamInfo
from loom.stores.judge import (
    AcquireFence,
    AppendOps,
    CopyPrefix,
    Delete,
    Rejected,
    Truncate,
    WriteOp,
)
from loom.stores.memory.subjects import find_subject
from loom.stores.rows import observation_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from loom.schemas.envelope import Envelope
    from loom.stores.memory.log import MemoryLog

_READ_CHUNK = 1000


class MemoryEventStore:
    """One node's handle on a :class:`MemoryLog`. See :class:`loom.stores.contracts.OwningEventStore`.

    ``origin`` labels this handle's own appends to its listener; ``owned`` are the shards it serves (default: all).
    Every call gives way to the event loop once before it acts, so that callers interleave as they do on a real log.
    All handles of one log live on one event loop.
    """

    def __init__(
        self, log: MemoryLog, *, origin: str | None = None, owned: Iterable[int] | None = None
    ) -> None:
        self._log = log
        self._origin = origin
        self._owned = frozenset(range(log.shards) if owned is None else owned)
        self._listener: CommitListener | None = None
        self._closed = False
        self._closing: set[asyncio.Future[None]] = set()
        log.join(self)

    async def append(self, append: StreamAppend, *, deadline_ms: int | None = None) -> Appended:
        """See :meth:`loom.stores.contracts.EventStore.append`."""
        (appended,) = await self.append_many([append], deadline_ms=deadline_ms)
        return appended

    async def append_many(
        self,
        appends: Sequence[StreamAppend],
        *,
        deadline_ms: int | None = None,  # noqa: ARG002 - nothing here takes time
    ) -> list[Appended]:
        """See :meth:`loom.stores.contracts.EventStore.append_many`.

        Raises:
            InvalidInputError: the streams are of several shards, beside what the contract says.
        """
        if len({self._log.shard_of(append.stream_id) for append in appends}) > 1:
            raise InvalidInputError(
                "append_many", "its streams are of several shards", "append to one chain's streams"
            )
        if not appends:
            return []
        result: list[Appended] = await self._write(AppendOps(tuple(appends)), appends[0].stream_id)
        return result

    async def read(self, stream_id: str, from_sequence: int = 0, limit: int = 1000) -> list[Envelope]:
        """See :meth:`loom.stores.contracts.EventStore.read`."""
        await self._turn()
        return self._log.index.events(stream_id, from_sequence, limit)

    async def read_last(self, stream_id: str) -> Envelope | None:
        """See :meth:`loom.stores.contracts.EventStore.read_last`."""
        await self._turn()
        row = self._log.index.row(stream_id)
        if row is None or not row.exists:
            return None
        last = row.head if row.first <= row.head else 0
        return self._log.index.events(stream_id, last, 1)[0]

    async def observe(self, stream_id: str) -> Observation:
        """See :meth:`loom.stores.contracts.EventStore.observe`."""
        await self._turn()
        return observation_of(self._log.index.row(stream_id))

    async def info(self, stream_id: str) -> StreamInfo | None:
        """See :meth:`loom.stores.contracts.EventStore.info`."""
        await self._turn()
        row = self._log.index.row(stream_id)
        return row.info(stream_id) if row is not None and row.exists else None

    async def acquire_fence(self, stream_id: str, owner: str) -> int:
        """See :meth:`loom.stores.contracts.EventStore.acquire_fence`."""
        token: int = await self._write(AcquireFence(stream_id, owner), stream_id)
        return token

    async def acquire_fence_if(self, stream_id: str, observation: Observation, owner: str) -> int:
        """See :meth:`loom.stores.contracts.EventStore.acquire_fence_if`."""
        token: int = await self._write(AcquireFence(stream_id, owner, observation), stream_id)
        return token

    async def truncate(self, stream_id: str, before: int) -> None:
        """See :meth:`loom.stores.contracts.EventStore.truncate`."""
        await self._write(Truncate(stream_id, before), stream_id)

    async def delete(self, stream_id: str) -> None:
        """See :meth:`loom.stores.contracts.EventStore.delete`."""
        await self._write(Delete(stream_id), stream_id)

    async def copy_prefix(self, source: str, target: str, through: int) -> int:
        """See :meth:`loom.stores.contracts.EventStore.copy_prefix`.

        Raises:
            InvalidInputError: the target is of another shard, beside what the contract says.
        """
        if self._log.shard_of(source) != self._log.shard_of(target):
            raise InvalidInputError(
                "copy_prefix", "its streams are of two shards", "mint the target for the source's"
            )
        head: int = await self._write(CopyPrefix(source, target, through), target)
        return head

    async def subscribe(self, stream_id: str, from_sequence: int = 0) -> AsyncIterator[Envelope]:
        """See :meth:`loom.stores.contracts.EventStore.subscribe`. It ends when this handle is closed."""
        sequence = from_sequence
        while not self._closed:
            changed = self._log.changed(stream_id)
            self._closing.add(changed)
            try:
                raw = self._log.index.encoded(stream_id, sequence, _READ_CHUNK)
                for envelope in map(decode_envelope, raw):
                    sequence = envelope.sequence + 1
                    yield envelope
                if not raw:
                    await changed
            finally:
                self._closing.discard(changed)
                self._log.forget(stream_id, changed)

    async def close(self) -> None:
        """See :meth:`loom.stores.contracts.EventStore.close`. The log outlives its handles."""
        self._closed = True
        self._log.leave(self)
        for future in self._closing:
            if not future.done():
                future.set_result(None)

    async def find_subject(self, subject: str) -> list[str]:
        """Every stream of the chains that belong to a subject."""
        await self._turn()
        return find_subject(self._log.index, subject)

    def shard_of(self, stream_id: str) -> int:
        """See :meth:`loom.stores.contracts.OwningEventStore.shard_of`."""
        return self._log.shard_of(stream_id)

    def owned(self) -> frozenset[int]:
        """See :meth:`loom.stores.contracts.OwningEventStore.owned`."""
        return self._owned

    def mint_shard(self) -> int | None:
        """See :meth:`loom.stores.contracts.OwningEventStore.mint_shard`."""
        return min(self._owned, default=None)

    def listen(self, listener: CommitListener) -> None:
        """See :meth:`loom.stores.contracts.OwningEventStore.listen`. Shards owned already are told as gained."""
        self._listener = listener
        for shard in sorted(self._owned):
            _call_soon(listener.gained, shard)

    def assign(self, shards: Iterable[int]) -> None:
        """Serve these shards from now on; the listener hears what was lost, then what was gained."""
        before, self._owned = self._owned, frozenset(shards)
        if self._listener is None:
            return
        for shard in sorted(before - self._owned):
            _call_soon(self._listener.lost, shard)
        for shard in sorted(self._owned - before):
            _call_soon(self._listener.gained, shard)

    def open_logs(self, shard: int, after: str = "", limit: int = 1000) -> list[StreamInfo]:
        """See :meth:`loom.stores.contracts.OwningEventStore.open_logs`."""
        ids = sorted(
            stream_id
            for stream_id, row in self._log.index.rows().items()
            if stream_id > after
            and row.kind == "executions"
            and row.exists
            and not row.finished
            and self._log.shard_of(stream_id) == shard
        )
        return [self._log.index.rows()[stream_id].info(stream_id) for stream_id in ids[:limit]]

    def inbox_streams(self, chain_id: str) -> list[StreamInfo]:
        """See :meth:`loom.stores.contracts.OwningEventStore.inbox_streams`."""
        return [row.info(stream_id) for stream_id, row in self._log.inbox_streams(chain_id)]

    async def list_inboxes(self, chain_id: str) -> list[str]:
        """See :data:`loom.stores.contracts.OPTIONAL_EVENT_STORE_METHODS`."""
        return [stream_id for stream_id, _ in self._log.inbox_streams(chain_id)]

    def committed(self, batch: list[Committed], appender: object) -> None:
        """Hand what the log made durable to the listener, as far as this handle serves it."""
        if self._listener is None:
            return
        origin = self._origin if appender is self else None
        ours = [
            Committed(c.stream_id, c.envelopes, origin)
            for c in batch
            if self._log.shard_of(c.stream_id) in self._owned
        ]
        if ours:
            _call_soon(self._listener.committed, ours)

    async def _turn(self) -> None:
        await asyncio.sleep(0)

    async def _write(self, op: WriteOp, stream_id: str) -> Any:
        await self._turn()
        if self._closed:
            raise StorageWriteError(stream_id, "the store is closed")
        verdict = self._log.commit(op, self)
        if isinstance(verdict, Rejected):
            raise verdict.error
        return verdict.result


def _call_soon(call: Callable[[Any], None], argument: object) -> None:
    """Call it on the running loop, in the order of the calls; at once where no loop runs."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        call(argument)
    else:
        loop.call_soon(call, argument)
