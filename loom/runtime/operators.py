"""Verbs of operators: forks, migration, recovery by hand. Each leaves who and why in the log."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from loom.errors import (
    ExecutionAlreadyExistsError,
    ExecutionFinishedError,
    InvalidInputError,
    WrongHeadError,
)
from loom.ids import check_execution_id
from loom.kernel.flow import FlowDefinition
from loom.kernel.state import ExecutionState, fold
from loom.kernel.transient import TransientState
from loom.runtime import facts
from loom.runtime.attempts import give_back
from loom.runtime.control import append_control
from loom.runtime.drivers import BY_HAND, NEVER, fence_owner
from loom.runtime.forks import fork_point, forked_log, held_copies
from loom.runtime.handle import Handle
from loom.schemas.envelope import TERMINAL_KINDS, Json, Kind, NewEvent
from loom.stores.contracts import NO_EVENTS, StreamAppend

if TYPE_CHECKING:
    from loom.runtime.access import Principal
    from loom.runtime.engine import Engine
    from loom.runtime.verbs import Verbs

MAX_RACES = 8


class Operators:
    """See :class:`loom.runtime.client.Client` for what each means to a caller."""

    def __init__(self, engine: Engine, verbs: Verbs) -> None:
        self._engine = engine
        self._verbs = verbs

    # Driving --------------------------------------------------------------------------------------------------------

    async def acquire_fence(self, execution_id: str, principal: Principal | None) -> int:
        """Take the execution from its driver; return the token."""
        await self._verbs.judged("acquire_fence", execution_id, principal)
        await self._verbs.readable(execution_id)
        engine = self._engine
        owner = fence_owner(f"{BY_HAND}{engine.node}", NEVER, engine.event_id())
        return await engine.patiently(lambda: engine.events.acquire_fence(execution_id, owner), execution_id)

    async def redrive(
        self,
        execution_id: str,
        reason: str,
        principal: Principal | None,
        flow: FlowDefinition[..., Any] | str | None,
    ) -> Handle[Any]:
        """Take an execution over on an operator's word, if need be with another flow (``resume_as``).

        Raises:
            LeaseHeldError: another node's lease says that it drives the execution now.
        """
        engine = self._engine
        workflow = flow.name if isinstance(flow, FlowDefinition) else flow
        if isinstance(flow, FlowDefinition):
            engine.flows.add(flow)
        elif workflow is not None:
            engine.flows.get(workflow)
        by = None if principal is None else principal.actor
        engine.backoff.cleared(execution_id)
        await give_back(engine, execution_id)
        for _ in range(MAX_RACES):
            async with engine.driving.exclusive(execution_id):
                run = engine.runs.get(execution_id)
                if run is not None:
                    engine.drop(run)
                loaded = await self._verbs.loaded(execution_id)
                if loaded.state.finished:
                    raise ExecutionFinishedError(reason, execution_id, loaded.state.status)
                if await engine.driving.recover(
                    loaded, reason, "operator", by=by, workflow=workflow, insists=True
                ):
                    return Handle(engine, execution_id, None, engine.waiters.of(execution_id))
        raise WrongHeadError(execution_id, NO_EVENTS, NO_EVENTS)

    async def recover(self, execution_id: str, reason: str | None, principal: Principal | None) -> bool:
        """Have the owner take an execution over: EXECUTION_RECOVERED by no driver, under what was observed."""
        await self._verbs.judged("recover", execution_id, principal)
        engine = self._engine
        await give_back(engine, execution_id)
        for _ in range(MAX_RACES):
            loaded = await self._verbs.loaded(execution_id)
            if loaded.state.finished:
                raise ExecutionFinishedError("recover", execution_id, loaded.state.status)
            if loaded.state.status == "suspended":
                return False
            by = None if principal is None else principal.actor
            known = {"reason": reason or "recover", "evidence": "operator", "by": by}
            data: dict[str, Json] = {name: value for name, value in known.items() if value is not None}
            event = NewEvent(engine.event_id(), Kind.EXECUTION_RECOVERED, data, facts.stamp(by))
            append = StreamAppend(execution_id, (event,), observation=loaded.observation)
            with contextlib.suppress(WrongHeadError):
                await engine.patiently(lambda append=append: engine.events.append(append), execution_id)  # type: ignore[misc]
                return True
        raise WrongHeadError(execution_id, NO_EVENTS, NO_EVENTS)

    async def restore_from_state(
        self, execution_id: str, state: ExecutionState, principal: Principal | None
    ) -> Handle[Any]:
        """Take an execution over from a state that a caller kept, once the log agrees with it."""
        await self._verbs.judged("restore_from_state", execution_id, principal)
        if isinstance(state, TransientState):
            raise InvalidInputError("state", "it was folded past sealed payloads", "load it with load_state")
        loaded = await self._verbs.loaded(execution_id)
        own = ExecutionState()
        for envelope in loaded.history:
            if envelope.sequence <= state.head:
                fold(own, envelope)
        if own.head != state.head or own != state:
            raise InvalidInputError(
                f"state of execution {execution_id!r}",
                "it is not what the log says at that sequence",
                "load it again with load_state; the log is the truth",
            )
        return await self.redrive(execution_id, "restore_from_state", principal, None)

    # Forks ----------------------------------------------------------------------------------------------------------

    async def fork(
        self,
        execution_id: str,
        *,
        at_sequence: int | None,
        at_step: str | None,
        new_id: str | None,
        reason: str | None,
        principal: Principal | None,
    ) -> Handle[Any]:
        """Start an execution, in a chain of its own, whose log begins as this one's did."""
        await self._verbs.judged("fork", execution_id, principal)
        engine = self._engine
        loaded = await self._verbs.loaded(execution_id)
        through = fork_point(loaded, at_sequence, at_step)
        target = engine.mint_beside(loaded.state.chain_id) if new_id is None else check_execution_id(new_id)
        places, copies = await held_copies(engine, loaded, through, target)
        events = forked_log(
            loaded.history[: through + 1],
            target,
            execution_id,
            through,
            places=places,
            principal=principal,
            reason=reason,
        )
        append = StreamAppend(target, events, expected_head=NO_EVENTS, fence=facts.FIRST_FENCE)
        try:
            await engine.patiently(lambda: engine.events.append_many([append, *copies]), target)
        except WrongHeadError:
            raise ExecutionAlreadyExistsError(target) from None
        handle: Handle[Any] = Handle(engine, target, None, engine.waiters.of(target))
        if engine.owns(target):
            await engine.driving.drive_fresh(target)
        return handle

    # Outcomes -------------------------------------------------------------------------------------------------------

    async def record_outcome(self, execution_id: str, outcome: Any, principal: Principal | None) -> None:
        """Note what became of a finished execution in the world."""
        await self._verbs.judged("record_outcome", execution_id, principal)
        await self._verbs.persons_readable("record_outcome", execution_id, principal)
        engine = self._engine
        data: dict[str, Json] = {"outcome": self._verbs.json_of(outcome, "outcome")}
        if principal is not None:
            data["recordedBy"] = principal.to_json()
        event = NewEvent(
            engine.event_id(),
            Kind.OUTCOME_RECORDED,
            data,
            facts.stamp(principal.actor if principal else None),
        )

        async def has_ended() -> None:
            info = await engine.events.info(execution_id)
            if info is None or info.status not in TERMINAL_KINDS:
                raise InvalidInputError(
                    f"outcome of execution {execution_id!r}", "it has not ended", "record it once it has"
                )

        await append_control(engine, execution_id, event, races=MAX_RACES, check=has_ended)
