"""The encrypting event store: sensitive fields rest sealed, and are open to whoever reads through it (system.md 2)."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from loom.schemas.envelope import TERMINAL_KINDS, Kind
from loom.stores.contracts import OwningEventStore
from loom.stores.sealing.cipher import CIPHER
from loom.stores.sealing.handover import OpeningListener
from loom.stores.sealing.keyring import KeyRing
from loom.stores.sealing.marker import SealingCapability
from loom.stores.sealing.nonces import NonceSource, nonce_source
from loom.stores.sealing.opener import Opened, Opener, Status, is_log
from loom.stores.sealing.paths import SensitiveMap
from loom.stores.sealing.sealer import Sealer
from loom.stores.sealing.subjects import Subjects
from loom.stores.sealing.tombstones import Tombstones

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loom.schemas.envelope import Envelope
    from loom.stores.contracts import (
        Appended,
        CommitListener,
        EventStore,
        Observation,
        SnapshotStore,
        StreamAppend,
        StreamInfo,
    )
    from loom.stores.keys.contract import KeyStore

_log = logging.getLogger("loom.sealing")

T = TypeVar("T")

REPORT_EVERY: Final = 16

_LAST: Final = TERMINAL_KINDS - {Kind.EXECUTION_CONTINUED}
"""Kinds after which the key of an execution that is its own subject is seldom wanted again: it is let go at once."""


@dataclass(frozen=True, slots=True)
class DroppedEvent:
    """A live event that a subscription left out. ``code`` is stable; nothing of the payload is here."""

    stream_id: str
    sequence: int
    subject: str
    reason: str
    code: str = "sealed-event-dropped"


DroppedCallback = Callable[[DroppedEvent], Any]


class EncryptingEventStore:
    """Any event store, with the sensitive fields of its events sealed under their subjects' keys.

    Seals on ``append`` and ``append_many``, in requests for other chains too; stamps ``metadata.seal`` in the same
    append on exactly the envelopes in which it sealed a field. Opens on ``read``, ``read_last``, ``subscribe`` and in what
    a listener is told. An execution's own log is read loudly: where a key is missing, ``KeyUnavailableError``, or
    ``PayloadShreddedError`` beside the subject's tombstone. Inbox and quarantine streams are not: what cannot be opened
    is redacted. An envelope whose marker this node cannot open stands as it is stored, for the marker's judge to refuse.

    ``sensitive`` adds to ``DEFAULT_SENSITIVE``. ``snapshots`` is where a compacted log's tombstone may be folded.
    ``on_dropped`` hears what a subscription leaves out, per subscription the first time and then every 16th. ``clock`` is
    monotonic, in seconds: it says how long keys are used from memory.
    Closing closes the inner store, and leaves the key store to whoever opened it.
    """

    FORWARDED: Final = ("notify", "mint_id", "health", "scan_open_logs", "find_subject", "list_inboxes")
    """Optional methods of the inner store that are as good through this one; absent where they are there."""
    REFUSED: Final = ("write", "snapshot", "open", "assign")
    """Ways around the sealing, or of stores that stand beside the inner one: refused here."""

    def __init__(
        self,
        inner: EventStore,
        keys: KeyStore,
        sensitive: Mapping[str, Iterable[str]] | None = None,
        *,
        snapshots: SnapshotStore | None = None,
        iv_source: NonceSource | None = None,
        on_dropped: DroppedCallback | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wrap ``inner``.

        Raises:
            ConfigError: a sensitive path cannot be sealed, or ``iv_source`` is not one that tests may give.
        """
        self._inner = inner
        self.keys = keys
        self._sensitive = SensitiveMap(sensitive)
        self._capability = SealingCapability(CIPHER, lambda: self._sensitive.covers)
        self._ring = KeyRing(keys, now=clock)
        self._subjects = Subjects(inner)
        self._on_dropped = on_dropped
        self._sealer = Sealer(self._sensitive, self._ring, self._subjects, nonce_source(iv_source))
        self._opener = Opener(
            self._sensitive, self._capability, self._ring, self._subjects, Tombstones(inner, snapshots)
        )

    @staticmethod
    def over(inner: EventStore, keys: KeyStore, *args: Any, **options: Any) -> EncryptingEventStore:
        """Wrap ``inner`` in the class that fits: one that owns streams where ``inner`` does."""
        if isinstance(inner, OwningEventStore):
            return EncryptingOwningEventStore(inner, keys, *args, **options)
        return EncryptingEventStore(inner, keys, *args, **options)

    # -- sealing -------------------------------------------------------------------------------------------------

    def sealing_capability(self) -> SealingCapability:
        """What this store seals and opens, live (system.md 2.2)."""
        return self._capability

    def register_sensitive(self, kind: str, paths: Iterable[str]) -> None:
        """Seal these paths too, from now on.

        Raises:
            ConfigError: as the constructor.
        """
        self._sensitive.add(kind, paths)

    def forget_keys(self, subject: str) -> None:
        """Use no key of the subject from memory any more: it was just destroyed."""
        self._ring.drop(subject)

    async def append(self, append: StreamAppend, *, deadline_ms: int | None = None) -> Appended:
        """See :meth:`loom.stores.contracts.EventStore.append`.

        Raises:
            what ``Sealer.seal`` raises, beside what the contract says.
        """
        sealed, named = await self._sealer.seal((append,))
        appended = await self._inner.append(sealed[0], deadline_ms=deadline_ms)
        self._subjects.learn(named)
        self._let_go((append,))
        return appended

    async def append_many(
        self, appends: Sequence[StreamAppend], *, deadline_ms: int | None = None
    ) -> list[Appended]:
        """See :meth:`loom.stores.contracts.EventStore.append_many`; raises as ``append``."""
        sealed, named = await self._sealer.seal(appends)
        appended = await self._inner.append_many(sealed, deadline_ms=deadline_ms)
        self._subjects.learn(named)
        self._let_go(appends)
        return appended

    def _let_go(self, appends: Iterable[StreamAppend]) -> None:
        """Executions that have ended need no key in memory, where they are subjects of their own."""
        for append in appends:
            if append.events and append.events[-1].type in _LAST:
                self._ring.drop(append.stream_id)

    # -- opening -------------------------------------------------------------------------------------------------

    async def read(self, stream_id: str, from_sequence: int = 0, limit: int = 1000) -> list[Envelope]:
        """See :meth:`loom.stores.contracts.EventStore.read`.

        Raises:
            KeyUnavailableError, PayloadShreddedError: a log holds what cannot be opened here (see the class).
        """
        stored = await self._inner.read(stream_id, from_sequence, limit)
        self._subjects.note(stored)
        if is_log(stream_id):
            return [await self._opener.loud(envelope) for envelope in stored]
        return [await self._quiet(envelope) for envelope in stored]

    async def read_last(self, stream_id: str) -> Envelope | None:
        """See :meth:`loom.stores.contracts.EventStore.read_last`; raises as ``read``."""
        last = await self._inner.read_last(stream_id)
        if last is None:
            return None
        return await self._opener.loud(last) if is_log(stream_id) else await self._quiet(last)

    async def read_at_rest(self, stream_id: str, from_sequence: int = 0, limit: int = 1000) -> list[Envelope]:
        """Read as ``read`` does, the envelopes as they are stored: no key is asked for."""
        return await self._inner.read(stream_id, from_sequence, limit)

    async def read_redacted(
        self, stream_id: str, from_sequence: int = 0, limit: int = 1000
    ) -> list[Envelope]:
        """Read as ``read`` does, but what cannot be opened is redacted in a log too: for erasure and export."""
        return [await self._quiet(e) for e in await self._inner.read(stream_id, from_sequence, limit)]

    async def survey(self, stream_id: str, from_sequence: int = 0, limit: int = 1000) -> list[Opened]:
        """Read as ``read_redacted`` does, and say of each envelope whether it opens here."""
        stored = await self._inner.read(stream_id, from_sequence, limit)
        self._subjects.note(stored)
        found = [await self._opener.open(envelope) for envelope in stored]
        return [
            replace(o, envelope=self._opener.redacted(o.envelope)) if o.status is Status.LOCKED else o
            for o in found
        ]

    async def subscribe(self, stream_id: str, from_sequence: int = 0) -> AsyncIterator[Envelope]:
        """See :meth:`loom.stores.contracts.EventStore.subscribe`. What cannot be opened here is left out, and told."""
        dropped = 0
        async with aclosing(_generator(self._inner.subscribe(stream_id, from_sequence))) as events:
            async for envelope in events:
                opened = await self._opener.open(envelope)
                if opened.status is Status.READABLE:
                    yield opened.envelope
                    continue
                if dropped % REPORT_EVERY == 0:
                    self._tell_dropped(
                        DroppedEvent(stream_id, envelope.sequence, opened.subject, opened.status.value)
                    )
                dropped += 1

    async def subscribe_loud(self, stream_id: str, from_sequence: int = 0) -> AsyncIterator[Envelope]:
        """Subscribe as ``subscribe`` does, but end where ``read`` would raise, with what it would raise."""
        async with aclosing(_generator(self._inner.subscribe(stream_id, from_sequence))) as events:
            async for envelope in events:
                if is_log(stream_id):
                    yield await self._opener.loud(envelope)
                else:
                    yield await self._quiet(envelope)

    # -- unchanged -----------------------------------------------------------------------------------------------

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
        """See :meth:`loom.stores.contracts.EventStore.copy_prefix`: stored envelopes, never opened."""
        return await self._inner.copy_prefix(source, target, through)

    async def close(self) -> None:
        """See :meth:`loom.stores.contracts.EventStore.close`."""
        await self._inner.close()

    def __getattr__(self, name: str) -> Any:
        if name in EncryptingEventStore.FORWARDED:
            return getattr(self._inner, name)
        raise AttributeError(name)

    # -- parts ---------------------------------------------------------------------------------------------------

    async def _quiet(self, envelope: Envelope) -> Envelope:
        opened = await self._opener.open(envelope)
        return self._opener.redacted(envelope) if opened.status is Status.LOCKED else opened.envelope

    def _tell_dropped(self, dropped: DroppedEvent) -> None:
        if self._on_dropped is None:
            _log.warning(
                "%s: stream %s sequence %d subject %s (%s)",
                dropped.code,
                dropped.stream_id,
                dropped.sequence,
                dropped.subject,
                dropped.reason,
            )
            return
        self._on_dropped(dropped)


class EncryptingOwningEventStore(EncryptingEventStore):
    """The same over a store that serves shards: what it tells a listener is opened (``Committed.unopened`` says what not)."""

    _inner: OwningEventStore

    def __init__(self, inner: OwningEventStore, keys: KeyStore, *args: Any, **options: Any) -> None:
        super().__init__(inner, keys, *args, **options)
        self._handover: OpeningListener | None = None

    def listen(self, listener: CommitListener) -> None:
        """See :meth:`loom.stores.contracts.OwningEventStore.listen`."""
        self._handover = OpeningListener(self._opener, self._subjects, listener)
        self._inner.listen(self._handover)

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

    async def close(self) -> None:
        """See :meth:`loom.stores.contracts.EventStore.close`."""
        await super().close()
        if self._handover is not None:
            await self._handover.close()


async def _generator(events: AsyncIterator[Envelope]) -> AsyncGenerator[Envelope]:
    """An iterator as a generator, which can be closed; closes the iterator where that can be."""
    try:
        async for envelope in events:
            yield envelope
    finally:
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()
