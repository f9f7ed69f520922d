"""What tests of the runtime share: flows, a log's kinds, a store that fails when told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from loom.schemas.envelope import Kind


async def add(a, b):
    return a + b


def kinds(history):
    return [event.type for event in history]


def of_kind(history, kind):
    return [event for event in history if event.type == kind]


class Trouble:
    """What a runtime told its callbacks."""

    def __init__(self):
        self.errors, self.storage, self.denied, self.warnings = [], [], [], []

    @property
    def options(self) -> dict[str, Any]:
        return {
            "on_error": lambda error, about: self.errors.append((error, about)),
            "on_storage_error": lambda error, about: self.storage.append((error, about)),
            "on_execution_denied": lambda request, reason: self.denied.append((request, reason)),
            "on_warn": lambda message, about: self.warnings.append((message, about)),
        }


class FaultyStore:
    """An event store whose appends a test can hold, fail, or lose the answer of; everything else passes through."""

    def __init__(self, inner):
        self._inner = inner
        self.before: Callable[[list], Any] | None = None
        self.after: Callable[[list], Any] | None = None
        self.appended: list = []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def append(self, append, *, deadline_ms=None):
        return (await self.append_many([append], deadline_ms=deadline_ms))[0]

    async def append_many(self, appends, *, deadline_ms=None):
        if self.before is not None:
            outcome = self.before(appends)
            if asyncio.iscoroutine(outcome):
                await outcome
        done = await self._inner.append_many(appends, deadline_ms=deadline_ms)
        self.appended.append(appends)
        if self.after is not None:
            outcome = self.after(appends)
            if asyncio.iscoroutine(outcome):
                await outcome
        return done


def has(appends, kind):
    return any(event.type == kind for append in appends for event in append.events)


def is_step(appends):
    return has(appends, Kind.STEP_COMPLETED)


def picture(fleet, runtimes=()):
    """Where every open execution and every node of a fleet stands: what a failed run is told with."""
    lines = []
    for stream_id, row in fleet.log.index.rows().items():
        if row.kind == "executions" and not row.finished:
            events = fleet.log.index.events(stream_id, max(0, row.head - 5), 10)
            shown = ", ".join(f"{e.sequence} {e.type}" for e in events)
            lease = fleet.leases.lease(stream_id)
            lines.append(
                f"{stream_id}: fence {row.fence} of {row.fence_owner}, driven by {row.node}, {lease}; {shown}"
            )
    lines += [f"at {fleet.clock()}: {row}" for row in fleet.leases.present.values()]
    for runtime in runtimes:
        engine = runtime._engine
        runs = {
            i: (r.phase.value, r.journal.behind, r.steps.busy, r._stirs()) for i, r in engine.runs.items()
        }
        lines.append(
            f"{runtime.node}: live {engine.live()}, owns {sorted(engine.owning.owned())}, runs {runs}, "
            f"unsettled {runtime._recovery._unsettled}, held back {engine.backoff.snapshot()}"
        )
    return "\n".join(lines)
