"""One budget for everything that a call does: it is handed down, never begun anew."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on ``time.monotonic``, in seconds; ``budget_ms`` is what was given, for messages."""

    at: float
    budget_ms: int

    @classmethod
    def after(cls, budget_ms: int) -> Deadline:
        """Return the deadline that lies ``budget_ms`` ahead."""
        return cls(time.monotonic() + budget_ms / 1000, budget_ms)

    @property
    def left_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self.at - time.monotonic())

    @property
    def left_ms(self) -> int:
        """Milliseconds left, at least 0."""
        return int(self.left_s * 1000)

    @property
    def passed(self) -> bool:
        """Whether nothing is left."""
        return time.monotonic() >= self.at
