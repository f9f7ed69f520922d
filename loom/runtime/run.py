"""One run: a flow machine driven against its log.

Every fact enters one at a time: it gets its place in the journal, the machine applies it, and what the flow decides on
it is journaled before the next enters. So the order live is the order on replay (system.md 0, "Flow context").
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from loom.errors import LoomError
from loom.kernel.commands import (
    Abandon,
    Command,
    Complete,
    ContinueAsNew,
    Fail,
    PublishRecord,
    RecordDecision,
    RunStep,
    SendMessage,
    StartChild,
    Wait,
)
from loom.kernel.inbox import wakes_of
from loom.kernel.machine import FlowMachine, RunInfo
from loom.kernel.state import ExecutionState, fold
from loom.runtime import effects, endings
from loom.runtime.journal import Journal, JournalLatched
from loom.runtime.phase import Phase
from loom.runtime.steps import Steps
from loom.runtime.waiting import Waiting
from loom.schemas.envelope import Envelope, Json, Kind
from loom.stores.rows import REBASABLE_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loom.kernel.flow import FlowDefinition
    from loom.runtime.driver_leases import DriverLease
    from loom.runtime.engine import Engine
    from loom.stores.contracts import Outgoing, StreamAppend, StreamInfo

MAX_UNFOLDED: Final = 256


class Run:
    """Drives one execution on this node, under its fence.

    All methods are called on the runtime's loop. ``phase`` is PARKED from the moment the park is in the journal;
    ``active`` says whether the flow may still go on here.
    """

    __slots__ = (
        "_barrier",
        "_entering",
        "_pumping",
        "_ready",
        "_state",
        "_unfolded",
        "active",
        "chain_id",
        "engine",
        "id",
        "info",
        "journal",
        "lease",
        "loop",
        "machine",
        "pending",
        "phase",
        "steps",
        "successor",
        "waiting",
    )

    def __init__(
        self,
        engine: Engine,
        flow: FlowDefinition[..., Any],
        info: RunInfo,
        state: ExecutionState | None,
        *,
        head: int,
        fence: int = 0,
    ) -> None:
        self.engine = engine
        self.loop = engine.loop
        self.id = info.execution_id
        self.chain_id = info.chain_id
        self.info = info
        self.machine = FlowMachine(flow, info, engine.sources)
        self.journal = Journal(
            engine,
            engine.loop,
            self.id,
            head=head,
            fence=fence,
            on_settled=self._journal_settled,
            on_failed=self._journal_failed,
            gate=self.may_append,
        )
        self.lease: DriverLease | None = None
        self.steps = Steps(self)
        self.waiting = Waiting(self)
        self.phase = Phase.RUNNING
        self.active = True
        self.pending: dict[str, Command] = {}
        self.successor: str | None = None
        self._state = state
        self._unfolded: list[Envelope] = []
        self._ready: list[Callable[[], None]] = []
        self._barrier = False
        self._pumping = False
        self._entering: set[asyncio.Future[bool]] = set()

    def detach(self) -> None:
        """Let go of everything that refers back here, so that a run is freed with its last reference."""
        self.journal.detach()
        self.steps.detach()
        self.waiting.detach()

    # Beginnings -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Run a fresh flow; sequence 0 is durable."""
        self.do(self._start)

    def replay(self, history: Sequence[Envelope]) -> None:
        """Bring the flow to where its log ends; nothing is written, nothing runs before ``take_up``.

        Raises:
            FlowStuckError, SealedPayloadUnreadableError: it cannot go on here.
        """
        commands = self.machine.replay(history)
        if self.state.status == "suspended" and all(isinstance(c, Wait) for c in commands):
            self.phase = Phase.PARKED
            self.waiting.rows.update(wakes_of(self.machine.waiting))
        self._ready.append(lambda: self._execute(commands))

    def take_up(self, fence: int, recovered: Envelope | None = None) -> None:
        """Go on under the fence that was taken; ``recovered`` stands in the log behind what was replayed."""
        self.journal.fence = fence
        if recovered is not None:
            self.note(recovered)
            self.phase = Phase.RUNNING  # also where the log was parked: it parks again
            self.journal.head = self.journal.tail = recovered.sequence
        self.look()

    def _start(self) -> None:
        self._execute(self.machine.start())

    # Entering -------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> ExecutionState:
        """The state folded up to everything given out; folded when it is first asked for."""
        state = self._state
        if state is None:
            state = self._state = ExecutionState(answers=None)
        if self._unfolded:
            for envelope in self._unfolded:
                fold(state, envelope)
            self._unfolded.clear()
        return state

    def may_act(self) -> bool:
        """Whether an effect may start: nothing is known to have failed, and its evidence of life stands."""
        return self.active and self.journal.failed is None and self.may_append()

    def may_append(self) -> bool:
        """Whether it is shown to be alive: its node is, and its lease, if it has one, counts (system.md 6)."""
        lease = self.lease
        return self.engine.live() and (lease is None or lease.valid())

    def drives(self) -> bool:
        """Whether it is at work: such a run holds a lease once it has been for the grace."""
        return self.active and self.phase is Phase.RUNNING

    def gone(self) -> bool:
        """Whether it has ended or was stopped."""
        return self.phase in {Phase.OVER, Phase.STOPPED}

    def do(self, fact: Callable[[], None]) -> None:
        """Let something enter, after what is entering now."""
        self._ready.append(fact)
        if not self._pumping:
            self._pump()

    def first(self, fact: Callable[[], None]) -> None:
        """Let something enter before whatever waits, once the run goes on."""
        self._ready.insert(0, fact)

    def go_on(self) -> None:
        """It may act again: start, send and see what was held back."""
        self.steps.proceed()
        self.journal.flush()
        self.look()

    def look(self) -> None:
        """See whether a wait can be answered now."""
        if self.active and not self._pumping:
            self._pump()

    def enter(
        self,
        kind: str,
        data: dict[str, Json],
        *,
        outgoing: tuple[Outgoing, ...] = (),
        consumed: tuple[tuple[str, int], ...] = (),
        weight: int = 0,
    ) -> None:
        """Give a fact its place, apply it, and do what the flow asks for next. Only called through ``do``."""
        data["at"] = self.engine.now()
        self.apply(self.record(kind, data, outgoing=outgoing, consumed=consumed, weight=weight))

    def apply(self, envelope: Envelope) -> None:
        """Let the flow have an event that has its place, and do what it asks for next."""
        self._execute(self.machine.apply(envelope))

    def entered(self, envelope: Envelope) -> None:
        """Apply an event that has its place already. Only called through ``do`` or ``first``."""
        self.note(envelope)
        self.apply(envelope)

    def record(
        self,
        kind: str,
        data: dict[str, Json],
        *,
        outgoing: tuple[Outgoing, ...] = (),
        consumed: tuple[tuple[str, int], ...] = (),
        companions: tuple[StreamAppend, ...] = (),
        weight: int = 0,
    ) -> Envelope:
        """Journal a fact that the flow does not see; ``companions`` as in ``Journal.push``."""
        envelope = self.journal.push(
            kind,
            data,
            self.engine.stamp,
            outgoing=outgoing,
            consumed=consumed,
            companions=companions,
            weight=weight,
        )
        self.note(envelope)
        return envelope

    def note(self, envelope: Envelope) -> None:
        """Remember an event for the state."""
        self._unfolded.append(envelope)
        if len(self._unfolded) >= MAX_UNFOLDED:
            _ = self.state

    def unpark(self) -> bool:
        """A parked run goes on; whether it was parked."""
        if self.phase is not Phase.PARKED:
            return False
        self.phase = Phase.RUNNING
        self.engine.unparked(self)
        return True

    def hold(self) -> None:
        """Let nothing enter until ``release``: an event is on its way whose fate decides what stands in its place."""
        self._barrier = True

    def release(self) -> None:
        """Go on."""
        self._barrier = False
        if not self._pumping:
            self._pump()

    def _pump(self) -> None:
        self._pumping = True
        try:
            while self.active and not self._barrier:
                if self._ready:
                    self._ready.pop(0)()
                elif not self.waiting.settle():
                    break
        except LoomError as error:
            self._ready.clear()
            self.engine.broken(self, error)
        except Exception as error:  # noqa: BLE001 - one run's fault is not its neighbours'
            self.engine.failed(self, error)
        finally:
            self._pumping = False
            self.journal.flush()

    def _execute(self, commands: list[Command]) -> None:
        for command in commands:
            kind = type(command)
            if kind is RunStep:
                self.steps.ask(command)  # type: ignore[arg-type]
            elif kind is Wait:
                self.waiting.asked(command.site_id)  # type: ignore[union-attr]
            else:
                self._execute_other(command)

    def _execute_other(self, command: Command) -> None:
        if isinstance(command, RecordDecision):
            data = {"siteId": command.site_id, "kind": command.kind, "value": command.value}
            self.record(Kind.DECISION_RECORDED, data)
        elif isinstance(command, Complete | Fail | ContinueAsNew):
            endings.end(self, command)
        elif isinstance(command, Abandon):
            self.waiting.dropped(command.site_id)
            self.pending.pop(command.site_id, None)
            self.steps.abandon(command.site_id)
        elif isinstance(command, StartChild):
            effects.start_child(self, command)
        elif isinstance(command, SendMessage):
            effects.send_message(self, command)
        elif isinstance(command, PublishRecord):
            effects.publish_record(self, command)

    async def perform(self, fact: Callable[[], bool]) -> bool:
        """Let a verb's fact enter and wait until it is durable; False where ``fact`` found nothing to do.

        Raises:
            JournalLatched: the run was stopped first; judge again from the log.
        """
        entered: asyncio.Future[bool] = self.loop.create_future()

        def enter() -> None:
            self._entering.discard(entered)  # it may end the run, and has entered all the same
            if not entered.done():
                entered.set_result(fact())

        self._entering.add(entered)
        self.do(enter)
        try:
            if not self.active and not entered.done():
                raise JournalLatched
            if not await entered:
                return False
        finally:
            self._entering.discard(entered)
        await self.journal.durable()
        return True

    # The journal's answers ------------------------------------------------------------------------------------------

    def _journal_settled(self) -> None:
        if self.active:
            self.steps.proceed()

    def _journal_failed(self, error: BaseException) -> None:
        self.engine.journal_failed(self, error)

    def foreign(self, envelopes: Sequence[Envelope]) -> None:
        """Take events that verbs appended, as far as the run is idle and they follow its head.

        What it cannot take it finds out at its next append.
        """
        for envelope in envelopes:
            answer = envelope.type == Kind.EXECUTION_RESUMED
            follows = envelope.sequence == self.journal.head + 1 and not self.journal.behind
            if envelope.sequence <= self.journal.head:
                continue
            if not (follows and self.active and (answer or envelope.type in REBASABLE_KINDS)):
                return
            self.journal.head = self.journal.tail = envelope.sequence
            self.note(envelope)
            if answer:
                self.waiting.dropped(str(envelope.data.get("siteId")))
                self.unpark()
                self.do(partial(self.apply, envelope))

    @property
    def held(self) -> bool:
        """Whether an event travels alone (``hold``)."""
        return self._barrier

    def resting(self) -> bool:
        """Whether it waits for the world alone: no effect runs, none is asked for, all of it is durable."""
        return not (self._stirs() or self.pending or self.steps.working)

    def _stirs(self) -> bool:
        waiting = self.waiting
        return bool(self.journal.behind or self._ready or waiting.parking or waiting.reading)

    def timers(self) -> set[int]:
        """Instants that the flow's timers wait for now."""
        return set(wakes_of(self.machine.waiting)) if self.active else set()

    def moved(self) -> None:
        """This process no longer hears of the chain's inbox: from now on the run looks for itself, or leaves."""
        if self.active:
            self.waiting.doubt()
        self.look()

    async def rested(self) -> None:
        """Return once everything given out is durable, or the run is no longer this process's."""
        with contextlib.suppress(JournalLatched):
            await self.journal.durable()

    async def is_abreast(self) -> bool:
        """Whether it knows all of its log. If not, another drives it, and rows may be that one's: none of them is void.

        A node whose key store is away hears late of what others wrote, and holds on to its run meanwhile.
        """
        info = await self.engine.events.info(self.id)
        return info is None or not self.is_behind(info)

    def is_behind(self, info: StreamInfo) -> bool:
        """Whether its log goes on beyond all that it knows of and has given out itself."""
        return info.head > self.journal.tail

    def evictable(self) -> bool:
        """Whether the run rests, all of it durable, and may leave memory."""
        return self.phase is Phase.PARKED and not self._stirs()

    def rebase(self, beside: Sequence[Envelope]) -> None:
        """Control records of others stand where our events should: ours go behind them, and nothing else changes."""
        self.state.head += len(beside)
        self.journal.rebase(beside[-1].sequence)
        self.steps.proceed()

    def over(self) -> None:
        """The end is in the journal: nothing more enters."""
        self.phase = Phase.OVER
        self.active = False
        self.quiet()

    def stop(self, error: BaseException | None = None) -> None:
        """Stop here and now: no effect starts, nothing is appended. What ran is given up."""
        if self.phase is not Phase.STOPPED:
            self.phase = Phase.STOPPED
            self.active = False
            self.journal.latch(error or asyncio.CancelledError())
            self.quiet()

    def quiet(self) -> None:
        """Give up effects and alarms, and throw the flow away."""
        self._ready.clear()
        for entered in self._entering:
            if not entered.done():
                entered.set_exception(JournalLatched())
        self.waiting.quiet()
        self.steps.stop()
        self.machine.close()
