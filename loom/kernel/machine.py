"""The flow machine: events in, commands out.

A driver starts it, or replays a history into it, and then applies one event at a time, in log order; the flow runs
until quiet before the next, live and on replay alike (system.md 0, "Flow context"). The machine draws decisions from
injected sources, does no I/O and reads no clock.

The driver's part of the bargain: for each event, put it in the journal's queue, ``apply`` it, and queue what the
returned commands journal, before the next event. So the decisions that an event led to stand behind it in the log,
ahead of any other result, and replay knows them before it applies that event.
"""

from __future__ import annotations

import asyncio
from asyncio import events
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from loom.errors import (
    FlowDivergedError,
    FlowStuckError,
    FlowSuspended,
    InvalidInputError,
    NotDeterministicError,
    StepFailedError,
)
from loom.kernel import asks
from loom.kernel.asks import Answer, Ask, Effect
from loom.kernel.commands import (
    Abandon,
    Arm,
    Command,
    Complete,
    Fail,
    RecordDecision,
    RunStep,
    StartChild,
    Wait,
)
from loom.kernel.context import Context
from loom.kernel.flow import FlowDefinition
from loom.kernel.guard import assert_deliverable
from loom.kernel.loop import FlowLoop, FlowTimer, Scope
from loom.schemas.envelope import Envelope, Json, Kind

MAX_ERROR_CHARS: Final = 2_000
"""How much of an error's text a log keeps."""

