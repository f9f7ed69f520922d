"""The folder of a node's local files, locked: two processes on one file would spoil it for both."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING, Final

from loom.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

_LOCK_FILE: Final = "lock"


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
