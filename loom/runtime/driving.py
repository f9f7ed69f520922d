"""Taking executions up and giving them away: from a log to a run, under a fence (system.md 0, "Fence").

Whoever takes an execution reads it, decides that there is something to do, and takes the fence only if it is still as
read; exactly one of many wins. Per execution, this node does one such thing at a time.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from loom.errors import (
    ExecutionAlreadyExistsError,
    LeaseError,
    LeaseHeldError,
    LeaseLostError,
    LoomError,
    PayloadShreddedError,
    QuarantineHeldError,
    SealedPayloadUnreadableError,
    SealedStreamUnreadableError,
    StaleFenceError,
    UnknownFlowError,
    WrongHeadError,
)
from loom.kernel.inbox import InboxMessage, load_waits, wakes_of
from loom.runtime import facts
from loom.runtime.drivers import driver_of, fence_owner, undriven
from loom.runtime.reading import PAGE, Loaded, Reading
from loom.runtime.run import Run
from loom.runtime.waiters import Ending
from loom.schemas.envelope import TERMINAL_KINDS, Envelope, Json, Kind, NewEvent
from loom.stores.contracts import Observation, StreamAppend, WakeRow
from loom.stores.rows import REBASABLE_KINDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from loom.kernel.state import ExecutionState
    from loom.runtime.claims import Claim
    from loom.runtime.engine import Engine


MAX_AT_ONCE: Final = 64
MAX_TRIES: Final = 4
REFUSALS: Final = (SealedPayloadUnreadableError, SealedStreamUnreadableError, PayloadShreddedError)
INBOX_ROW_AT: Final = 0
"""The fixed instant of inbox and refusal rows: always due (system.md 5)."""


class Driving(Reading):
    """Takes executions up on this node.

    ``hint`` is told of instants at which a wake row falls due, ``abandoned`` of executions that this node drove and
    drives no longer, ``undecided`` of those that it would drive, were it not for another's lease.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        engine.driving = self
        self._locks: dict[str, asyncio.Lock] = {}
        self._again: dict[str, bool] = {}
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)
        self.hint: Callable[[int], None] = lambda _at: None
        self.abandoned: Callable[[str], None] = lambda _execution_id: None
        self.undecided: Callable[[str], None] = lambda _execution_id: None

    # One at a time --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def exclusive(self, execution_id: str) -> AsyncIterator[None]:
        """Be the only one of this node to take up or give away the execution."""
        lock = self._locks.get(execution_id)
        if lock is None:
            lock = self._locks[execution_id] = asyncio.Lock()
        try:
            async with lock:
                yield
        finally:
            if not lock.locked() and not getattr(lock, "_waiters", None):
                self._locks.pop(execution_id, None)

    def wake(self, execution_id: str) -> None:
        """See soon whether a parked execution can go on; calls that come meanwhile are one more look."""
        if execution_id in self._again:
            self._again[execution_id] = True
            return
        self._again[execution_id] = False
        self._engine.spawn(self._wake(execution_id), execution_id)

    async def _wake(self, execution_id: str) -> None:
        try:
            while True:
                self._again[execution_id] = False
                try:
                    async with self._slots:
                        await self.notify(execution_id)
                except REFUSALS:
                    pass  # told, and a row is left; but what came meanwhile may have changed it
                except BaseException:
                    self.leave_inbox_row(execution_id)
                    raise
                if not self._again[execution_id]:
                    return
        finally:
            del self._again[execution_id]

    # Taking up ------------------------------------------------------------------------------------------------------

    async def notify(self, execution_id: str) -> bool:
        """The notify pass: if the parked execution's next wait can be answered, take it and answer.

        Returns whether this node took it, or its own run was told to look. Losing to another node is no error.

        Raises:
            SealedPayloadUnreadableError: the next message cannot be opened here; nothing was taken or appended.
            SealedStreamUnreadableError, PayloadShreddedError: its log cannot; likewise.
        """
        engine = self._engine
        for _ in range(MAX_TRIES):
            async with self.exclusive(execution_id):
                run = engine.runs.get(execution_id)
                if run is not None and run.active:
                    run.look()
                    return True
                loaded = None
                try:
                    loaded = await self.load(execution_id)
                    if loaded is None or loaded.state.status != "suspended":
                        return False
                    unread = await self.answerable(loaded.state)
                    if unread is None:
                        return False
                    taken = await self.take(loaded, unread=unread) is not None
                except QuarantineHeldError as error:
                    engine.held(execution_id, error)
                    raise
                except REFUSALS as error:
                    if await self.moved(loaded):  # say, what could not be opened was held meanwhile
                        continue
                    engine.refused(execution_id, error)
                    raise
                except WrongHeadError:
                    continue
                if not taken:  # it cannot go on here now; later, or elsewhere, it may
                    self.leave_inbox_row(execution_id)
                return taken
        self.leave_inbox_row(execution_id)
        return False

    async def take(
        self,
        loaded: Loaded,
        *,
        workflow: str | None = None,
        unread: dict[str, list[InboxMessage]] | None = None,
    ) -> Run | None:
        """Take an execution up as it was read: replay it, take its fence, drive it. Called under ``exclusive``.

        Returns None, with nothing written, where its flow is not known here or cannot go on.

        Raises:
            WrongHeadError: it is no longer as read: another was first.
        """
        engine = self._engine
        run = self.prepare(loaded, workflow)
        if run is None:
            return None
        stolen = False
        if engine.leasing is not None and not _is_fresh(loaded):
            stolen = loaded.state.status == "suspended"  # the fence will prove that nobody drives it
            if not await self._enter(run, stands_down=not stolen):
                return None
        try:
            fence = await self._fence(run, loaded.observation)
        except WrongHeadError:
            raise
        except BaseException:
            self.abandoned(run.id)  # the fence may be ours
            raise
        if stolen and run.lease is None and engine.leasing is not None:
            await engine.leasing.steal(run)
        for topic, messages in (unread or {}).items():
            run.waiting.feeds.seed(topic, messages)
        return self._adopt(run, fence)

    def prepare(self, loaded: Loaded, workflow: str | None = None) -> Run | None:
        """Replay an execution; None, and told, where it cannot go on here. Readability is judged before any fence."""
        engine, state = self._engine, loaded.state
        if not engine.live() or engine.backoff.blocked(state.execution_id):
            return None
        name = workflow or workflow_of(loaded.history, state)
        try:
            flow = engine.flows.get(name)
            info = facts.info_of(state, workflow=name)
            run = Run(engine, flow, info, state, head=state.head)
            if state.held_once:
                _ = run.waiting.holds
            run.replay(loaded.history)
        except REFUSALS as error:
            self._refused(state.execution_id, error)
            return None
        except LoomError as error:
            engine.backoff.failed(state.execution_id)
            engine.signals.repeated_error(error, state.execution_id)
            if not isinstance(error, UnknownFlowError):
                engine.waiters.refused(state.execution_id, error)
            return None
        return run

    async def _enter(self, run: Run, *, stands_down: bool = True, insists: bool = False) -> bool:
        """Lease before fence: a live driver of another node is stood down on, no fence is taken (D11, 1)."""
        engine = self._engine
        assert engine.leasing is not None
        try:
            await engine.leasing.enter(run)
        except LeaseError as error:
            if isinstance(error, LeaseHeldError) and not stands_down:
                return True
            run.stop()
            if insists:
                raise
            self.undecided(run.id)
            return False
        return True

    async def _fence(self, run: Run, seen: Observation, *, claimed: bool = False) -> int:
        engine = self._engine
        owner = fence_owner(engine.node, seen.head, engine.event_id())
        try:
            return await engine.patiently(lambda: engine.events.acquire_fence_if(run.id, seen, owner), run.id)
        except BaseException:
            run.stop()
            engine.leave(run, row_stays=claimed)
            raise

    def _adopt(self, run: Run, fence: int, recovered: Envelope | None = None) -> Run | None:
        engine = self._engine
        if (older := engine.runs.get(run.id)) is not None:  # its fence is stale by now
            engine.drop(older)
        if run.gone():  # its lease was lost on the way to the fence, which is ours: nobody else will drive it
            self.abandoned(run.id)
            return None
        engine.register(run)
        engine.backoff.cleared(run.id)
        run.take_up(fence, recovered)
        return run

    def begin(self, started: Envelope, claim: Claim | None = None) -> Run | None:
        """Drive a fresh execution whose first event this node has just appended, under its first fence."""
        engine = self._engine
        info = facts.info_of_start(started)
        try:
            flow = engine.flows.get(info.workflow)
        except UnknownFlowError as error:
            engine.signals.repeated_error(error, info.execution_id)
            return None
        if claim is not None and claim.lost:
            return self.abandoned(info.execution_id)  # it stands all the same
        run = Run(engine, flow, info, None, head=0, fence=facts.FIRST_FENCE)
        run.note(started)
        if claim is not None and engine.leasing is not None:
            engine.leasing.hand_over(claim, run)
        if info.continued_from is not None and run.state.held_once:
            _ = run.waiting.holds
        engine.register(run)
        engine.remember_first(started)  # its first verb need not read
        run.begin()
        return run

    async def explain(self, execution_id: str) -> None:
        """Tell operators, and whoever waits for its end here, why a log cannot be read on this node, if it cannot."""
        try:
            loaded = await self.load(execution_id)
        except REFUSALS as error:
            self._refused(execution_id, error)
            return
        if loaded is not None:
            self.tell_end(execution_id, loaded.history)

    def _refused(self, execution_id: str, error: LoomError) -> None:
        self._engine.refused(execution_id, error)
        self._engine.waiters.refused(execution_id, error)

    async def drive_fresh(self, execution_id: str) -> bool:
        """Take up an execution that nobody drives yet: started, or answered, by a verb."""
        engine = self._engine
        async with self._slots, self.exclusive(execution_id):
            if execution_id in engine.runs or execution_id in engine.starting:
                return False
            info = await engine.events.info(execution_id)
            try:
                loaded = await self.load(execution_id)
            except REFUSALS as error:
                self._refused(execution_id, error)
                return False
            if info is None or loaded is None or info.fence != loaded.observation.fence:
                return False  # somebody took it between the two reads
            if not undriven(loaded.history, driver_of(info)):
                return False
            try:
                return await self.take(loaded) is not None
            except WrongHeadError:
                return False

    async def recover(
        self,
        loaded: Loaded,
        reason: str,
        evidence: str,
        *,
        previous: str | None = None,
        by: str | None = None,
        workflow: str | None = None,
        insists: bool = False,
    ) -> Run | None:
        """Take over an execution whose driver is gone: replay, lease, a conditional EXECUTION_RECOVERED, then the fence.

        Called under ``exclusive``. Returns None where another was first, or the flow cannot go on here.

        Raises:
            LeaseHeldError, LeaseStoreTimeoutError: another driver lives, or nobody can say; only told if ``insists``.
        """
        engine, seen = self._engine, loaded.observation
        run = self.prepare(loaded, workflow)
        if run is None or (engine.leasing is not None and not await self._enter(run, insists=insists)):
            return None
        known: dict[str, Json] = {
            "reason": reason,
            "evidence": evidence,
            "previousNode": previous,
            "by": by,
            "workflow": workflow,
        }
        data = {name: value for name, value in known.items() if value is not None}
        # It names this node: whoever else hears of it leaves the execution to us.
        metadata = facts.stamp(by) | {"node": engine.node}
        event = NewEvent(engine.event_id(), Kind.EXECUTION_RECOVERED, data, metadata)
        append = StreamAppend(run.id, (event,), observation=seen)
        claimed = False
        try:
            done = await engine.patiently(lambda: engine.events.append(append), run.id)
            claimed = True
            fence = await self._fence(run, Observation(done.head, seen.fence, seen.anchor), claimed=True)
        except (WrongHeadError, StaleFenceError):
            run.stop()
            engine.leave(run, row_stays=claimed)
            return None
        except BaseException:
            run.stop()
            engine.leave(run, row_stays=claimed)
            self.abandoned(run.id)  # the fence may be ours
            raise
        recovered = Envelope(event.id, run.id, done.head, event.type, done.timestamp, data, event.metadata)
        return self._adopt(run, fence, recovered)

    def continued(self, run: Run, data: dict[str, Any]) -> None:
        """A run of this node continued as new: its successor stands, under its first fence."""
        engine = self._engine
        event, claim = data.pop("event"), data.pop("claim")
        successor, at = str(data["successorId"]), run.journal.companions[-1].timestamp
        started = Envelope(event.id, successor, 0, event.type, at, event.data, event.metadata)
        if engine.live() and engine.owns(run.chain_id):
            self.begin(started, claim)
        elif claim is not None:
            engine.leave(claim)  # the owner drives it

    # Losing ---------------------------------------------------------------------------------------------------------

    def journal_failed(self, run: Run, error: BaseException) -> None:
        """Somebody else appended, or the store gave up: find out which, and act."""
        engine = self._engine
        if isinstance(error, LeaseLostError):
            engine.lease_lost(run, error.reason)
            return
        if isinstance(error, WrongHeadError | StaleFenceError):
            engine.spawn(self._conflict(run), run.id)
            return
        if isinstance(error, ExecutionAlreadyExistsError):
            engine.signals.error(error, run.id)
        else:
            engine.signals.storage_error(error, run.id)
        engine.orphaned(run, error)

    async def _conflict(self, run: Run) -> None:
        engine = self._engine
        async with self.exclusive(run.id):
            info = await engine.patiently(lambda: engine.events.info(run.id), run.id)
            try:
                tail = await engine.patiently(
                    lambda: engine.events.read(run.id, run.journal.head + 1, PAGE), run.id
                )
            except REFUSALS as error:
                if engine.leasing is not None:
                    engine.leasing.give_up(run)
                engine.drop(run)
                self._refused(run.id, error)
                return
            if engine.runs.get(run.id) is not run:
                return
            ours = info is not None and info.fence == run.journal.fence
            erased = any(e.type == Kind.PAYLOAD_SHREDDED for e in tail)
            if ours and tail and not erased and not run.held and all(e.type in REBASABLE_KINDS for e in tail):
                run.rebase(tail)
                return
            engine.drop(run)
            self.tell_end(run.id, tail)
            if erased:
                engine.erased(run.id)
            elif info is not None and not ended(tail) and ours:
                # The log went on without this run, and nobody else has the execution: take it up as it stands.
                loaded = await self.load(run.id)
                if loaded is not None and not loaded.state.finished:
                    await self.take(loaded)
            elif not ended(tail) and engine.owns(run.chain_id):
                self.wake(run.id)  # whoever has it may have parked it, and is not told of messages here

    def tell_end(self, execution_id: str, envelopes: Sequence[Envelope]) -> None:
        """Tell whoever waits here, if these events end the execution."""
        for envelope in envelopes:
            if envelope.type in TERMINAL_KINDS:
                self._engine.waiters.ended(execution_id, Ending(envelope.type, envelope.data))

    def leave_inbox_row(self, execution_id: str, kind: str = "inbox") -> None:
        """Leave a row: for the shard's owner to look again, or (``refusal``) for any node (system.md 0, lost wake-ups)."""
        self._engine.spawn(self._leave_row(WakeRow(execution_id, INBOX_ROW_AT, kind)), execution_id)

    async def _leave_row(self, row: WakeRow) -> None:
        if self._engine.wakes is None or not await self._engine.schedule([row]):
            self.undecided(row.execution_id)  # no row will tell anybody: this node looks again by itself

    def timers_of(self, state: ExecutionState) -> tuple[int, ...]:
        """Instants for which a parked execution needs a wake row."""
        return wakes_of(load_waits(state.waits)) if state.status == "suspended" else ()


def _is_fresh(loaded: Loaded) -> bool:
    """Whether nobody can have left a lease: a start by a verb, that no driver has touched, of no predecessor."""
    first = loaded.history[0]
    return (
        len(loaded.history) == 1
        and loaded.observation.fence == facts.FIRST_FENCE
        and "node" not in first.metadata
        and "continuedFrom" not in first.data
    )


def ended(envelopes: Sequence[Envelope]) -> bool:
    """Whether one of these events ends the execution."""
    return any(e.type in TERMINAL_KINDS for e in envelopes)


def workflow_of(history: Sequence[Envelope], state: ExecutionState) -> str:
    """The flow that drives it: that of its start, or the one an operator resumed it as."""
    for envelope in reversed(history):
        if envelope.type == Kind.EXECUTION_RECOVERED and isinstance(envelope.data.get("workflow"), str):
            return str(envelope.data["workflow"])
    return state.workflow
