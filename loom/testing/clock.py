"""A clock that stands still until a test moves it."""

from __future__ import annotations

from typing import Final

EPOCH_MS: Final = 1_700_000_000_000


class VirtualClock:
    """Milliseconds since the epoch; call it for the time, ``advance`` it to let time pass."""

    def __init__(self, now_ms: int = EPOCH_MS) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        """Return the time now."""
        return self.now_ms

    def advance(self, ms: int) -> None:
        """Let time pass; never backwards."""
        if ms < 0:
            raise ValueError("time does not go back")
        self.now_ms += ms

    def advance_to(self, instant_ms: int) -> None:
        """Let time pass until an instant, if it has not come yet."""
        self.now_ms = max(self.now_ms, instant_ms)
