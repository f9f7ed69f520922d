"""Crypto-shredding of a subject: intent, destruction, tombstone, in that order, safe to repeat (system.md 0, "Erasure").

The order is what a crash leaves legible. An intent without a tombstone is the window in which the key may be gone. Then only
proof says that it is: this key store destroyed it (``KeyStore.was_destroyed``), or the operator asserts that the key died in
the store that has the say (``force``). Either counts only beside the durable intent. A key that is merely absent, or
another one under the same name, is never taken for a destroyed one, and then nothing is written and nothing destroyed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal

from loom.errors import (
    ErasureLostRaceError,
    KeyUnavailableError,
    OutcomeUnknownError,
    ShredIncompleteError,
    StoreError,
    WrongHeadError,
)
from loom.ids import IdSource, routing_id, ulid
from loom.kernel.readable import detail_of, sealed_refusal
from loom.schemas.envelope import EVENT_SCHEMA, Json, Kind, NewEvent
from loom.stores.contracts import StreamAppend
from loom.stores.sealing.marker import SEAL
from loom.stores.sealing.opener import Status
from loom.stores.sealing.survey import LogView, look_at, streams_of, surveyed
from loom.stores.sealing.tombstones import erases

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loom.schemas.envelope import Envelope
    from loom.stores.contracts import EventStore, SnapshotStore
    from loom.stores.keys.contract import KeyStore

MAX_TRIES: Final = 64
"""How often a control record is tried again after another append came first."""
PAUSE_S: Final = 0.003
MAX_REASON: Final = 256
PAGE: Final = 1000

Force = Literal["key-destroyed-elsewhere"]
"""The operator's assertion that a key which is not here was destroyed in the key store that has the say."""


class KeyEnd(Enum):
    """What became of the key."""

    DESTROYED = "destroyed"
    GONE = "gone before"
    NOTHING = "nothing was sealed"


@dataclass(frozen=True, slots=True)
class Shredded:
    """What a shredding did: the logs that hold the subject's tombstone now, those among them that it wrote, the key."""

    subject: str
    logs: tuple[LogView, ...]
    written: tuple[str, ...]
    key: KeyEnd


@dataclass(frozen=True, slots=True)
class ExportedStream:
    """One stream of an export, in the clear; ``erased``: what was sealed in it is gone, and redacted here."""

    stream_id: str
    erased: bool
    events: tuple[Envelope, ...]


