"""Which runs of a node hold a lease, and since when (system.md 6; the entry points: docs/adr/0030).

Lazy, the default: a run under a fence that nobody else held before costs nothing until it has driven for the grace. A run
that takes its execution from others, or after them, holds a lease before it takes the fence. Eager: every run does.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from loom.errors import LeaseError, LeaseHeldError, LeaseLostError, LeaseStoreTimeoutError
from loom.runtime.lease_keeper import Grant, LeaseKeeper

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

LOOKS_PER_GRACE: Final = 4
SHORTEST_LOOK_S: Final = 0.01
TAKEN_OVER: Final = "taken over"


class Driver(Protocol):
    """What drives an execution: a run."""

    id: str
    lease: DriverLease | None

    def drives(self) -> bool:
        """Whether it is at work: not parked, not over."""
        ...

    def gone(self) -> bool:
        """Whether it has ended or was stopped: it leaves no lease behind that is had later."""
        ...


class DriverLease:
    """One driver's hold on one execution. ``lost`` says why it is none any more.

    Granted, it counts as long as the keeper's clocks say. Uncertain (``since`` is when a row may first have been written),
    as long as such a row would. Neither: the driver goes on without one, and nothing speaks for or against its life.
    """

    __slots__ = ("_keeper", "execution_id", "granted", "lost", "on_lost", "since")

    def __init__(self, keeper: LeaseKeeper, execution_id: str, on_lost: Callable[[str], None]) -> None:
        self._keeper = keeper
        self.execution_id = execution_id
        self.on_lost = on_lost
        self.granted = False
        self.since: tuple[float, float] | None = None
        self.lost: str | None = None

    def valid(self) -> bool:
        """Whether its driver may start effects and append: no I/O."""
        if self.lost is not None:
            return False
        if self.granted:
            return self._keeper.valid(self.execution_id)
        return self.since is None or not self._keeper.passed(self.since)

    def lose(self, reason: str) -> None:
        """It is lost; the driver hears of it once."""
        if self.lost is None:
            self.lost = reason
            self.on_lost(reason)


class DriverLeases:
    """The leases of a node's runs. ``drivers`` are those of now; ``on_lost(driver, reason)`` ends one.

    ``grace_ms`` defaults to the renew cadence. Used on one event loop.
    """

    def __init__(
        self,
        keeper: LeaseKeeper,
        *,
        drivers: Callable[[], Iterable[Any]],
        on_lost: Callable[[Any, str], None],
        eager: bool = False,
        grace_ms: int | None = None,
        on_store_error: str = "stop",
    ) -> None:
        self.keeper = keeper
        self.eager = eager
        self.grace_s = keeper.renew_s if grace_ms is None else grace_ms / 1000
        self._drivers, self._on_lost = drivers, on_lost
        self._stops = on_store_error == "stop"
        self._holds: dict[str, set[DriverLease]] = {}
        self._forgetful: set[str] = set()
        self._waking: set[str] = set()
        self._ages: dict[Any, int] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look after the node's runs from now on."""
        self.keeper.start()
        self._timer = asyncio.get_running_loop().create_task(self._look(), name="loom-lease-grace")

    async def close(self) -> None:
        """Look no more; whoever still holds is told ``closed``."""
        tasks = [*self._tasks, *([] if self._timer is None else [self._timer])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.keeper.close()

    # Entering -------------------------------------------------------------------------------------------------------

    def must_ask(self, execution_id: str) -> bool:
        """Whether a run that goes on under its own fence must hold a lease first.

        Always if eager. Else where a row of this node may stand that is not renewed: once expired, it would speak against
        a run that lives.
        """
        return self.eager or self.keeper.doubts(execution_id)

    async def enter(self, driver: Driver) -> None:
        """Hold a lease for a driver before it takes a fence or appends.

        Raises:
            LeaseHeldError: another driver lives. LeaseStoreTimeoutError: the store does not say (mode ``stop``).
            LeaseLostError: this node is closing, or the driver was stopped meanwhile.
        """
        lease = DriverLease(self.keeper, driver.id, partial(self._on_lost, driver))
        grant = await self._ask(lease)
        if grant is Grant.HELD:
            raise LeaseHeldError(driver.id)
        if grant is Grant.CLOSED:
            raise LeaseLostError(driver.id, "closed")
        if grant is not Grant.GRANTED and self._stops:
            raise LeaseStoreTimeoutError(f"no lease on {driver.id!r} could be had; it is tried again")
        self._hold(lease)
        driver.lease = lease
        if driver.gone():
            self.leave(driver)
            raise LeaseLostError(driver.id, "stopped meanwhile")

    async def enter_if_asked(self, driver: Driver) -> None:
        """As ``enter``, where a run that goes on under its own fence must hold a lease first."""
        if self.must_ask(driver.id):
            await self.enter(driver)

    async def _ask(self, lease: DriverLease, *, urgent: bool = False) -> Grant:
        holders = self._holds.get(lease.execution_id)
        if holders and any(hold.granted for hold in holders) and self.keeper.valid(lease.execution_id):
            lease.granted = True
            return Grant.GRANTED
        grant = await self.keeper.acquire(
            lease.execution_id, partial(self._lose, lease.execution_id), urgent=urgent
        )
        lease.granted = grant is Grant.GRANTED
        return grant

    def leave(self, driver: Driver, *, forget: bool = False) -> asyncio.Task[None] | None:
        """A driver is done with its lease: give it back, or ``forget`` it; the task ends once that has happened.

        With other holds on the execution still standing it happens when the last goes. None: there was nothing to do.
        """
        lease, driver.lease = driver.lease, None
        if lease is None:
            return None
        holds = self._holds.get(lease.execution_id, set())
        holds.discard(lease)
        if forget:
            self._forgetful.add(lease.execution_id)
        if holds:
            return None
        self._holds.pop(lease.execution_id, None)
        forget = lease.execution_id in self._forgetful
        self._forgetful.discard(lease.execution_id)
        if lease.lost is not None:
            return None
        if forget:
            self.keeper.forget(lease.execution_id)
            return None
        return self._spawn(self.keeper.release(lease.execution_id))

    def give_up(self, driver: Driver) -> None:
        """A driver is about to stop for good while its node lives: the row that it leaves to expire is the evidence that others need.

        One that had none yet has one written for that: presence alone would vouch for it.
        """
        if driver.lease is not None:
            self.leave(driver, forget=True)
        else:
            self._spawn(self._testify(driver.id))

    async def _testify(self, execution_id: str) -> None:
        if execution_id not in self._holds:
            grant = await self.keeper.acquire(execution_id, lambda _reason: None, urgent=True)
            if grant is Grant.GRANTED and execution_id not in self._holds:
                self.keeper.forget(execution_id)

    def _hold(self, lease: DriverLease) -> None:
        self._holds.setdefault(lease.execution_id, set()).add(lease)

    def _lose(self, execution_id: str, reason: str) -> None:
        self._forgetful.discard(execution_id)
        for lease in self._holds.pop(execution_id, set()):
            lease.lose(reason)

    def hand_over(self, claim: Driver, driver: Driver) -> None:
        """The run for which a claim stood is there."""
        lease, claim.lease = claim.lease, None
        if lease is not None:
            driver.lease = lease
            lease.on_lost = partial(self._on_lost, driver)

    def may_wake(self, driver: Driver, again: Callable[[], None]) -> bool:
        """Whether a driver that rests in memory may go on; if not, ``again`` is called once it holds a lease."""
        if driver.lease is not None or not self.must_ask(driver.id):
            return True
        if driver.id not in self._waking:
            self._waking.add(driver.id)
            self._spawn(self._wake(driver, again))
        return False

    async def _wake(self, driver: Driver, again: Callable[[], None]) -> None:
        try:
            await self.enter(driver)
        except LeaseError:  # another has it, or nobody can say: the run finds out, or asks again
            await asyncio.sleep(self.keeper.calls.bound_s)
        finally:
            self._waking.discard(driver.id)
        again()

    async def steal(self, driver: Driver) -> None:
        """Hold a lease whoever has it: the fence was won on the proof that nobody drove (D11, 1)."""
        lease = DriverLease(self.keeper, driver.id, partial(self._on_lost, driver))
        lease.granted = await self.keeper.steal(driver.id, partial(self._lose, driver.id))
        if lease.granted:
            self._hold(lease)
            driver.lease = lease

    async def settle(self, bound_s: float) -> None:
        """Wait for what is being given back, at most so long."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=bound_s)

    # Lazily ---------------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Find drivers that have been at work for the grace: no run costs a timer of its own."""
        while True:
            await asyncio.sleep(max(self.grace_s / LOOKS_PER_GRACE, SHORTEST_LOOK_S))
            ages = {}
            for driver in list(self._drivers()):
                if driver.lease is None and driver.drives():
                    age = self._ages.get(driver, 0) + 1
                    if age > LOOKS_PER_GRACE:
                        self._late(driver)
                    else:
                        ages[driver] = age
            self._ages = ages

    def _late(self, driver: Driver) -> None:
        lease = DriverLease(self.keeper, driver.id, partial(self._on_lost, driver))
        driver.lease = lease
        self._hold(lease)
        self._spawn(self._acquire_late(driver, lease))

    async def _acquire_late(self, driver: Driver, lease: DriverLease) -> None:
        """The three outcomes of S7g: granted; another lives; unknown, and then a row may stand for a while."""
        keeper, retry_s = self.keeper, min(self.grace_s, self.keeper.renew_s)
        while driver.lease is lease:
            sent = keeper.now()
            grant = await self._ask(lease, urgent=lease.since is not None)
            if grant in {Grant.HELD, Grant.CLOSED}:
                self._holds.get(lease.execution_id, set()).discard(lease)
                lease.lose(TAKEN_OVER if grant is Grant.HELD else "closed")
                return
            if grant is Grant.GRANTED:
                lease.since = None
                if driver.lease is not lease and not self._holds.get(lease.execution_id):
                    # It gave up meanwhile, and wants its row to speak for that.
                    self.keeper.forget(lease.execution_id)
                return
            if grant in {Grant.UNKNOWN, Grant.LATE} and self._stops:
                lease.since = lease.since or sent
                await asyncio.sleep(min(retry_s, max(0.0, lease.since[0] + keeper.lasts_s - keeper.now()[0])))
                if not lease.valid():
                    self._holds.get(lease.execution_id, set()).discard(lease)
                    lease.lose("its acquire was never answered")
                    return
            else:  # nothing was sent, or an outage is to be outlived
                await asyncio.sleep(self.grace_s if grant is not Grant.CANCELLED else 0)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
