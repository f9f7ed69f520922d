"""When a failed step is tried again."""

from __future__ import annotations

from dataclasses import dataclass

from loom.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential back-off between attempts of a step.

    ``attempts`` counts all attempts, the first among them; ``first_ms`` is the delay before the second, ``factor`` its
    growth, ``max_ms`` its ceiling. ``terminal`` names exception types (by class name, bases included) that are never
    retried, besides ``loom.TerminalError``.

    Raises:
        ConfigError: fewer than one attempt, or a negative delay.
    """

    attempts: int = 5
    first_ms: int = 200
    factor: float = 2.0
    max_ms: int = 60_000
    terminal: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first_ms < 0 or self.max_ms < 0 or self.factor < 0:
            raise ConfigError(
                "RetryPolicy", "a count or delay is below its least", "use attempts >= 1 and delays >= 0"
            )

    def delay_ms(self, attempt: int) -> int:
        """Delay after failed attempt number ``attempt`` (1 is the first), in milliseconds."""
        try:
            return min(self.max_ms, int(self.first_ms * self.factor ** (attempt - 1)))
        except OverflowError:
            return self.max_ms


NO_RETRY = RetryPolicy(attempts=1)
