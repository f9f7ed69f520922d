"""Nodes in memory for tests: a fleet on one log, crashes, and time that passes when the test says so."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from loom.config import MIN_TTL_MS, Config
from loom.errors import DeadlineExceededError
from loom.runtime import Client, Runtime, wall_clock
from loom.stores.memory.event_store import MemoryEventStore
from loom.stores.memory.lease_store import LeaseTable, MemoryLeaseStore
from loom.stores.memory.log import MemoryLog
from loom.stores.memory.snapshot_store import MemorySnapshotStore, SnapshotTable
from loom.stores.memory.wake_store import MemoryWakeStore, WakeTable
from loom.stores.sealing.snapshots import EncryptingSnapshotStore
from loom.testing.clock import VirtualClock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from loom.kernel.flow import FlowDefinition
    from loom.runtime import Handle
    from loom.stores.contracts import Clock, EventStore, WakeStore

R = TypeVar("R")

SETTLE_S: Final = 10.0
_BREATH_S: Final = 0.002
_CALM_TURNS: Final = 3
_DAY_MS: Final = 86_400_000


class MemoryFleet:
    """Any number of nodes on one log, one lease store, one wake store, in one process.

    ``ttl_ms`` is every node's presence: what a killed node leaves behind is taken over once it has passed.
    """

    def __init__(self, *, partitions: int = 4, clock: Clock = wall_clock, ttl_ms: int = 2_000) -> None:
        self.clock = clock
        self.partitions = partitions
        self.log = MemoryLog(clock, shards=partitions)
        self.leases = LeaseTable(clock)
        self.wakes = WakeTable(clock, partitions)
        self.snapshots = SnapshotTable()
        self._ttl_ms = ttl_ms

    def config(self, node_id: str, **settings: Any) -> Config:
        """Settings of a node of this fleet."""
        defaults = {
            "recovery_interval_ms": max(50, self._ttl_ms // 2),
            "presence_ttl_ms": self._ttl_ms,
            "leases": {"ttl_ms": max(MIN_TTL_MS, self._ttl_ms)},
        }
        return Config(
            storage="memory", node_id=node_id, partitions=self.partitions, **{**defaults, **settings}
        )

    def store(self, owned: Iterable[int] | None = None) -> MemoryEventStore:
        """A handle on the log that serves these shards (all by default)."""
        return MemoryEventStore(self.log, owned=owned)

    def runtime(
        self,
        node_id: str = "node",
        flows: Iterable[FlowDefinition[..., Any]] = (),
        *,
        owned: Iterable[int] | None = None,
        events: EventStore | None = None,
        settings: dict[str, Any] | None = None,
        **options: Any,
    ) -> Runtime:
        """A node, not opened yet; ``options`` are those of ``loom.Runtime``. With ``keys`` it seals."""
        keys = options.get("keys", getattr(events, "keys", None))
        snapshots = MemorySnapshotStore(self.snapshots)
        return Runtime(
            self.config(node_id, **(settings or {})),
            flows=flows,
            events=events if events is not None else self.store(owned),
            snapshots=snapshots if keys is None else EncryptingSnapshotStore(snapshots, keys),
            leases=MemoryLeaseStore(self.leases),
            wakes=MemoryWakeStore(self.wakes),
            clock=self.clock,
            **options,
        )

    def client(self, **options: Any) -> Client:
        """A client of the fleet: it owns nothing and drives nothing."""
        return Client(
            self.config("client"),
            events=self.store(()),
            leases=MemoryLeaseStore(self.leases),
            wakes=MemoryWakeStore(self.wakes),
            clock=self.clock,
            **options,
        )


async def crash(runtime: Runtime) -> None:
    """End a node as a kill would: nothing more is written, nobody is told, its presence row is left to expire."""
    engine = runtime._engine  # noqa: SLF001 - a crash asks nobody
    events = engine.events
    for part in (runtime._timers, runtime._recovery, runtime._ghosts, runtime._retiring):  # noqa: SLF001
        if part is not None:
            await part.stop()
    leasing, engine.leasing = engine.leasing, None
    if leasing is not None:
        await leasing.close()
    if runtime._presence is not None:  # noqa: SLF001
        await runtime._presence.stop(leave=False)  # noqa: SLF001
    runtime._stores = None  # noqa: SLF001
    await engine.close()
    await events.close()


async def until(
    condition: Callable[[], bool], what: str = "the condition", within_s: float = SETTLE_S
) -> None:
    """Wait until a condition holds.

    Raises:
        DeadlineExceededError: it did not hold in time.
    """

    async def holds() -> bool:
        return condition()

    await _until(holds, what, within_s)


async def until_parked(runtime: Runtime, execution_id: str) -> None:
    """Wait until a run rests in its node's memory.

    Raises:
        DeadlineExceededError: it did not in time.
    """
    parked = runtime._engine.parked_runs  # noqa: SLF001 - memory is what is asked about
    await until(lambda: execution_id in parked, f"the park of {execution_id}")


async def until_rows(wakes: WakeStore, execution_id: str, *kinds: str) -> None:
    """Wait until an execution's wake rows are of these kinds: what tells of a refusal may be seen before its row is.

    Raises:
        DeadlineExceededError: they were not in time.
    """

    async def holds() -> bool:
        return tuple(row.kind for row in await wakes.rows_of(execution_id)) == kinds

    await _until(holds, f"rows {kinds} of {execution_id}", SETTLE_S)


async def _until(condition: Callable[[], Awaitable[bool]], what: str, within_s: float) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while not await condition():
        if loop.time() > deadline:
            raise DeadlineExceededError(what, round(within_s * 1000))
        await asyncio.sleep(_BREATH_S)


class TimeSkippingRuntime(Runtime):
    """A node in memory whose time stands still until it is skipped: a flow that sleeps for days ends at once."""

    def __init__(self, flows: Iterable[FlowDefinition[..., Any]] = (), **options: Any) -> None:
        self.time = VirtualClock()
        settings = options.pop("config", None) or Config(storage="memory", recovery_interval_ms=_DAY_MS)
        super().__init__(settings, flows=flows, clock=self.time, **options)

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        return self

    async def settle(self) -> None:
        """Wait until nothing moves: every run rests, all of it is durable, and no due timer is left."""
        turns = 0
        while turns < _CALM_TURNS:  # what became durable is heard of a turn of the loop later
            await until(self._quiet, "rest of every run")
            await asyncio.sleep(0)
            turns = turns + 1 if self._quiet() else 0

    async def skip(
        self, ms: int = 0, *, seconds: float = 0, minutes: float = 0, hours: float = 0, days: float = 0
    ) -> None:
        """Let time pass, timer by timer, and let what it wakes come to rest."""
        total = ms + round((((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 1000)
        until_ms = self.time() + total
        await self.settle()
        while (due := self.next_due()) is not None and due <= until_ms:
            await self._advance(due)
        await self._advance(until_ms)

    async def run(self, handle: Handle[R]) -> R:
        """The result of an execution, skipping whatever time it waits for.

        Raises:
            DeadlineExceededError: it waits for something that time does not bring.
        """
        while True:
            await self.settle()
            due = self.next_due()
            if due is None or await handle.status() not in {"running", "suspended"}:
                return await handle.result(SETTLE_S)
            await self._advance(due)

    def next_due(self) -> int | None:
        """The next instant at which something is due; None where nothing waits for time."""
        alarm = self._engine.alarms.next_due
        timers = [at for run in self._engine.runs.values() for at in run.timers()]
        waiting = [at for at in (alarm, min(timers, default=None)) if at is not None]
        return min(waiting, default=None)

    async def _advance(self, instant_ms: int) -> None:
        self.time.advance_to(instant_ms)
        self._engine.alarms.kick()
        if self._timers is not None:
            self._timers.kick()
        for run in list(self._engine.runs.values()):
            run.look()
        await self.settle()

    def _quiet(self) -> bool:
        now = self.time()
        return self._engine.idle() and all(
            at > now for run in self._engine.runs.values() for at in run.timers()
        )
