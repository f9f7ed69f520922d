"""Deletions that a quiet partition still owes (kafka.md, "Topics").

A tombstone is carried out when its segment is cleaned, and an active segment rolls only on an append: in a partition
that went quiet, what was deleted stays on disk. Whoever owes a deletion appends a small record once the lag has passed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SLACK_MS: Final = 1_000
"""So that the record comes after the lag by the broker's clock too."""


class Debts:
    """Deletions of one partition, per topic. Times are milliseconds since the epoch."""

    def __init__(self, lag_ms: int) -> None:
        self._lag_ms = lag_ms
        self._due: dict[str, int] = {}

    def rediscover(self, tombstones: Mapping[str, int], appended: Mapping[str, int]) -> None:
        """Take what a takeover found: per topic the time of the last tombstone, and of the last record of any kind."""
        for topic, at in tombstones.items():
            if appended.get(topic, at) < at + self._lag_ms:
                self._due[topic] = at + self._lag_ms + SLACK_MS

    @property
    def owed(self) -> dict[str, int]:
        """When each debt is due (a copy), for a checkpoint."""
        return dict(self._due)

    def restore(self, owed: Mapping[str, int]) -> None:
        """Take what a checkpoint kept."""
        self._due.update(owed)

    def committed(self, written: Iterable[str], deleted: Iterable[str], now: int) -> None:
        """Topics were written to, which pays what was due; deletions in some of them are owed from now on."""
        for topic in written:
            if self._due.get(topic, now + 1) <= now:
                del self._due[topic]
        for topic in deleted:
            self._due[topic] = now + self._lag_ms + SLACK_MS

    def due(self, now: int) -> list[str]:
        """Topics that need a record now."""
        return [topic for topic, due in self._due.items() if due <= now]

    def next_due(self) -> int | None:
        """When the next record is needed."""
        return min(self._due.values(), default=None)
