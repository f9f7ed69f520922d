"""The file behind an index: rows and events that left memory, and the checkpoint (kafka.md, "The local checkpoint").

A cache of the log in SQLite: whatever is lost with it is read from the log again. One connection reads, one writes; each
may be used from any thread, one call at a time.
"""

from __future__ import annotations

import json
import sqlite3
import struct
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from pydantic_core import from_json, to_json

from loom.errors import IndexFileError
from loom.ids import inbox_stream
from loom.stores.name_filter import NameFilter
from loom.stores.rows import StreamRow

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

FORMAT: Final = 1
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS streams (
    id TEXT PRIMARY KEY, open INTEGER NOT NULL, held INTEGER NOT NULL, zero INTEGER NOT NULL, row TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS open_streams ON streams (id) WHERE open = 1;
CREATE TABLE IF NOT EXISTS segments (
    stream TEXT NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL, data BLOB NOT NULL, UNIQUE (stream, first)
);
CREATE TABLE IF NOT EXISTS snapshots (id TEXT PRIMARY KEY, sequence INTEGER NOT NULL, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
_PAGE: Final = 16_384
"""Bytes: a finished stream takes a kilobyte or three, and a page of four would hold one."""
_AT_ONCE: Final = 64
"""Rows of one statement."""
_HEAD: Final = struct.Struct("<QHI")

Stored = tuple[int, str, bytes]
"""An event as it rests: sequence, id, encoded envelope."""


@dataclass(slots=True)
class StreamImage:
    """What is to be written of one stream: its row, and the events below ``held`` that are not in the file yet.

    While a stream is being loaded its row may come before its events: then ``held`` is not above the row's head, and
    ``zero`` says whether event 0 is there.
    ``trim`` drops from the file what the row says is trimmed or deleted.
    """

    stream_id: str
    row: str
    open: bool
    held: int
    zero: bool
    events: Sequence[Stored]
    first: int
    deleted: bool = False
    trim: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotImage:
    """What is to be written of one snapshot; ``data`` None deletes it."""

    execution_id: str
    sequence: int
    data: bytes | None


class IndexFile:
    """One SQLite file. A file that is damaged or of another format is emptied."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read_lock, self._write_lock = Lock(), Lock()
        try:
            self._open()
            if self._meta("format") not in {None, str(FORMAT)}:
                raise IndexFileError(str(path), "another format")  # noqa: TRY301 - the same remedy
        except (sqlite3.DatabaseError, IndexFileError):
            with suppress(AttributeError):
                self.close()
            _remove(path)
            self._open()
        self._writer.execute("INSERT OR IGNORE INTO meta VALUES ('format', ?)", (str(FORMAT),))
        # names of the streams in it; None: it was not empty when it was opened, so only the file itself can tell
        self._names = NameFilter() if self._one("SELECT 1 FROM streams LIMIT 1", ()) is None else None

    def _open(self) -> None:
        self._writer = _connect(self.path)
        self._writer.executescript(_TABLES)
        self._reader = _connect(self.path)

    def close(self) -> None:
        """Close both connections; idempotent."""
        with self._read_lock, self._write_lock:
            self._reader.close()
            self._writer.close()

    def row(self, stream_id: str) -> StreamRow | None:
        """Row of a stream."""
        if self._names is not None and not self._names.may_hold(stream_id):
            return None
        found = self._one("SELECT row FROM streams WHERE id = ?", (stream_id,))
        return None if found is None else load_row(found[0])

    def stream(self, stream_id: str) -> tuple[StreamRow, int, bool] | None:
        """Row of a stream, the sequence below which its events are here, and whether event 0 is."""
        if self._names is not None and not self._names.may_hold(stream_id):
            return None
        found = self._one("SELECT row, held, zero FROM streams WHERE id = ?", (stream_id,))
        return None if found is None else (load_row(found[0]), found[1], bool(found[2]))

    def events(self, stream_id: str, first: int, last: int, limit: int) -> list[Stored]:
        """Events with ``first <= sequence <= last`` in order, at most ``limit``."""
        query = "SELECT data FROM segments WHERE stream = ? AND last >= ? AND first <= ? ORDER BY first"
        found: list[Stored] = []
        with self._reading() as db, closing(db.execute(query, (stream_id, first, last))) as segments:
            for (data,) in segments:
                found += [event for event in _unpack(data) if first <= event[0] <= last]
                if len(found) >= limit:
                    break
        return found[:limit]

    def open_logs(self, after: str, limit: int) -> list[tuple[str, StreamRow]]:
        """Logs without a terminal event as of their last write, ordered by id."""
        query = "SELECT id, row FROM streams WHERE open = 1 AND id > ? ORDER BY id LIMIT ?"
        with self._reading() as db:
            found = db.execute(query, (after, limit)).fetchall()
        return [(stream_id, load_row(row)) for stream_id, row in found]

    def inbox_streams(self, chain_id: str) -> list[tuple[str, StreamRow]]:
        """Inbox streams of a chain, ordered by name."""
        shared = inbox_stream(chain_id)
        query = "SELECT id, row FROM streams WHERE id = ? OR (id > ? AND id < ?) ORDER BY id"
        with self._reading() as db:
            found = db.execute(query, (shared, shared + ":", shared + ";")).fetchall()
        return [(stream_id, load_row(row)) for stream_id, row in found]

    def snapshot(self, execution_id: str) -> tuple[int, bytes] | None:
        """Sequence and encoded snapshot."""
        found: tuple[int, bytes] | None = self._one(
            "SELECT sequence, data FROM snapshots WHERE id = ?", (execution_id,)
        )
        return found

    def snapshot_sequence(self, execution_id: str) -> int:
        """Sequence of a snapshot, -1 where there is none."""
        found = self._one("SELECT sequence FROM snapshots WHERE id = ?", (execution_id,))
        return -1 if found is None else int(found[0])

    def write(self, streams: Sequence[StreamImage], snapshots: Sequence[SnapshotImage] = ()) -> None:
        """Write all of it in one transaction."""
        if self._names is not None:
            for image in streams:
                self._names.add(image.stream_id)
        with self._writing() as db:
            _put(db, "streams", [(s.stream_id, s.open, s.held, s.zero, s.row) for s in streams])
            for image in streams:
                if image.deleted:
                    db.execute("DELETE FROM segments WHERE stream = ?", (image.stream_id,))
                elif image.trim:
                    _trim(db, image.stream_id, image.first)
            segments = [
                (s.stream_id, s.events[0][0], s.events[-1][0], _pack(s.events))
                for s in streams
                if s.events and not s.deleted
            ]
            _put(db, "segments", segments)
            db.executemany("DELETE FROM snapshots WHERE id = ?", [(s.execution_id,) for s in snapshots])
            db.executemany(
                "INSERT INTO snapshots VALUES (?, ?, ?)",
                [(s.execution_id, s.sequence, s.data) for s in snapshots if s.data is not None],
            )

    def forget(self, stream_id: str) -> None:
        """Forget a stream."""
        with self._writing() as db:
            db.execute("DELETE FROM streams WHERE id = ?", (stream_id,))
            db.execute("DELETE FROM segments WHERE stream = ?", (stream_id,))

    def save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Replace the checkpoint, in one step."""
        value = json.dumps(checkpoint, sort_keys=True)
        with self._writing() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES ('checkpoint', ?)", (value,))

    def checkpoint(self) -> dict[str, Any] | None:
        """Return the last checkpoint, None where there is none."""
        found = self._meta("checkpoint")
        return None if found is None else dict(json.loads(found))

    def wipe(self) -> None:
        """Forget everything."""
        with self._writing() as db:
            for table in ("streams", "segments", "snapshots"):
                db.execute(f"DELETE FROM {table}")  # noqa: S608 - three names of our own
            db.execute("DELETE FROM meta WHERE key = 'checkpoint'")
        self._names = NameFilter()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction."""
        with self._write_lock, self._translated():
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
            except BaseException:
                self._writer.execute("ROLLBACK")
                raise
            self._writer.execute("COMMIT")

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._read_lock, self._translated():
            yield self._reader

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise IndexFileError(str(self.path), str(error)) from error

    def _meta(self, key: str) -> str | None:
        found = self._one("SELECT value FROM meta WHERE key = ?", (key,))
        return None if found is None else str(found[0])

    def _one(self, query: str, parameters: tuple[Any, ...]) -> Any:
        with self._read_lock:
            try:
                return self._reader.execute(query, parameters).fetchone()
            except sqlite3.Error as error:
                raise IndexFileError(str(self.path), str(error)) from error


def dump_row(row: StreamRow) -> str:
    """A row as text."""
    return to_json(
        (
            row.kind,
            row.head,
            row.first,
            row.fence,
            row.fence_owner,
            row.anchor,
            row.status,
            row.node,
            row.consumed,
            row.timestamp,
            row.deleted,
            row.recent,
            row.sealed,
        )
    ).decode()


def load_row(text: str) -> StreamRow:
    """The row of ``dump_row``."""
    return StreamRow(*from_json(text))


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=64)
    try:
        db.execute(f"PRAGMA page_size = {_PAGE}")  # of a new file
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")  # a crash of the machine may lose the end, never the whole
        db.execute("PRAGMA secure_delete = ON")  # what was erased from the log does not linger here
    except sqlite3.Error:
        db.close()
        raise
    return db


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def _put(db: sqlite3.Connection, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert or replace rows, many by one statement: each gives Python's lock away, and has to get it back."""
    if not rows:
        return
    whole = len(rows) - len(rows) % _AT_ONCE
    row = f"({', '.join('?' * len(rows[0]))})"
    into = f"INSERT OR REPLACE INTO {table} VALUES "  # noqa: S608 - names of our own
    many = into + ", ".join([row] * _AT_ONCE)
    for start in range(0, whole, _AT_ONCE):
        db.execute(many, tuple(chain.from_iterable(rows[start : start + _AT_ONCE])))
    db.executemany(into + row, rows[whole:])


def _pack(events: Iterable[Stored]) -> bytes:
    parts: list[bytes] = []
    for sequence, event_id, value in events:
        key = event_id.encode()
        parts += (_HEAD.pack(sequence, len(key), len(value)), key, value)
    return b"".join(parts)


def _unpack(data: bytes) -> Iterator[Stored]:
    place = 0
    while place < len(data):
        sequence, id_length, length = _HEAD.unpack_from(data, place)
        place += _HEAD.size
        end = place + id_length
        yield sequence, data[place:end].decode(), data[end : end + length]
        place = end + length


def _trim(db: sqlite3.Connection, stream_id: str, first: int) -> None:
    """Drop the events between 0 and ``first`` from the file, those that share a segment with kept ones too."""
    query = "SELECT first, data FROM segments WHERE stream = ? AND first < ?"
    for start, data in db.execute(query, (stream_id, first)).fetchall():
        kept = [event for event in _unpack(data) if event[0] == 0 or event[0] >= first]
        db.execute("DELETE FROM segments WHERE stream = ? AND first = ?", (stream_id, start))
        if kept:
            db.execute(
                "INSERT INTO segments VALUES (?, ?, ?, ?)", (stream_id, kept[0][0], kept[-1][0], _pack(kept))
            )
