"""The flow machine: events in, commands out.

A driver starts it, or replays a history into it, and then applies one event at a time, in log order; the flow runs
until quiet before the next, live and on replay alike (system.md 0, "Flow context"). The machine draws decisions from
injected sources, does no I/O and reads no clock.

The driver's part of the bargain: for each event, queue it in the journal, ``apply`` it, and queue what the returned
commands journal, before the next event. So the decisions that an event led to stand behind it in the log, ahead of any
other result, and replay knows them before it applies that event. What the flow abandoned is never answered.
"""

from __future__ import annotations

import asyncio
from asyncio import events
from typing import TYPE_CHECKING, Any, Final, NoReturn

from loom.errors import (
    FlowDivergedError,
    FlowStuckError,
    FlowSuspended,
    InboxMessageRefusedError,
    InvalidInputError,
    NotDeterministicError,
)
from loom.kernel import asks
from loom.kernel.board import Board
from loom.kernel.commands import Arm, Complete, Fail, RecordDecision, Wait
from loom.kernel.context import Context
from loom.kernel.failures import MAX_ERROR_CHARS, failure_of
from loom.kernel.guard import assert_deliverable, check_ingest
from loom.kernel.info import DecisionSources, RunInfo
from loom.kernel.loop import FlowLoop
from loom.schemas.envelope import Envelope, Json, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from loom.kernel.asks import Effect
    from loom.kernel.commands import Command
    from loom.kernel.flow import FlowDefinition
    from loom.kernel.tasks import FlowTask, FlowTimer

__all__ = ["MAX_ERROR_CHARS", "DecisionSources", "FlowMachine", "RunInfo"]

_PATCHED: Final = "patched"


