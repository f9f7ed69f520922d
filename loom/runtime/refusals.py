"""What its owner cannot open, another node carries on (system.md 1.4 and 5; docs/adr/0021).

A node that refuses leaves a refusal row. Every node looks through these rows, whoever owns their shards, and does what an
owner would do, by request: it answers the parked execution, or takes a running one over on the evidence that anybody needs.
A row goes once nothing is left to do; on a node that cannot open it either, it stays, and that node backs off. What fails
for other reasons is tried so often, and then left to an operator (``attempts``).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from loom.errors import LoomError, StoreError
from loom.runtime.attempts import Attempts
from loom.runtime.background import Background
from loom.runtime.driving import REFUSALS
from loom.runtime.holds import held_back
from loom.schemas.envelope import TERMINAL_KINDS, Kind
from loom.stores.contracts import WakeRow

if TYPE_CHECKING:
    from loom.runtime.engine import Engine
    from loom.runtime.recovery import Recovery
    from loom.stores.contracts import WakeStore

EVERY_S: Final = 0.5
PAGE: Final = 128
SHARDS_A_ROUND: Final = 16
AT_ONCE: Final = 16
CLAIM_MS: Final = 5_000


class RefusalScan(Background):
    """Looks through the refusal rows of all shards, a page at a time, round and round."""

    TASK = "loom-refusals"

    def __init__(self, engine: Engine, wakes: WakeStore, recovery: Recovery) -> None:
        self._engine, self._wakes, self._recovery = engine, wakes, recovery
        self._attempts = Attempts(engine, wakes)
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._acting: set[str] = set()
        self._offsets: dict[int, int] = {}
        self._next = 0

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                if self._engine.live():
                    await self._round()
            except StoreError as error:
                self._engine.signals.repeated_storage_error(error, "refusal rows")

    async def _round(self) -> None:
        engine = self._engine
        count = engine.config.partitions
        for _ in range(min(count, SHARDS_A_ROUND)):
            shard, self._next = self._next, (self._next + 1) % count
            offset = self._offsets.get(shard, 0)
            rows = await self._wakes.refusals(engine.now(), PAGE, shard=shard, offset=offset)
            self._offsets[shard] = offset + PAGE if len(rows) == PAGE else 0
            for row in rows:
                execution_id = row.execution_id
                resting = (
                    not self._attempts.due(row) if self._attempts.spent(row) else self._blocked(execution_id)
                )
                if execution_id in self._acting or resting:
                    continue  # without a claim: nothing may hide the row from a node that can open it
                await self._slots.acquire()
                self._acting.add(execution_id)
                engine.spawn(self._act(row), execution_id)

    def _blocked(self, execution_id: str) -> bool:
        backoff = self._engine.backoff
        return backoff.blocked(execution_id) or backoff.blocked(held_back(execution_id))

    async def _act(self, row: WakeRow) -> None:
        engine, wakes = self._engine, self._wakes
        try:
            if not await wakes.claim(row, engine.node, CLAIM_MS):
                return
            settled, current = False, row.execution_id
            try:
                current = await engine.driving.head_of(row.execution_id)
                if self._attempts.spent(row):
                    settled = await self._attempts.given_up(row, current)
                else:
                    settled = await self._settled(current)
            except LoomError as error:
                engine.signals.repeated_error(error, row.execution_id)
                if isinstance(error, REFUSALS) and not self._blocked(row.execution_id):
                    engine.backoff.failed(row.execution_id)
            if settled:
                await wakes.complete(row.execution_id, row.wake_at)
            else:
                await wakes.claim(row, engine.node, 0)
                if not self._attempts.spent(row):
                    await self._attempts.count(row, current)
        finally:
            self._acting.discard(row.execution_id)
            self._slots.release()

    async def _settled(self, current: str) -> bool:
        """Do for the execution what there is to do; whether nothing is left of it."""
        engine = self._engine
        if await self._rests_here(current):
            return not self._held_up(current)
        info = await engine.events.info(current)
        if info is None or info.status in TERMINAL_KINDS:
            return True
        chain_id = await engine.chain_of(current)
        if chain_id is None or await self._recovery.cancel_requested(chain_id, current):
            return True
        if info.status == Kind.EXECUTION_SUSPENDED:
            await engine.driving.notify(current)
        else:
            await self._recovery.carry_on(info)
        if await self._rests_here(current):
            return not self._held_up(current)
        return await self._rests(current)

    async def _rests(self, execution_id: str) -> bool:
        """Whether it has ended, or waits and nothing it waits for is there."""
        driving = self._engine.driving
        loaded = await driving.load(execution_id)
        if loaded is None or loaded.state.finished:
            return True
        if loaded.state.status != "suspended":
            return False  # its driver lives, or nobody knows yet
        alarms = [WakeRow(execution_id, at, "timer") for at in driving.timers_of(loaded.state)]
        # The owner cannot read what it sleeps until: where alarms were lost, nobody else writes them again.
        if alarms and not await self._engine.schedule(alarms):
            return False
        return await driving.answerable(loaded.state) is None

    def _held_up(self, execution_id: str) -> bool:
        """Whether a run of this node waits for what is held and it cannot open: another may (system.md 4.3)."""
        run = self._engine.runs.get(execution_id)
        return run is not None and run.active and run.waiting.held_up

    async def _rests_here(self, execution_id: str) -> bool:
        """Whether this node drives it, and what it has to do is durable."""
        run = self._engine.runs.get(execution_id)
        if run is None or not run.active:
            return False
        run.look()
        await run.rested()
        return await run.is_abreast()
