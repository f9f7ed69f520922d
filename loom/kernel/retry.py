"""When a failed step is tried again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential back-off between attempts of a step.

    ``attempts`` counts all attempts, the first among them; ``first_ms`` is the delay before the second, ``factor`` its
    growth, ``max_ms`` its ceiling. ``terminal`` names exception types (by class name, bases included) that are never
    retried, besides ``loom.TerminalError``.
    """

    attempts: int = 5
    first_ms: int = 200
    factor: float = 2.0
    max_ms: int = 60_000
    terminal: tuple[str, ...] = ()

    def delay_ms(self, attempt: int) -> int:
        """Delay after failed attempt number ``attempt`` (1 is the first), in milliseconds."""
        return min(self.max_ms, int(self.first_ms * self.factor ** min(attempt - 1, 64)))


NO_RETRY = RetryPolicy(attempts=1)
