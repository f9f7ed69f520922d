"""Answers at gates: through the run of this process where it has one, else in the log (system.md 0, "Gates")."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from loom.errors import ExecutionFinishedError, GateNotOpenError, LeaseError, WrongHeadError
from loom.kernel.inbox import find_gate, load_waits
from loom.runtime import facts
from loom.runtime.journal import JournalLatched
from loom.runtime.phase import Phase
from loom.schemas.envelope import Json, Kind, NewEvent
from loom.stores.contracts import StreamAppend

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from loom.runtime.engine import Engine
    from loom.runtime.reading import Loaded

MAX_RACES: Final = 64
"""How often a verb tries again after another append came first."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What is answered at a gate, by whom, and of which request, so that a copy of it is known."""

    gate: str
    answer: Json
    by: str | None
    request_id: str | None

    def data(self) -> dict[str, Json]:
        """Fields of EXECUTION_RESUMED beside where it enters."""
        known = {"kind": "gate", "answer": self.answer, "by": self.by, "requestId": self.request_id}
        return {key: value for key, value in known.items() if key == "answer" or value is not None}


class Answers:
    """Gives answers on one node; ``load`` reads an execution, patiently."""

    def __init__(self, engine: Engine, load: Callable[[str], Awaitable[Loaded]]) -> None:
        self._engine, self._load = engine, load

    async def give(self, execution_id: str, given: Answer) -> None:
        """Answer the gate; one whose request stands in the log is answered already.

        Raises:
            GateNotOpenError, ExecutionFinishedError: it does not wait there.
        """
        try:
            await self._resume(execution_id, given)
        except (GateNotOpenError, ExecutionFinishedError):
            if not await self._was_answered(execution_id, given.request_id):
                raise

    async def _resume(self, execution_id: str, given: Answer) -> None:
        for _ in range(MAX_RACES):
            current = await self._engine.driving.current(execution_id)
            if await self._answer_here(current, given):
                return
            loaded = await self._load(current)
            if loaded.state.finished:
                if loaded.state.status == "continued":
                    continue
                raise ExecutionFinishedError("resume", execution_id, loaded.state.status)
            if await self._answer_in_log(loaded, given):
                return
            await pause(self._engine.surroundings.draw)
        raise GateNotOpenError(execution_id, given.gate)

    async def _was_answered(self, execution_id: str, request_id: str | None) -> bool:
        """Whether an answer of that request stands in the log, of the execution or of one that continues it."""
        if request_id is None:
            return False
        for log in {execution_id: None, await self._engine.driving.current(execution_id): None}:
            history = (await self._load(log)).history
            if any(
                e.type == Kind.EXECUTION_RESUMED and e.data.get("requestId") == request_id for e in history
            ):
                return True
        return False

    async def _answer_here(self, execution_id: str, given: Answer) -> bool:
        """Answer through the run of this process, if it has one."""
        engine = self._engine
        run = engine.runs.get(execution_id)
        if run is None or not run.active:
            return False
        if run.phase is Phase.PARKED and run.lease is None and engine.leasing is not None:
            try:
                await engine.leasing.enter_if_asked(run)
            except LeaseError:
                return False  # another drives it, or nobody can say: the log takes the answer
        try:
            if await run.perform(partial(run.waiting.answer_gate, given.gate, given.data())):
                return True
        except JournalLatched:
            return False  # another was first: judge again from the log
        raise GateNotOpenError(execution_id, given.gate)

    async def _answer_in_log(self, loaded: Loaded, given: Answer) -> bool:
        engine, state = self._engine, loaded.state
        found = find_gate(load_waits(state.waits), given.gate) if state.status == "suspended" else None
        if found is None:
            raise GateNotOpenError(state.execution_id, given.gate)
        data: dict[str, Json] = {"siteId": found[0], "arm": found[1], **given.data(), "at": engine.now()}
        event = NewEvent(engine.event_id(), Kind.EXECUTION_RESUMED, data, facts.stamp(given.by))
        append = StreamAppend(state.execution_id, (event,), observation=loaded.observation)
        try:
            await engine.patiently(lambda: engine.events.append(append), state.execution_id)
        except WrongHeadError:
            return False
        return True


async def pause(draw: Callable[[], float]) -> None:
    """Let the other go first; at random, so that two do not keep step."""
    await asyncio.sleep(0.001 + 0.019 * draw())
