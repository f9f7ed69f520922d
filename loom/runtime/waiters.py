"""Whoever waits in this process for the end of an execution."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from weakref import ref

from loom.schemas.quick import quick

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from loom.errors import LoomError
    from loom.schemas.envelope import Json

SWEEP_AT_LEAST: Final = 4_096


@quick
@dataclass(frozen=True, slots=True)
class Ending:
    """How an execution ended: type and data of its last event, or why this node will not see it.

    ``error`` says that this node cannot drive it; ``moved`` that another process hears of it from now on.
    """

    kind: str
    data: Mapping[str, Json]
    error: LoomError | None = None
    moved: bool = False


MOVED: Final = Ending("", {}, moved=True)


class Waiters:
    """A future per execution that somebody holds; forgotten soon after nobody does."""

    def __init__(self) -> None:
        self._refs: dict[str, ref[asyncio.Future[Ending]]] = {}
        self._sweep_at = SWEEP_AT_LEAST

    def of(self, execution_id: str) -> asyncio.Future[Ending]:
        """The future of an execution's end, as far as this process hears of it."""
        known = self._refs.get(execution_id)
        future = None if known is None else known()
        if future is None or future.done():
            future = asyncio.get_running_loop().create_future()
            self._refs[execution_id] = ref(future)
            if len(self._refs) > self._sweep_at:
                self._sweep()
        return future

    def waited_for(self, execution_id: str) -> bool:
        """Whether somebody here waits for its end."""
        known = self._refs.get(execution_id)
        future = None if known is None else known()
        return future is not None and not future.done()

    def ended(self, execution_id: str, ending: Ending) -> None:
        """It has ended."""
        known = self._refs.pop(execution_id, None)
        future = None if known is None else known()
        if future is not None and not future.done():
            future.set_result(ending)

    def refused(self, execution_id: str, error: LoomError) -> None:
        """This node cannot drive it to its end."""
        self.ended(execution_id, Ending("", {}, error))

    def moved(self, concerns: Callable[[str], bool]) -> None:
        """This process no longer hears of these executions."""
        for execution_id in [i for i in self._refs if concerns(i)]:
            self.ended(execution_id, MOVED)

    def close(self, error: LoomError) -> None:
        """Nobody is told anything any more but this."""
        for execution_id in list(self._refs):
            self.refused(execution_id, error)

    def _sweep(self) -> None:
        self._refs = {
            i: known
            for i, known in self._refs.items()
            if (future := known()) is not None and not future.done()
        }
        self._sweep_at = max(SWEEP_AT_LEAST, 2 * len(self._refs))
