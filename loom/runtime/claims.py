"""Leases of executions that do not exist yet: a start where every run is leased, and a continue-as-new (D11, 1; S7g)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from loom.errors import (
    ExecutionAlreadyExistsError,
    LeaseError,
    LeaseHeldError,
    LeaseLostError,
    StartLeaseHeldError,
)
from loom.stores.contracts import NO_EVENTS

if TYPE_CHECKING:
    from loom.runtime.driver_leases import DriverLease
    from loom.runtime.engine import Engine
    from loom.runtime.run import Run


class Claim:
    """Stands for the run of an execution until there is one."""

    __slots__ = ("id", "lease")

    def __init__(self, execution_id: str) -> None:
        self.id = execution_id
        self.lease: DriverLease | None = None

    @property
    def lost(self) -> bool:
        """Whether its lease was lost before there was a run: none may begin on it."""
        return self.lease is not None and self.lease.lost is not None

    def drives(self) -> bool:
        """Nothing runs yet."""
        return False

    def gone(self) -> bool:
        """Nothing can be stopped yet."""
        return False

    def stop(self, error: BaseException) -> None:
        """Nothing runs yet; whoever is about to append looks at the lease first."""


async def claim_start(engine: Engine, execution_id: str) -> Claim | None:
    """Lease an execution before its first event, where this node leases all of its runs; else None.

    Raises:
        ExecutionAlreadyExistsError: it exists, and is driven. StartLeaseHeldError: another node leased the id and has not
            begun; try again, or choose another. LeaseStoreTimeoutError: the store does not say.
    """
    if engine.leasing is None or not engine.leasing.must_ask(execution_id):
        return None
    claim = Claim(execution_id)
    try:
        await engine.leasing.enter(claim)
    except LeaseHeldError:
        seen = await engine.patiently(lambda: engine.events.observe(execution_id), execution_id)
        if seen.head != NO_EVENTS:
            raise ExecutionAlreadyExistsError(execution_id) from None
        raise StartLeaseHeldError(
            f"another node leased {execution_id!r} and has not begun it; try again, or choose another id"
        ) from None
    if claim.lease is not None and not claim.lease.valid():
        raise LeaseLostError(execution_id, "not shown to be alive")
    return claim


async def claim_successor(run: Run, successor: str) -> Claim | None:
    """Lease a successor while its predecessor still holds: no instant has one that runs unleased (S7g).

    Tries as long as the run may act. None: it may no longer, or nothing is leased here.
    """
    leasing = run.engine.leasing
    if leasing is None:
        return None
    claim = Claim(successor)
    while run.may_act():
        try:
            await leasing.enter(claim)
        except LeaseError:
            await asyncio.sleep(leasing.keeper.calls.bound_s)
            continue
        return claim
    return None
