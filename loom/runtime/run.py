"""One run: a flow machine driven against its log.

Every fact enters one at a time: it gets its place in the journal, the machine applies it, and what the flow decides on
it is journaled before the next enters. So the order live is the order on replay (system.md 0, "Flow context").
"""

from __future__ import annotations

import asyncio
import contextlib
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from loom.errors import LoomError, PayloadShreddedError, SealedPayloadUnreadableError
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
from loom.kernel.inbox import InboxMessage, Plan, dump_waits, find_gate, next_delivery, topics_of, wakes_of
from loom.kernel.machine import FlowMachine, RunInfo
from loom.kernel.state import ExecutionState, fold
from loom.runtime import effects, endings
from loom.runtime.feeds import Feeds
from loom.runtime.journal import Journal, JournalLatched
from loom.runtime.steps import Steps
from loom.schemas.envelope import Envelope, Json, Kind
from loom.stores.contracts import Outgoing, WakeRow
from loom.stores.rows import SIDE_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loom.kernel.flow import FlowDefinition
    from loom.runtime.alarms import Alarm
    from loom.runtime.engine import Engine

MAX_UNFOLDED: Final = 256
ELSEWHERE_POLL_MS: Final = 250
"""How often a live wait looks into an inbox that another process writes."""


class Phase(Enum):
    """Where a run stands."""

    RUNNING = "running"
    PARKED = "parked"
    OVER = "over"
    STOPPED = "stopped"


