"""This node's evidence of life, and what is known of others' (clauses.md, point 6; system.md 6).

A node beats its presence row every third of its TTL. One whose own row has lapsed by the margin stops its runs: others
may take their executions over. Evidence that cannot be read is no evidence: nothing is re-driven on a guess.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Final

from loom.errors import LoomError
from loom.runtime.lease_calls import MARGIN_DIVISOR, LeaseCalls
from loom.runtime.surroundings import SYSTEM, Surroundings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from loom.runtime.signals import Signals
    from loom.schemas.envelope import Json
    from loom.stores.contracts import Clock, LeaseStore, Presence

BEATS_PER_TTL: Final = 3
SOONER_S: Final = 0.25
_NEVER: Final = (-math.inf, math.inf, -math.inf)
_ALWAYS: Final = (math.inf, -math.inf, math.inf)
"""When a row stands: until then on the monotonic clock, and between these on the wall clock."""


class PresenceKeeper:
    """Beats this node's row and answers whether another's has expired.

    ``node`` is the incarnation. ``on_lapsed`` is called when the own row can no longer be relied on, ``on_regained``
    when it can again. Times are judged on the monotonic and on the wall clock, from the instant before a beat is sent.
    """

    def __init__(
        self,
        leases: LeaseStore,
        node: str,
        ttl_ms: int,
        *,
        signals: Signals,
        details: dict[str, Json],
        on_lapsed: Callable[[], None],
        on_regained: Callable[[], None],
        on_emptied: Callable[[], None],
        surroundings: Surroundings = SYSTEM,
        calls: LeaseCalls | None = None,
        stops: bool = True,
        covers: Callable[[], Sequence[str]] = tuple,
        clock: Clock | None = None,
    ) -> None:
        """Prepare it; nothing is sent yet.

        ``covers`` is what this node opens: announced with each beat, as are ``details`` and what ``clock`` shows, by which
        timers fire. ``calls`` are shared with the node's leases; without ``stops`` the node never lapses (mode ``continue``).
        """
        self._leases = leases
        self._node = node
        self._ttl_ms = ttl_ms
        self._signals = signals
        self._details, self._covers = details, covers
        self._on_lapsed, self._on_regained, self._on_emptied = on_lapsed, on_regained, on_emptied
        self._stands = _NEVER
        self._lapsed = True
        self._epoch: str | None = None
        self._monotonic, self._wall = surroundings.monotonic, surroundings.wall
        self._lasts_s = (ttl_ms - ttl_ms // MARGIN_DIVISOR) / 1000
        self._clock: Clock = self._wall_ms if clock is None else clock
        self._stops = stops
        self._emptied_until = 0.0
        self.calls = LeaseCalls(ttl_ms, signals, surroundings) if calls is None else calls
        self._task: asyncio.Task[None] | None = None

    def _wall_ms(self) -> int:
        return round(self._wall() * 1000)

    def is_live(self) -> bool:
        """Whether this node's own row stands beyond doubt: only then may its runs act."""
        until, low, high = self._stands
        return self._monotonic() < until and low < self._wall() < high

    @property
    def emptied(self) -> bool:
        """Whether a missing row counts for nothing now: the store was emptied, or seen first, within one TTL."""
        return self._monotonic() < self._emptied_until

    async def start(self) -> None:
        """Beat once, then keep beating; a store that does not answer is told to ``on_storage_error``, not raised."""
        await self._beat()
        self._task = asyncio.create_task(self._keep(), name="loom-presence")

    async def stop(self, *, leave: bool = True) -> None:
        """Stop beating; ``leave`` marks the row ended, so that others need not wait for it to expire."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if leave and self._stands is not _NEVER:
            try:
                await self.calls.bounded(self._leases.leave(self._node), self._node)
            except (LoomError, TimeoutError) as error:
                self._signals.storage_error(error, self._node)

    async def rows(self, nodes: Iterable[str]) -> dict[str, Presence]:
        """The presence rows of these incarnations; one without a row is absent.

        Raises:
            LoomError, TimeoutError: they could not be read; nothing may be concluded.
        """
        await self._look_at_epoch()
        return await self.calls.bounded(self._leases.presence(list(nodes)), self._node)

    async def _keep(self) -> None:
        pause_s = self._ttl_ms / BEATS_PER_TTL / 1000
        while True:
            # While the store fails, ask again sooner: a row is worth more than a rhythm.
            await asyncio.sleep(pause_s if self.is_live() else min(pause_s, SOONER_S))
            if not self.is_live():  # this process stood still, say: what it held may be others' by now
                self._lapse()
            await self._beat()

    async def _beat(self) -> None:
        sent = (self._monotonic(), self._wall())
        try:
            details = self._details | {"at": self._clock(), "ttlMs": self._ttl_ms}
            await self.calls.bounded(
                self._leases.beat(self._node, self._ttl_ms, self._covers(), details), self._node
            )
            await self._look_at_epoch()
        except (LoomError, TimeoutError) as error:
            self._signals.repeated_storage_error(error, self._node)
            if not self.is_live():
                self._lapse()
            return
        if not self.is_live():
            self._lapse()  # it was doubted meanwhile, and what was held back then is not taken up by itself
        if self._stops:
            monotonic, wall = sent
            self._stands = monotonic + self._lasts_s, wall - self._lasts_s, wall + self._lasts_s
        else:
            self._stands = _ALWAYS
        if self._lapsed:
            self._lapsed = False
            self._signals.settled(self._node)
            self._on_regained()

    def _lapse(self) -> None:
        if not self._lapsed:
            self._lapsed = True
            self._on_lapsed()

    async def _look_at_epoch(self) -> None:
        epoch = await self.calls.bounded(self._leases.epoch(), self._node)
        if epoch == self._epoch:
            return
        first, self._epoch = self._epoch is None, epoch
        self._emptied_until = self._monotonic() + self._ttl_ms / 1000
        if not first:
            self._on_emptied()
