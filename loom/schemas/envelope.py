"""The envelope: one event of one stream, as every store returns it and every fold reads it.

Wire names are those of the log (``inboxSeq``, ``messageId``, ...): they stand inside ``data`` and ``metadata`` and
are read by others, so they never change (system.md, head).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from loom.schemas.quick import quick

EVENT_SCHEMA: Final = "1.25.0"
"""Version of the event shapes, stamped as ``metadata.schema``. 1.24.0 is the same without the seal marker."""

LEGACY_EVENT_SCHEMA: Final = "1.24.0"

Json = Any
"""A value that JSON can hold: mapping with string keys, list, string, number, boolean or None."""


@quick
@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event that has no place in a stream yet; the store gives it stream, sequence and timestamp.

    ``id`` is unique within the stream and makes an append repeatable: the same events offered again are the same
    append (kafka.md, group commit). ``metadata`` is stamped by runtime and stores only.
    """

    id: str
    type: str
    data: dict[str, Json]
    metadata: dict[str, Json] = field(default_factory=dict)


@quick
@dataclass(frozen=True, slots=True)
class Envelope:
    """One event as it stands in a stream.

    ``sequence`` counts from 0 without gaps within ``stream_id``; compaction may later leave 0 and drop a prefix
    after it. ``timestamp`` is milliseconds since the epoch. ``data`` and ``metadata`` are shared, not copied:
    readers never change them.
    """

    id: str
    stream_id: str
    sequence: int
    type: str
    timestamp: int
    data: dict[str, Json]
    metadata: dict[str, Json] = field(default_factory=dict)


class Kind:
    """Event kinds, in wire names (system.md 0)."""

    EXECUTION_STARTED: Final = "EXECUTION_STARTED"
    EXECUTION_SUSPENDED: Final = "EXECUTION_SUSPENDED"
    EXECUTION_RESUMED: Final = "EXECUTION_RESUMED"
    EXECUTION_RECOVERED: Final = "EXECUTION_RECOVERED"
    EXECUTION_CONTINUED: Final = "EXECUTION_CONTINUED"
    EXECUTION_COMPLETED: Final = "EXECUTION_COMPLETED"
    EXECUTION_FAILED: Final = "EXECUTION_FAILED"
    EXECUTION_CANCELLED: Final = "EXECUTION_CANCELLED"
    EXECUTION_DENIED: Final = "EXECUTION_DENIED"
    STEP_COMPLETED: Final = "STEP_COMPLETED"
    STEP_FAILED: Final = "STEP_FAILED"
    DECISION_RECORDED: Final = "DECISION_RECORDED"
    OUTCOME_RECORDED: Final = "OUTCOME_RECORDED"
    INBOX_MESSAGE: Final = "INBOX_MESSAGE"
    MESSAGE_CONSUMED: Final = "MESSAGE_CONSUMED"
    INBOX_QUARANTINED: Final = "INBOX_QUARANTINED"
    INBOX_RELEASED: Final = "INBOX_RELEASED"
    PAYLOAD_SHREDDED: Final = "PAYLOAD_SHREDDED"
    ERASURE_PENDING: Final = "ERASURE_PENDING"
    # Additive: a child start (the request leaves in the same transaction) and a message to another chain.
    CHILD_STARTED: Final = "CHILD_STARTED"
    MESSAGE_SENT: Final = "MESSAGE_SENT"
    RECORD_PUBLISHED: Final = "RECORD_PUBLISHED"
    # Additive: an operator removes the history before it, or the chain.
    EXECUTION_PURGED: Final = "EXECUTION_PURGED"


TERMINAL_KINDS: Final = frozenset(
    {
        Kind.EXECUTION_COMPLETED,
        Kind.EXECUTION_FAILED,
        Kind.EXECUTION_CANCELLED,
        Kind.EXECUTION_CONTINUED,
    }
)
"""Kinds after which the execution's own flow never runs again."""
