"""How often a re-drive is tried: a count in the refusal row itself, so that all nodes count as one (D10; docs/adr/0034).

An attempt is spent where a node could open the log, knew the flow, and could not go on all the same. One that could not
open it, does not know its flow, stood down or could not read the evidence spends none: another may do better, or it may
itself, later. Nodes that count at once write the same row, and a row keeps the most that it was told.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from loom.errors import LoomError, RedriveExhaustedError
from loom.schemas.envelope import TERMINAL_KINDS

if TYPE_CHECKING:
    from loom.runtime.engine import Engine
    from loom.stores.contracts import WakeRow, WakeStore


class Attempts:
    """The cap on attempts per row: ``max_redrive_attempts``."""

    def __init__(self, engine: Engine, wakes: WakeStore) -> None:
        self._engine, self._wakes = engine, wakes
        self._cap = engine.config.max_redrive_attempts

    def spent(self, row: WakeRow) -> bool:
        """Whether nobody is to try again without an operator's word."""
        backoff, about = self._engine.backoff, _given_up(row.execution_id)
        if row.holds >= self._cap:
            return True
        if backoff.known(about):  # an operator gave it its attempts back
            backoff.cleared(about)
            backoff.cleared(row.execution_id)
        return False

    def due(self, row: WakeRow) -> bool:
        """Whether a row that was given up is to be looked at, and told of, again."""
        return not self._engine.backoff.blocked(_given_up(row.execution_id))

    async def given_up(self, row: WakeRow, current: str) -> bool:
        """Tell it, first and then every 16th time; whether the row can go, for its execution has ended.

        Raises:
            StoreError: it could not be read.
        """
        info = await self._engine.events.info(current)
        if info is None or info.status in TERMINAL_KINDS:
            return True
        self._engine.backoff.failed(_given_up(row.execution_id))
        self._engine.signals.repeated_error(RedriveExhaustedError(current, row.holds), current)
        return False

    async def count(self, row: WakeRow, current: str) -> None:
        """Count an attempt, if the last look at the execution was one."""
        backoff = self._engine.backoff
        if not backoff.blocked(current) or backoff.refused(current):
            return
        first = await self._engine.first_of(current)
        if first is not None and first.data.get("workflow") in self._engine.flows:
            await self._wakes.schedule([replace(row, holds=row.holds + 1)])


async def give_back(engine: Engine, execution_id: str) -> None:
    """An operator's word gives an execution's rows their attempts back. Best effort, and told where it fails."""
    if engine.wakes is None:
        return
    try:
        for row in await engine.wakes.rows_of(execution_id):
            if row.kind == "refusal" and row.holds:
                # Twice: once leaves a row that was written again while a node was at work on it.
                for _ in range(2):
                    await engine.wakes.complete(execution_id, row.wake_at)
                await engine.wakes.schedule([replace(row, holds=0)])
    except LoomError as error:
        engine.signals.repeated_storage_error(error, execution_id)


def _given_up(execution_id: str) -> str:
    return f"given up:{execution_id}"
