"""A look at the fleet from one client: what ``loom doctor`` says beside the servers' own state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from loom.runtime.lease_checkup import lease_findings
from loom.stores.findings import Finding

if TYPE_CHECKING:
    from loom.config import Config
    from loom.runtime.factory import Stores
    from loom.stores.contracts import Clock

PAGE: Final = 500
MAX_WAITING: Final = 1_000
"""Refused executions that one look reads."""


async def findings(config: Config, stores: Stores, clock: Clock) -> list[Finding]:
    """What is wrong with sealing in this fleet, and with evidence of life.

    Raises:
        StoreError: a store cannot be read now.
    """
    found = [] if stores.sealing is None else stores.sealing.stores()
    if stores.leases is None:
        found.append(
            Finding(
                "leases-off",
                "warning",
                "there is no lease store: nodes cannot tell whether another still drives an execution",
                "set redis_url, and leave leases.enabled on",
            )
        )
        return found
    present = await stores.leases.present()
    found += await lease_findings(config, stores, stores.leases, present, clock)
    fleet = {row.node: row.covers for row in present if not row.expired}
    if not fleet:
        found.append(Finding("no-live-node", "warning", "no node is alive", "start `loom worker`"))
    if stores.sealing is not None:
        found += await stores.sealing.coverage(fleet, await _refused(config, stores, clock))
    return found


async def _refused(config: Config, stores: Stores, clock: Clock) -> list[str]:
    """Executions that a node refused, and none has carried on since."""
    waiting: dict[str, None] = {}
    for shard in range(config.partitions if stores.wakes is not None else 0):
        assert stores.wakes is not None
        offset = 0
        while page := await stores.wakes.refusals(clock(), PAGE, shard=shard, offset=offset):
            waiting.update((row.execution_id, None) for row in page)
            offset += len(page)
            if len(waiting) >= MAX_WAITING:
                return list(waiting)[:MAX_WAITING]
    return list(waiting)