class FlowMachine:
    """One run of one flow. Not thread-safe: one driver, one call at a time."""

    __slots__ = (
        "__weakref__",
        "_applied",
        "_board",
        "_drawn",
        "_ended_in_log",
        "_held",
        "_latched",
        "_next",
        "_outcome",
        "_patches",
        "_recorded",
        "_replaying",
        "_root",
        "flow",
        "info",
        "loop",
        "sources",
    )

    def __init__(self, flow: FlowDefinition[..., Any], info: RunInfo, sources: DecisionSources) -> None:
        self.flow = flow
        self.info = info
        self.sources = sources
        self.loop = FlowLoop(self, info.started_at)
        self._board = Board(self.loop)
        self._root: FlowTask | None = None
        self._outcome: Command | None = None
        self._latched: BaseException | None = None
        self._applied = 0
        self._patches: dict[str, bool] | None = None
        # Replay: the event held back, the one behind it, decisions recorded but not asked for, those drawn anew.
        self._held: Envelope | None = None
        self._next: Envelope | None = None
        self._recorded: dict[str, Envelope] = {}
        self._drawn: list[tuple[int, Command]] = []
        self._replaying = False
        self._ended_in_log = False

    # The driver's face --------------------------------------------------------------------------------------------

    def start(self) -> list[Command]:
        """Run a fresh flow until quiet; return what it asks for. Does nothing once begun.

        Raises:
            FlowStuckError: the flow does not come to rest. Latches the machine.
        """
        if self._latched is None and self._root is None and self._outcome is None:
            self._begin()
        return self._take()

    def apply(self, envelope: Envelope) -> list[Command]:
        """Let one event enter, run until quiet, and return the new commands; events that do not enter are ignored.

        Raises:
            FlowDivergedError: the code did not ask for this. Latches the machine.
            FlowStuckError: the flow does not come to rest. Latches the machine.
            SealedPayloadUnreadableError: the event holds a payload that this node cannot open. Latches the machine.
            PayloadShreddedError: the event holds a payload whose subject was erased. Latches the machine.
        """
        if self._latched is None and asks.enters(envelope):
            self._enter(envelope)
        return self._take()

    def replay(self, envelopes: Iterable[Envelope], *, more: bool = False) -> list[Command]:
        """Feed history, in batches of any size; ``more`` says that another batch follows.

        An event is held back until the next result is seen, so that the decisions behind it are known. With
        ``more=False`` all of it is applied, and the commands still outstanding are returned: those whose answer the log
        does not hold, in the order in which the code asked; steps to be tried again with their next ``attempt`` and
        ``not_before``.

        Raises:
            FlowDivergedError: at the first event that the code did not ask for. Latches the machine.
            FlowStuckError, SealedPayloadUnreadableError, PayloadShreddedError: as ``apply``.
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
        self._replaying = False
        self._release()
        self._held = None
        return self._outstanding()

    def latch(self, error: BaseException) -> None:
        """Let no command out any more, whatever the flow does (system.md 1.4); the first error stays."""
        if self._latched is None:
            self._latched = error
            self._board.out = []

    def close(self) -> None:
        """Throw the run away: close every task, free everything; idempotent."""
        self.latch(FlowSuspended("the run is closed"))
        self.loop.close()
        self._board.clear()
        self._recorded.clear()
        self._held = self._next = None
        self._root = None

    @property
    def waiting(self) -> tuple[Wait, ...]:
        """Open waits in park order: the order in which the code asked."""
        return tuple(a.command for a in self._board.open.values() if isinstance(a.command, Wait))

    @property
    def running_sites(self) -> tuple[str, ...]:
        """Sites of open steps and other effects, in the order asked."""
        return tuple(site for site, a in self._board.open.items() if not isinstance(a.command, Wait))

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
        """Whether history is being replayed of which more is known to follow."""
        return self._replaying

    @property
    def history_length(self) -> int:
        """Results and decisions so far: the same live and on replay."""
        return self._applied

    @property
    def logical_ms(self) -> int:
        """Logical time: that of the last event that entered (its ``at``, else its timestamp)."""
        return self.loop.now_ms

    @property
    def complaints(self) -> tuple[str, ...]:
        """What asyncio would have logged (a task's error that nobody looked at): message and type, the last 16."""
        return tuple(self.loop.complaints or ())

    # The context's face -------------------------------------------------------------------------------------------

    def next_site(self) -> str:
        """Id of the call that the running task makes.

        Raises:
            FlowSuspended: the run is over, or refused.
            NotDeterministicError: the call comes from outside the flow, from a step for instance.
        """
        self.check_inside()
        return self.loop.scope.next_site()

    def check_inside(self) -> None:
        """Raise unless the flow itself is running now, and may go on."""
        if events._get_running_loop() is not self.loop:  # noqa: SLF001 - of this thread: right in a step's thread too
            raise NotDeterministicError("the context, used outside its flow,")
        if self._latched is not None or self._outcome is not None:
            raise FlowSuspended("this run is over: never catch FlowSuspended")

    def ask(self, command: Effect) -> asyncio.Future[Any]:
        """Emit a command and return the future that its answer resolves."""
        future: asyncio.Future[Any] = asyncio.Future(loop=self.loop)
        self._board.put(command, future)
        return future

    def abandon(self, site_id: str) -> None:
        """Take a command back: the task that asked was cancelled. Nothing to do where it was answered."""
        if self._latched is None:
            self._board.take_back(site_id)

    def decide(self, kind: str, draw: Callable[[], Json]) -> Json:
        """A decision: as recorded, else drawn now and recorded."""
        site = self.next_site()
        known = self._recorded.pop(site, None)
        if known is not None and known.data.get("kind") == kind:
            self._applied += 1
            return known.data.get("value")
        unasked = known or self._first_unasked() or self._next
        if unasked is not None:
            self._diverge(unasked, f"decision {kind!r} at {site}")
        return self._draw(RecordDecision(site, kind, draw()))

    def patched(self, patch_id: str) -> bool:
        """Whether changed code takes its new way; one answer per id and run."""
        self.check_inside()
        if self._patches is None:
            self._patches = {}
        on = self._patches.get(patch_id)
        if on is None:
            site = f"{_PATCHED}:{patch_id}"
            if self._recorded.pop(site, None) is not None:
                self._applied += 1
                on = True
            elif self._next is not None:
                on = False  # the log goes on from here without the mark: the old code wrote it
            else:
                on = bool(self._draw(RecordDecision(site, _PATCHED, value=True)))
            self._patches[patch_id] = on
        return on

    def child_end(self, child_id: str) -> tuple[Json] | None:
        """How a child ended, in a 1-tuple, if its end has entered."""
        return self._board.child_end(child_id)

    def end(self, outcome: Command) -> None:
        """The flow has come to its end; the first outcome stands. What is still open is dropped with it."""
        if self._outcome is None and self._latched is None:
            self._outcome = outcome
            self._board.end(outcome)

    # The loop's face: asyncio's timers are durable ones -----------------------------------------------------------

    def timer_asked(self, timer: FlowTimer) -> None:
        """A timer of asyncio becomes a wait at a site of its own."""
        timer.site_id = self.next_site()
        self._board.put(Wait(timer.site_id, (Arm("timer", wake_at=round(timer.when() * 1000)),)), timer)

    def timer_dropped(self, timer: FlowTimer) -> None:
        """The flow gave it up, or it has fired."""
        self.abandon(timer.site_id)

    # One event ----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        try:
            args = (self.flow.parse_input(self.info.input),) if self.flow.takes_input else ()
        except InvalidInputError as error:
            self.end(failure_of(error))
            return
        self._root = self.loop.start_root(self.flow.fn(Context(self), *args))
        self._run()

    def _enter(self, envelope: Envelope) -> None:
        if asks.is_ending(envelope):
            self._enter_ending(envelope)
            return
        site = envelope.data.get("siteId", "")
        ask = self._board.open.get(site)
        if ask is None:
            late = None if self._outcome is not None else self._board.abandoned(site)
            if late is None or not asks.answers(late, envelope):
                self._diverge(envelope, self._expected())
            return  # the answer of a call that was taken back while it was on its way
        if not asks.answers(ask.command, envelope):
            self._diverge(envelope, asks.describe(ask.command))
        if envelope.type == Kind.MESSAGE_CONSUMED:
            self._guard(envelope.data)
        self.loop.now_ms = max(self.loop.now_ms, envelope.data.get("at", envelope.timestamp))
        if self._board.settle(ask, envelope):
            self._applied += 1
            self._run()

    def _enter_ending(self, envelope: Envelope) -> None:
        if self._ended_in_log or not asks.ends_alike(envelope, self._outcome):
            self._diverge(envelope, self._expected())
        self._ended_in_log = True
        self._board.open.clear()

    def _guard(self, data: Mapping[str, Json]) -> None:
        """Refuse a recorded answer that this node cannot open, before the flow sees it (system.md 1.3, 1.4)."""
        message_id, topic = str(data.get("messageId", "")), str(data.get("topic", ""))
        try:
            assert_deliverable(
                self.info.execution_id,
                message_id,
                topic,
                data.get("payload"),
                erased=self.info.erased,
                recorded=True,
            )
        except Exception as refusal:
            self.latch(refusal)
            raise

    def _run(self) -> None:
        try:
            self.loop.run_until_quiet()
        except FlowStuckError as error:
            stuck = FlowStuckError(error.callbacks, self.info.execution_id)
            self.latch(stuck)
            raise stuck from None
        except BaseException as error:
            self.latch(error)
            raise
        if self._latched is not None:
            raise self._latched
        root = self._root
        if root is not None and root.done():
            if self._outcome is None:
                self._finish(root)
            elif not root.cancelled():
                root.exception()  # the signal that ended it has been seen
        if self._outcome is not None:
            self.loop.close()

    def _finish(self, root: FlowTask) -> None:
        if root.cancelled():
            self.end(Fail("CancelledError", "the flow was cancelled from within"))
            return
        error = root.exception()
        if error is not None:
            self.end(failure_of(error))
            return
        try:
            output = self.flow.dump(root.result(), f"result of flow {self.flow.name!r}")
            if self.info.parent is not None:  # it reaches the parent as a message, which must be deliverable
                check_ingest(str(self.info.parent.get("executionId")), "child", output)
        except (InvalidInputError, InboxMessageRefusedError) as unfit:
            self.end(failure_of(unfit))
        else:
            self.end(Complete(output))

    # What goes out ------------------------------------------------------------------------------------------------

    def _draw(self, decision: RecordDecision) -> Json:
        self._applied += 1
        self._board.out.append(decision)
        self._drawn.append((self._board.next_order(), decision))
        return decision.value

    def _take(self) -> list[Command]:
        """What this call returns."""
        self._drawn.clear()
        return self._board.take()

    def _outstanding(self) -> list[Command]:
        """What the log does not answer yet, in the order asked."""
        pending: list[tuple[int, Command]] = [(a.order, a.command) for a in self._board.open.values()]
        pending.extend(self._drawn)
        pending.sort(key=lambda p: p[0])
        self._take()
        commands = [command for _, command in pending]
        if self._outcome is not None and not self._ended_in_log:
            commands.append(self._outcome)
        return commands

    # Replay -------------------------------------------------------------------------------------------------------

    def _note_decision(self, envelope: Envelope) -> None:
        site = envelope.data.get("siteId")
        if not isinstance(site, str) or site in self._recorded or self._ended_in_log:
            self._diverge(envelope, self._expected())
        self._recorded[site] = envelope

    def _release(self) -> None:
        """Apply the event held back (at first: the start), now that the decisions behind it are known."""
        if self._held is not None:
            self._enter(self._held)
        elif self._root is None and self._outcome is None:
            self._begin()
        if self._next is not None:
            self._take()
        unasked = self._first_unasked()
        if unasked is not None:
            self._diverge(unasked, self._expected())

    def _first_unasked(self) -> Envelope | None:
        """The first recorded decision not asked for; a mark of a patch may outlive the code that asked for it."""
        for site, envelope in self._recorded.items():
            if not site.startswith(_PATCHED):
                return envelope
        return None

    def _expected(self) -> str:
        """What the code would take next, in words."""
        return self._board.describe() if self._outcome is None else asks.describe(self._outcome)

    def _diverge(self, envelope: Envelope, expected: str) -> NoReturn:
        """Latch on a divergence and stop whoever runs."""
        sequence, recorded = (
            (-1, "nothing") if envelope is None else (envelope.sequence, asks.describe_event(envelope))
        )
        error = FlowDivergedError(self.info.execution_id, sequence, recorded, expected)
        self.latch(error)
        if self.loop.is_running():
            raise FlowSuspended("the flow left its log: never catch FlowSuspended")
        raise error
