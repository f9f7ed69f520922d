"""Ids and stream names (system.md 0, kafka.md "Topics").

A chain's streams carry its id, so the partition of a stream follows from its name alone.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from functools import lru_cache
from typing import Final, Protocol
from urllib.parse import quote, unquote

from loom.entropy import Entropy
from loom.errors import InvalidIdError

RESERVED_PREFIX: Final = "__loom"
INBOX_PREFIX: Final = "__loom_inbox__:"
QUARANTINE_PREFIX: Final = "__loom_quarantine__:"
MAX_ID_LENGTH: Final = 200
CROCKFORD: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
"""Digits of a ULID, five bits each."""
_TIME_LENGTH: Final = 10
_DIGIT_OF: Final = "".join(CROCKFORD[byte & 31] for byte in range(256)).encode()
"""A digit for every byte: random bytes become random digits."""
_tail = Entropy(16)
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~@=+-]*")


class IdSource(Protocol):
    """Where fresh ids come from; injected, so that tests and the simulation repeat themselves."""

    def __call__(self) -> str:
        """Return a fresh id, unique and sortable by time."""
        ...


def ulid() -> str:
    """Return a fresh ULID in its 26-character text form: milliseconds, then 80 random bits."""
    return _moment(time.time_ns() // 1_000_000) + _tail().translate(_DIGIT_OF).decode()


@lru_cache(8)
def _moment(ms: int) -> str:
    """What a ULID of that millisecond begins with."""
    return "".join(CROCKFORD[ms >> 5 * place & 31] for place in reversed(range(_TIME_LENGTH)))


def check_execution_id(execution_id: str) -> str:
    """Return ``execution_id`` if a caller may choose it.

    Raises:
        InvalidIdError: it is empty, longer than 200 characters, starts with the reserved prefix, or holds ``:`` or
            another character outside letters, digits and ``._~@=+-`` (two chains' stream names could coincide).
    """
    if execution_id.startswith(RESERVED_PREFIX):
        raise InvalidIdError(
            execution_id, f"ids that start with {RESERVED_PREFIX!r} are reserved; choose another"
        )
    if not execution_id or len(execution_id) > MAX_ID_LENGTH or not _ID.fullmatch(execution_id):
        raise InvalidIdError(
            execution_id,
            f"use 1 to {MAX_ID_LENGTH} letters, digits and ._~@=+- (first a letter or digit)",
        )
    return execution_id


def inbox_stream(chain_id: str, topic: str | None = None) -> str:
    """Name of a chain's inbox stream: per topic, or the shared one of the older layout when ``topic`` is None."""
    return (
        f"{INBOX_PREFIX}{chain_id}" if topic is None else f"{INBOX_PREFIX}{chain_id}:{quote(topic, safe='')}"
    )


def quarantine_stream(chain_id: str) -> str:
    """Name of a chain's quarantine stream."""
    return f"{QUARANTINE_PREFIX}{chain_id}"


def stream_kind(stream_id: str) -> str:
    """Which topic a stream lives in: ``executions``, ``inbox`` or ``quarantine``."""
    if not stream_id.startswith(RESERVED_PREFIX):
        return "executions"
    if stream_id.startswith(INBOX_PREFIX):
        return "inbox"
    if stream_id.startswith(QUARANTINE_PREFIX):
        return "quarantine"
    return "executions"


def routing_id(stream_id: str) -> str:
    """The id whose hash places a stream: the chain id in the name of an inbox or quarantine stream, else itself."""
    if not stream_id.startswith(RESERVED_PREFIX):
        return stream_id
    if stream_id.startswith(INBOX_PREFIX):
        return stream_id[len(INBOX_PREFIX) :].split(":", 1)[0]
    if stream_id.startswith(QUARANTINE_PREFIX):
        return stream_id[len(QUARANTINE_PREFIX) :]
    return stream_id


def inbox_topic(stream_id: str) -> str | None:
    """The topic of a per-topic inbox stream, None for the shared one."""
    rest = stream_id[len(INBOX_PREFIX) :].split(":", 1)
    return unquote(rest[1]) if len(rest) > 1 else None


def dedupe_key(sender: str | None, message_id: str) -> str:
    """Identity of a message for at-most-once delivery: hex SHA-256 of the canonical JSON ``[sender, message_id]``."""
    canonical = json.dumps([sender, message_id], ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
