"""The streams that an index holds in memory, and how they leave it for the file."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Final

from loom.ids import routing_id
from loom.schemas.envelope import TERMINAL_KINDS, Kind
from loom.stores.index_entry import ENTRY_BYTES, Entry
from loom.stores.index_file import IndexFile, SnapshotImage, StreamImage, dump_row
from loom.stores.rows import StreamRow, new_row

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from loom.stores.event_run import EventRun

BATCH_STREAMS: Final = 512
"""Streams, and snapshots, in one write of the file."""
_LOW_WATER: Final = 0.9
_HARD_LIMIT: Final = 1.5


class StreamTable:
    """Streams and snapshots in memory, least recently changed first, over a file that holds the others.

    Fields and methods that say so need ``lock``. It is held for a few memory operations at a time, and never while the
    file is written: what is written is copied first, and what changed meanwhile stays in memory.
    """

    def __init__(self, path: Path, budget_bytes: int) -> None:
        self.file = IndexFile(path)
        self.lock = Lock()
        self.bytes = 0
        self.entries: OrderedDict[str, Entry] = OrderedDict()
        """With ``lock``, to change it or to walk it."""
        self.snapshots: dict[str, tuple[int, bytes | None]] = {}
        """Snapshots (None: deleted) that are not in the file yet. With ``lock``."""
        self.inboxes: dict[str, set[str]] = {}
        """Inbox streams in memory, by chain. With ``lock``."""
        self.open_logs: dict[str, None] = {}
        """Open logs in memory. With ``lock``."""
        self._budget = budget_bytes
        self._maintaining = Lock()
        self._dirty: dict[str, None] = {}
        self._finished: dict[str, None] = {}

    def entry(self, stream_id: str, *, fresh: bool = False) -> Entry:
        """Return the stream, brought into memory if it is not there; ``fresh``: it cannot be in the file. With ``lock``."""
        entry = self.entries.get(stream_id)
        if entry is None:
            found = None if fresh else self.file.stream(stream_id)
            row, held, zero = (new_row(stream_id), 0, False) if found is None else found
            entry = self.entries[stream_id] = Entry(row, held, zero_stored=zero)
            self.bytes += ENTRY_BYTES
            if row.kind == "inbox":
                self.inboxes.setdefault(routing_id(stream_id), set()).add(stream_id)
        return entry

    def take(self, stream_id: str, entry: Entry, sequence: int, event_id: str, value: bytes) -> None:
        """Keep an event; the row has it already. With ``lock``."""
        self.bytes += entry.add(sequence, event_id, value)
        self.touch(stream_id, entry)

    def take_run(self, entry: Entry, run: EventRun) -> None:
        """Keep what is new of a run, which the row has already. With ``lock``."""
        cost = entry.add_run(run)
        if cost:
            self.bytes += cost
            self.touch(run.stream_id, entry)

    def replace_row(self, stream_id: str, entry: Entry, row: StreamRow) -> None:
        """Give the stream another row, and drop the events that it says are gone. With ``lock``."""
        self.bytes -= entry.replace(row)
        self.touch(stream_id, entry)

    def touch(self, stream_id: str, entry: Entry) -> None:
        """Note a change of the stream. With ``lock``."""
        entry.version += 1
        self._dirty[stream_id] = None
        self.entries.move_to_end(stream_id)
        row = entry.row
        if row.deleted or row.status in TERMINAL_KINDS:
            self._note_end(stream_id, row)
        elif row.kind == "executions":
            self.open_logs[stream_id] = None
        elif routing_id(stream_id) not in self.open_logs:  # nothing in memory runs on it: it need not stay
            self._finished[stream_id] = None

    def _note_end(self, stream_id: str, row: StreamRow) -> None:
        self.open_logs.pop(stream_id, None)
        self._finished[stream_id] = None
        if row.status != Kind.EXECUTION_CONTINUED:
            for inbox in self.inboxes.get(stream_id, ()):
                self._finished[inbox] = None

    def keep_snapshot(self, execution_id: str, sequence: int, data: bytes | None) -> None:
        """Keep a snapshot, or note that it is gone. With ``lock``."""
        before = self.snapshots.get(execution_id)
        self.bytes += len(data or b"") - len((before and before[1]) or b"")
        self.snapshots[execution_id] = sequence, data

    def forget(self, stream_id: str) -> None:
        """Forget a stream altogether, as if it had never been. Not with ``lock``."""
        with self._maintaining:
            with self.lock:
                entry = self.entries.get(stream_id)
                if entry is not None:
                    self._drop(stream_id, entry)
                self._dirty.pop(stream_id, None)
                self._finished.pop(stream_id, None)
            self.file.forget(stream_id)

    # -- leaving memory -----------------------------------------------------------------------------------------

    @property
    def overdue(self) -> bool:
        """Whether ``maintain`` has enough to do to be worth a call."""
        return self.over_budget or len(self._finished) + len(self.snapshots) >= BATCH_STREAMS

    @property
    def over_budget(self) -> bool:
        """Whether what is in memory costs more than it may."""
        return self.bytes > self._budget

    @property
    def overfull(self) -> bool:
        """Whether memory is so far over its budget that nothing more may come before ``maintain``."""
        return self.bytes > self._budget * _HARD_LIMIT

    def maintain(self) -> None:
        """Let finished streams leave memory; then, over budget, those that changed longest ago. Not with ``lock``."""
        with self._maintaining:
            while victims := self._victims():
                self._flush(victims, leave=True)
            while len(self.snapshots) >= BATCH_STREAMS or (self.over_budget and self.snapshots):
                self._flush([], leave=False)

    def relieve(self) -> None:
        """As ``maintain``, but no more than it takes to be no longer ``overfull``. Not with ``lock``."""
        with self._maintaining:
            while self.overfull and (victims := self._victims()):
                self._flush(victims, leave=True)
            while self.overfull and self.snapshots:
                self._flush([], leave=False)

    def flush(self) -> None:
        """Write everything that the file lacks as of now; it stays in memory. Not with ``lock``."""
        with self._maintaining:
            with self.lock:
                names = list(self._dirty)
            for start in range(0, len(names), BATCH_STREAMS):
                self._flush(names[start : start + BATCH_STREAMS], leave=False)
            for _ in range(0, len(self.snapshots), BATCH_STREAMS):
                self._flush([], leave=False)

    def clear(self) -> None:
        """Forget everything, in memory and in the file. Not with ``lock``."""
        with self._maintaining, self.lock:
            self.file.wipe()
            self._let_go()

    def close(self) -> None:
        """Close the file, after a write under way, and let go what memory holds; it is lost. Idempotent."""
        with self._maintaining, self.lock:
            self.file.close()
            self._let_go()

    def _let_go(self) -> None:
        for kept in (
            self.entries,
            self.snapshots,
            self.inboxes,
            self.open_logs,
            self._dirty,
            self._finished,
        ):
            kept.clear()
        self.bytes = 0

    def _victims(self) -> list[str]:
        with self.lock:
            victims = [s for s, _ in zip(self._finished, range(BATCH_STREAMS), strict=False)]
            for stream_id in victims:
                del self._finished[stream_id]
            if not self.over_budget:
                return victims
            excess = self.bytes - self._budget * _LOW_WATER
            excess -= sum(self.entries[s].bytes for s in victims if s in self.entries)
            chosen = set(victims)
            for stream_id, entry in self.entries.items():
                if excess <= 0 or len(victims) >= BATCH_STREAMS:
                    break
                if stream_id not in chosen:
                    victims.append(stream_id)
                    excess -= entry.bytes
            return victims

    def _flush(self, names: Sequence[str], *, leave: bool) -> None:
        """Write what changed of these streams, and pending snapshots, in one transaction of the file."""
        with self.lock:
            entries = {s: self.entries[s] for s in names if s in self.entries}
            images = [_image(s, entry) for s, entry in entries.items() if s in self._dirty]
            states = {s: (entry.version, entry.end, entry.has_zero) for s, entry in entries.items()}
            for image in images:
                entries[image.stream_id].trim = False
            snapshots = dict(list(self.snapshots.items())[:BATCH_STREAMS])
        try:
            if images or snapshots:
                self.file.write(images, [SnapshotImage(s, *kept) for s, kept in snapshots.items()])
        except BaseException:
            with self.lock:
                for image in images:
                    entries[image.stream_id].trim |= image.trim
                if leave:
                    self._finished.update(dict.fromkeys(entries))
            raise
        with self.lock:
            for stream_id, entry in entries.items():
                self._settle(stream_id, entry, states[stream_id], leave=leave)
            for execution_id, kept in snapshots.items():
                if self.snapshots.get(execution_id) == kept:
                    del self.snapshots[execution_id]
                    self.bytes -= len(kept[1] or b"")

    def _settle(self, stream_id: str, entry: Entry, state: tuple[int, int, bool], *, leave: bool) -> None:
        """Note that the file has the stream as of ``version``; let it leave if nothing changed since."""
        version, end, zero = state
        if entry.version != version:  # it stays; the file took events that may have been trimmed since
            entry.trim = entry.trim or entry.row.deleted or entry.row.first > 1
            if not entry.row.deleted:
                entry.stored, entry.zero_stored = max(entry.stored, end), entry.zero_stored or zero
            return
        self._dirty.pop(stream_id, None)
        entry.stored, entry.zero_stored = end, zero
        if leave:
            self._drop(stream_id, entry)

    def _drop(self, stream_id: str, entry: Entry) -> None:
        del self.entries[stream_id]
        self.open_logs.pop(stream_id, None)
        self.bytes -= entry.bytes
        if entry.row.kind == "inbox":
            chain_id = routing_id(stream_id)
            self.inboxes[chain_id].discard(stream_id)
            if not self.inboxes[chain_id]:
                del self.inboxes[chain_id]


def is_open(row: StreamRow) -> bool:
    """Whether the row is that of an execution log without a terminal event."""
    return row.kind == "executions" and row.exists and not row.finished


def _image(stream_id: str, entry: Entry) -> StreamImage:
    row = entry.row
    return StreamImage(
        stream_id,
        dump_row(row),
        is_open(row),
        entry.end,
        entry.has_zero,
        entry.unstored(),
        row.first,
        deleted=row.deleted,
        trim=entry.trim,
    )
