"""Drained topics of an inbox are retired: what was consumed of them rests no longer (system.md 0, "Inbox"; seed, D9).

A topic in use is trimmed every ``inbox_trim_every`` messages. One that has gone quiet would keep what came after the last trim,
so a node looks, now and then, at the parked executions that it has in memory. A held topic is not drained, whatever its cursor says.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from loom.errors import LoomError
from loom.ids import inbox_topic
from loom.kernel.inbox import is_drained
from loom.runtime.background import Background

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loom.runtime.engine import Engine
    from loom.runtime.run import Run

MAX_A_PASS: Final = 256
"""Streams trimmed in one pass; the next goes on."""

YIELD_EVERY: Final = 64
ABOUT: Final = "drained topics"


class Retiring(Background):
    """Trims the drained topics of resident parked executions, each once per park that moved it."""

    TASK = "loom-retiring"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._looked: dict[str, int] = {}
        """Heads at which resident executions were looked at."""

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._engine.config.recovery_interval_ms / 1000)
            if not self._engine.live():
                continue
            try:
                await self.retire()
            except LoomError as error:
                self._engine.signals.repeated_storage_error(error, ABOUT)

    async def retire(self) -> list[str]:
        """Make one pass; return the streams that were trimmed.

        Raises:
            LoomError: the event store failed; what was done is done.
        """
        engine = self._engine
        trimmed: list[str] = []
        parked = list(engine.parked_runs)
        self._looked = {i: head for i, head in self._looked.items() if i in engine.parked_runs}
        for turn, execution_id in enumerate(parked):
            if turn % YIELD_EVERY == YIELD_EVERY - 1:
                await asyncio.sleep(0)
            run = engine.runs.get(execution_id)
            if run is None or run.journal.behind or self._looked.get(execution_id) == run.state.head:
                continue
            head = run.state.head
            for stream_id, before in list(self._drained(run)):
                if len(trimmed) >= MAX_A_PASS:
                    return trimmed
                await engine.events.truncate(stream_id, before)
                trimmed.append(stream_id)
            self._looked[execution_id] = head
        return trimmed

    def _drained(self, run: Run) -> Iterator[tuple[str, int]]:
        """Streams with something to trim, and up to where. A shared stream of the older layout is left alone."""
        owning, state = self._engine.owning, run.state
        if owning is None or not state.cursors:
            return
        for info in owning.inbox_streams(run.chain_id):
            topic = inbox_topic(info.stream_id)
            if topic is not None and info.first <= info.head and is_drained(state, topic, info.head):
                yield info.stream_id, info.head + 1
