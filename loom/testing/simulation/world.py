"""The simulated world: one time, one source of chance, and the order in which anything happens."""

from __future__ import annotations

import hashlib
import heapq
import random
from typing import TYPE_CHECKING, Final, Protocol

from loom.errors import LoomError
from loom.testing.clock import EPOCH_MS
from loom.testing.virtual_loop import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS_AT_ONCE: Final = 20_000
LINES_KEPT: Final = 400
"""Lines of the log that a failure shows; all of them enter the digest."""


class SimulationError(LoomError):
    """An invariant does not hold. The message ends with the command that repeats it."""


class Actor(Protocol):
    """What has an event loop of its own."""

    name: str

    def due(self) -> float:
        """When it has something to do, in seconds of the world; infinite: not by itself."""
        ...

    def turn(self) -> None:
        """Do what is ready."""
        ...


class World:
    """Time passes only when nothing is to be done at the present. Of what is, one is chosen at random, then the next.

    ``rng`` is the only source of chance of everything in it, so that a seed decides all. ``now`` is seconds from the start.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)  # noqa: S311 - a simulation repeats itself
        self.now = 0.0
        self.steps = 0
        self.actors: list[Actor] = []
        self.failure: str | None = None
        """What was found not to hold, wherever that was: whoever runs the world raises it after the step."""
        self.lines: list[str] = []
        self.digest = hashlib.sha256()
        self.unspeakable: tuple[str, ...] = ()
        """What nobody may say aloud, in a log or an error."""
        self._moved_to, self._moved_at = 0.0, 0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._entries = 0
        self._tokens = 0

    def note(self, text: str) -> None:
        """Write a line of the log."""
        if self.unspeakable:
            self.overhear(text)
        line = f"{self.now:10.4f} {text}"
        self.digest.update(line.encode() + b"\n")
        self.lines.append(line)
        if len(self.lines) > 2 * LINES_KEPT:
            del self.lines[:-LINES_KEPT]

    def overhear(self, text: str) -> None:
        """Somebody is told something: it must hold nothing of what is sealed."""
        if any(word in text for word in self.unspeakable):
            self.failure = self.failure or f"what is sealed is told: {text}"

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Do something later; what is due at one instant happens in the order of asking, as far as it is the world's."""
        self._entries += 1
        heapq.heappush(self._agenda, (self.now + seconds, self._entries, call))

    def step(self) -> bool:
        """Let one thing happen, now or when time has passed to it; False where nothing ever will."""
        agenda = self._agenda
        dues = [actor.due() for actor in self.actors]
        soonest = min(dues, default=NEVER)
        if agenda and agenda[0][0] < soonest:
            soonest = agenda[0][0]
        if soonest == NEVER:
            return False
        self.now = max(self.now, soonest)
        now = self.now
        ready = [actor for actor, due in zip(self.actors, dues, strict=True) if due <= now]
        choices = len(ready) + (bool(agenda) and agenda[0][0] <= now)
        self._count()
        choice = self.rng.randrange(choices) if choices > 1 else 0
        if choice < len(ready):
            ready[choice].turn()
        else:
            heapq.heappop(agenda)[2]()
        return True

    def _count(self) -> None:
        self.steps += 1
        if self.now > self._moved_to:
            self._moved_to, self._moved_at = self.now, self.steps
        elif self.steps - self._moved_at > STEPS_AT_ONCE:
            self.failure = f"something spins: {STEPS_AT_ONCE} steps and no time has passed"

    def wall_ms(self) -> int:
        """The true time: milliseconds since the epoch, as the stores' servers have it."""
        return EPOCH_MS + round(self.now * 1000)

    def fresh_id(self) -> str:
        """An id that was never given before: 26 characters, in the order of asking."""
        self._tokens += 1
        return f"0{self._tokens:09d}{self.rng.getrandbits(64):016X}"

    def token(self, size: int) -> str:
        """Hex digits of so many bytes, never given before."""
        self._tokens += 1
        return f"{self._tokens:0{2 * size}x}"[-2 * size :]

    def chance(self, probability: float) -> bool:
        """Whether it happens this time."""
        return self.rng.random() < probability