class Run:
    """Drives one execution on this node, under its fence.

    All methods are called on the runtime's loop. ``phase`` is PARKED from the moment the park is in the journal;
    ``active`` says whether the flow may still go on here.
    """

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
        )
        self.steps = Steps(self)
        self._feeds: Feeds | None = None
        self.phase = Phase.RUNNING
        self.active = True
        self.pending: dict[str, Command] = {}
        self.rows: set[int] = set()
        self._state = state
        self._unfolded: list[Envelope] = []
        self._ready: list[Callable[[], None]] = []
        self._barrier = False
        self._pumping = False
        self._wait_sites: set[str] = set()
        self._entering: set[asyncio.Future[bool]] = set()
        self._alarm: Alarm | None = None
        self._parking = False
        self._refused = False

    @property
    def feeds(self) -> Feeds:
        """What is known of the chain's inbox."""
        if self._feeds is None:
            self._feeds = Feeds(self)
        return self._feeds

    def detach(self) -> None:
        """Let go of everything that refers back here, so that a run is freed with its last reference."""
        self.journal.detach()
        self.steps.detach()
        if self._feeds is not None:
            self._feeds.detach()

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
            self.rows.update(wakes_of(self.machine.waiting))
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
        """Whether an effect may start: nothing is known to have failed, and this node's evidence of life stands."""
        return self.active and self.journal.failed is None and self.engine.live()

    def do(self, fact: Callable[[], None]) -> None:
        """Let something enter, after what is entering now."""
        self._ready.append(fact)
        if not self._pumping:
            self._pump()

    def first(self, fact: Callable[[], None]) -> None:
        """Let something enter before whatever waits, once the run goes on."""
        self._ready.insert(0, fact)

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
        envelope = self.record(kind, data, outgoing=outgoing, consumed=consumed, weight=weight)
        self._execute(self.machine.apply(envelope))

    def entered(self, envelope: Envelope) -> None:
        """Apply an event that has its place already. Only called through ``do`` or ``first``."""
        self.note(envelope)
        self._execute(self.machine.apply(envelope))

    def record(
        self,
        kind: str,
        data: dict[str, Json],
        *,
        outgoing: tuple[Outgoing, ...] = (),
        consumed: tuple[tuple[str, int], ...] = (),
        weight: int = 0,
    ) -> Envelope:
        """Journal a fact that the flow does not see."""
        envelope = self.journal.push(
            kind, data, self.engine.stamp, outgoing=outgoing, consumed=consumed, weight=weight
        )
        self.note(envelope)
        return envelope

    def note(self, envelope: Envelope) -> None:
        """Remember an event for the state."""
        self._unfolded.append(envelope)
        if len(self._unfolded) >= MAX_UNFOLDED:
            _ = self.state

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
                elif not self._settle():
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
                self._wait_sites.add(command.site_id)  # type: ignore[union-attr]
            else:
                self._execute_other(command)

    def _execute_other(self, command: Command) -> None:
        if isinstance(command, RecordDecision):
            data = {"siteId": command.site_id, "kind": command.kind, "value": command.value}
            self.record(Kind.DECISION_RECORDED, data)
        elif isinstance(command, Complete | Fail | ContinueAsNew):
            endings.end(self, command)
        elif isinstance(command, Abandon):
            self._wait_sites.discard(command.site_id)
            self.pending.pop(command.site_id, None)
            self.steps.abandon(command.site_id)
        elif isinstance(command, StartChild):
            effects.start_child(self, command)
        elif isinstance(command, SendMessage):
            effects.send_message(self, command)
        elif isinstance(command, PublishRecord):
            effects.publish_record(self, command)

    # Waits ----------------------------------------------------------------------------------------------------------

    def _settle(self) -> bool:
        """Answer the first wait that can be answered; False where nothing can, and the run rests or parks."""
        if not self._wait_sites:
            self._rest(())
            return False
        waits = self.machine.waiting
        if len(waits) != len(self._wait_sites):
            self._wait_sites = {wait.site_id for wait in waits}
        topics = topics_of(waits)
        if topics and not self.feeds.ready(topics):
            return False
        try:
            plan = next_delivery(
                self.state,
                waits,
                self.feeds.unread,
                now_ms=self.engine.now(),
                ttl_ms=self.engine.config.inbox_message_ttl_ms,
                erased=self.info.erased,
            )
        except (SealedPayloadUnreadableError, PayloadShreddedError) as error:
            self._refuse(error, waits)
            return False
        if plan.delivery is None and not plan.disposals:
            self._rest(waits)
            return False
        self._deliver(plan)
        return True

    def _deliver(self, plan: Plan) -> None:
        for disposal in plan.disposals:
            passed = disposal.message
            self.record(
                Kind.MESSAGE_CONSUMED, disposal.data(), consumed=((passed.stream_id, passed.sequence),)
            )
            self._trim(passed)
        delivery = plan.delivery
        if delivery is None:
            return
        self._wait_sites.discard(delivery.site_id)
        at = self.engine.now()
        parked = self._unpark()
        resumed = delivery.resumed_data() | {"at": at}
        message = delivery.message
        if message is None:
            envelope = self.record(Kind.EXECUTION_RESUMED, resumed)
        else:
            envelope = self.record(
                Kind.MESSAGE_CONSUMED,
                delivery.consumed_data() | {"at": at},
                consumed=((message.stream_id, message.sequence),),
            )
            if parked:
                self.record(Kind.EXECUTION_RESUMED, resumed)
            self._trim(message)
        if parked:
            self.steps.hold_until(self.journal.position)
        self._execute(self.machine.apply(envelope))

    def _unpark(self) -> bool:
        if self.phase is not Phase.PARKED:
            return False
        self.phase = Phase.RUNNING
        self.engine.unparked(self)
        return True

    def _trim(self, message: InboxMessage) -> None:
        before = self.feeds.disposed(message)
        if before is not None:
            self.journal.when_durable(lambda: self.engine.trim(message.stream_id, before))

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

    def answer_gate(self, gate: str, answer: Json, by: str | None) -> bool:
        """Answer the first wait at a gate; False where the flow does not wait there. Only called in ``perform``."""
        found = find_gate(self.machine.waiting, gate)
        if found is None:
            return False
        site_id, arm = found
        data: dict[str, Json] = {"siteId": site_id, "arm": arm, "kind": "gate", "answer": answer}
        if by is not None:
            data["by"] = by
        self._wait_sites.discard(site_id)
        if self._unpark():
            self.steps.hold_until(self.journal.position + 1)
        self.enter(Kind.EXECUTION_RESUMED, data)
        return True

    # Rest and park --------------------------------------------------------------------------------------------------

    def _rest(self, waits: tuple[Wait, ...]) -> None:
        """Nothing can be answered now: wait for effects, or park."""
        if self.phase is Phase.PARKED:
            self.engine.rests(self)
        if self.phase is not Phase.RUNNING or self._parking:
            return
        if self.steps.busy or self.pending:
            if waits:
                self._watch(waits)
            return
        wakes = [at for at in wakes_of(waits) if at not in self.rows]
        if not wakes or self.engine.wakes is None:
            self._park(waits)
            return
        # An alarm that nobody knows of would be lost with this process: the row comes before the park.
        self._parking = True
        self._watch(waits)
        self.engine.spawn(self._schedule(wakes), self.id)

    async def _schedule(self, wakes: list[int]) -> None:
        try:
            stored = await self.engine.schedule([WakeRow(self.id, at, "timer") for at in wakes])
        finally:
            self._parking = False
        if stored:
            self.rows.update(wakes)
            self.look()
        else:
            self.engine.later(self.engine.retry_ms, self.look)

    def _park(self, waits: tuple[Wait, ...]) -> None:
        if self.machine.is_done:
            return
        if not waits:
            self.engine.signals.warn("the flow waits for nothing that can happen; cancel it", self.id)
        self.phase = Phase.PARKED
        self._clear_alarm()
        self.record(Kind.EXECUTION_SUSPENDED, {"waits": dump_waits(waits)})
        self.journal.when_durable(self._parked)

    def _parked(self) -> None:
        """The park is durable: read the inbox again (system.md 0, lost wake-ups), then rest in memory or leave it."""
        if self.phase is not Phase.PARKED:
            return
        if self._feeds is not None:
            self._feeds.doubt()
        self.engine.parked(self)
        self.look()

    def _watch(self, waits: tuple[Wait, ...]) -> None:
        """While branches run: an alarm for the earliest timer, and a look into an inbox that is not ours."""
        due = min(wakes_of(waits), default=None)
        if topics_of(waits) and not self.engine.owns(self.chain_id):
            poll = self.engine.now() + ELSEWHERE_POLL_MS
            due = poll if due is None else min(due, poll)
        if due is None or (self._alarm is not None and self._alarm.callback and self._alarm.due <= due):
            return
        self._clear_alarm()
        self._alarm = self.engine.alarms.at(due, self._alarmed)

    def moved(self) -> None:
        """This process no longer hears of the chain's inbox: from now on the run looks for itself, or leaves."""
        if self.active and self._feeds is not None:
            self._feeds.doubt()
        self.look()

    def _alarmed(self) -> None:
        self._alarm = None
        if not self.engine.owns(self.chain_id):
            self.feeds.doubt()
        self.look()

    def _clear_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _refuse(self, error: LoomError, waits: tuple[Wait, ...]) -> None:
        """A message that this node cannot open: nothing is appended for it; the flow parks, the row stays."""
        self.engine.refused(self.id, error)
        self.feeds.forget()  # next time it is read anew: the key may have come
        if self.phase is Phase.RUNNING and not self._refused:
            self._refused = True
            self._rest(waits)

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
            if not (follows and self.active and (answer or envelope.type in SIDE_KINDS)):
                return
            self.journal.head = self.journal.tail = envelope.sequence
            self.note(envelope)
            if answer:
                self._wait_sites.discard(str(envelope.data.get("siteId")))
                self._unpark()
                self.do(partial(self._apply, envelope))

    def _apply(self, envelope: Envelope) -> None:
        self._execute(self.machine.apply(envelope))

    @property
    def held(self) -> bool:
        """Whether an event travels alone (``hold``)."""
        return self._barrier

    def resting(self) -> bool:
        """Whether it waits for the world alone: no effect runs, none is asked for, all of it is durable."""
        busy = self.journal.behind or self._ready or self._parking or self.pending
        return not (busy or self._reading() or self.steps.working)

    def _reading(self) -> bool:
        return self._feeds is not None and self._feeds.reading

    def timers(self) -> set[int]:
        """Instants that the flow's timers wait for now."""
        return set(wakes_of(self.machine.waiting)) if self.active else set()

    async def rested(self) -> None:
        """Return once everything given out is durable, or the run is no longer this process's."""
        with contextlib.suppress(JournalLatched):
            await self.journal.durable()

    def evictable(self) -> bool:
        """Whether the run rests, all of it durable, and may leave memory."""
        idle = not (self.journal.behind or self._ready or self._parking or self._reading())
        return self.phase is Phase.PARKED and idle

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
        self._clear_alarm()
        self.steps.stop()
        self.machine.close()
