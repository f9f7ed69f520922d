"""The index of a shard: what its writer judges by and serves reads from (kafka.md, "Reading").

Streams in use are in memory, within a byte budget; those that changed longest ago leave it for a local file, finished
ones at once. The file is written in batches by ``maintain``, never by an append; a stream that is needed again is read
from it.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, Final

from loom.ids import RESERVED_PREFIX
from loom.schemas.payload import dump
from loom.stores.contracts import NO_EVENTS, Snapshot, StreamInfo
from loom.stores.index_table import StreamTable
from loom.stores.ops import DropSnapshot, Effect, PutEvent, PutMark, PutSnapshot
from loom.stores.rows import StreamRow, merge_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from loom.errors import StreamBrokenError
    from loom.schemas.envelope import Envelope
    from loom.stores.event_run import EventRun
    from loom.stores.index_file import Stored

DEFAULT_BUDGET_BYTES: Final = 256 * 1024 * 1024


class StreamIndex:
    """Committed streams of one shard. See :class:`loom.stores.rows.Index`.

    Who may call what: ``row``, ``apply`` and ``load_*`` are the writer thread's (the row that ``row`` returns changes
    only under these); ``maintain`` and ``save_checkpoint`` may run beside them on any thread; so may all other reads.

    ``encode`` and ``decode`` translate an envelope and its record value; an effect that carries ``encoded`` is kept as
    it is. Memory keeps to ``budget_bytes`` as long as ``maintain`` is called when ``overdue``; half as much again is
    never exceeded, since ``apply`` then does it itself.
    """

    def __init__(
        self,
        path: Path,
        encode: Callable[[Envelope], bytes],
        decode: Callable[[bytes], Envelope],
        *,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
    ) -> None:
        self._encode, self._decode = encode, decode
        self._table = StreamTable(path, budget_bytes)
        self._stopped: dict[str, StreamBrokenError] = {}

    # -- reading ------------------------------------------------------------------------------------------------

    def row(self, stream_id: str) -> StreamRow | None:
        """See :class:`loom.stores.view.View`.

        Raises:
            StreamBrokenError: the stream was stopped; so do ``event_ids``, ``events`` and ``encoded``.
        """
        if stream_id in self._stopped:
            raise self._stopped[stream_id]
        entry = self._table.entries.get(stream_id)
        return self._table.file.row(stream_id) if entry is None else entry.row

    def info(self, stream_id: str) -> StreamInfo | None:
        """What is known of a stream, None where it was never appended to or is deleted."""
        with self._table.lock:
            entry = self._table.entries.get(stream_id)
            if entry is not None:
                return entry.row.info(stream_id) if entry.row.exists else None
        row = self._table.file.row(stream_id)
        return row.info(stream_id) if row is not None and row.exists else None

    def event_ids(self, stream_id: str, first: int, last: int) -> list[str]:
        """See :class:`loom.stores.view.View`."""
        return [event_id for _, event_id, _ in self._stored(stream_id, first, last, last - first + 1)]

    def events(self, stream_id: str, from_sequence: int, limit: int) -> list[Envelope]:
        """See :class:`loom.stores.view.View`."""
        return [self._decode(value) for value in self.encoded(stream_id, from_sequence, limit)]

    def encoded(self, stream_id: str, from_sequence: int, limit: int) -> list[bytes]:
        """As ``events``, as the log holds them."""
        return [value for _, _, value in self._stored(stream_id, from_sequence, None, limit)]

    def _stored(self, stream_id: str, first: int, last: int | None, limit: int) -> list[Stored]:
        if stream_id in self._stopped:
            raise self._stopped[stream_id]
        table = self._table
        with table.lock:
            entry = table.entries.get(stream_id)
            if entry is not None:
                row, start, zero = entry.row, entry.start, entry.zero
                exists, low = row.exists, max(first, row.first)
                upto = row.head if last is None else min(last, row.head)
                tail = entry.tail(low, min(upto, max(low, start) + limit))
        if entry is None:
            found_row = table.file.row(stream_id)
            if found_row is None:
                return []
            exists, low = found_row.exists, max(first, found_row.first)
            upto = found_row.head if last is None else min(last, found_row.head)
            start, zero, tail = found_row.head + 1, None, []
        if not exists or limit <= 0:
            return []
        found: list[Stored] = []
        if first <= 0 <= upto:
            found = table.file.events(stream_id, 0, 0, 1) if zero is None else [(0, *zero)]
        if low < start and low <= upto:
            found += table.file.events(stream_id, low, min(upto, start - 1), limit)
        return (found + tail)[:limit]

    def snapshot_sequence(self, execution_id: str) -> int:
        """See :class:`loom.stores.view.View`."""
        with self._table.lock:
            found = self._table.snapshots.get(execution_id)
        return self._table.file.snapshot_sequence(execution_id) if found is None else found[0]

    def snapshot(self, execution_id: str) -> tuple[int, bytes] | None:
        """Sequence of a snapshot and its encoded form, None where there is none."""
        with self._table.lock:
            found = self._table.snapshots.get(execution_id)
        if found is None:
            return self._table.file.snapshot(execution_id)
        sequence, data = found
        return None if data is None else (sequence, data)

    def open_logs(self, after: str = "", limit: int = 1000) -> list[StreamInfo]:
        """Execution logs without a terminal event, ordered by id, a page after ``after``."""
        table = self._table
        with table.lock:
            names = list(table.open_logs)
        chosen = heapq.nsmallest(limit, (s for s in names if s > after))
        with table.lock:
            # One that has left memory meanwhile is in the file by now.
            rows = {s: table.entries[s].row for s in chosen if s in table.open_logs}
            found = {s: row.info(s) for s, row in rows.items() if row.exists}
        while True:
            page = table.file.open_logs(after, limit)
            with table.lock:
                found |= {s: row.info(s) for s, row in page if s not in table.entries and s not in found}
            # A page may hold nothing but streams that memory knows better: go on until the answer is complete.
            if len(page) < limit or sum(s <= page[-1][0] for s in found) >= limit:
                return [found[s] for s in sorted(found)[:limit]]
            after = page[-1][0]

    def inbox_streams(self, chain_id: str) -> list[StreamInfo]:
        """Inbox streams of a chain, ordered by name."""
        table = self._table
        with table.lock:
            known = {s: table.entries[s].row.info(s) for s in table.inboxes.get(chain_id, ())}
        found = {s: row.info(s) for s, row in table.file.inbox_streams(chain_id)} | known
        return [found[s] for s in sorted(found) if found[s].head > NO_EVENTS]

    # -- writing ------------------------------------------------------------------------------------------------

    def apply(self, effects: Iterable[Effect]) -> None:
        """See :class:`loom.stores.rows.Index`. ``DropEvent`` needs nothing: the mark beside it says what is gone."""
        table = self._table
        with table.lock:
            for effect in effects:
                if isinstance(effect, PutEvent):
                    self._put(effect)
                elif isinstance(effect, PutMark):
                    table.replace_row(effect.stream_id, table.entry(effect.stream_id), effect.row.copy())
                elif isinstance(effect, PutSnapshot):
                    kept = effect.snapshot
                    table.keep_snapshot(
                        kept.execution_id, kept.sequence, effect.encoded or encode_snapshot(kept)
                    )
                elif isinstance(effect, DropSnapshot):
                    table.keep_snapshot(effect.execution_id, NO_EVENTS, None)
        if table.overfull:
            table.maintain()

    def _put(self, effect: PutEvent) -> None:
        e = effect.envelope
        # The judge has seen that there is no such log; an inbox may have a row before it has a message.
        fresh = e.sequence == 0 and not e.stream_id.startswith(RESERVED_PREFIX)
        entry = self._table.entry(e.stream_id, fresh=fresh)
        entry.row.take(e, effect.fence)
        value = effect.encoded if effect.encoded is not None else self._encode(e)
        self._table.take(e.stream_id, entry, e.sequence, e.id, value)
        for inbox, position in effect.consumed:
            self._consume(inbox, position)

    def _consume(self, inbox: str, position: int) -> None:
        entry = self._table.entry(inbox)
        entry.row.consume(position)
        self._table.touch(inbox, entry)

    def stop(self, error: StreamBrokenError) -> None:
        """Refuse with ``error`` whatever asks for the stream (kafka.md: a stream that is broken stops)."""
        self._stopped[error.stream_id] = error

    def resume(self) -> None:
        """Take back every ``stop``, before the log is read again."""
        self._stopped.clear()

    # -- building it from the log -------------------------------------------------------------------------------
    # Marks first, then events and snapshots, each in log order. What is loaded twice changes nothing. Whether anything
    # is missing is for the reader to watch.

    def load_mark(self, stream_id: str, row: StreamRow | None) -> None:
        """Begin the stream with its mark; the index keeps ``row``. None: the mark is gone, and the stream with it."""
        if row is None:
            self._table.forget(stream_id)
            return
        with self._table.lock:
            entry = self._table.entry(stream_id)
            if not entry.row.deleted:
                self._table.replace_row(stream_id, entry, merge_rows(entry.row, row))
        if self._table.overfull:
            self._table.relieve()

    def load_run(self, run: EventRun) -> None:
        """Keep events of one stream, unless it is deleted; what is above the row's head becomes the head."""
        table = self._table
        with table.lock:
            entry = table.entry(run.stream_id)
            entry.row.put_run(run)
            if entry.row.deleted:
                return
            table.take_run(entry, run)
            for inbox, position in run.consumed:
                self._consume(inbox, position)
        if table.overfull:  # the keeper of the file, if it has one, is behind
            table.relieve()

    def load_drop(self, stream_id: str, sequence: int) -> None:
        """Nothing to do for a tombstone of an event: the mark beside it says what is gone."""

    def load_snapshot(self, execution_id: str, sequence: int, value: bytes | None) -> None:
        """Keep an encoded snapshot; None: it was deleted (``sequence`` says nothing then)."""
        with self._table.lock:
            self._table.keep_snapshot(execution_id, NO_EVENTS if value is None else sequence, value)
        if self._table.overdue:
            self._table.maintain()

    # -- the file -----------------------------------------------------------------------------------------------

    @property
    def overdue(self) -> bool:
        """Whether ``maintain`` has enough to do to be worth a call."""
        return self._table.overdue

    @property
    def bytes_in_memory(self) -> int:
        """Estimate of what the streams in memory cost."""
        return self._table.bytes

    @property
    def streams_in_memory(self) -> int:
        """How many streams are in memory."""
        return len(self._table.entries)

    def maintain(self) -> None:
        """Let finished streams leave memory; then, over budget, those that changed longest ago.

        Raises:
            IndexFileError: the file cannot be written; what it lacks is still in memory.
        """
        self._table.maintain()

    def save_checkpoint(
        self,
        position: Mapping[str, int],
        identity: Mapping[str, Any],
        now_ms: int,
        *,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Write everything that the file lacks; then, in one step, that it holds the log up to ``position``.

        ``position`` is the next offset to read, per topic; everything before it was applied when this was called. What
        was applied later may be in the file, too: reading it again changes nothing. ``identity`` is what makes the log
        this log (cluster id, topic ids, P). ``extra`` is kept beside them (JSON).

        Raises:
            IndexFileError: the file cannot be written; the checkpoint before stands.
        """
        self._table.flush()
        self._table.file.save_checkpoint(
            {
                "position": dict(position),
                "identity": dict(identity),
                "saved_at": now_ms,
                "extra": dict(extra or {}),
            }
        )

    def load_checkpoint(
        self, identity: Mapping[str, Any], now_ms: int, *, max_age_ms: int, ends: Mapping[str, int]
    ) -> dict[str, int] | None:
        """Return the position up to which the file holds the log, or empty the index and return None.

        A checkpoint is thrown away if it is of another ``identity``, older than ``max_age_ms`` (tombstones may be gone),
        from the future, or beyond the ``ends`` of the topics. Call it before anything is loaded.
        """
        found = self._table.file.checkpoint()
        if found is not None and found["identity"] == dict(identity):
            position: dict[str, int] = found["position"]
            fresh = 0 <= now_ms - found["saved_at"] <= max_age_ms
            if fresh and position.keys() == ends.keys() and all(position[t] <= ends[t] for t in ends):
                return position
        self.clear()
        return None

    def checkpoint_extra(self) -> dict[str, Any]:
        """What the caller added to the checkpoint that stands, empty where there is none."""
        found = self._table.file.checkpoint() or {}
        return dict(found.get("extra", {}))

    def clear(self) -> None:
        """Forget everything, in memory and in the file."""
        self._table.clear()
        self._stopped.clear()

    def close(self) -> None:
        """Close the file; what only memory holds is lost, and read from the log again. Idempotent."""
        self._table.close()


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """Return a snapshot as JSON: what is kept where the store gives no encoded form of its own."""
    return dump({"state": snapshot.state, "metadata": snapshot.metadata}, "snapshot")
