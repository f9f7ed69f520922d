"""The folder of a node's local files, locked: two processes on one file would spoil it for both."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from typing import TYPE_CHECKING, Final

from loom.errors import ConfigError
from loom.topics.catalogue import DELETE_RETENTION_MS

if TYPE_CHECKING:
    from pathlib import Path

_LOCK_FILE: Final = "lock"
STALE_S: Final = DELETE_RETENTION_MS / 2000
"""Age from which on no checkpoint is used any more (kafka.md, "The local checkpoint")."""


class FolderLock:
    """A folder of this process alone, until ``close`` or its end."""

    def __init__(self, path: Path) -> None:
        """Make the folder and lock it.

        Raises:
            ConfigError: another process has it, or it cannot be made.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._fd: int | None = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as failed:
            raise ConfigError(
                "data_dir",
                f"{str(path)!r} cannot be used ({failed.strerror})",
                "name a folder that can be written",
            ) from failed
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as held:
            self.close()
            raise ConfigError(
                "data_dir",
                f"{str(path)!r} is used by another process",
                "give each node its own node_id, or another folder",
            ) from held

    def close(self) -> None:
        """Let it go; idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def sweep(parent: Path) -> None:
    """Remove the folders in ``parent`` that no process has locked and that hold nothing young enough to be used.

    A node without a name of its own gets a new one at every start, and leaves a folder behind.
    """
    for folder in parent.iterdir():
        lock = folder / _LOCK_FILE
        if not lock.is_file():
            continue
        youngest = max(file.stat().st_mtime for file in folder.iterdir())
        if time.time() - youngest < STALE_S:
            continue
        with contextlib.suppress(ConfigError, OSError):
            held = FolderLock(folder)
            shutil.rmtree(folder, ignore_errors=True)
            held.close()
