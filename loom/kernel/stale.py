"""The stale-batch check: whether facts built on an older state may still be appended (seed, D9; clauses.md, "Quarantine").

The fold refuses nothing, so that old logs replay as they always did; this is where a batch that lost its race is found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loom.kernel.inbox import DISCARDED, DUPLICATE, EXPIRED
from loom.kernel.quarantine import (
    DISCARD,
    HELD,
    QUARANTINE_FOLD_CAP,
    RELEASED,
    Entry,
    entry_of,
    held_total,
    is_delivery_of,
    release_of,
)
from loom.schemas.envelope import Json, Kind, NewEvent

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from loom.kernel.state import ExecutionState


def is_stale(state: ExecutionState, batch: Iterable[NewEvent]) -> bool:
    """Whether a batch built on an older state may not be appended to this one.

    It is stale if it

    * consumes at or below a cursor, delivers a key that the window knows, or answers a wait that is not open any more;
    * consumes on a held topic, but for its first entry once that is released, for what is discarded or expired behind
      the hold, and for a repeat of what was delivered;
    * releases anything but the held entry that a queue starts with;
    * holds a message at or below its cursor, or one beyond the cap of the fold, or says so in a fact that is malformed.
    """
    landing = _Landing(state)
    return any(landing.refuses(event) for event in batch)


class _Landing:
    """The state that a batch lands on, event by event; the state itself is not changed."""

    def __init__(self, state: ExecutionState) -> None:
        self._state = state
        self._cursors: dict[str, int] = {}
        self._queues: dict[str, list[Entry]] = {}
        self._total = held_total(state)
        self._delivered: set[str] = set()
        self._passed: set[str] = set()
        self._waiting = {w.get("siteId") for w in state.waits} if state.status == "suspended" else None

    def refuses(self, event: NewEvent) -> bool:
        if event.type == Kind.MESSAGE_CONSUMED:
            return self._consumed(event.data)
        if event.type == Kind.INBOX_QUARANTINED:
            return self._quarantined(event.data)
        return event.type == Kind.INBOX_RELEASED and self._released(event.data)

    def _consumed(self, data: Mapping[str, Json]) -> bool:
        topic, position, key, reason = data["topic"], data["inboxSeq"], data["messageId"], data.get("reason")
        queue = self._queue(topic)
        if queue and is_delivery_of(queue[0], key, position):
            queue.pop(0)
            self._total -= 1
        elif position <= self._cursor(topic) or (queue and not self._behind_a_hold(key, reason)):
            return True
        else:
            self._cursors[topic] = position
        self._passed.add(key)
        if reason:
            return False
        if key in self._state.dedupe or key in self._delivered:
            return True
        if self._waiting is not None and data.get("siteId") not in self._waiting:
            return True
        self._delivered.add(key)
        return False

    def _behind_a_hold(self, key: str, reason: Json) -> bool:
        if reason == DUPLICATE:
            return key in self._state.dedupe or key in self._passed
        return reason in {DISCARDED, EXPIRED}

    def _quarantined(self, data: Mapping[str, Json]) -> bool:
        found = entry_of(data)
        if found is None or self._total >= QUARANTINE_FOLD_CAP:
            return True
        topic, entry = found
        if entry["inboxSeq"] <= self._cursor(topic):
            return True
        self._cursors[topic] = entry["inboxSeq"]
        self._queue(topic).append(entry)
        self._total += 1
        return False

    def _released(self, data: Mapping[str, Json]) -> bool:
        found = release_of(data)
        if found is None:
            return True
        topic, key, disposition = found
        queue = self._queue(topic)
        if not queue or queue[0].get("state") != HELD or queue[0].get("key") != key:
            return True
        if disposition == DISCARD:
            queue.pop(0)
            self._total -= 1
            self._passed.add(key)
        else:
            queue[0] = {**queue[0], "state": RELEASED}
        return False

    def _cursor(self, topic: str) -> int:
        return self._cursors.get(topic, self._state.cursors.get(topic, -1))

    def _queue(self, topic: str) -> list[Entry]:
        if topic not in self._queues:
            self._queues[topic] = list(self._state.quarantined.get(topic, ()))
        return self._queues[topic]
