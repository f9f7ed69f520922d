"""What every part of a node shares: stores, clock, ids, the runs of this process, and whoever waits for their ends."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import itertools
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from loom.errors import InvalidIdError, LeaseLostError, LoomError, PayloadShreddedError, StoreError
from loom.ids import IdSource, ulid
from loom.kernel.evidence import CONTINUE, UNLEASED
from loom.kernel.machine import DecisionSources
from loom.runtime.alarms import Alarms
from loom.runtime.backoff import Backoff
from loom.runtime.claims import Claim
from loom.runtime.firsts import Firsts
from loom.runtime.holds import held_back, trim_copies
from loom.runtime.patience import patiently
from loom.runtime.phase import Phase
from loom.runtime.surroundings import SYSTEM, Surroundings
from loom.runtime.waiters import MOVED, Ending, Waiters
from loom.schemas.envelope import EVENT_SCHEMA, Envelope, Json, Kind
from loom.stores.contracts import OwningEventStore, WakeRow
from loom.stores.guarded import GuardedEventStore
from loom.topics.partitioner import Minter, mint, partition_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from loom.config import Config
    from loom.errors import QuarantineHeldError
    from loom.kernel.flow import FlowRegistry
    from loom.runtime.driver_leases import DriverLeases
    from loom.runtime.driving import Driving
    from loom.runtime.factory import Stores
    from loom.runtime.run import Run
    from loom.runtime.signals import Signals
    from loom.stores.contracts import Clock

T = TypeVar("T")

RETRY_MS: Final = 250
MAX_MINT_DRAWS: Final = 4096
PROBES: Final = 32


class Engine:
    """The shared ground of a node; created on its event loop.

    ``node`` is the incarnation ``<node_id>:<random>`` that every append of a driver carries. ``drives`` says whether
    this process drives executions at all (a client does not).
    """

    driving: Driving

    def __init__(
        self,
        config: Config,
        stores: Stores,
        flows: FlowRegistry,
        signals: Signals,
        *,
        clock: Clock,
        ids: IdSource = ulid,
        drives: bool,
        surroundings: Surroundings = SYSTEM,
    ) -> None:
        self.config = config
        self.events = GuardedEventStore.over(stores.events)
        self.wakes, self.leases = stores.wakes, stores.leases
        self.snapshots = stores.snapshots
        self.owning = self.events if isinstance(self.events, OwningEventStore) else None
        self.flows = flows
        self.signals = signals
        self.clock = clock
        self.now = clock
        self.ids = ids
        self.drives = drives
        self.loop = asyncio.get_running_loop()
        self.surroundings = surroundings
        self.node = f"{config.node_id}:{surroundings.token(4)}{mode_of(config)}"
        self.stamp: dict[str, Json] = {"schema": EVENT_SCHEMA, "node": self.node}
        self.sources = DecisionSources(clock, surroundings.draw, ids)
        self.alarms = Alarms(clock)
        self.backoff = Backoff(clock)
        self.runs: dict[str, Run] = {}
        self.chains: dict[str, Run] = {}
        self.parked_runs: OrderedDict[str, None] = OrderedDict()
        self.starting: set[str] = set()
        self.waiters = Waiters()
        self.retry_ms = RETRY_MS
        self.max_behind = config.journal_max_behind
        self.patience_ms = config.storage_patience_ms
        self.alive: Callable[[], bool] = lambda: True
        self._firsts = Firsts(surroundings.monotonic)
        self._seals = hasattr(self.events, "sealing_capability")
        self.leasing: DriverLeases | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._pool = (
            ThreadPoolExecutor(config.step_threads, thread_name_prefix="loom-step") if drives else None
        )
        self._event_prefix = f"{surroundings.token(6)}-"
        self._events_made = itertools.count()
        self.closed = False
        self._partitions = self._known_placement()
        self._minter = Minter(self._partitions) if self._partitions and ids is ulid else None

    # Small things ---------------------------------------------------------------------------------------------------

    def event_id(self) -> str:
        """A fresh event id: a prefix of this process, and a count."""
        return f"{self._event_prefix}{next(self._events_made):x}"

    def live(self) -> bool:
        """Whether this node may act for its runs: it is not closed, and its evidence of life stands."""
        return not self.closed and self.alive()

    def owns(self, chain_id: str) -> bool:
        """Whether this process writes the chain's shard now, and hears what becomes durable in it."""
        owning = self.owning
        return self.drives and owning is not None and owning.shard_of(chain_id) in owning.owned()

    def hears(self, execution_id: str) -> bool:
        """Whether this process is told of the execution's end."""
        return execution_id in self.runs or self.owns(execution_id)

    def inbox_heads(self, chain_id: str) -> dict[str, int]:
        """Heads of the chain's inbox streams, where this process owns its shard."""
        if self.owning is None:
            return {}
        return {info.stream_id: info.head for info in self.owning.inbox_streams(chain_id)}

    def mint(self) -> tuple[str, bool]:
        """A fresh execution id, in a shard of this process where it owns one, and whether it does."""
        shard = self.owning.mint_shard() if self.owning is not None and self.drives else None
        return (self.ids(), False) if shard is None else (self._mint_in(shard), True)

    def mint_beside(self, chain_id: str) -> str:
        """A fresh execution id in the chain's shard."""
        return self.ids() if self.owning is None else self._mint_in(self.owning.shard_of(chain_id))

    def _mint_in(self, shard: int) -> str:
        if self._minter is not None:
            return self._minter(shard)
        if self._partitions:
            return mint(shard, self._partitions, self.ids)
        assert self.owning is not None
        for _ in range(MAX_MINT_DRAWS):  # a store that places ids in a way of its own
            candidate = self.ids()
            if self.owning.shard_of(candidate) == shard:
                return candidate
        raise InvalidIdError(
            candidate, f"none of the source's ids belongs to shard {shard}; give another source"
        )

    def _known_placement(self) -> int:
        """How many partitions the store places ids in, where it does so as on Kafka; 0 where it does otherwise."""
        owning, count = self.owning, self.config.partitions
        if owning is None:
            return count
        probes = [f"{n:026d}" for n in range(PROBES)]
        return count if all(owning.shard_of(p) == partition_of(p, count) for p in probes) else 0

    def beside(self, chain_id: str) -> Callable[[str], bool]:
        """Tell whether an id belongs to the chain's shard; anything does where shards are not known."""
        owning = self.owning
        if owning is None:
            return lambda _id: True
        shard = owning.shard_of(chain_id)
        return lambda candidate: owning.shard_of(candidate) == shard

    async def first_of(self, execution_id: str) -> Envelope | None:
        """Sequence 0 of an execution without its input, None where there is none; remembered (``firsts``)."""
        known = self._firsts.get(execution_id)
        if known is not None:
            return known
        found = await self.events.read(execution_id, 0, 1)
        if not found or found[0].sequence != 0 or found[0].type != Kind.EXECUTION_STARTED:
            return None
        return self._firsts.put(found[0])

    def remember_first(self, started: Envelope) -> None:
        """Keep what verbs need of a first event that this process wrote; it may rest sealed, though it is open here."""
        self._firsts.put(started, sealed=self._seals)

    def erased(self, execution_id: str) -> None:
        """The execution's subject was erased: nothing that this node still holds of it in the clear is used any more."""
        self._firsts.drop(execution_id)
        run = self.runs.get(execution_id)
        if run is not None:
            self.drop(run)

    async def chain_of(self, execution_id: str) -> str | None:
        """Chain of an execution, None where there is none."""
        first = await self.first_of(execution_id)
        return None if first is None else str(first.data.get("chainId") or execution_id)

    async def patiently(self, call: Callable[[], Awaitable[T]], about: str) -> T:
        """Make a store call that may be repeated until it answers, within ``storage_patience_ms``."""
        return await patiently(self, call, about)

    async def call_in_thread(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Call an ordinary function on a thread of the pool; await what it returns if that is to be awaited."""
        context = contextvars.copy_context()
        result = await self.loop.run_in_executor(self._pool, partial(context.run, fn, *args, **kwargs))
        return await result if inspect.isawaitable(result) else result

    # Background work ------------------------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, Any], about: str) -> None:
        """Do something beside; its failure is told, never raised."""
        if self.closed:
            work.close()
            return
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._spawned, about))

    def _spawned(self, about: str, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, StoreError):
            self.signals.repeated_storage_error(error, about)
        elif error is not None:
            self.signals.repeated_error(error, about)

    def later(self, delay_ms: int, call: Callable[[], None]) -> None:
        """Call after a delay of real time."""
        if not self.closed:
            self.loop.call_later(delay_ms / 1000, call)

    async def schedule(self, rows: Sequence[WakeRow]) -> bool:
        """Write wake rows; False, and told, where the store does not take them now."""
        if self.wakes is None:
            return True
        try:
            await self.wakes.schedule(rows)
        except StoreError as error:
            self.signals.repeated_storage_error(error, rows[0].execution_id)
            return False
        for row in rows:
            self.driving.hint(row.wake_at)
        return True

    # Runs -----------------------------------------------------------------------------------------------------------

    def register(self, run: Run) -> None:
        """This process drives the execution now."""
        self.runs[run.id] = run
        self.chains[run.chain_id] = run

    def forget(self, run: Run, *, row_stays: bool = False) -> None:
        """It does so no longer. ``row_stays`` leaves its lease's row to expire: others may do what it could not."""
        if run.lease is not None:
            self.leave(run, row_stays=row_stays)
        if self.runs.get(run.id) is run:
            del self.runs[run.id]
            if run.successor is not None:
                self.starting.discard(run.successor)
            self.parked_runs.pop(run.id, None)
            if self.chains.get(run.chain_id) is run:
                del self.chains[run.chain_id]
            if run.phase is Phase.STOPPED and not self.owns(run.chain_id):
                self.waiters.ended(run.id, MOVED)
            run.detach()

    def unparked(self, run: Run) -> None:
        """A parked run goes on; rows of its answered waits are retired once that is durable."""
        self.parked_runs.pop(run.id, None)

    def parked(self, run: Run) -> None:
        """A park is durable: rows that no wait of it has are retired."""
        self.retire(run, run.waiting.rows - run.timers())
        if run.lease is not None:
            self.leave(run)

    def rests(self, run: Run) -> None:
        """A parked run found nothing to do: it stays in memory among the last ``max_resident``.

        Where another process hears of what wakes it, it has no place here.
        """
        if not run.evictable():
            return
        if run.lease is not None:  # had for a wake that came to nothing
            self.leave(run)
        if not self.owns(run.chain_id):
            self.drop(run)
            return
        self.parked_runs[run.id] = None
        self.parked_runs.move_to_end(run.id)
        if len(self.parked_runs) > self.config.max_resident:
            self.loop.call_soon(self._evict)

    def _evict(self) -> None:
        limit = self.config.max_resident
        while len(self.parked_runs) > limit:
            run = self.runs.get(next(iter(self.parked_runs)))
            if run is None or not run.evictable():
                self.parked_runs.popitem(last=False)
                continue
            self.drop(run)

    def drop(self, run: Run) -> None:
        """Let a run leave memory; its log has everything."""
        run.stop()
        self.forget(run)

    def retire(self, run: Run, instants: set[int]) -> None:
        """Delete wake rows that no wait of the execution has any more."""
        if self.wakes is not None and instants:
            run.waiting.rows -= instants
            self.spawn(self._complete(run.id, instants), run.id)

    async def _complete(self, execution_id: str, instants: set[int]) -> None:
        assert self.wakes is not None
        for instant in instants:
            await self.wakes.complete(execution_id, instant)

    def ended(self, run: Run, kind: str, data: dict[str, Json]) -> None:
        """A terminal event is durable."""
        if run.waiting.met_holds:
            self.spawn(trim_copies(self, run.state), run.id)
        released = None if run.lease is None else self.leave(run)
        self.forget(run)
        if run.waiting.rows:
            self.retire(run, set(run.waiting.rows))
        if kind == Kind.EXECUTION_CONTINUED:
            self.driving.continued(run, data)
        if released is None:
            self.waiters.ended(run.id, Ending(kind, data))
        else:  # whoever acts on the end finds no lease in its way
            released.add_done_callback(lambda _: self.waiters.ended(run.id, Ending(kind, data)))

    def leave(self, run: Run | Claim, *, row_stays: bool = False) -> asyncio.Task[None] | None:
        """A run needs its lease no longer; the task ends once it is given back."""
        return None if self.leasing is None else self.leasing.leave(run, forget=row_stays)

    async def still_fenced(self, execution_id: str) -> bool:
        """Whether this node's run of an execution still holds its fence: then a missing lease row was lost, not taken."""
        run = self.runs.get(execution_id)
        info = await self.events.info(execution_id)
        return run is not None and info is not None and info.fence == run.journal.fence

    def may_wake(self, run: Run) -> bool:
        """Whether a parked run may go on now; if not, it is told to look again once it holds a lease."""
        return self.leasing is None or self.leasing.may_wake(run, run.look)

    def lease_lost(self, run: Run | Claim, reason: str) -> None:
        """Another may drive it from now on: its effects are given up and nothing is appended (superseded, not failed)."""
        if not isinstance(run, Claim) and self.runs.get(run.id) is run:
            self.signals.warn(f"lease lost ({reason}): this node stops the run", run.id)
            self.orphaned(run, LeaseLostError(run.id, reason))
        else:
            run.stop(LeaseLostError(run.id, reason))

    def orphaned(self, run: Run, error: BaseException, *, row_stays: bool = False) -> None:
        """A run was dropped while its execution is this node's to drive: it is looked at again."""
        run.stop(error)
        self.forget(run, row_stays=row_stays)
        self.driving.abandoned(run.id)
        if run.successor is not None:
            self.driving.abandoned(run.successor)  # it may stand all the same

    def trim(self, stream_id: str, before: int) -> None:
        """Delete the consumed prefix of an inbox stream."""
        self.spawn(self.events.truncate(stream_id, before), stream_id)

    def refused(self, execution_id: str, error: LoomError) -> None:
        """Something cannot be opened here: told first and then every 16th; a row is left for a node that can."""
        self.signals.repeated_error(error, execution_id)
        erased = isinstance(error, PayloadShreddedError)
        self.backoff.failed(execution_id, refused=not erased)
        if not erased:  # else it opens nowhere
            self.driving.leave_inbox_row(execution_id, "refusal")

    def held(self, execution_id: str, error: QuarantineHeldError) -> None:
        """Nothing but held topics: told first and then every 16th; the row stays, its polls back off, other topics flow."""
        self.signals.repeated_error(error, execution_id)
        self.backoff.failed(held_back(execution_id))
        self.driving.leave_inbox_row(execution_id, "refusal")

    def broken(self, run: Run, error: LoomError) -> None:
        """The flow cannot go on here (diverged, stuck, sealed): nothing more is appended, the log stays as it is."""
        self.signals.error(error, run.id)
        self.backoff.failed(run.id)
        self.orphaned(run, error, row_stays=True)
        self.waiters.refused(run.id, error)

    def failed(self, run: Run, error: Exception) -> None:
        """Driving failed in a way that nobody foresaw: the run is dropped, and its execution looked at again later."""
        self.signals.repeated_error(error, run.id)
        self.backoff.failed(run.id)
        self.orphaned(run, error, row_stays=True)

    def journal_failed(self, run: Run, error: BaseException) -> None:
        """The journal latched: find out who was first, and stop or go on accordingly."""
        self.driving.journal_failed(run, error)

    def idle(self) -> bool:
        """Whether nothing of this node moves: no background work, no effect, nothing on its way to the log."""
        return not self._tasks and all(run.resting() for run in self.runs.values())

    # End ------------------------------------------------------------------------------------------------------------

    async def drain(self, bound_s: float) -> None:
        """Wait until what was given to journals is durable, at most so long."""
        deadline = self.loop.time() + bound_s
        while any(run.journal.behind and run.journal.failed is None for run in self.runs.values()):
            if self.loop.time() >= deadline:
                return
            await asyncio.sleep(0.005)

    async def stop_runs(self) -> None:
        """Stop every run where it stands; nothing is appended any more."""
        for run in list(self.runs.values()):
            self.drop(run)

    def orphan_all(self) -> None:
        """Stop every run; this node may take them up again if nobody else has."""
        for run in list(self.runs.values()):
            self.orphaned(run, LeaseLostError(run.id, "presence lapsed"))

    def go_on(self) -> None:
        """This node's evidence of life stands again: what was taken up meanwhile has held everything back."""
        for run in list(self.runs.values()):
            run.go_on()

    async def close(self) -> None:
        """Stop every run where it stands and every background task."""
        self.closed = True
        for run in list(self.runs.values()):
            run.stop()
            run.detach()
        self.runs.clear()
        self.chains.clear()
        self.parked_runs.clear()
        self.alarms.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self.waiters.close(StoreError("the runtime was closed; ask another for the result"))


def mode_of(config: Config) -> str:
    """What every reader of a node's rows must know of it."""
    if not config.leases.enabled:
        return UNLEASED
    return CONTINUE if config.leases.on_store_error == "continue" else ""
