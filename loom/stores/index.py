"""The index of a shard: what its writer judges by and serves reads from (kafka.md, "Reading").

Streams in use are in memory, within a byte budget; the least recently appended leave it for a local file, finished ones
first. The file is written in batches by ``maintain``, never by an append; a stream that is needed again is read from it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from loom.ids import routing_id
from loom.schemas.envelope import Kind
from loom.schemas.payload import dump
from loom.stores.contracts import NO_EVENTS, Snapshot, StreamInfo
from loom.stores.index_entry import ENTRY_BYTES, Entry
from loom.stores.index_file import IndexFile, SnapshotImage, Stored, StreamImage, dump_row
from loom.stores.ops import DropSnapshot, Effect, PutEvent, PutMark, PutSnapshot
from loom.stores.rows import StreamRow, new_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from loom.errors import StreamBrokenError
    from loom.schemas.envelope import Envelope

DEFAULT_BUDGET_BYTES: Final = 256 * 1024 * 1024
BATCH_STREAMS: Final = 512
"""Streams, and snapshots, in one write of the file."""
_LOW_WATER: Final = 0.9
_HARD_LIMIT: Final = 1.5


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """A snapshot as JSON: what an index keeps where the store gives no bytes of its own."""
    return dump({"state": snapshot.state, "metadata": snapshot.metadata}, "snapshot")


class StreamIndex:
    """Committed streams of one shard. See :class:`loom.stores.rows.Index`.

    Who may call what: ``row``, ``apply`` and the loader belong to the writer's thread (the row that ``row`` returns
    changes only under these); ``maintain`` and ``save_checkpoint`` may run beside them on any thread; the remaining
    reads on any. A lock is held for a few memory operations, and never while the file is written.

    ``encode`` and ``decode`` translate an envelope and its record value; an effect that carries ``encoded`` is kept as
    it is. Memory stays within ``budget_bytes`` as long as ``maintain`` is called; half as much again is never exceeded.
    """

    def __init__(
        self,
        path: Path,
        encode: Callable[[Envelope], bytes],
        decode: Callable[[bytes], Envelope],
        *,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
    ) -> None:
        self._file = IndexFile(path)
        self._encode, self._decode = encode, decode
        self._budget = budget_bytes
        self.lock, self._maintaining = Lock(), Lock()
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # least recently appended first
        self._dirty: dict[str, None] = {}
        self._finished: dict[str, None] = {}
        self._inboxes: dict[str, set[str]] = {}
        self._snapshots: dict[str, tuple[int, bytes | None]] = {}
        self._broken: dict[str, StreamBrokenError] = {}
        self._bytes = 0

    # -- reading ------------------------------------------------------------------------------------------------

    def row(self, stream_id: str) -> StreamRow | None:
        """See :class:`loom.stores.rows.View`.

        Raises:
            StreamBrokenError: the stream was stopped. So do all reads of its events.
        """
        if stream_id in self._broken:
            raise self._broken[stream_id]
        entry = self._entries.get(stream_id)
        return self._file.row(stream_id) if entry is None else entry.row

    def info(self, stream_id: str) -> StreamInfo | None:
        """What is known of a stream, None where it was never appended to or is deleted."""
        with self.lock:
            entry = self._entries.get(stream_id)
            if entry is not None:
                return entry.row.info(stream_id) if entry.row.exists else None
        row = self._file.row(stream_id)
        return row.info(stream_id) if row is not None and row.exists else None

    def event_ids(self, stream_id: str, first: int, last: int) -> list[str]:
        """See :class:`loom.stores.rows.View`."""
        return [event_id for _, event_id, _ in self._stored(stream_id, first, last, last - first + 1)]

    def events(self, stream_id: str, from_sequence: int, limit: int) -> list[Envelope]:
        """See :class:`loom.stores.rows.View`."""
        return [self._decode(value) for value in self.encoded(stream_id, from_sequence, limit)]

    def encoded(self, stream_id: str, from_sequence: int, limit: int) -> list[bytes]:
        """As ``events``, as the log holds them."""
        return [value for _, _, value in self._stored(stream_id, from_sequence, None, limit)]

    def _stored(self, stream_id: str, first: int, last: int | None, limit: int) -> list[Stored]:
        if stream_id in self._broken:
            raise self._broken[stream_id]
        with self.lock:
            entry = self._entries.get(stream_id)
            if entry is not None:
                row, start, zero = entry.row, entry.start, entry.zero
                exists, low = row.exists, max(first, row.first)
                upto = row.head if last is None else min(last, row.head)
                tail = entry.tail(low, min(upto, max(low, start) + limit))
        if entry is None:
            found_row = self._file.row(stream_id)
            if found_row is None:
                return []
            exists, low = found_row.exists, max(first, found_row.first)
            upto = found_row.head if last is None else min(last, found_row.head)
            start, zero, tail = found_row.head + 1, None, []
        if not exists or limit <= 0:
            return []
        found: list[Stored] = []
        if first <= 0 <= upto:
            found = self._file.events(stream_id, 0, 0, 1) if zero is None else [(0, *zero)]
        if low < start and low <= upto:
            found += self._file.events(stream_id, low, min(upto, start - 1), limit)
        return (found + tail)[:limit]

    def snapshot_sequence(self, execution_id: str) -> int:
        """See :class:`loom.stores.rows.View`."""
        with self.lock:
            found = self._snapshots.get(execution_id)
        return self._file.snapshot_sequence(execution_id) if found is None else found[0]

    def snapshot(self, execution_id: str) -> tuple[int, bytes] | None:
        """Sequence of a snapshot and its encoded form, None where there is none."""
        with self.lock:
            found = self._snapshots.get(execution_id)
        if found is None:
            return self._file.snapshot(execution_id)
        sequence, data = found
        return None if data is None else (sequence, data)

    def open_logs(self, after: str = "", limit: int = 1000) -> list[StreamInfo]:
        """Execution logs without a terminal event, ordered by id, a page after ``after``."""
        with self.lock:
            names = (s for s, e in self._entries.items() if s > after and _is_open(e.row))
            found = {s: self._entries[s].row.info(s) for s in heapq.nsmallest(limit, names)}
        while True:
            page = self._file.open_logs(after, limit)
            with self.lock:
                found |= {s: row.info(s) for s, row in page if s not in self._entries and s not in found}
            # A page may hold nothing but streams that memory knows better: go on until it proves the answer complete.
            if len(page) < limit or sum(s <= page[-1][0] for s in found) >= limit:
                return [found[s] for s in sorted(found)[:limit]]
            after = page[-1][0]

    def inbox_streams(self, chain_id: str) -> list[StreamInfo]:
        """Inbox streams of a chain, ordered by name."""
        with self.lock:
            known = {s: self._entries[s].row.info(s) for s in self._inboxes.get(chain_id, ())}
        found = {s: row.info(s) for s, row in self._file.inbox_streams(chain_id)} | known
        return [found[s] for s in sorted(found) if found[s].head > NO_EVENTS]

    @property
    def bytes_in_memory(self) -> int:
        """Estimate of what the streams in memory cost."""
        return self._bytes

    @property
    def streams_in_memory(self) -> int:
        """How many streams are in memory."""
        return len(self._entries)

    # -- writing ------------------------------------------------------------------------------------------------

    def apply(self, effects: Iterable[Effect]) -> None:
        """See :class:`loom.stores.rows.Index`. ``DropEvent`` needs nothing: the mark beside it says what is gone."""
        with self.lock:
            for effect in effects:
                if isinstance(effect, PutEvent):
                    self._put(effect)
                elif isinstance(effect, PutMark):
                    self.replace_row(effect.stream_id, self.entry(effect.stream_id), effect.row.copy())
                elif isinstance(effect, PutSnapshot):
                    kept = effect.snapshot
                    self.keep_snapshot(
                        kept.execution_id, kept.sequence, effect.encoded or encode_snapshot(kept)
                    )
                elif isinstance(effect, DropSnapshot):
                    self.keep_snapshot(effect.execution_id, NO_EVENTS, None)
        if self._bytes > self._budget * _HARD_LIMIT:
            self.maintain()

    def _put(self, effect: PutEvent) -> None:
        e = effect.envelope
        entry = self.entry(e.stream_id, fresh=e.sequence == 0)
        entry.row.put(e.sequence, e.id, e.type, e.timestamp, fence=effect.fence, node=e.metadata.get("node"))
        value = effect.encoded if effect.encoded is not None else self._encode(e)
        self.take(e.stream_id, entry, e.sequence, e.id, value)
        for inbox, position in effect.consumed:
            self.consume(inbox, position)

    def stop(self, error: StreamBrokenError) -> None:
        """Stop a stream: whatever asks for it gets ``error``, until the next takeover."""
        self._broken[error.stream_id] = error

    # -- for the loader, too: the writer's thread, with the lock held --------------------------------------------

    def entry(self, stream_id: str, *, fresh: bool = False) -> Entry:
        """The stream in memory, brought there if it is not; ``fresh``: it cannot be in the file."""
        entry = self._entries.get(stream_id)
        if entry is None:
            row = None if fresh else self._file.row(stream_id)
            entry = self._entries[stream_id] = Entry(new_row(stream_id) if row is None else row)
            self._bytes += ENTRY_BYTES
            if entry.row.kind == "inbox":
                self._inboxes.setdefault(routing_id(stream_id), set()).add(stream_id)
        return entry

    def take(self, stream_id: str, entry: Entry, sequence: int, event_id: str, value: bytes) -> None:
        """Keep an event of the stream; its row has it already."""
        self._bytes += entry.add(sequence, event_id, value)
        self.touch(stream_id, entry)

    def touch(self, stream_id: str, entry: Entry) -> None:
        """Note a change of the stream."""
        entry.version += 1
        self._dirty[stream_id] = None
        self._entries.move_to_end(stream_id)
        row = entry.row
        if row.deleted or row.finished:
            self._finished[stream_id] = None
            if row.status != Kind.EXECUTION_CONTINUED:
                for inbox in self._inboxes.get(stream_id, ()):
                    self._finished[inbox] = None

    def replace_row(self, stream_id: str, entry: Entry, row: StreamRow) -> None:
        """Give the stream another row, and drop the events that it says are gone."""
        self._bytes -= entry.replace(row)
        self.touch(stream_id, entry)

    def consume(self, inbox: str, position: int) -> None:
        """Note that everything of an inbox up to ``position`` is disposed of; nothing where it has no messages."""
        entry = self._entries.get(inbox)
        if entry is None and self._file.row(inbox) is None:
            return
        entry = self.entry(inbox)
        entry.row.consume(position)
        self.touch(inbox, entry)

    def keep_snapshot(self, execution_id: str, sequence: int, data: bytes | None) -> None:
        """Note a snapshot, or that it is gone."""
        before = self._snapshots.get(execution_id)
        self._bytes += len(data or b"") - len((before and before[1]) or b"")
        self._snapshots[execution_id] = sequence, data

    # -- leaving memory -----------------------------------------------------------------------------------------

    @property
    def overdue(self) -> bool:
        """Whether a call of ``maintain`` would be worth its while."""
        return self._bytes > self._budget or len(self._finished) + len(self._snapshots) >= BATCH_STREAMS

    def maintain(self) -> None:
        """Write finished streams to the file and let them leave memory; then, over budget, the least recent others.

        Raises:
            StoreError: the file cannot be written; nothing has left memory.
        """
        with self._maintaining:
            while victims := self._victims():
                self._flush(victims, leave=True)
            while len(self._snapshots) >= BATCH_STREAMS:
                self._flush([], leave=False)

    def _victims(self) -> list[str]:
        with self.lock:
            victims = [s for s, _ in zip(self._finished, range(BATCH_STREAMS), strict=False)]
            for stream_id in victims:
                del self._finished[stream_id]
            if self._bytes <= self._budget:
                return victims
            excess = self._bytes - self._budget * _LOW_WATER
            excess -= sum(self._entries[s].bytes for s in victims if s in self._entries)
            chosen = set(victims)
            for stream_id, entry in self._entries.items():
                if excess <= 0 or len(victims) >= BATCH_STREAMS:
                    break
                if stream_id not in chosen:
                    victims.append(stream_id)
                    excess -= entry.bytes
            return victims

    def _flush(self, names: Sequence[str], *, leave: bool) -> None:
        """Write what changed of these streams, and pending snapshots, in one transaction."""
        with self.lock:
            entries = {s: self._entries[s] for s in names if s in self._entries}
            images = [_image(s, entry) for s, entry in entries.items() if s in self._dirty]
            versions = {s: (entry.version, entry.row.head + 1) for s, entry in entries.items()}
            for image in images:
                entries[image.stream_id].trim = False
            snapshots = dict(
                zip(self._snapshots, list(self._snapshots.values())[:BATCH_STREAMS], strict=False)
            )
        try:
            if images or snapshots:
                self._file.write(images, [SnapshotImage(s, *kept) for s, kept in snapshots.items()])
        except BaseException:
            with self.lock:
                for image in images:
                    entries[image.stream_id].trim |= image.trim
            raise
        with self.lock:
            for stream_id, entry in entries.items():
                self._settle(stream_id, entry, *versions[stream_id], leave=leave)
            for execution_id, kept in snapshots.items():
                if self._snapshots.get(execution_id) == kept:
                    del self._snapshots[execution_id]
                    self._bytes -= len(kept[1] or b"")

    def _settle(self, stream_id: str, entry: Entry, version: int, end: int, *, leave: bool) -> None:
        """Note that the stream is in the file as of ``version``; let it leave memory if nothing changed since."""
        if entry.version != version:  # it stays; what the file took is there, and may have been trimmed since
            if not entry.row.deleted:
                entry.stored = max(entry.stored, end)
            entry.trim = entry.trim or entry.row.deleted or entry.row.first > 1
            return
        self._dirty.pop(stream_id, None)
        entry.stored = end
        if leave:
            del self._entries[stream_id]
            self._bytes -= entry.bytes
            if entry.row.kind == "inbox":
                chain_id = routing_id(stream_id)
                self._inboxes[chain_id].discard(stream_id)
                if not self._inboxes[chain_id]:
                    del self._inboxes[chain_id]

    # -- the checkpoint -----------------------------------------------------------------------------------------

    def save_checkpoint(self, position: Mapping[str, int], identity: Mapping[str, Any], now_ms: int) -> None:
        """Write everything that changed, then, in one step, that the file holds the log up to ``position``.

        ``position`` is the next offset to read, per topic; everything before it was applied when this was called. What
        was applied later may be in the file, too: reading it again changes nothing. ``identity`` is what makes the log
        this log (cluster id, topic ids, P).
        """
        with self._maintaining:
            with self.lock:
                names = list(self._dirty)
            for start in range(0, len(names), BATCH_STREAMS):
                self._flush(names[start : start + BATCH_STREAMS], leave=False)
            while self._snapshots:
                self._flush([], leave=False)
            self._file.save_checkpoint(
                {"position": dict(position), "identity": dict(identity), "saved_at": now_ms}
            )

    def load_checkpoint(
        self, identity: Mapping[str, Any], now_ms: int, *, max_age_ms: int, ends: Mapping[str, int]
    ) -> dict[str, int] | None:
        """Return the position up to which the file holds the log, or empty the index and return None.

        It is thrown away if it is of another ``identity``, older than ``max_age_ms`` (tombstones may be gone) or from
        the future, or beyond the ``ends`` of the topics. Call it before anything is applied.
        """
        found = self._file.checkpoint()
        if found is not None and found["identity"] == dict(identity):
            position: dict[str, int] = found["position"]
            fresh = 0 <= now_ms - found["saved_at"] <= max_age_ms
            if fresh and position.keys() == ends.keys() and all(position[t] <= ends[t] for t in ends):
                return position
        self.clear()
        return None

    def clear(self) -> None:
        """Forget everything, in memory and in the file."""
        with self._maintaining, self.lock:
            self._file.wipe()
            for kept in (
                self._entries,
                self._dirty,
                self._finished,
                self._inboxes,
                self._snapshots,
                self._broken,
            ):
                kept.clear()
            self._bytes = 0

    def close(self) -> None:
        """Close the file; what is in memory only is lost, and read from the log again. Idempotent."""
        with self._maintaining:
            self._file.close()


def _is_open(row: StreamRow) -> bool:
    return row.kind == "executions" and row.exists and not row.finished


def _image(stream_id: str, entry: Entry) -> StreamImage:
    row = entry.row
    return StreamImage(
        stream_id,
        dump_row(row),
        _is_open(row),
        entry.unstored(),
        row.first,
        deleted=row.deleted,
        trim=entry.trim,
    )
