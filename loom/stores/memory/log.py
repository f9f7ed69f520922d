"""The log in memory: the index of committed streams, and the one writer that all handles share."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

from loom.errors import LoomError, PayloadTooLargeError
from loom.ids import inbox_stream, routing_id
from loom.schemas.codec import decode_envelope, encode_envelope
from loom.stores.contracts import Clock, Committed, Outgoing, StreamAppend
from loom.stores.judge import (
    Accepted,
    AppendOps,
    DropEvent,
    DropSnapshot,
    Effect,
    PutEvent,
    PutMark,
    PutSnapshot,
    Rejected,
    SendOut,
    Staged,
    StreamRow,
    Verdict,
    WriteOp,
    new_row,
)
from loom.topics.partitioner import partition_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from loom.schemas.envelope import Envelope

DEFAULT_SHARDS: Final = 8
MAX_EVENT_BYTES: Final = 1_000_000
MAX_APPEND_BYTES: Final = 16_000_000
APPLIED_IDS: Final = 100_000
"""How many ids of requests on other chains are remembered, to apply each once."""


class MemoryIndex:
    """Committed streams. Events rest encoded as in the log, so a reader that changes what it got changes nothing here."""

    def __init__(self) -> None:
        self._rows: dict[str, StreamRow] = {}
        self._events: dict[str, dict[int, tuple[str, bytes]]] = {}
        self._snapshots: dict[str, int] = {}

    def row(self, stream_id: str) -> StreamRow | None:
        """See :class:`loom.stores.view.View`."""
        return self._rows.get(stream_id)

    def rows(self) -> dict[str, StreamRow]:
        """All rows by stream; not to be changed."""
        return self._rows

    def event_ids(self, stream_id: str, first: int, last: int) -> list[str]:
        """See :class:`loom.stores.view.View`."""
        events = self._events.get(stream_id, {})
        return [events[sequence][0] for sequence in self._present(stream_id, first, last)]

    def events(self, stream_id: str, from_sequence: int, limit: int) -> list[Envelope]:
        """See :class:`loom.stores.view.View`."""
        return [decode_envelope(raw) for raw in self.encoded(stream_id, from_sequence, limit)]

    def encoded(self, stream_id: str, from_sequence: int, limit: int) -> list[bytes]:
        """As ``events``, as they rest."""
        row = self._rows.get(stream_id)
        if row is None or limit <= 0:
            return []
        events = self._events.get(stream_id, {})
        last = min(row.head, max(from_sequence, row.first) + limit)
        return [events[sequence][1] for sequence in self._present(stream_id, from_sequence, last)][:limit]

    def snapshot_sequence(self, execution_id: str) -> int:
        """See :class:`loom.stores.view.View`."""
        return self._snapshots.get(execution_id, -1)

    def apply(self, effects: Iterable[Effect]) -> None:
        """See :class:`loom.stores.rows.Index`."""
        for effect in effects:
            if isinstance(effect, PutEvent):
                self._put(effect)
            elif isinstance(effect, DropEvent):
                self._events.get(effect.stream_id, {}).pop(effect.sequence, None)
            elif isinstance(effect, PutMark):
                self._rows[effect.stream_id] = effect.row.copy()
            elif isinstance(effect, PutSnapshot):
                self._snapshots[effect.snapshot.execution_id] = effect.snapshot.sequence
            elif isinstance(effect, DropSnapshot):
                self._snapshots.pop(effect.execution_id, None)

    def _put(self, effect: PutEvent) -> None:
        e = effect.envelope
        row = self._row(e.stream_id)
        row.take(e, effect.fence)
        raw = effect.encoded if effect.encoded is not None else encode_envelope(e)
        self._events.setdefault(e.stream_id, {})[e.sequence] = e.id, raw
        for inbox, position in effect.consumed:
            self._row(inbox).consume(position)

    def _row(self, stream_id: str) -> StreamRow:
        row = self._rows.get(stream_id)
        if row is None:
            row = self._rows[stream_id] = new_row(stream_id)
        return row

    def _present(self, stream_id: str, first: int, last: int) -> Iterable[int]:
        row = self._rows.get(stream_id)
        if row is None or not row.exists:
            return
        if first <= 0 <= last:
            yield 0
        yield from range(max(first, row.first), min(last, row.head) + 1)


class LogHandle(Protocol):
    """What the log needs of a store handle: to tell it what became durable."""

    def committed(self, batch: list[Committed], appender: object) -> None:
        """Events became durable, appended by the handle ``appender`` (None: applied by the log itself)."""
        ...


class MemoryLog:
    """All shards of one log. Handles on it are the nodes of a fleet; each op is a transaction of its own.

    ``published`` holds what ``ctx.publish`` sent to the estate, in order; ``refused`` the requests on other chains that
    could not be applied, with why.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        shards: int = DEFAULT_SHARDS,
        max_event_bytes: int = MAX_EVENT_BYTES,
        max_append_bytes: int = MAX_APPEND_BYTES,
    ) -> None:
        self.index = MemoryIndex()
        self.shards = shards
        self.published: list[Outgoing] = []
        self.refused: list[tuple[Outgoing, LoomError]] = []
        self._clock = clock
        self._max_event_bytes, self._max_append_bytes = max_event_bytes, max_append_bytes
        self._handles: list[LogHandle] = []
        self._applied: dict[str, None] = {}
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}

    def shard_of(self, stream_id: str) -> int:
        """Shard of a stream, as on Kafka."""
        return partition_of(routing_id(stream_id), self.shards)

    def join(self, handle: LogHandle) -> None:
        """Tell ``handle`` from now on what becomes durable."""
        self._handles.append(handle)

    def leave(self, handle: LogHandle) -> None:
        """Tell it no longer."""
        if handle in self._handles:
            self._handles.remove(handle)

    def commit(self, op: WriteOp, appender: object) -> Verdict:
        """Judge ``op`` and make it durable; then apply what it sent to other chains."""
        verdict = self._commit(op, appender)
        if isinstance(verdict, Accepted):
            self._send(verdict.effects)
        return verdict

    def changed(self, stream_id: str) -> asyncio.Future[None]:
        """Return a future that is done once an event enters the stream."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(stream_id, []).append(future)
        return future

    def forget(self, stream_id: str, future: asyncio.Future[None]) -> None:
        """Drop a future of ``changed`` that nobody waits for any more."""
        waiting = self._waiting.get(stream_id, [])
        if future in waiting:
            waiting.remove(future)
            if not waiting:
                del self._waiting[stream_id]

    def inbox_streams(self, chain_id: str) -> list[tuple[str, StreamRow]]:
        """Inbox streams of a chain, by name."""
        shared = inbox_stream(chain_id)
        return sorted(
            (stream_id, row)
            for stream_id, row in self.index.rows().items()
            if row.exists and (stream_id == shared or stream_id.startswith(shared + ":"))
        )

    def _commit(self, op: WriteOp, appender: object) -> Verdict:
        staged = Staged(self.index)
        verdict = staged.judge(op, self._clock(), self._admit)
        if isinstance(verdict, Accepted):
            self.index.apply(staged.effects)
            self._tell(staged.effects, appender)
        return verdict

    def _admit(self, effects: list[Effect]) -> None:
        total = 0
        for effect in effects:
            if isinstance(effect, PutEvent):
                effect.encoded = encode_envelope(effect.envelope)
                size = len(effect.encoded)
                total += size
                if size > self._max_event_bytes:
                    raise PayloadTooLargeError(effect.envelope.stream_id, size, self._max_event_bytes)
                if total > self._max_append_bytes:
                    raise PayloadTooLargeError(effect.envelope.stream_id, total, self._max_append_bytes)

    def _tell(self, effects: list[Effect], appender: object) -> None:
        by_stream: dict[str, list[Envelope]] = {}
        for effect in effects:
            if isinstance(effect, PutEvent):
                by_stream.setdefault(effect.envelope.stream_id, []).append(effect.envelope)
        batch = [Committed(stream_id, tuple(envelopes), None) for stream_id, envelopes in by_stream.items()]
        if batch:
            for handle in self._handles:
                handle.committed(batch, appender)
        for stream_id in by_stream:
            for future in self._waiting.pop(stream_id, ()):
                if not future.done():
                    future.set_result(None)

    def _send(self, effects: list[Effect]) -> None:
        queue = [effect.outgoing for effect in effects if isinstance(effect, SendOut)]
        for outgoing in queue:  # grows while it is walked: a request may send on
            if outgoing.id in self._applied:
                continue
            self._applied[outgoing.id] = None
            if len(self._applied) > APPLIED_IDS:
                del self._applied[next(iter(self._applied))]
            if outgoing.target == "publish":
                self.published.append(outgoing)
                continue
            assert isinstance(outgoing.body, StreamAppend)
            verdict = self._commit(AppendOps((outgoing.body,)), None)
            if isinstance(verdict, Accepted):
                queue += [effect.outgoing for effect in verdict.effects if isinstance(effect, SendOut)]
            elif isinstance(verdict, Rejected):
                self.refused.append((outgoing, verdict.error))
