"""The timer service: due wake rows of owned shards, claimed and fired (docs/architecture.md; system.md 5).

It polls the wake store, sooner where this process itself scheduled a row, and never later than ``POLL_MS``. A row goes
once what it stands for has happened or is void; one that cannot be acted on now stays, and its claim keeps it from being
looked at again at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from typing import TYPE_CHECKING, Final

from loom.errors import LoomError, QuarantineHeldError, StoreError
from loom.runtime.alarms import POLL_MS
from loom.runtime.background import Background
from loom.runtime.holds import held_back, held_topics

if TYPE_CHECKING:
    from collections.abc import Callable

    from loom.runtime.engine import Engine
    from loom.runtime.run import Run
    from loom.stores.contracts import WakeRow, WakeStore

BATCH: Final = 256
AT_ONCE: Final = 64
CLAIM_MS: Final = 5_000
EPOCH_EVERY_S: Final = 1.0
MAX_HINTS: Final = 4_096
SHORTEST_PAUSE_MS: Final = 1


class TimerService(Background):
    """Fires this node's timers."""

    TASK = "loom-timers"

    def __init__(self, engine: Engine, wakes: WakeStore, *, on_emptied: Callable[[], None]) -> None:
        self._engine = engine
        self._wakes = wakes
        self._on_emptied = on_emptied
        self._epoch: str | None = None
        self._epoch_due = 0.0
        self._hints: list[int] = []
        self._moved = asyncio.Event()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._firing: set[tuple[str, int]] = set()
        engine.driving.hint = self.hint

    def hint(self, due: int) -> None:
        """A row falls due then."""
        if len(self._hints) < MAX_HINTS:
            heapq.heappush(self._hints, due)
        if due == self._hints[0]:
            self._moved.set()

    def kick(self) -> None:
        """Look now: the clock was moved, or rows were rebuilt."""
        self._moved.set()

    async def _keep(self) -> None:
        failures = 0
        while True:
            try:
                full = await self._round()
                failures = 0
            except StoreError as error:
                full = False
                failures += 1
                self._engine.signals.repeated_storage_error(error, "wake rows")
            if not full:
                await self._pause(failures)

    async def _pause(self, failures: int) -> None:
        now = self._engine.now()
        while self._hints and self._hints[0] <= now:
            heapq.heappop(self._hints)
        wait_ms = POLL_MS if not self._hints else min(POLL_MS, self._hints[0] - now)
        wait_ms = max(wait_ms, SHORTEST_PAUSE_MS) if not failures else POLL_MS * min(failures, 20)
        self._moved.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_ms / 1000):
                await self._moved.wait()

    async def _round(self) -> bool:
        """Fire what is due; whether there may be more right now."""
        engine = self._engine
        shards = engine.owning.owned() if engine.owning is not None else frozenset()
        if not shards or not engine.live():
            return False
        await self._look_at_epoch()
        rows = await self._wakes.due(engine.now(), BATCH, shards=shards, refused=False)
        fresh = [row for row in rows if (row.execution_id, row.wake_at) not in self._firing]
        for row in fresh:
            await self._slots.acquire()
            self._firing.add((row.execution_id, row.wake_at))
            engine.spawn(self._fire(row), row.execution_id)
        return len(rows) == BATCH and bool(fresh)

    async def _look_at_epoch(self) -> None:
        """A store that was emptied has lost rows that nobody else will write again."""
        now = self._engine.loop.time()
        if now < self._epoch_due:
            return
        self._epoch_due = now + EPOCH_EVERY_S
        epoch = await self._wakes.epoch()
        if self._epoch is not None and epoch != self._epoch:
            self._on_emptied()
        self._epoch = epoch

    async def _fire(self, row: WakeRow) -> None:
        engine = self._engine
        try:
            if self._blocked(row):
                refused = engine.backoff.refused(row.execution_id)
                if refused:
                    # It is due: whoever can open it need not wait until this node tries again.
                    engine.driving.leave_inbox_row(row.execution_id, "refusal")
                if row.kind == "timer" or not refused:  # else it is that very row, which no claim may hide
                    await self._wakes.claim(row, engine.node, CLAIM_MS)
                return
            if not await self._wakes.claim(row, engine.node, CLAIM_MS):
                return
            try:
                settled = await self._settled(row)
            except QuarantineHeldError:
                return  # told; the row waits for a node that can open it, or for an operator
            except LoomError as error:
                if not engine.backoff.blocked(row.execution_id):
                    engine.backoff.failed(row.execution_id)
                engine.signals.repeated_error(error, row.execution_id)
                return
            if settled:
                await self._wakes.complete(row.execution_id, row.wake_at)
        finally:
            self._firing.discard((row.execution_id, row.wake_at))
            self._slots.release()

    def _blocked(self, row: WakeRow) -> bool:
        backoff = self._engine.backoff
        if row.kind == "inbox" and backoff.blocked(held_back(row.execution_id)):
            return True
        return backoff.blocked(row.execution_id)

    async def _looked(self, run: Run, row: WakeRow) -> bool:
        """Let a run of this process look; whether the row can go."""
        run.look()
        await run.rested()
        if row.kind == "timer" and row.wake_at in run.timers():
            return False
        if row.kind != "timer" and run.active and run.waiting.held_up:
            return False
        return await run.is_abreast()

    async def _settled(self, row: WakeRow) -> bool:
        """Do what the row is for; whether it is done or void, so that the row can go."""
        engine = self._engine
        run = engine.runs.get(row.execution_id)
        if run is not None and run.active:
            return await self._looked(run, row)
        current = row.execution_id if row.kind == "timer" else await engine.driving.head_of(row.execution_id)
        await engine.driving.notify(current)
        run = engine.runs.get(current)
        if run is not None and run.active:
            return await self._looked(run, row)
        loaded = await engine.driving.load(current)
        if loaded is None or loaded.state.finished:
            return True
        if loaded.state.status != "suspended":
            return False  # its driver, or whoever recovers it, comes to rest first
        if row.kind == "timer":
            return row.wake_at not in engine.driving.timers_of(loaded.state)
        return not held_topics(loaded.state)
