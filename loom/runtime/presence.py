"""This node's evidence of life, and what is known of others' (clauses.md, point 6; system.md 6).

A node beats its presence row every third of its TTL. One whose own row has lapsed by the margin stops its runs: others
may take their executions over. Evidence that cannot be read is no evidence: nothing is re-driven on a guess.
"""

from __future__ import annotations

import asyncio
import time
from enum import Enum
from typing import TYPE_CHECKING, Final

from loom.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from loom.runtime.signals import Signals
    from loom.schemas.envelope import Json
    from loom.stores.contracts import LeaseStore

MARGIN_DIVISOR: Final = 6
BEATS_PER_TTL: Final = 3
SOONER_S: Final = 0.25
CALL_BOUND_MS: Final = 1_000
"""A beat is bounded by the smaller of this and TTL/6 (clauses.md, "Wake rows, leases")."""


class Evidence(Enum):
    """What is known of an incarnation."""

    LIVE = "live"
    EXPIRED = "expired"
    QUIET = "quiet"
    ABSENT = "absent"


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
    ) -> None:
        self._leases = leases
        self._node = node
        self._ttl_ms = ttl_ms
        self._signals = signals
        self._details = details
        self._on_lapsed, self._on_regained, self._on_emptied = on_lapsed, on_regained, on_emptied
        self._beat_at: tuple[float, float] | None = None
        self._lapsed = True
        self._epoch: str | None = None
        self._quiet_until = 0.0
        self._task: asyncio.Task[None] | None = None

    def is_live(self) -> bool:
        """Whether this node's own row stands beyond doubt: only then may its runs act."""
        if self._beat_at is None:
            return False
        limit_s = (self._ttl_ms - self._ttl_ms // MARGIN_DIVISOR) / 1000
        monotonic, wall = self._beat_at
        return time.monotonic() - monotonic < limit_s and abs(time.time() - wall) < limit_s

    @property
    def quiet(self) -> bool:
        """Whether a missing row counts for nothing now: the store was emptied, or seen first, within one TTL."""
        return time.monotonic() < self._quiet_until

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
        if leave and self._beat_at is not None:
            try:
                async with asyncio.timeout(self._bound_s):
                    await self._leases.leave(self._node)
            except (StoreError, TimeoutError) as error:
                self._signals.storage_error(error, self._node)

    async def evidence(self, nodes: Iterable[str]) -> dict[str, Evidence]:
        """What is known of these incarnations.

        Raises:
            StoreError, TimeoutError: it could not be read; nothing may be concluded.
        """
        wanted = list(nodes)
        if not wanted:
            return {}
        async with asyncio.timeout(self._bound_s):
            await self._look_at_epoch()
            rows = await self._leases.presence(wanted)
        missing = Evidence.QUIET if self.quiet else Evidence.ABSENT
        return {
            node: missing if node not in rows else Evidence.EXPIRED if rows[node].expired else Evidence.LIVE
            for node in wanted
        }

    @property
    def _bound_s(self) -> float:
        return min(self._ttl_ms / MARGIN_DIVISOR, CALL_BOUND_MS) / 1000

    async def _keep(self) -> None:
        pause_s = self._ttl_ms / BEATS_PER_TTL / 1000
        while True:
            # While the store fails, ask again sooner: a row is worth more than a rhythm.
            await asyncio.sleep(pause_s if self.is_live() else min(pause_s, SOONER_S))
            if not self.is_live():  # this process stood still, say: what it held may be others' by now
                self._lapse()
            await self._beat()

    async def _beat(self) -> None:
        sent = (time.monotonic(), time.time())
        try:
            async with asyncio.timeout(self._bound_s):
                await self._leases.beat(self._node, self._ttl_ms, details=self._details)
                await self._look_at_epoch()
        except (StoreError, TimeoutError) as error:
            self._signals.repeated_storage_error(error, self._node)
            if not self.is_live():
                self._lapse()
            return
        self._beat_at = sent
        if self._lapsed:
            self._lapsed = False
            self._signals.settled(self._node)
            self._on_regained()

    def _lapse(self) -> None:
        if not self._lapsed:
            self._lapsed = True
            self._on_lapsed()

    async def _look_at_epoch(self) -> None:
        epoch = await self._leases.epoch()
        if epoch == self._epoch:
            return
        first, self._epoch = self._epoch is None, epoch
        self._quiet_until = time.monotonic() + self._ttl_ms / 1000
        if not first:
            self._on_emptied()
