"""The event store on Kafka: to the writer in this process where there is one, by request to the owner where not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from loom.errors import (
    InvalidInputError,
    NotOwnerError,
    OutcomeUnknownError,
    StorageWriteError,
    StoreClosedError,
    WrongHeadError,
)
from loom.ids import routing_id, ulid
from loom.schemas.codec import Codec
from loom.schemas.records import NotifyOp, ReadOp
from loom.stores.contracts import Appended, Observation, StreamInfo
from loom.stores.judge import AcquireFence, AppendOps, CopyPrefix, Delete, Truncate, WriteOp
from loom.stores.kafka import wire
from loom.stores.kafka.connection import Connection
from loom.stores.kafka.deadline import Deadline
from loom.stores.kafka.find import SubjectFinder
from loom.stores.kafka.subscribe import LiveFeed, LiveQueue, follow
from loom.topics.partitioner import mint, partition_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from loom.ids import IdSource
    from loom.schemas.envelope import Envelope
    from loom.schemas.records import ReadReply
    from loom.stores.contracts import Clock, CommitListener, Committed, StreamAppend
    from loom.stores.kafka.settings import KafkaSettings
    from loom.stores.kafka.shard import Shard
    from loom.stores.kafka.writer import WriterHealth

_log = logging.getLogger("loom.kafka.store")

MAX_LIMIT: Final = 100_000
"""Most events of one read."""
_FENCE_TRIES: Final = 16


class KafkaEventStore:
    """See :class:`loom.stores.contracts.OwningEventStore`. Of the event loop on which ``open`` was awaited.

    With ``owns`` it joins the group of owners and writes the partitions it is given; without, it asks their owners for
    everything. ``origin`` labels the appends of this handle to its listener. ``on_fatal`` hears once, on the loop, why
    this node can own nothing any more; from then on it is a store that asks.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        owns: bool,
        clock: Clock,
        codec: Codec | None = None,
        origin: str | None = None,
        ids: IdSource = ulid,
        on_fatal: Callable[[Exception], None] | None = None,
    ) -> None:
        self._settings = settings
        self._codec = codec if codec is not None else Codec()
        self._origin = origin
        self._ids = ids
        self._on_fatal = on_fatal
        self.failure: Exception | None = None
        """Why this node can own nothing any more; None while it can."""
        self._listener: CommitListener | None = None
        self._feed = LiveFeed()
        self._closed = False
        self._closing: asyncio.Future[None] | None = None
        self._gained: set[int] = set()
        self._kafka = Connection(settings, owns=owns, codec=self._codec, clock=clock, ids=ids, listener=self)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def open(self) -> None:
        """Check the topics, fix the position for replies, and join the owners.

        Raises:
            UnreachableError: the brokers do not answer within ``open_ms``. TopicsError: topics of the prefix are missing
            or have another number of partitions. ConfigError: the local folder is used by another process.
        """
        self._loop = asyncio.get_running_loop()
        try:
            await self._kafka.open(self._loop)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """See :meth:`loom.stores.contracts.EventStore.close`: within ``close_ms``, what is in flight is finished."""
        if self._closing is None:
            self._closed = True
            self._feed.close()
            self._closing = asyncio.ensure_future(self._kafka.close())
        await asyncio.shield(self._closing)

    # -- writing -------------------------------------------------------------------------------------------------

    async def append(self, append: StreamAppend, *, deadline_ms: int | None = None) -> Appended:
        """See :meth:`loom.stores.contracts.EventStore.append`."""
        placed: list[Appended] = await self._write(AppendOps((append,)), append.stream_id, deadline_ms)
        return placed[0]

    async def append_many(
        self, appends: Sequence[StreamAppend], *, deadline_ms: int | None = None
    ) -> list[Appended]:
        """See :meth:`loom.stores.contracts.EventStore.append_many`.

        Raises:
            InvalidInputError: the streams are of several shards, beside what the contract says.
        """
        if len({self.shard_of(append.stream_id) for append in appends}) > 1:
            raise InvalidInputError(
                "append_many", "its streams are of several shards", "append to one chain's streams"
            )
        if not appends:
            return []
        placed: list[Appended] = await self._write(
            AppendOps(tuple(appends)), appends[0].stream_id, deadline_ms
        )
        return placed

    async def acquire_fence(self, stream_id: str, owner: str) -> int:
        """See :meth:`loom.stores.contracts.EventStore.acquire_fence`."""
        deadline = self._deadline(None)
        local = await self._write_here(AcquireFence(stream_id, owner), stream_id, deadline)
        if local is not _ELSEWHERE:
            return int(local)
        # By request only on a condition: a copy that waits in the log can then never take the fence from ourselves.
        for _ in range(_FENCE_TRIES):
            seen = await self._observe(stream_id, deadline)
            with contextlib.suppress(WrongHeadError):
                return int(await self._ask(AcquireFence(stream_id, owner, seen), stream_id, deadline))
        raise StorageWriteError(stream_id, "the stream changes all the time")

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
        if self.shard_of(source) != self.shard_of(target):
            raise InvalidInputError(
                "copy_prefix", "its streams are of two shards", "mint the target for the source's"
            )
        head: int = await self._write(CopyPrefix(source, target, through), target)
        return head

    async def write(self, op: WriteOp, stream_id: str, *, deadline_ms: int | None = None) -> Any:
        """Any write of the judge, for the stores that stand beside this one; raises as ``append``."""
        return await self._write(op, stream_id, deadline_ms)

    async def notify(self, execution_id: str) -> None:
        """Ask the owner of an execution to look at its inbox again; nothing is promised."""
        if self._kafka.shard(self.shard_of(execution_id)) is not None:
            self.notified(execution_id)
        else:
            self._kafka.requester.post(
                self.shard_of(execution_id), routing_id(execution_id), NotifyOp(execution_id)
            )

    async def _write(self, op: WriteOp, stream_id: str, deadline_ms: int | None = None) -> Any:
        deadline = self._deadline(deadline_ms)
        result = await self._write_here(op, stream_id, deadline)
        return await self._ask(op, stream_id, deadline) if result is _ELSEWHERE else result

    async def _write_here(self, op: WriteOp, stream_id: str, deadline: Deadline) -> Any:
        """Write through the writer of this process; ``_ELSEWHERE`` where the owner has to be asked.

        A writer that ends while the write is in flight leaves it unwritten, or unknown; the same write by request is
        then the repeat that finds out.
        """
        if self._closed or self._loop is None:
            raise StoreClosedError(stream_id)
        shard = self._kafka.shard(self.shard_of(stream_id))
        if shard is None:
            return _ELSEWHERE
        try:
            return await shard.writer.submit(op, origin=self._origin, deadline=deadline.at, loop=self._loop)
        except NotOwnerError:
            return _ELSEWHERE
        except OutcomeUnknownError:
            if deadline.passed or self._closed:
                raise
            return _ELSEWHERE

    async def _ask(self, op: WriteOp, stream_id: str, deadline: Deadline) -> Any:
        request = wire.request_op(op, self._codec)
        return await self._kafka.requester.write(
            self.shard_of(stream_id), stream_id, routing_id(stream_id), request, deadline
        )

    # -- reading -------------------------------------------------------------------------------------------------

    async def read(self, stream_id: str, from_sequence: int = 0, limit: int = 1000) -> list[Envelope]:
        """See :meth:`loom.stores.contracts.EventStore.read`. Broken streams raise ``StreamBrokenError``."""
        found: list[Envelope] = []
        limit, deadline = min(limit, MAX_LIMIT), self._deadline(None)
        while len(found) < limit:
            asked = min(limit - len(found), wire.MAX_READ)
            query = ReadOp("events", stream_id, from_sequence, asked)
            page = await self._read(query, partial(_events, query), deadline)
            found += map(self._codec.decode_envelope, page)
            if len(page) < asked:
                break
            from_sequence = found[-1].sequence + 1
        return found

    async def read_last(self, stream_id: str) -> Envelope | None:
        """See :meth:`loom.stores.contracts.EventStore.read_last`."""
        page = await self._read(
            ReadOp("last", stream_id), lambda shard: shard.last(stream_id), self._deadline(None)
        )
        return self._codec.decode_envelope(page[0]) if page else None

    async def observe(self, stream_id: str) -> Observation:
        """See :meth:`loom.stores.contracts.EventStore.observe`."""
        return await self._observe(stream_id, self._deadline(None))

    async def info(self, stream_id: str) -> StreamInfo | None:
        """See :meth:`loom.stores.contracts.EventStore.info`."""
        found = await self._read_row(
            ReadOp("info", stream_id), lambda s: s.info(stream_id), self._deadline(None)
        )
        return found if found is None or isinstance(found, StreamInfo) else wire.info_of(found)

    async def find_subject(self, subject: str) -> list[str]:
        """Every stream of the chains that belong to a subject: one reading of the whole log.

        Raises:
            IncompleteReadError, UnreachableError, TopicsError: it cannot be read to its end now.
        """
        return await asyncio.to_thread(SubjectFinder(self._settings, self._codec).find, subject)

    async def list_inboxes(self, chain_id: str) -> list[str]:
        """See :data:`loom.stores.contracts.OPTIONAL_EVENT_STORE_METHODS`."""
        query = ReadOp("inboxes", chain_id)
        page = await self._read(query, lambda shard: shard.inboxes(chain_id), self._deadline(None))
        return [name.decode() for name in page]

    async def snapshot(self, execution_id: str) -> bytes | None:
        """Encoded snapshot of an execution, None where there is none."""
        query = ReadOp("snapshot", execution_id)

        def read(shard: Shard) -> list[bytes]:
            found = shard.snapshot(execution_id)
            return [] if found is None else [found]

        page = await self._read(query, read, self._deadline(None))
        return page[0] if page else None

    async def _observe(self, stream_id: str, deadline: Deadline) -> Observation:
        found = await self._read_row(ReadOp("observe", stream_id), lambda s: s.observe(stream_id), deadline)
        return found if isinstance(found, Observation) else Observation(found.head, found.fence, found.anchor)

    async def _read(
        self, query: ReadOp, read: Callable[[Shard], list[bytes]], deadline: Deadline
    ) -> list[bytes]:
        here = await self._read_here(query.stream_id, read, deadline)
        if here is not _ELSEWHERE:
            values: list[bytes] = here
            return values
        return [value for part in await self._ask_read(query, deadline) for value in part.values]

    async def _read_row(self, query: ReadOp, read: Callable[[Shard], Any], deadline: Deadline) -> Any:
        here = await self._read_here(query.stream_id, read, deadline)
        return (await self._ask_read(query, deadline))[0].info if here is _ELSEWHERE else here

    async def _read_here(self, stream_id: str, read: Callable[[Shard], Any], deadline: Deadline) -> Any:
        """Read what the writer of this process keeps, once it has proved that it still is the writer."""
        if self._closed or self._loop is None:
            raise StoreClosedError(stream_id)
        shard = self._kafka.shard(self.shard_of(stream_id))
        if shard is None:
            return _ELSEWHERE
        try:
            await shard.writer.decide(deadline=deadline.at, loop=self._loop)
            return read(shard)
        except NotOwnerError:
            return _ELSEWHERE

    async def _ask_read(self, query: ReadOp, deadline: Deadline) -> list[ReadReply]:
        stream_id = query.stream_id
        return await self._kafka.requester.read(
            self.shard_of(stream_id), stream_id, routing_id(stream_id), query, deadline
        )

    async def subscribe(self, stream_id: str, from_sequence: int = 0) -> AsyncIterator[Envelope]:
        """See :meth:`loom.stores.contracts.EventStore.subscribe`. It ends when the store is closed.

        A subscriber that falls behind, and one whose partition moves, reads on from the log: nothing is skipped.
        """
        shard, topic = self.shard_of(stream_id), self._settings.catalogue.topic_of_stream(stream_id)
        queue, tailed = LiveQueue(), False
        self._feed.add(stream_id, queue)

        async def read(sequence: int, limit: int) -> list[Envelope]:
            nonlocal tailed
            if not tailed and self._kafka.shard(shard) is None:
                await self._kafka.tail.follow(stream_id, topic, shard)
                tailed = True
            return await self.read(stream_id, sequence, limit)

        try:
            async with contextlib.aclosing(follow(queue, read, from_sequence)) as events:
                async for envelope in events:
                    yield envelope
        finally:
            self._feed.remove(stream_id, queue)
            if tailed:
                self._kafka.tail.unfollow(stream_id, topic, shard)

    # -- owning --------------------------------------------------------------------------------------------------

    def shard_of(self, stream_id: str) -> int:
        """See :meth:`loom.stores.contracts.OwningEventStore.shard_of`."""
        return partition_of(routing_id(stream_id), self._settings.partitions)

    def owned(self) -> frozenset[int]:
        """See :meth:`loom.stores.contracts.OwningEventStore.owned`."""
        return self._kafka.owned()

    def mint_shard(self) -> int | None:
        """See :meth:`loom.stores.contracts.OwningEventStore.mint_shard`."""
        return self._kafka.mint_shard()

    def mint_id(self, source: IdSource | None = None, *, shard: int | None = None) -> str:
        """Return a fresh execution id: of ``shard``, else of the shard to mint for, else of any."""
        source = self._ids if source is None else source
        shard = self.mint_shard() if shard is None else shard
        return source() if shard is None else mint(shard, self._settings.partitions, source)

    def listen(self, listener: CommitListener) -> None:
        """See :meth:`loom.stores.contracts.OwningEventStore.listen`. Shards served already are told as gained."""
        self._listener = listener
        for shard in sorted(self._gained):
            listener.gained(shard)

    def health(self) -> list[WriterHealth]:
        """How the writers of this process are: what waits, what is stuck, which streams were stopped."""
        return self._kafka.health()

    def open_logs(self, shard: int, after: str = "", limit: int = 1000) -> list[StreamInfo]:
        """See :meth:`loom.stores.contracts.OwningEventStore.open_logs`; empty where the shard is not served here."""
        held = self._kafka.shard(shard)
        return [] if held is None else held.index.open_logs(after, limit)

    def inbox_streams(self, chain_id: str) -> list[StreamInfo]:
        """See :meth:`loom.stores.contracts.OwningEventStore.inbox_streams`."""
        held = self._kafka.shard(self.shard_of(chain_id))
        return [] if held is None else held.index.inbox_streams(chain_id)

    # -- what the writers say (their threads) --------------------------------------------------------------------

    def committed(self, batch: Sequence[Committed]) -> None:
        """Hand a transaction to the loop."""
        self._call(self._take, batch)

    def gained(self, partition: int) -> None:
        """Tell the loop that a tenure serves."""
        self._call(self._take_gained, partition)

    def lost(self, partition: int) -> None:
        """Tell the loop that a writer ended."""
        self._call(self._take_lost, partition)

    def notified(self, execution_id: str) -> None:
        """Tell the loop that an execution's inbox is to be looked at."""
        told = getattr(self._listener, "notified", None)
        if told is not None:
            self._call(told, execution_id)

    def followed(self, stream_id: str, envelopes: Sequence[Envelope]) -> None:
        """Take events that another process wrote; on the loop already."""
        self._feed.put(stream_id, envelopes)

    def fatal(self, error: Exception) -> None:
        """Tell the loop that this node can own nothing any more."""
        _log.error("this node owns no partition any more: %s", error)
        self.failure = error
        if self._on_fatal is not None:
            self._call(self._on_fatal, error)

    def _call(self, call: Callable[[Any], None], argument: object) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(call, argument)

    def _take(self, batch: Sequence[Committed]) -> None:
        if len(self._feed):
            for committed in batch:
                self._feed.put(committed.stream_id, committed.envelopes)
        if self._listener is not None:
            self._listener.committed(batch)

    def _take_gained(self, partition: int) -> None:
        # What others committed before this tenure was read, not handed over.
        self._feed.restart(lambda stream_id: self.shard_of(stream_id) == partition)
        self._gained.add(partition)
        if self._listener is not None:
            self._listener.gained(partition)

    def _take_lost(self, partition: int) -> None:
        self._feed.restart(lambda stream_id: self.shard_of(stream_id) == partition)
        if partition in self._gained:
            self._gained.discard(partition)
            if self._listener is not None:
                self._listener.lost(partition)

    def _deadline(self, deadline_ms: int | None) -> Deadline:
        return Deadline.after(self._settings.deadline_ms if deadline_ms is None else deadline_ms)


def _events(query: ReadOp, shard: Shard) -> list[bytes]:
    return shard.read(query.stream_id, query.from_sequence, query.limit)


_ELSEWHERE: Final = object()
