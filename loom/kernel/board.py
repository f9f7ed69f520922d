"""The open sites of a run: what was asked and not answered yet, and how an answer reaches whoever waits."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from loom.errors import StepFailedError
from loom.kernel.asks import describe
from loom.kernel.commands import Abandon, RecordDecision, RunStep, StartChild, Wait
from loom.kernel.tasks import FlowTimer
from loom.schemas.envelope import Envelope, Json, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loom.kernel.asks import Effect
    from loom.kernel.commands import Command
    from loom.kernel.loop import FlowLoop

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Answer:
    """How a wait was answered: the arm's index, and what came with it."""

    index: int
    value: Json = None


class Ask:
    """An open site: its command, where the result goes, and when it was asked (``order`` overall, ``turn`` by call)."""

    __slots__ = ("command", "order", "sink", "turn")

    def __init__(self, command: Effect, sink: asyncio.Future[Any] | FlowTimer, order: int, turn: int) -> None:
        self.command = command
        self.sink = sink
        self.order = order
        self.turn = turn


class Board:
    """Open asks in the order asked, and the commands that the present call of the machine returns.

    Sites that were taken back are remembered: an answer may have been on its way.
    """

    __slots__ = ("_abandoned", "_dropped", "_ends", "_loop", "_order", "_turn", "open", "out")

    def __init__(self, loop: FlowLoop) -> None:
        self.open: dict[str, Ask] = {}
        self.out: list[Command] = []
        self._loop = loop
        self._abandoned: dict[str, Effect] | None = None
        self._dropped: set[str] | None = None
        self._ends: dict[str, Json] | None = None
        self._order = 0
        self._turn = 0

    def next_order(self) -> int:
        """Place of the next command among all."""
        self._order += 1
        return self._order

    def put(self, command: Effect, sink: asyncio.Future[Any] | FlowTimer) -> None:
        """Emit a command; its answer goes to ``sink``."""
        self.open[command.site_id] = Ask(command, sink, self.next_order(), self._turn)
        self.out.append(command)

    def take_back(self, site_id: str) -> None:
        """Abandon a site. Nothing to do where it was answered."""
        ask = self.open.pop(site_id, None)
        if ask is None:
            return
        if self._abandoned is None:
            self._abandoned = {}
        self._abandoned[site_id] = ask.command
        if ask.turn != self._turn:
            self.out.append(Abandon(site_id))
        elif self._dropped is None:
            self._dropped = {site_id}
        else:
            self._dropped.add(site_id)

    def abandoned(self, site_id: str) -> Effect | None:
        """The command of a site that was taken back."""
        return None if self._abandoned is None else self._abandoned.get(site_id)

    def take(self) -> list[Command]:
        """What the present call emitted, but for what it took back again; the next call begins."""
        out, self.out = self.out, []
        self._turn += 1
        if self._dropped is not None:
            dropped, self._dropped = self._dropped, None
            out = [c for c in out if getattr(c, "site_id", None) not in dropped]
        return out

    def end(self, outcome: Command) -> None:
        """The flow has ended: what it asked for in this very call, and did not await, is never begun."""
        self.open.clear()
        self.out = [c for c in self.out if isinstance(c, RecordDecision)]
        self.out.append(outcome)

    def clear(self) -> None:
        """Forget everything: the run is over."""
        self.open.clear()
        self.out = []
        self._abandoned = self._dropped = None

    def child_end(self, child_id: str) -> tuple[Json] | None:
        """How a child ended, in a 1-tuple, if its end has entered."""
        return (self._ends[child_id],) if self._ends is not None and child_id in self._ends else None

    def settle(self, ask: Ask, envelope: Envelope) -> bool:
        """Give an event's result to whoever waits for it; False where the flow has nothing to run for."""
        data, command, sink = envelope.data, ask.command, ask.sink
        if envelope.type == Kind.STEP_FAILED and not data.get("final"):
            if isinstance(command, RunStep):
                attempt, not_before = data.get("attempt", command.attempt) + 1, data.get("retryAt", 0)
                ask.command = replace(command, attempt=attempt, not_before=not_before)
            return False
        del self.open[command.site_id]
        if isinstance(sink, FlowTimer):
            self._loop.fire(sink)
        elif envelope.type == Kind.STEP_FAILED:
            sink.set_exception(_step_error(command, data.get("error")))
        elif isinstance(command, RunStep):
            sink.set_result(data.get("output"))
        elif isinstance(command, Wait):
            self._answer(command, sink, data)
        else:
            sink.set_result(data.get("childId" if isinstance(command, StartChild) else "messageId"))
        return True

    def _answer(self, command: Wait, sink: asyncio.Future[Any], data: Mapping[str, Json]) -> None:
        index = data.get("arm", 0)
        value = data.get("payload") if "payload" in data else data.get("answer")
        child_id = command.arms[index].child_id
        sink.set_result(Answer(index, value))
        if child_id is not None:
            self._child_ended(child_id, value)

    def _child_ended(self, child_id: str, end: Json) -> None:
        """A child ends once, and its message is consumed once: whoever else waits for it learns of it here."""
        if self._ends is None:
            self._ends = {}
        self._ends[child_id] = end
        for site, other in list(self.open.items()):
            if isinstance(other.command, Wait) and isinstance(other.sink, asyncio.Future):
                index = next(
                    (i for i, arm in enumerate(other.command.arms) if arm.child_id == child_id), None
                )
                if index is not None:
                    self.take_back(site)
                    other.sink.set_result(Answer(index, end))

    def describe(self) -> str:
        """What is open, in words."""
        shown = [describe(a.command) for a in list(self.open.values())[:_SHOWN]]
        more = len(self.open) - len(shown)
        return (" or ".join(shown) or "nothing") + (f" or {more} more" if more else "")


def _step_error(command: Effect, error: Json) -> StepFailedError:
    name = command.name if isinstance(command, RunStep) else describe(command)
    recorded = error if isinstance(error, dict) else {}
    return StepFailedError(name, str(recorded.get("type", "Error")), str(recorded.get("message", "")))
