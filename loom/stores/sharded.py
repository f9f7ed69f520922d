"""One event store made of several, each with streams of its own (system.md 2.2).

Where their sealing differs there is no true answer for the whole, so the question is refused, each time it is asked.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from loom.errors import ConfigError, InvalidInputError, ShardSealingMismatchError
from loom.ids import routing_id
from loom.stores.contracts import StreamAppend
from loom.stores.keys.contract import shares_keys
from loom.topics.partitioner import partition_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from loom.schemas.envelope import Envelope
    from loom.stores.contracts import Appended, EventStore, Observation, StreamInfo
    from loom.stores.sealing.marker import SealingCapability


class ShardedEventStore:
    """Streams placed among ``shards`` by their chain. See :class:`loom.stores.contracts.EventStore`.

    ``place`` gives the index of a chain's shard; default: as the partitioner does. A transaction never spans two shards:
    an append that would, a copy, or a request for a chain of another shard, is refused before anything is written.
    """

    FORWARDED: Final = ("read_at_rest", "read_redacted", "survey", "subscribe_loud", "notify", "list_inboxes")
    """Optional methods that are there where every shard has them."""
    REFUSED: Final = ("write", "snapshot", "open", "assign", "mint_id", "health", "scan_open_logs")

    def __init__(self, shards: Sequence[EventStore], place: Callable[[str], int] | None = None) -> None:
        """Put ``shards`` together.

        Raises:
            ConfigError: there are none.
        """
        if not shards:
            raise ConfigError("shards", "there are none", "give at least one event store")
        self._shards = tuple(shards)
        self._place = place or (lambda chain_id: partition_of(chain_id, len(self._shards)))

    def shard_for(self, stream_id: str) -> EventStore:
        """The store that a stream lies in."""
        return self._shards[self._place(routing_id(stream_id))]

    async def append(self, append: StreamAppend, *, deadline_ms: int | None = None) -> Appended:
        """See :meth:`loom.stores.contracts.EventStore.append`.

        Raises:
            InvalidInputError: it sends to a chain of another shard, beside what the contract says.
        """
        shard = self._one_shard([append])
        return await shard.append(append, deadline_ms=deadline_ms)

    async def append_many(
        self, appends: Sequence[StreamAppend], *, deadline_ms: int | None = None
    ) -> list[Appended]:
        """See :meth:`loom.stores.contracts.EventStore.append_many`.

        Raises:
            InvalidInputError: the streams, or chains that they send to, are of several shards.
        """
        if not appends:
            return []
        return await self._one_shard(appends).append_many(appends, deadline_ms=deadline_ms)

    async def read(self, stream_id: str, from_sequence: int = 0, limit: int = 1000) -> list[Envelope]:
        """See :meth:`loom.stores.contracts.EventStore.read`."""
        return await self.shard_for(stream_id).read(stream_id, from_sequence, limit)

    async def read_last(self, stream_id: str) -> Envelope | None:
        """See :meth:`loom.stores.contracts.EventStore.read_last`."""
        return await self.shard_for(stream_id).read_last(stream_id)

    async def observe(self, stream_id: str) -> Observation:
        """See :meth:`loom.stores.contracts.EventStore.observe`."""
        return await self.shard_for(stream_id).observe(stream_id)

    async def info(self, stream_id: str) -> StreamInfo | None:
        """See :meth:`loom.stores.contracts.EventStore.info`."""
        return await self.shard_for(stream_id).info(stream_id)

    async def acquire_fence(self, stream_id: str, owner: str) -> int:
        """See :meth:`loom.stores.contracts.EventStore.acquire_fence`."""
        return await self.shard_for(stream_id).acquire_fence(stream_id, owner)

    async def acquire_fence_if(self, stream_id: str, observation: Observation, owner: str) -> int:
        """See :meth:`loom.stores.contracts.EventStore.acquire_fence_if`."""
        return await self.shard_for(stream_id).acquire_fence_if(stream_id, observation, owner)

    async def truncate(self, stream_id: str, before: int) -> None:
        """See :meth:`loom.stores.contracts.EventStore.truncate`."""
        await self.shard_for(stream_id).truncate(stream_id, before)

    async def delete(self, stream_id: str) -> None:
        """See :meth:`loom.stores.contracts.EventStore.delete`."""
        await self.shard_for(stream_id).delete(stream_id)

    async def copy_prefix(self, source: str, target: str, through: int) -> int:
        """See :meth:`loom.stores.contracts.EventStore.copy_prefix`.

        Raises:
            InvalidInputError: the target is of another shard, beside what the contract says.
        """
        shard = self.shard_for(source)
        if shard is not self.shard_for(target):
            raise InvalidInputError(
                "copy_prefix", "its streams are of two shards", "mint the target for the source's"
            )
        return await shard.copy_prefix(source, target, through)

    def subscribe(self, stream_id: str, from_sequence: int = 0) -> AsyncIterator[Envelope]:
        """See :meth:`loom.stores.contracts.EventStore.subscribe`."""
        return self.shard_for(stream_id).subscribe(stream_id, from_sequence)

    async def close(self) -> None:
        """See :meth:`loom.stores.contracts.EventStore.close`: every shard, whatever one of them says."""
        ends = await asyncio.gather(*(shard.close() for shard in self._shards), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    def __getattr__(self, name: str) -> Any:
        if name == "sealing_capability" and any(hasattr(shard, name) for shard in self._shards):
            return self._sealing_capability
        if name == "keys" and self._shared_keys() is not None:
            return self._shared_keys()
        if name == "find_subject" and all(hasattr(shard, name) for shard in self._shards):
            return self._find_subject
        if name in ShardedEventStore.FORWARDED and all(hasattr(shard, name) for shard in self._shards):
            return lambda stream_id, *args, **options: getattr(self.shard_for(stream_id), name)(
                stream_id, *args, **options
            )
        raise AttributeError(name)

    def _sealing_capability(self) -> SealingCapability | None:
        """What every shard seals and opens, judged now; None where none seals.

        Raises:
            ShardSealingMismatchError: they differ. A shard without the method seals nothing.
        """
        answers = []
        for shard in self._shards:
            asked = getattr(shard, "sealing_capability", None)
            answers.append(None if asked is None else asked())
        told = [(None, ()) if a is None else (a.cipher, tuple(a.covers)) for a in answers]
        if len(set(told)) > 1:
            raise ShardSealingMismatchError(tuple((n, *one) for n, one in enumerate(told)))
        return answers[0]

    async def _find_subject(self, subject: str) -> list[str]:
        """Streams of a subject in every shard."""
        found = await asyncio.gather(*(getattr(shard, "find_subject")(subject) for shard in self._shards))  # noqa: B009
        return [stream_id for part in found for stream_id in part]

    def _shared_keys(self) -> Any:
        """The key store of all shards, None unless they share one."""
        stores = [getattr(shard, "keys", None) for shard in self._shards]
        first = stores[0]
        return first if all(shares_keys(first, store) for store in stores) else None

    def _one_shard(self, appends: Sequence[StreamAppend]) -> EventStore:
        shards = {id(shard): shard for append in appends for shard in self._touched(append)}
        if len(shards) > 1:
            raise InvalidInputError(
                "append", "it touches streams of several shards", "append to one shard's chains at a time"
            )
        return next(iter(shards.values()))

    def _touched(self, append: StreamAppend) -> list[EventStore]:
        touched = [self.shard_for(append.stream_id)]
        for outgoing in append.outgoing:
            if isinstance(outgoing.body, StreamAppend):
                touched += self._touched(outgoing.body)
        return touched
