"""When a writer may begin again, and how long it waits before it does (kafka.md, "Tenure").

Two owners of one partition would fence each other for ever. So a writer that is fenced again and again, each time
before it has settled, gives way after a bounded number of tenures; the other then stays.
"""

from __future__ import annotations

import random
from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 5.0


class TenureEnd(Enum):
    """Why a tenure ended."""

    POISONED = "poisoned"
    """Something happened that the client may have answered by sending a request twice; or a transaction failed."""
    FENCED = "fenced"
    """Another producer has the transactional id, or the broker ended a transaction that outlived its timeout."""
    STOPPED = "stopped"
    """The writer was told to stop."""


class Backoff:
    """Pauses between attempts: exponential with jitter, from the first again after ``reset``."""

    def __init__(self, draw: Callable[[float, float], float] = random.uniform) -> None:
        self._draw = draw
        self._attempts = 0

    def next_s(self) -> float:
        """Seconds to wait before the next attempt."""
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._attempts, 16))
        self._attempts += 1
        return self._draw(pause / 2, pause)

    def reset(self) -> None:
        """All is well again."""
        self._attempts = 0


class Rivalry:
    """Counts tenures that a rival ended before they had settled. Times are seconds on a monotonic clock."""

    def __init__(
        self, most: int, settled_s: float, draw: Callable[[float, float], float] = random.uniform
    ) -> None:
        self._most, self._settled_s = most, settled_s
        self._backoff = Backoff(draw)
        self._fenced = 0
        self._serving_since: float | None = None

    def serving(self, now: float) -> None:
        """A tenure began to serve."""
        self._serving_since = now

    def fenced(self, now: float) -> float | None:
        """A tenure, or the attempt to begin one, was fenced: seconds to wait before the next, None to give way."""
        settled = self._serving_since is not None and now - self._serving_since >= self._settled_s
        self._serving_since = None
        if settled:
            self._fenced = 0
            self._backoff.reset()
        self._fenced += 1
        return None if self._fenced > self._most else self._backoff.next_s()