_MAX_GROUPED: Final = 8


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a run knows of itself before its first event.

    ``input`` is recorded JSON. ``started_at`` is the timestamp of sequence 0, in milliseconds, and the first logical
    time. ``erased`` names the subject if the log holds a tombstone for it.
    """

    execution_id: str
    chain_id: str
    workflow: str
    input: Json
    started_at: int
    subject: str | None = None
    principal: Mapping[str, Json] | None = None
    parent: Mapping[str, Json] | None = None
    continued_from: str | None = None
    erased: str | None = None


@dataclass(frozen=True, slots=True)
class DecisionSources:
    """Where decisions are drawn that the log then keeps."""

    now_ms: Callable[[], int]
    random: Callable[[], float]
    uuid: Callable[[], str]


class FlowMachine:
    """One run of one flow. Not thread-safe: one driver, one thread at a time."""

    def __init__(self, flow: FlowDefinition[..., Any], info: RunInfo, sources: DecisionSources) -> None:
        self.flow = flow
        self.info = info
        self.sources = sources
        self.loop = FlowLoop(self)
        self.loop.now_ms = info.started_at
        self.child_ends: dict[str, Json] = {}
        self._root: asyncio.Task[Any] | None = None
        self._open: dict[str, Ask] = {}
        self._abandoned: dict[str, Effect] = {}
        self._out: list[Command] = []
        self._dropped: set[str] = set()
        self._order = 0
        self._turn = 0
        self._outcome: Command | None = None
        self._latched: BaseException | None = None
        self._applied = 0
        self._ended_in_log = False
        # Replay: the event held back, the one after it, decisions recorded and not yet asked for, and those drawn new.
        self._held: Envelope | None = None
        self._next: Envelope | None = None
        self._replaying = False
        self._recorded: dict[str, Envelope] = {}
        self._drawn: list[tuple[int, RecordDecision]] = []
        self._patches: dict[str, bool] = {}

    # The driver's face --------------------------------------------------------------------------------------------

    def start(self) -> list[Command]:
        """Run a fresh flow until quiet; return what it asks for."""
        if self._latched is not None or self._root is not None:
            return []
        self._begin()
        return self._take()

    def apply(self, envelope: Envelope) -> list[Command]:
        """Let one event enter, run until quiet, and return the new commands.

        Raises:
            FlowDivergedError: the code did not ask for this. Latches the machine.
            FlowStuckError: the flow does not come to rest. Latches the machine.
            SealedPayloadUnreadableError: the event holds a payload that this node cannot open. Latches the machine.
        """
        if self._latched is not None or not asks.enters(envelope):
            return []
        self._enter(envelope)
        return self._take()

    def replay(self, envelopes: Iterable[Envelope], *, more: bool = False) -> list[Command]:
        """Feed history, in batches of any size; ``more`` says that another batch follows.

        An event is held back until the next result is seen, so that the decisions behind it are known. With
        ``more=False`` all of it is applied and the commands still outstanding are returned: those whose answer is not
        in the log, in the order in which the code asked.

        Raises:
            FlowDivergedError: at the first event that the code did not ask for. Latches the machine.
            FlowStuckError, SealedPayloadUnreadableError: as ``apply``.
        """
        if self._latched is not None:
            return []
        self._replaying = True
        for envelope in envelopes:
            if envelope.type == Kind.DECISION_RECORDED:
                self._note_decision(envelope)
            elif asks.enters(envelope):
                self._next = envelope
                self._release()
                self._held = envelope
        if more:
            return []
        self._next = None
        self._replaying = self._held is not None and asks.is_ending(self._held)
        self._drawn = []
        self._release()
        self._held = None
        self._replaying = False
        self._out.clear()
        self._dropped.clear()
        return self._outstanding()

    def latch(self, error: BaseException) -> None:
        """Let no command out any more, whatever the flow does (system.md 1.4); the first error stays."""
        if self._latched is None:
            self._latched = error
            self._out.clear()

    def close(self) -> None:
        """Throw the run away: close every task, free everything; idempotent."""
        if self._latched is None:
            self._latched = FlowSuspended("the run is closed")
        self.loop.close()
        self._open.clear()
        self._abandoned.clear()
        self._recorded.clear()
        self._out.clear()
        self._root = None

    @property
    def waiting(self) -> tuple[Wait, ...]:
        """Open waits in park order."""
        return tuple(a.command for a in self._open.values() if isinstance(a.command, Wait))

    @property
    def running_sites(self) -> tuple[str, ...]:
        """Sites of open steps and other effects, in the order asked."""
        return tuple(site for site, a in self._open.items() if not isinstance(a.command, Wait))

    @property
    def is_done(self) -> bool:
        """Whether the flow has come to its end."""
        return self._outcome is not None

    @property
    def outcome(self) -> Command | None:
        """``Complete``, ``Fail`` or ``ContinueAsNew`` once the flow has ended."""
        return self._outcome

    @property
    def latched(self) -> BaseException | None:
        """The error that latched the machine."""
        return self._latched

    @property
    def is_replaying(self) -> bool:
        """Whether history is being fed of which more is known to follow."""
        return self._replaying

    @property
    def history_length(self) -> int:
        """Results and decisions so far: the same live and on replay."""
        return self._applied

    @property
    def logical_ms(self) -> int:
        """Logical time: the timestamp of the last event that entered."""
        return self.loop.now_ms

    @property
    def complaints(self) -> tuple[str, ...]:
        """What asyncio would have logged (a task's error that nobody looked at); at most 16, the last ones."""
        return tuple(self.loop.complaints)

    # The context's face -------------------------------------------------------------------------------------------

    def next_site(self) -> str:
        """Id of the call that the running task makes.

        Raises:
            FlowSuspended: the run is over or refused.
            NotDeterministicError: the call comes from outside the flow, a step for instance.
        """
        self.check_inside()
        return self.loop.scope.next_site()

    def check_inside(self) -> None:
        """Raise unless the flow itself is running now, and may go on."""
        if events._get_running_loop() is not self.loop:  # noqa: SLF001 - thread-local, so also right in threads
            raise NotDeterministicError("using the context outside its flow")
        if self._latched is not None or self._outcome is not None:
            raise FlowSuspended("this run is over: never catch FlowSuspended")

    def ask(self, command: Effect) -> asyncio.Future[Any]:
        """Emit a command and return the future that its answer resolves."""
        future: asyncio.Future[Any] = asyncio.Future(loop=self.loop)
        self._emit(command, future)
        return future

    def abandon(self, site_id: str) -> None:
        """The task that asked was cancelled: take the command back."""
        ask = self._open.pop(site_id, None)
        if ask is None:
            return
        self._abandoned[site_id] = ask.command
        if ask.turn == self._turn:
            self._dropped.add(site_id)
        else:
            self._out.append(Abandon(site_id))

    def decide(self, kind: str, draw: Callable[[], Json]) -> Json:
        """A decision: as recorded, else drawn now and recorded."""
        site = self.next_site()
        known = self._recorded.pop(site, None)
        if known is not None:
            if known.data.get("kind") != kind:
                self._diverge(known, f"decision {kind!r} at {site}")
            self._applied += 1
            return known.data.get("value")
        if self._next is not None:
            self._diverge(self._next, f"decision {kind!r} at {site}")
        return self._draw(RecordDecision(site, kind, draw()))

    def patched(self, patch_id: str) -> bool:
        """Whether changed code takes its new way: recorded at the first call of a run that was not past it yet."""
        self.check_inside()
        on = self._patches.get(patch_id)
        if on is None:
            site = f"patched:{patch_id}"
            if self._recorded.pop(site, None) is not None:
                self._applied += 1
                on = True
            elif self._next is not None:
                on = False  # the log went on from here without the mark: the old code wrote it
            else:
                on = bool(self._draw(RecordDecision(site, "patched", True)))
            self._patches[patch_id] = on
        return on

    def end(self, outcome: Command) -> None:
        """The flow has come to its end; the first outcome stands."""
        if self._outcome is None and self._latched is None:
            self._outcome = outcome
            self._out.append(outcome)

    # The loop's face: durable timers ------------------------------------------------------------------------------

    def timer_asked(self, scope: Scope, handle: FlowTimer) -> None:
        """A timer of asyncio becomes a wait at a site of its own."""
        self.check_inside()
        handle.site_id = scope.next_site()
        wake_at = round(handle.when() * 1000)
        self._emit(Wait(handle.site_id, (Arm("timer", wake_at=wake_at),)), handle)

    def timer_dropped(self, handle: FlowTimer) -> None:
        """The flow cancelled it, or it fired already."""
        if self._latched is None:
            self.abandon(handle.site_id)

    # Inside -------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        try:
            args = (self.flow.parse_input(self.info.input),) if self.flow.takes_input else ()
        except InvalidInputError as error:
            self.end(_failure(error))
            return
        coro = self.flow.fn(Context(self), *args)
        self._root = self.loop.start_root(coro)
        self._run()

    def _enter(self, envelope: Envelope) -> None:
        if asks.is_ending(envelope):
            self._enter_ending(envelope)
            return
        data = envelope.data
        site = data.get("siteId")
        ask = self._open.get(site)
        if ask is None:
            late = self._abandoned.get(site)
            if late is None or self._ended_in_log or not asks.answers(late, envelope):
                self._diverge(envelope, self._expected(None))
            return  # the answer of a call that was taken back while it was on its way
        if not asks.answers(ask.command, envelope):
            self._diverge(envelope, self._expected(ask))
        if envelope.type == Kind.MESSAGE_CONSUMED:
            self._guard(data)
        at = data.get("at", envelope.timestamp)
        self.loop.now_ms = max(self.loop.now_ms, at)
        if self._settle(site, ask, envelope):
            self._applied += 1
            self._run()

    def _settle(self, site: str, ask: Ask, envelope: Envelope) -> bool:
        """Give an event's result to whoever waits for it; False where the flow has nothing to run for."""
        data = envelope.data
        command = ask.command
        sink = ask.sink
        if envelope.type == Kind.STEP_FAILED and not data.get("final"):
            retry_at = data.get("retryAt", 0)
            ask.command = replace(command, attempt=data.get("attempt", 1) + 1, not_before=retry_at)
            return False
        del self._open[site]
        if isinstance(sink, FlowTimer):
            self.loop.fire(sink)
        elif envelope.type == Kind.STEP_FAILED:
            error = data.get("error") or {}
            name = command.name if isinstance(command, RunStep) else asks.describe(command)
            sink.set_exception(
                StepFailedError(name, str(error.get("type", "Error")), str(error.get("message", "")))
            )
        elif isinstance(command, Wait):
            self._answer(command, sink, data, envelope.type)
        elif isinstance(command, StartChild):
            sink.set_result(data.get("childId"))
        elif isinstance(command, RunStep):
            sink.set_result(data.get("output"))
        else:
            sink.set_result(data.get("messageId"))
        return True

    def _answer(self, command: Wait, sink: asyncio.Future[Any], data: Mapping[str, Json], kind: str) -> None:
        value = data.get("payload" if kind == Kind.MESSAGE_CONSUMED else "answer")
        index = data.get("arm", 0)
        child_id = command.arms[index].child_id
        sink.set_result(Answer(index, value))
        if child_id is None:
            return
        self.child_ends[child_id] = value
        # A child ends once and its message is consumed once: whoever else waits for it learns of it here.
        for site, other in list(self._open.items()):
            if not isinstance(other.command, Wait) or not isinstance(other.sink, asyncio.Future):
                continue
            also = next((i for i, arm in enumerate(other.command.arms) if arm.child_id == child_id), None)
            if also is not None:
                self.abandon(site)
                other.sink.set_result(Answer(also, value))

    def _enter_ending(self, envelope: Envelope) -> None:
        if self._ended_in_log or not asks.ends_alike(envelope, self._outcome):
            self._diverge(envelope, self._expected(None))
        self._ended_in_log = True
        self._open.clear()

    def _guard(self, data: Mapping[str, Json]) -> None:
        try:
            assert_deliverable(
                self.info.execution_id,
                str(data.get("messageId", "")),
                str(data.get("topic", "")),
                data.get("payload"),
                erased=self.info.erased,
                recorded=True,
            )
        except Exception as error:
            self.latch(error)
            raise

    def _run(self) -> None:
        try:
            self.loop.run_until_quiet()
        except FlowStuckError as error:
            stuck = FlowStuckError(error.callbacks, self.info.execution_id)
            self.latch(stuck)
            raise stuck from None
        if isinstance(self._latched, FlowDivergedError):
            raise self._latched
        root = self._root
        if self._outcome is None and root is not None and root.done():
            self._finish(root)
        if self._outcome is not None:
            self._open.clear()
            self.loop.close()

    def _finish(self, root: asyncio.Task[Any]) -> None:
        if root.cancelled():
            self.end(Fail("CancelledError", "the flow was cancelled from within"))
            return
        error = root.exception()
        if error is not None:
            self.end(_failure(error))
            return
        try:
            self.end(Complete(self.flow.dump(root.result(), f"result of flow {self.flow.name!r}")))
        except InvalidInputError as unfit:
            self.end(_failure(unfit))

    def _emit(self, command: Effect, sink: asyncio.Future[Any] | FlowTimer) -> None:
        self._order += 1
        self._open[command.site_id] = Ask(command, sink, self._order, self._turn)
        self._out.append(command)

    def _draw(self, decision: RecordDecision) -> Json:
        self._order += 1
        self._applied += 1
        self._out.append(decision)
        self._drawn.append((self._order, decision))
        return decision.value

    def _take(self) -> list[Command]:
        out, self._out = self._out, []
        self._turn += 1
        self._drawn.clear()
        if self._dropped:
            out = [c for c in out if getattr(c, "site_id", None) not in self._dropped]
            self._dropped.clear()
        return out

    def _outstanding(self) -> list[Command]:
        """What the log does not answer yet, in the order asked."""
        pending: list[tuple[int, Command]] = [(a.order, a.command) for a in self._open.values()]
        pending.extend(self._drawn)
        pending.sort(key=lambda p: p[0])
        self._drawn = []
        self._turn += 1
        commands = [command for _, command in pending]
        if self._outcome is not None and not self._ended_in_log:
            commands.append(self._outcome)
        return commands

    # Replay -------------------------------------------------------------------------------------------------------

    def _note_decision(self, envelope: Envelope) -> None:
        site = envelope.data.get("siteId")
        if not isinstance(site, str) or site in self._recorded or self._ended_in_log:
            self._diverge(envelope, self._expected(None))
        else:
            self._recorded[site] = envelope

    def _release(self) -> None:
        """Apply the event held back (at first: start), now that the decisions behind it are known."""
        self._turn += 1
        if self._held is not None:
            self._enter(self._held)
        elif self._root is None and self._outcome is None:
            self._begin()
        self._out.clear()
        self._dropped.clear()
        for site, unasked in self._recorded.items():
            if not site.startswith("patched:"):
                self._diverge(unasked, self._expected(None))

    def _expected(self, ask: Ask | None) -> str:
        if ask is not None:
            return asks.describe(ask.command)
        if self._outcome is not None:
            return asks.describe(self._outcome)
        if not self._open:
            return "nothing"
        shown = [asks.describe(a.command) for _, a in zip(range(3), self._open.values(), strict=False)]
        return " or ".join(shown)

    def _diverge(self, envelope: Envelope, expected: str) -> None:
        """Latch on a divergence and stop whoever runs."""
        error = FlowDivergedError(
            self.info.execution_id, envelope.sequence, asks.describe_event(envelope), expected
        )
        self.latch(error)
        if self.loop.is_running():
            raise FlowSuspended("the flow left its log: never catch FlowSuspended") from error
        raise error


def _failure(error: BaseException) -> Fail:
    details: dict[str, Json] = {}
    if isinstance(error, BaseExceptionGroup):
        leaves = _leaves(error)
        details["errors"] = [{"type": type(e).__name__, "message": _text(e)} for e in leaves[:_MAX_GROUPED]]
    return Fail(type(error).__name__, _text(error), details)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    stack: list[BaseException] = [group]
    while stack and len(found) < _MAX_GROUPED:
        error = stack.pop()
        if isinstance(error, BaseExceptionGroup):
            stack.extend(reversed(error.exceptions))
        else:
            found.append(error)
    return found


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a user's __str__ may do anything
        text = ""
    return text[:MAX_ERROR_CHARS].encode("utf-8", "replace").decode()
