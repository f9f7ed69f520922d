"""Summaries of one partition: the lately used in memory, all of them in a temporary local file.

The file is a cache of the topic ``states`` and holds committed summaries only: it is made anew at each takeover and
gone when it is closed.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from loom.processors.summary import Summary
from loom.schemas.records import ExecutionSummary

if TYPE_CHECKING:
    from collections.abc import Iterable

    from loom.schemas.codec import Codec

RESIDENT: Final = 20_000
"""Summaries kept in memory per partition: about 1 KB each."""


class SummaryTable:
    """Execution id to summary. Not thread-safe, and bound to the thread that makes it."""

    def __init__(self, codec: Codec, resident: int = RESIDENT) -> None:
        self._codec, self._resident = codec, resident
        self._recent: OrderedDict[str, Summary] = OrderedDict()
        self._folder = tempfile.TemporaryDirectory(prefix="loom-fold-")
        self._file = sqlite3.connect(Path(self._folder.name) / "states.db", isolation_level=None)
        for pragma in ("journal_mode=OFF", "synchronous=OFF", "locking_mode=EXCLUSIVE", "cache_size=-8000"):
            self._file.execute(f"PRAGMA {pragma}")
        self._file.execute("CREATE TABLE states (id TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID")

    def get(self, execution_id: str) -> Summary | None:
        """Return the summary, None where there is none; the caller may change it."""
        summary = self._recent.get(execution_id)
        if summary is not None:
            self._recent.move_to_end(execution_id)
            return summary
        row = self._file.execute("SELECT value FROM states WHERE id = ?", (execution_id,)).fetchone()
        if row is None:
            return None
        summary = self._recent[execution_id] = Summary.of(
            self._codec.decode(row[0], ExecutionSummary, "summary")
        )
        return summary

    def add(self, execution_id: str) -> Summary:
        """Return a new, empty summary."""
        summary = self._recent[execution_id] = Summary(execution_id)
        return summary

    def committed(self, changed: Iterable[tuple[str, bytes | None]]) -> None:
        """Keep what ``states`` now holds (None: deleted), and let the least used leave memory."""
        kept, gone = [], []
        for execution_id, value in changed:
            if value is None:
                gone.append((execution_id,))
                self._recent.pop(execution_id, None)
            else:
                kept.append((execution_id, value))
        self._file.execute("BEGIN")
        self._file.executemany("INSERT OR REPLACE INTO states VALUES (?, ?)", kept)
        self._file.executemany("DELETE FROM states WHERE id = ?", gone)
        self._file.execute("COMMIT")
        while len(self._recent) > self._resident:
            self._recent.popitem(last=False)

    def __len__(self) -> int:
        """How many summaries were committed."""
        return int(self._file.execute("SELECT count(*) FROM states").fetchone()[0])

    def close(self) -> None:
        """Let everything go; idempotent."""
        self._recent.clear()
        self._file.close()
        self._folder.cleanup()
