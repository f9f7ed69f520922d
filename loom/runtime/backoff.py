"""Back-off per execution: what fails again and again is tried ever more rarely, and its neighbours go on."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from loom.stores.contracts import Clock

MAX_TRACKED: Final = 1024
"""Bound of the map (system.md 1.6); the oldest is forgotten, and is then only tried more often."""


class Backoff:
    """Exponential delays by id: ``first_ms``, doubled at each failure, at most ``max_ms``; no cap on attempts."""

    def __init__(self, clock: Clock, *, first_ms: int = 1_000, max_ms: int = 600_000) -> None:
        self._clock = clock
        self._first_ms, self._max_ms = first_ms, max_ms
        self._held: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._refused: set[str] = set()

    def failed(self, about: str, *, refused: bool = False) -> int:
        """Count a failure; return the delay in milliseconds before the next try. ``refused``: another node may do better."""
        _, delay = self._held.pop(about, (0, 0))
        delay = min(delay * 2, self._max_ms) if delay else self._first_ms
        self._held[about] = (self._clock() + delay, delay)
        if refused:
            self._refused.add(about)
        else:
            self._refused.discard(about)
        if len(self._held) > MAX_TRACKED:
            oldest, _ = self._held.popitem(last=False)
            self._refused.discard(oldest)
        return delay

    def refused(self, about: str) -> bool:
        """Whether its last failure was one of this node alone: something could not be opened here."""
        return about in self._refused

    def known(self, about: str) -> bool:
        """Whether it has failed, and not gone well since."""
        return about in self._held

    def blocked(self, about: str) -> bool:
        """Whether its delay has not passed yet."""
        held = self._held.get(about)
        return held is not None and held[0] > self._clock()

    def cleared(self, about: str) -> None:
        """It went well: the next failure starts from the first delay."""
        self._held.pop(about, None)
        self._refused.discard(about)

    def snapshot(self) -> dict[str, int]:
        """Instants until which each is held, for the operator."""
        return {about: until for about, (until, _) in self._held.items()}
