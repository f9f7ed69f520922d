"""The verbs that read: they change nothing and take no fence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loom.errors import ExecutionNotFoundError
from loom.kernel.state import ExecutionState, fold
from loom.runtime.handle import status_of
from loom.schemas.envelope import TERMINAL_KINDS, Envelope, Kind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from loom.runtime.access import Principal
    from loom.runtime.engine import Engine
    from loom.runtime.verbs import Verbs


class Queries:
    """See :class:`loom.runtime.client.Client` for what each means to a caller."""

    def __init__(self, engine: Engine, verbs: Verbs) -> None:
        self._engine = engine
        self._verbs = verbs

    async def load_state(self, execution_id: str, principal: Principal | None) -> ExecutionState:
        """The state folded from the whole log."""
        await self._verbs.judged("load_state", execution_id, principal)
        state = ExecutionState()
        for envelope in await self._history(execution_id):
            fold(state, envelope)
        return state

    async def query(self, execution_id: str, principal: Principal | None) -> dict[str, Any]:
        """Where it stands, without payloads."""
        await self._verbs.judged("query", execution_id, principal)
        state = (await self._verbs.loaded(execution_id)).state
        return {
            "executionId": execution_id,
            "chainId": state.chain_id,
            "workflow": state.workflow,
            "status": state.status,
            "head": state.head,
            "startedAt": state.started_at,
            "updatedAt": state.timestamp,
            "steps": state.steps,
            "waits": [dict(wait) for wait in state.waits],
            "children": {child_id: child.get("workflow") for child_id, child in state.children.items()},
            "recovered": state.recovered,
            "successor": state.successor,
        }

    async def history(self, execution_id: str, principal: Principal | None) -> list[Envelope]:
        """Every event of its log."""
        await self._verbs.judged("load_state", execution_id, principal)
        return await self._history(execution_id)

    async def _history(self, execution_id: str) -> list[Envelope]:
        engine = self._engine
        seen = await engine.patiently(lambda: engine.events.observe(execution_id), execution_id)
        if seen.head < 0:
            raise ExecutionNotFoundError(execution_id)
        return await engine.patiently(lambda: engine.driving.read_all(execution_id, seen.head), execution_id)

    async def follow(self, execution_id: str, principal: Principal | None) -> AsyncIterator[Envelope]:
        """Events from the first on, live, through successors, until the end. Nothing of a log that cannot be opened here."""
        await self._verbs.judged("load_state", execution_id, principal)
        current: str | None = execution_id
        while current is not None:
            await self._engine.driving.assert_opens(current)
            stream, current = self._engine.events.subscribe(current, 0), None
            async for envelope in stream:
                yield envelope
                if envelope.type == Kind.EXECUTION_CONTINUED:
                    current = str(envelope.data["successorId"])
                if envelope.type in TERMINAL_KINDS:
                    break

    async def parked_at_sequence(self, execution_id: str, principal: Principal | None) -> int | None:
        """Sequence of the park it rests at, None where it is not parked."""
        await self._verbs.judged("load_state", execution_id, principal)
        loaded = await self._verbs.loaded(execution_id)
        if loaded.state.status != "suspended":
            return None
        return next(e.sequence for e in reversed(loaded.history) if e.type == Kind.EXECUTION_SUSPENDED)

    async def follow_to_head(self, execution_id: str, principal: Principal | None) -> str:
        """The execution that its chain is at now."""
        await self._verbs.judged("load_state", execution_id, principal)
        head = await self._engine.driving.current(execution_id)
        await self._engine.driving.assert_opens(head)
        return head

    async def status(self, execution_id: str, principal: Principal | None) -> str:
        """Its status, from the last event alone."""
        await self._verbs.judged("query", execution_id, principal)
        info = await self._engine.driving.assert_opens(execution_id)
        if info is None:
            raise ExecutionNotFoundError(execution_id)
        return status_of(info.status)
