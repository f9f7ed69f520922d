"""Retention: chains that ended long enough ago are removed, each by the node that writes its partition (kafka.md, "Topics").

``states`` says what has ended, the log whether that is so. A sweep that is broken off, or made twice, does no harm.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from loom.errors import LoomError
from loom.processors.summaries import read_finished
from loom.runtime.background import Background
from loom.runtime.client import wall_clock

if TYPE_CHECKING:
    from loom.config import Config
    from loom.runtime.removal import RemovalReport
    from loom.stores.contracts import Clock

_log = logging.getLogger("loom.processors.retention")

MAX_A_SWEEP: Final = 1_000
"""Chains that one sweep of a partition removes; the next goes on."""

LONGEST_PAUSE_S: Final = 3_600.0
SHORTEST_PAUSE_S: Final = 1.0
SWEEPS_PER_RETENTION: Final = 10


class Remover(Protocol):
    """What retention asks of the runtime."""

    async def expire_chain(self, chain_id: str, last_id: str, ended_before: int) -> RemovalReport | None:
        """See :meth:`loom.runtime.removal_client.RemovalVerbs.expire_chain`."""
        ...


Finished = Callable[[int, int, int], list[tuple[str, str]]]
"""Chains of a partition whose last execution ended before an instant, and that; at most so many; read off the loop."""


class Retention(Background):
    """Sweeps the partitions that ``owned`` names, over and over."""

    TASK = "loom-retention"

    def __init__(
        self,
        retention_ms: int,
        remover: Remover,
        owned: Callable[[], frozenset[int]],
        finished: Finished,
        *,
        now: Clock = wall_clock,
        max_a_sweep: int = MAX_A_SWEEP,
    ) -> None:
        self._retention_ms, self._remover, self._owned = retention_ms, remover, owned
        self._finished, self._now, self._max_a_sweep = finished, now, max_a_sweep

    async def sweep(self) -> tuple[int, bool]:
        """Remove what has ended long enough ago; return how many chains, and whether more may be left.

        A chain that cannot be removed now is left for the next sweep.
        """
        removed, more = 0, False
        for partition in sorted(self._owned()):
            before = self._now() - self._retention_ms
            chains = await asyncio.to_thread(self._finished, partition, before, self._max_a_sweep)
            gone = 0
            for chain_id, last_id in chains:
                try:
                    gone += await self._remover.expire_chain(chain_id, last_id, before) is not None
                except LoomError as error:
                    _log.warning("chain %s is kept for now: %s", chain_id, error)
            removed += gone
            more = more or (len(chains) >= self._max_a_sweep and gone > 0)
        return removed, more

    async def _keep(self) -> None:
        pause_s = self._retention_ms / 1000 / SWEEPS_PER_RETENTION
        pause_s = min(max(pause_s, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)
        while True:
            more = False
            try:
                removed, more = await self.sweep()
                if removed:
                    _log.info("%d chains that ended long ago were removed", removed)
            except LoomError as error:
                _log.warning("a sweep of what has ended was broken off: %s", error)
            await asyncio.sleep(SHORTEST_PAUSE_S if more else pause_s)


def retention_of(config: Config, remover: Remover, owned: Callable[[], frozenset[int]]) -> Retention | None:
    """The retention that the settings ask for; None where all is kept."""
    if config.retention_ms is None:
        return None
    return Retention(config.retention_ms, remover, owned, partial(read_finished, config))
