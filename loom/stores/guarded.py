"""The event store that a runtime uses: no envelope of a log that this node cannot open passes it (system.md 2.3).

Every read of a log, live or not, and all that a listener is told goes through here, so this is the one place where
``assert_stream_readable`` has to stand. Inbox and quarantine streams pass: their heads are the delivery guard's business.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from loom.errors import KeyUnavailableError
from loom.ids import stream_kind
from loom.kernel.readable import READ, Opens, assert_stream_readable, sealed_refusal, unreadable
from loom.operator import SealedDetail
from loom.stores.at_rest import AtRestView
from loom.stores.contracts import OwningEventStore, wanted

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence

    from loom.schemas.envelope import Envelope
    from loom.stores.contracts import (
        Appended,
        CommitListener,
        Committed,
        EventStore,
        Observation,
        StreamAppend,
        StreamInfo,
    )

T = TypeVar("T")


class GuardedEventStore:
    """Any event store; reading a log that this node cannot open is ``SealedStreamUnreadableError``.

    The refusal names the operation ``read`` and the reason of an unknown owner; whoever answers a caller words it anew for
    the verb (``loom.kernel.readable.reworded``). A missing key is translated, an erasure (``PayloadShreddedError``) passes. It does not read at
    rest: the views that may are their callers' own, made from the inner store.
    """

    FORWARDED: Final = (
        "sealing_capability",
        "keys",
        "notify",
        "mint_id",
        "health",
        "scan_open_logs",
        "list_inboxes",
    )
    REFUSED: Final = (
        "read_at_rest",
        "read_redacted",
        "survey",
        "find_subject",
        "write",
        "snapshot",
        "open",
        "assign",
        "subscribe_loud",
    )

    def __init__(self, inner: EventStore) -> None:
        self._inner = inner

    @staticmethod
    def over(inner: EventStore) -> GuardedEventStore:
        """Guard ``inner`` with the class that fits: one that owns streams where ``inner`` does. Twice is once."""
        if isinstance(inner, GuardedEventStore):
            return inner
        return (
            GuardedOwningEventStore(inner)
            if isinstance(inner, OwningEventStore)
            else GuardedEventStore(inner)
        )

    # -- guarded -------------------------------------------------------------------------------------------------

    async def read(self, stream_id: str, from_sequence: int = 0, limit: int = 1000) -> list[Envelope]:
        """See :meth:`loom.stores.contracts.EventStore.read`.

        Raises:
            SealedStreamUnreadableError: the log holds, there, what this node cannot open.
            PayloadShreddedError: and its subject was erased.
            ShardSealingMismatchError: shards of the store disagree on what they open.
        """
        found = await self._translated(stream_id, self._inner.read(stream_id, from_sequence, limit))
        self._judge(stream_id, found)
        return found

    async def read_last(self, stream_id: str) -> Envelope | None:
        """See :meth:`loom.stores.contracts.EventStore.read_last`; raises as ``read``."""
        found = await self._translated(stream_id, self._inner.read_last(stream_id))
        self._judge(stream_id, () if found is None else (found,))
        return found

    async def subscribe(self, stream_id: str, from_sequence: int = 0) -> AsyncIterator[Envelope]:
        """See :meth:`loom.stores.contracts.EventStore.subscribe`; ends as ``read`` raises, at the first such event.

        It does not leave out what it cannot open: a reader that waits for the end would wait for ever.
        """
        loud = getattr(self._inner, "subscribe_loud", self._inner.subscribe)
        async with aclosing(_generator(loud(stream_id, from_sequence))) as events:
            while True:
                envelope = await self._translated(stream_id, anext(events, None))
                if envelope is None:
                    return
                self._judge(stream_id, (envelope,))
                yield envelope

    def quarantine_view(self) -> AtRestView:
        """Return the one way past the guard: for the quarantine verbs, and for them alone (system.md 4.9)."""
        return AtRestView(self._inner, lambda: capability_of(self._inner))

    async def _translated(self, stream_id: str, call: Awaitable[T]) -> T:
        """Await; a missing key becomes the refusal, raised outside the handler so that nothing leads back to it."""
        try:
            return await call
        except KeyUnavailableError as closed:
            detail = SealedDetail("key-unavailable", closed.sequence, closed.covers)
        raise sealed_refusal(READ, stream_id, detail)

    def _judge(self, stream_id: str, envelopes: Sequence[Envelope]) -> None:
        if envelopes and stream_kind(stream_id) == "executions":
            assert_stream_readable(stream_id, envelopes, capability_of(self._inner))

    # -- unchanged -----------------------------------------------------------------------------------------------

    async def append(self, append: StreamAppend, *, deadline_ms: int | None = None) -> Appended:
        """See :meth:`loom.stores.contracts.EventStore.append`.

        Raises:
            SealedStreamUnreadableError: the current key of the subject is not here; nothing was written.
        """
        return await self._translated(append.stream_id, self._inner.append(append, deadline_ms=deadline_ms))

    async def append_many(
        self, appends: Sequence[StreamAppend], *, deadline_ms: int | None = None
    ) -> list[Appended]:
        """See :meth:`loom.stores.contracts.EventStore.append_many`; raises as ``append``."""
        about = appends[0].stream_id if appends else ""
        return await self._translated(about, self._inner.append_many(appends, deadline_ms=deadline_ms))

    async def observe(self, stream_id: str) -> Observation:
        """See :meth:`loom.stores.contracts.EventStore.observe`."""
        return await self._inner.observe(stream_id)

    async def info(self, stream_id: str) -> StreamInfo | None:
        """See :meth:`loom.stores.contracts.EventStore.info`."""
        return await self._inner.info(stream_id)

    async def acquire_fence(self, stream_id: str, owner: str) -> int:
        """See :meth:`loom.stores.contracts.EventStore.acquire_fence`."""
        return await self._inner.acquire_fence(stream_id, owner)

    async def acquire_fence_if(self, stream_id: str, observation: Observation, owner: str) -> int:
        """See :meth:`loom.stores.contracts.EventStore.acquire_fence_if`."""
        return await self._inner.acquire_fence_if(stream_id, observation, owner)

    async def truncate(self, stream_id: str, before: int) -> None:
        """See :meth:`loom.stores.contracts.EventStore.truncate`."""
        await self._inner.truncate(stream_id, before)

    async def delete(self, stream_id: str) -> None:
        """See :meth:`loom.stores.contracts.EventStore.delete`."""
        await self._inner.delete(stream_id)

    async def copy_prefix(self, source: str, target: str, through: int) -> int:
        """See :meth:`loom.stores.contracts.EventStore.copy_prefix`."""
        return await self._inner.copy_prefix(source, target, through)

    async def close(self) -> None:
        """See :meth:`loom.stores.contracts.EventStore.close`."""
        await self._inner.close()

    def __getattr__(self, name: str) -> Any:
        if name in GuardedEventStore.FORWARDED:
            return getattr(self._inner, name)
        raise AttributeError(name)


class GuardedOwningEventStore(GuardedEventStore):
    """The same over a store that serves shards; ``Committed.unopened`` then names what this node must not use."""

    _inner: OwningEventStore

    def __init__(self, inner: OwningEventStore) -> None:
        super().__init__(inner)

    def listen(self, listener: CommitListener) -> None:
        """See :meth:`loom.stores.contracts.OwningEventStore.listen`."""
        self._inner.listen(_GuardedListener(self._inner, listener))

    def shard_of(self, stream_id: str) -> int:
        """See :meth:`loom.stores.contracts.OwningEventStore.shard_of`."""
        return self._inner.shard_of(stream_id)

    def owned(self) -> frozenset[int]:
        """See :meth:`loom.stores.contracts.OwningEventStore.owned`."""
        return self._inner.owned()

    def mint_shard(self) -> int | None:
        """See :meth:`loom.stores.contracts.OwningEventStore.mint_shard`."""
        return self._inner.mint_shard()

    def open_logs(self, shard: int, after: str = "", limit: int = 1000) -> list[StreamInfo]:
        """See :meth:`loom.stores.contracts.OwningEventStore.open_logs`."""
        return self._inner.open_logs(shard, after, limit)

    def inbox_streams(self, chain_id: str) -> list[StreamInfo]:
        """See :meth:`loom.stores.contracts.OwningEventStore.inbox_streams`."""
        return self._inner.inbox_streams(chain_id)


class _GuardedListener:
    """Adds to ``Committed.unopened`` what a marker keeps from this node, and takes the data of all such events away."""

    def __init__(self, store: OwningEventStore, listener: CommitListener) -> None:
        self._store, self._listener = store, listener

    def committed(self, batch: Sequence[Committed]) -> None:
        self._listener.committed([self._judged(committed) for committed in wanted(self._listener, batch)])

    def gained(self, shard: int) -> None:
        self._listener.gained(shard)

    def lost(self, shard: int) -> None:
        self._listener.lost(shard)

    def __getattr__(self, name: str) -> Any:
        if name in {"notified", "wants"}:
            return getattr(self._listener, name)
        raise AttributeError(name)

    def _judged(self, committed: Committed) -> Committed:
        if stream_kind(committed.stream_id) != "executions":
            return committed
        capability = capability_of(self._store)
        closed = set(committed.unopened)
        closed |= {e.sequence for e in committed.envelopes if unreadable(e, capability) is not None}
        if not closed:
            return committed
        envelopes = tuple(replace(e, data={}) if e.sequence in closed else e for e in committed.envelopes)
        return replace(committed, envelopes=envelopes, unopened=tuple(sorted(closed)))


def capability_of(store: Any) -> Opens | None:
    """What a store opens, asked now; None: nothing.

    Raises:
        ShardSealingMismatchError: its shards disagree.
    """
    asked = getattr(store, "sealing_capability", None)
    found: Opens | None = None if asked is None else asked()
    return found


async def _generator(events: AsyncIterator[Envelope]) -> AsyncGenerator[Envelope]:
    """An iterator as a generator, which can be closed; closes the iterator where that can be."""
    try:
        async for envelope in events:
            yield envelope
    finally:
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()
