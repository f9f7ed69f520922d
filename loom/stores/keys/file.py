"""Keys in one file, for the nodes of one host: SQLite, with deleted keys overwritten.

What is overwritten in the file may still rest in blocks that the file system or the disk gave up; it is wrapped there.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, TypeVar

from loom.errors import ConfigError, DecodeError, LoomError, StoreRefusedError
from loom.stores.keys.store import Charge, KeyRow, WrappedKey, WrappingKeyStore, charged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from loom.ids import IdSource
    from loom.stores.keys.wrapping import KeyWrapper

R = TypeVar("R")

SETTING: Final = "sealing.keys"
LOCK_S: Final = 5.0
"""How long a call waits for another process that writes."""

_TABLE: Final = "CREATE TABLE IF NOT EXISTS keys (subject TEXT PRIMARY KEY, row TEXT NOT NULL) WITHOUT ROWID"


class _FileRows:
    """Rows in SQLite. Calls run on a thread, one at a time; each is one transaction, on disk when it returns."""

    waits = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._db: sqlite3.Connection | None = None
        self._closed = False
        try:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            stat = path.stat()
        except OSError as error:
            raise ConfigError(
                SETTING,
                f"the file of keys cannot be opened ({type(error).__name__})",
                "name a file that can be written",
            ) from None
        self._identity = f"file:{stat.st_dev}:{stat.st_ino}"

    async def load(self, subject: str) -> KeyRow | None:
        return await self._call(lambda db: self._read(db, subject))

    async def charge(self, charges: Sequence[Charge]) -> list[KeyRow | LoomError]:
        return await self._call(lambda db: [self._charged(db, *charge) for charge in charges])

    async def destroy(self, subject: str) -> bool:
        def change(db: sqlite3.Connection) -> bool:
            row = self._read(db, subject)
            if row is None or not row.keys:
                return False
            self._write(db, subject, KeyRow(destroyed=True))
            return True

        return await self._call(change)

    def identity(self) -> str:
        return self._identity

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            if self._db is not None:
                self._db.close()
                self._db = None

    def _charged(
        self, db: sqlite3.Connection, subject: str, proposal: WrappedKey, limit: int
    ) -> KeyRow | LoomError:
        try:
            row = charged(self._read(db, subject), proposal, limit)
        except DecodeError as error:
            return error
        self._write(db, subject, row)
        return row

    async def _call(self, work: Callable[[sqlite3.Connection], R]) -> R:
        return await asyncio.to_thread(self._run, work)

    def _run(self, work: Callable[[sqlite3.Connection], R]) -> R:
        with self._lock, self._translated():
            if self._closed:
                raise self._refused("it is closed")
            db = self._db if self._db is not None else self._open()
            db.execute("BEGIN IMMEDIATE")
            try:
                result = work(db)
            except BaseException:
                db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")
            return result

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, timeout=LOCK_S, isolation_level=None, check_same_thread=False)
        try:
            for pragma in (
                "journal_mode=DELETE",
                "synchronous=FULL",
                "secure_delete=ON",
                "temp_store=MEMORY",
            ):
                db.execute(f"PRAGMA {pragma}")
            db.execute(_TABLE)
        except BaseException:
            db.close()
            raise
        self._db = db
        return db

    def _read(self, db: sqlite3.Connection, subject: str) -> KeyRow | None:
        found = db.execute("SELECT row FROM keys WHERE subject = ?", (subject,)).fetchone()
        return None if found is None else load_row(found[0], subject)

    def _write(self, db: sqlite3.Connection, subject: str, row: KeyRow) -> None:
        db.execute("REPLACE INTO keys (subject, row) VALUES (?, ?)", (subject, dump_row(row)))

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._refused(type(error).__name__) from None

    def _refused(self, problem: str) -> StoreRefusedError:
        return StoreRefusedError(
            "the file of keys", str(self._path), problem, "check the file, its folder and who else writes it"
        )


def dump_row(row: KeyRow) -> str:
    """Return a row as text: ``{"k": [[id, wrapped in hexadecimal, uses], ...]}``, or ``{"d": 1}`` once destroyed."""
    if row.destroyed:
        return '{"d":1}'
    return json.dumps(
        {"k": [[key.id, key.wrapped.hex(), key.uses] for key in row.keys]}, separators=(",", ":")
    )


def load_row(text: str, subject: str) -> KeyRow:
    """Return the row of a text.

    Raises:
        DecodeError: it is none. Its text is not repeated.
    """
    try:
        body: Any = json.loads(text)
        if body.get("d"):
            return KeyRow(destroyed=True)
        keys = tuple(WrappedKey(str(k), bytes.fromhex(w), int(n)) for k, w, n in body["k"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DecodeError(f"keys of subject {subject[:64]!r}", type(error).__name__) from None
    return KeyRow(keys)


class FileKeyStore(WrappingKeyStore):
    """See :class:`loom.stores.keys.contract.KeyStore`. The file is made, for its owner only, where it is missing.

    Raises:
        ConfigError: the file cannot be opened. (Calls: StoreRefusedError.)
    """

    def __init__(self, path: str | Path, wrapper: KeyWrapper, *, ids: IdSource | None = None) -> None:
        super().__init__(_FileRows(Path(path)), wrapper, ids=ids)
