"""The folded state of an execution's own log.

``fold`` is O(1) per event, works in place, and ignores kinds and metadata that it does not know. Wire names of the
folded record (``to_json``) are those of the seed: ``_waitAnswers``, ``_inbox.cursors``, ``_quarantined``, ``_erasure``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from loom.errors import DecodeError, StreamBrokenError
from loom.schemas.envelope import TERMINAL_KINDS, Envelope, Json, Kind

DEDUPE_WINDOW: Final = 1_024
"""How many keys of consumed messages a chain remembers. A constant of the fold: a fold reads no setting."""

STATE_VERSION: Final = 1

RUNNING: Final = "running"
SUSPENDED: Final = "suspended"
FINISHED: Final = frozenset({"completed", "failed", "cancelled", "continued"})


@dataclass(slots=True)
class ExecutionState:
    """What an execution's log says, up to and with ``head`` (-1: nothing yet).

    ``status`` is ``running``, ``suspended`` (parked, its ``waits`` unanswered), ``completed``, ``failed``,
    ``cancelled`` or ``continued``; ``""`` before the first event. ``answers`` holds each site's recorded event, by
    site, so that a flow can be replayed from a state alone (None: a lean state, which cannot). ``cursors`` and
    ``dedupe`` are the inbox (insertion-ordered, oldest first). ``children`` are those whose end was not consumed.
    ``unproductive`` counts recoveries since the last progress. Payloads are shared with the log's envelopes: readers
    never change them.
    """

    execution_id: str = ""
    head: int = -1
    timestamp: int = 0
    status: str = ""
    workflow: str = ""
    chain_id: str = ""
    subject: str | None = None
    principal: Mapping[str, Json] | None = None
    input: Json = None
    started_at: int = 0
    parent: Mapping[str, Json] | None = None
    continued_from: str | None = None
    forked_from: str | None = None
    waits: tuple[Mapping[str, Json], ...] = ()
    answers: dict[str, Envelope] | None = field(default_factory=dict)
    cursors: dict[str, int] = field(default_factory=dict)
    dedupe: dict[str, None] = field(default_factory=dict)
    quarantined: dict[str, list[dict[str, Json]]] = field(default_factory=dict)
    children: dict[str, dict[str, Json]] = field(default_factory=dict)
    steps: int = 0
    patched: dict[str, None] = field(default_factory=dict)
    output: Json = None
    error: Mapping[str, Json] | None = None
    reason: str | None = None
    successor: str | None = None
    recovered: int = 0
    unproductive: int = 0
    erasure: dict[str, dict[str, Json]] = field(default_factory=dict)
    outcome: Json = None

    @property
    def finished(self) -> bool:
        """Whether the execution has ended."""
        return self.status in FINISHED
