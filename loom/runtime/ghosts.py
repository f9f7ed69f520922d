"""Lease rows that nobody will come back for: of a start that never happened, of an end whose release was lost (D11, 1).

Once per TTL the node looks at a page of expired rows of the shards that it writes, and goes on behind it the next time. A
row of an execution that runs is evidence and stays; one of a node that outlives outages stays, for its starter may live.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from loom.errors import LoomError
from loom.kernel.evidence import CONTINUE
from loom.runtime.background import Background
from loom.schemas.envelope import TERMINAL_KINDS

if TYPE_CHECKING:
    from loom.runtime.engine import Engine
    from loom.runtime.lease_calls import LeaseCalls
    from loom.stores.contracts import Lease, LeaseStore

PAGE: Final = 100
ABOUT: Final = "ghost leases"


class GhostCollector(Background):
    """Deletes expired rows of what does not exist, or has ended. Never the evidence of a running execution."""

    TASK = "loom-ghosts"

    def __init__(self, engine: Engine, leases: LeaseStore, calls: LeaseCalls, ttl_ms: int) -> None:
        self._engine, self._leases, self._calls, self._ttl_ms = engine, leases, calls, ttl_ms
        self._after = ""

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_ms / 1000)
            if not self._engine.live() or self._calls.quiet:
                continue
            try:
                await self.collect()
            except (LoomError, TimeoutError) as error:
                self._engine.signals.repeated_storage_error(error, ABOUT)

    async def collect(self) -> list[str]:
        """Look at one page; return the executions whose rows went.

        Raises:
            LoomError, TimeoutError: the lease store failed; what was done is done.
        """
        page = await self._calls.bounded(self._leases.expired(PAGE, self._after), ABOUT)
        self._after = page[-1].execution_id if len(page) == PAGE else ""
        return [lease.execution_id for lease in page if await self._collected(lease)]

    async def _collected(self, lease: Lease) -> bool:
        execution_id = lease.execution_id
        if lease.owner.endswith(CONTINUE) or not self._engine.owns(execution_id):
            return False
        if not await self._over(execution_id):
            return False
        # Taken first, by a name that nobody renews: whoever starts the execution meanwhile stands down and tries again.
        name = f"{self._engine.node}~ghosts"
        if await self._calls.bounded(self._leases.acquire(execution_id, name, self._ttl_ms), ABOUT) is None:
            return False
        if not await self._over(execution_id):
            return False  # a stream has appeared: the row expires as its evidence
        await self._calls.bounded(self._leases.release_many([execution_id], name), ABOUT)
        return True

    async def _over(self, execution_id: str) -> bool:
        """Whether it never began, or has ended; what cannot be read is neither."""
        try:
            info = await self._engine.events.info(execution_id)
        except LoomError:
            return False
        return info is None or info.status in TERMINAL_KINDS