class SubjectRecords:
    """All that is recorded of subjects in one log, at rest and opened: what erasure and export work on.

    ``events`` is the store as it was made, sealing or not; ``keys`` its key store, None where this node has none.
    """

    def __init__(
        self,
        events: EventStore,
        keys: KeyStore | None,
        snapshots: SnapshotStore | None = None,
        *,
        ids: IdSource = ulid,
    ) -> None:
        self._events: Any = events
        self._keys = keys
        self._snapshots: Any = snapshots
        self._ids = ids

    async def survey(self, subject: str) -> tuple[LogView, ...]:
        """Every execution of a subject, as this node sees it. Empty: there is none. Nothing is written.

        Raises:
            ConfigError: the store cannot find the executions of a subject. StoreError: the log cannot be read now.
        """
        return await surveyed(self._events, subject)

    async def look(self, execution_id: str) -> LogView | None:
        """One execution, its inbox left out; None where there is none. Raises as ``survey``."""
        return await look_at(self._events, execution_id)

    # -- erasure -------------------------------------------------------------------------------------------------

    async def shred(
        self, subject: str, *, force: Force | None = None, by: str | None = None, reason: str | None = None
    ) -> Shredded:
        """Destroy a subject's key, and say so in every log of it. Safe to repeat after a crash at any point.

        Raises:
            KeyUnavailableError: what is sealed cannot be opened here, without intent and proof. Nothing was written.
            SealedStreamUnreadableError: this node does not open all that was sealed; likewise.
            ShredIncompleteError: the key is destroyed, and not every log says so yet: repeat it.
            ErasureLostRaceError, StoreError: before the destruction; the key stands, intents may: repeat it.
        """
        views = await self.survey(subject)
        names = self._names(subject, views)
        held = await self._held(names)
        await self.assert_erasable(subject, views, force=force)
        pending = [view for view in views if not view.erased]
        if not held and not await self._begun(subject, pending, force):
            return Shredded(subject, views, (), KeyEnd.NOTHING if pending else KeyEnd.GONE)
        fact: dict[str, Json] = {"subjectId": subject}
        if reason is not None:
            fact["reason"] = reason[:MAX_REASON]
        if held:
            for view in pending:
                await self._note(view.execution_id, Kind.ERASURE_PENDING, fact, by)
            await self._destroy(subject, held)
            views = await self.survey(subject)  # those that were started meanwhile, too
        written = await self._tombstones(subject, views, fact, by)
        return Shredded(subject, views, written, KeyEnd.DESTROYED if held else KeyEnd.GONE)

    async def assert_erasable(
        self, subject: str, views: Sequence[LogView], *, force: Force | None = None
    ) -> None:
        """Refuse where it is not certain that what does not open here was, or is about to be, destroyed.

        Raises:
            KeyUnavailableError, SealedStreamUnreadableError: as ``shred``.
        """
        pending = [view for view in views if not view.erased]
        for view in pending:
            if view.closed is not None and view.closed.status is Status.FOREIGN:
                detail = detail_of(view.closed.envelope, "marker-unopenable")
                raise sealed_refusal("erase", view.execution_id, detail)
        locked = [view for view in pending if view.closed is not None]
        if not locked:
            return
        if await self._proven(subject) and any(view.pending or view.erased for view in views):
            return
        if force == "key-destroyed-elsewhere" and all(view.pending for view in locked):
            return
        raise self._unavailable(subject, locked[0])

    async def _begun(self, subject: str, pending: Sequence[LogView], force: Force | None) -> bool:
        """Whether logs without a tombstone are owed one, where no key is here.

        Raises:
            KeyUnavailableError: an intent stands, and nothing says that it was carried out.
        """
        if not any(view.sealed or view.pending for view in pending):
            return False
        if force is None and not await self._proven(subject):
            raise KeyUnavailableError(subject)
        return True

    async def _proven(self, subject: str) -> bool:
        return self._keys is not None and await self._keys.was_destroyed(subject)

    @staticmethod
    def _names(subject: str, views: Sequence[LogView]) -> tuple[str, ...]:
        """Names of keys: the subject's, and its chains' own, under which a message that came before the start is sealed."""
        return tuple(dict.fromkeys((subject, *(view.chain_id for view in views))))

    async def _held(self, names: Sequence[str]) -> list[str]:
        """Those of the keys that are here.

        Raises:
            KeyUnavailableError: one is here, and this node cannot unwrap it.
        """
        if self._keys is None:
            return []
        return [name for name in names if await self._keys.get(name) is not None]

    async def _destroy(self, subject: str, names: Sequence[str]) -> None:
        assert self._keys is not None
        for name in names:
            await self._keys.destroy(name)
            for store in (self._events, self._snapshots):
                forget = getattr(store, "forget_keys", None)
                if forget is not None:
                    forget(name)
            if not await self._keys.was_destroyed(name):
                raise KeyUnavailableError(subject)

    async def _tombstones(
        self, subject: str, views: Sequence[LogView], fact: dict[str, Json], by: str | None
    ) -> tuple[str, ...]:
        written: list[str] = []
        lacking = [view for view in views if not view.erased]
        try:
            for view in lacking:
                await self._note(view.execution_id, Kind.ERASURE_PENDING, fact, by)
                if await self._note(view.execution_id, Kind.PAYLOAD_SHREDDED, fact, by):
                    written.append(view.execution_id)
        except StoreError as error:
            raise ShredIncompleteError(subject, len(written), len(lacking)) from error
        return tuple(written)

    async def _note(self, log: str, kind: str, fact: dict[str, Json], by: str | None) -> bool:
        """Append a control record unless the log holds it already; whether it did."""
        metadata: dict[str, Json] = {"schema": EVENT_SCHEMA}
        if by is not None:
            metadata["actor"] = by
        event = NewEvent(self._ids(), kind, fact, metadata)
        for turn in range(MAX_TRIES):
            seen = await self._events.observe(log)
            if await self._says(log, kind, str(fact["subjectId"])):
                return False
            try:
                await self._events.append(StreamAppend(log, (event,), observation=seen))
            except (WrongHeadError, OutcomeUnknownError):
                await asyncio.sleep(PAUSE_S * (1 + turn % 8))
                continue
            return True
        raise ErasureLostRaceError(log, MAX_TRIES)

    async def _says(self, log: str, kind: str, subject: str) -> bool:
        start = 0
        while page := await self._at_rest(log, start):
            for envelope in page:
                if envelope.type == kind and envelope.data.get("subjectId") == subject:
                    return True
                if kind == Kind.PAYLOAD_SHREDDED and erases(envelope, subject):
                    return True
            start = page[-1].sequence + 1
        return False

    async def _at_rest(self, stream_id: str, start: int) -> list[Envelope]:
        read = getattr(self._events, "read_at_rest", self._events.read)
        found: list[Envelope] = await read(stream_id, start, PAGE)
        return found

    @staticmethod
    def _unavailable(subject: str, view: LogView) -> KeyUnavailableError:
        assert view.closed is not None
        envelope = view.closed.envelope
        marker = envelope.metadata.get(SEAL)
        covers = tuple(marker.get("covers", ())) if isinstance(marker, dict) else ()
        return KeyUnavailableError(subject, envelope.stream_id, envelope.sequence, covers)

    # -- what goes with it ---------------------------------------------------------------------------------------

    async def end(self, view: LogView, event: NewEvent) -> bool:
        """End an erased execution, which no node can drive any more; False where it had ended, or others were first."""
        info = await self._events.info(view.execution_id)
        seen = await self._events.observe(view.execution_id)
        if info is None or info.head != seen.head:
            return False
        try:
            await self._events.append(StreamAppend(view.execution_id, (event,), observation=seen))
        except WrongHeadError:
            return False
        return True

    async def drop_snapshots(self, views: Sequence[LogView]) -> None:
        """Delete the folded states of these executions."""
        if self._snapshots is not None:
            for view in views:
                await self._snapshots.delete(view.execution_id)

    # -- export --------------------------------------------------------------------------------------------------

    async def export(self, subject: str, *, force: Force | None = None) -> tuple[ExportedStream, ...]:
        """Every stream of a subject, opened; what was erased is redacted, and said to be.

        Raises:
            KeyUnavailableError, SealedStreamUnreadableError: something does not open here, and is not proven to be erased.
        """
        views = await self.survey(subject)
        await self.assert_erasable(subject, views, force=force)
        erased = {view.chain_id for view in views if view.erased or view.closed is not None}
        chains = {view.execution_id: view.chain_id for view in views}
        found: list[ExportedStream] = []
        for stream_id in await streams_of(self._events, subject):
            events = await self._redacted(stream_id)
            chain = chains.get(stream_id) or routing_id(stream_id)
            found.append(ExportedStream(stream_id, chain in erased, tuple(events)))
        return tuple(found)

    async def _redacted(self, stream_id: str) -> list[Envelope]:
        read = getattr(self._events, "read_redacted", self._events.read)
        found: list[Envelope] = []
        while page := await read(stream_id, found[-1].sequence + 1 if found else 0, PAGE):
            found += page
        return found
