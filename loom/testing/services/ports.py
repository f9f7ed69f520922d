"""Ports for servers of our own.

They are drawn below the range that the system hands to outgoing connections: a client that keeps retrying against a
stopped server could otherwise be given the server's own port, connect to itself, and keep the server from coming back.
A drawn port can still be lost to somebody who is quicker; whoever starts a server draws again when it fails to bind.
"""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path
from typing import Final

_LOWEST: Final = 15_000
_DEFAULT_EPHEMERAL: Final = 32_768
_DRAWS: Final = 200

BIND_ATTEMPTS: Final = 5
"""How many sets of ports a server is tried on before its start is given up."""

BIND_FAILURES: Final = ("Address already in use", "Failed to bind", "AddrInUse", "address in use")
"""What servers print when somebody else was quicker."""


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on just now."""
    source = random.SystemRandom()  # two processes that start together must not draw the same ports
    highest = max(_LOWEST + 1_000, _first_ephemeral())
    for _ in range(_DRAWS):
        port = source.randrange(_LOWEST, highest)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def free_ports(count: int) -> list[int]:
    """That many different free ports."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


def _first_ephemeral() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return _DEFAULT_EPHEMERAL
