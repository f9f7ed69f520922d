"""A server process of our own, which ends when we do.

Each server runs in a process group led by a guard: a shell that blocks on a pipe whose other end only this process
holds, and kills the group when the pipe closes. The pipe closes when the owner exits, however it exits (``kill -9``
included), so no server outlives its owner. The guard is started first and the server joins its group as it is forked;
there is no moment at which a server runs unguarded.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from loom.errors import ServiceFailedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TERM_GRACE_S: Final = 10.0
"""How long a server may take to end on SIGTERM before it is killed."""

_GUARD: Final = "read -r _; kill -KILL 0"
_TAIL_LINES: Final = 30
_TAIL_BYTES: Final = 16_384


class OwnedProcess:
    """A server process with a folder of its own; :meth:`stop` ends it, and also runs when the interpreter exits."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        """Make the process object, not yet started.

        Args:
            name: what the server is called in messages and in its folder's name.
            folder: where it keeps its files; by default a temporary folder, removed by :meth:`stop`.
        """
        self.name = name
        self._temporary = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix=f"loom-{name}-")) if folder is None else folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log_path = self.folder / f"{name}.log"
        self._lock = threading.RLock()
        self._guard: subprocess.Popen[bytes] | None = None
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The server's process id, or None while it does not run."""
        server = self._server
        return server.pid if server is not None and server.poll() is None else None

    @property
    def running(self) -> bool:
        """Whether the server's process is there (paused counts as running)."""
        return self.pid is not None

    def spawn(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Start ``command`` in the folder, its output appended to the log file.

        Raises:
            ServiceFailedError: the executable could not be started.
        """
        with self._lock:
            if self.running:
                raise ServiceFailedError(self.name, "it runs already", "")
            self._reap()
            atexit.register(self.stop)
            shell = shutil.which("sh") or "/bin/sh"
            self._guard = subprocess.Popen(
                [shell, "-c", _GUARD],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )
            try:
                with self.log_path.open("ab") as log:
                    self._server = subprocess.Popen(
                        list(command),
                        cwd=self.folder,
                        env=None if env is None else {**os.environ, **env},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        process_group=self._guard.pid,
                    )
            except OSError as error:
                self._reap()
                raise ServiceFailedError(
                    self.name, f"cannot start {command[0]}: {error.strerror}", ""
                ) from error

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the server to end; its exit status, or None when it still runs after ``timeout_s`` seconds."""
        server = self._server
        if server is None:
            return None
        try:
            return server.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def pause(self) -> None:
        """Freeze the server (SIGSTOP): connections stay open, nothing is answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server go on (SIGCONT)."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the server at once (SIGKILL), as a crash would; its folder stays, so that it can be started again."""
        with self._lock:
            self._signal(signal.SIGKILL)
            self._reap()

    def terminate(self) -> None:
        """End the server in order (SIGTERM, then SIGKILL after ten seconds); its folder stays."""
        with self._lock:
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)  # a stopped process acts on SIGTERM only once it goes on
            if self.wait(TERM_GRACE_S) is None:
                self._signal(signal.SIGKILL)
            self._reap()

    def stop(self) -> None:
        """End the server for good. Safe to call twice.

        One with a temporary folder is killed and its folder removed: what it holds is not wanted any more, so it need
        not be put in order first. One with a folder of the caller's ends as by :meth:`terminate`.
        """
        if self._temporary:
            self.kill()
        else:
            self.terminate()
        atexit.unregister(self.stop)
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def log_tail(self) -> str:
        """The last lines of the server's output."""
        with contextlib.suppress(OSError), self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - _TAIL_BYTES))
            lines = log.read().decode("utf-8", "replace").splitlines()
            return "\n".join(lines[-_TAIL_LINES:])
        return ""

    def _signal(self, number: signal.Signals) -> None:
        server = self._server
        if server is not None:
            server.send_signal(number)  # does nothing once the process has been reaped

    def _reap(self) -> None:
        """Close the guard's pipe, which ends whatever is left of the group, and collect both processes."""
        guard, self._guard = self._guard, None
        if guard is not None:
            if guard.stdin is not None:
                guard.stdin.close()
            guard.wait()
        server, self._server = self._server, None
        if server is not None:
            server.wait()
