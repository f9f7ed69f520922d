"""Reading the evidence of life: one bounded look at the lease store, and nothing concluded from no answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from loom.errors import LeaseEvidenceError, LoomError
from loom.kernel.evidence import CONTINUE, Evidence, Seen, judge

if TYPE_CHECKING:
    from loom.runtime.presence import PresenceKeeper
    from loom.stores.contracts import LeaseStore


class EvidenceReader:
    """What a node sees of others' rows. ``node`` is its own incarnation."""

    def __init__(self, leases: LeaseStore, presence: PresenceKeeper, node: str) -> None:
        self._leases, self._presence = leases, presence
        self._proof = leases.scope == "cluster" and not node.endswith(CONTINUE)

    async def of(self, execution_id: str, driver: str | None) -> tuple[Evidence, str]:
        """What is known of an execution's driver, and in which words.

        Raises:
            LeaseEvidenceError: it could not be read; nothing may be concluded.
        """
        try:
            lease, rows = await asyncio.gather(self._lease(execution_id), self._rows(driver))
        except (LoomError, TimeoutError) as error:
            raise LeaseEvidenceError(
                f"evidence on the driver of {execution_id!r} could not be read ({type(error).__name__}); "
                "nothing is taken over until it can be"
            ) from None
        known = self._presence
        return judge(driver, lease, rows, quiet=known.calls.quiet, emptied=known.emptied, proof=self._proof)

    async def _lease(self, execution_id: str) -> Seen | None:
        lease = await self._presence.calls.bounded(self._leases.get(execution_id), "leases")
        return None if lease is None else Seen(lease.owner, lease.expired)

    async def _rows(self, driver: str | None) -> Seen | None:
        if driver is None:
            return None
        row = (await self._presence.rows([driver])).get(driver)
        return None if row is None else Seen(driver, row.expired)
