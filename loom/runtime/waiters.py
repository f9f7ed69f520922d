"""Whoever waits in this process for the end of an execution."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loom.errors import LoomError
    from loom.schemas.envelope import Json


@dataclass(frozen=True, slots=True)
class Ending:
    """How an execution ended: type and data of its last event, or why this node will not see it (``error``)."""

    kind: str
    data: Mapping[str, Json]
    error: LoomError | None = None


class Waiters:
    """A future per execution that somebody waits for; it goes when they go."""

    def __init__(self) -> None:
        self._futures: WeakValueDictionary[str, asyncio.Future[Ending]] = WeakValueDictionary()

    def of(self, execution_id: str) -> asyncio.Future[Ending]:
        """The future of an execution's end, as far as this process hears of it."""
        future = self._futures.get(execution_id)
        if future is None or future.done():
            future = asyncio.get_running_loop().create_future()
            self._futures[execution_id] = future
        return future

    def ended(self, execution_id: str, ending: Ending) -> None:
        """It has ended."""
        future = self._futures.pop(execution_id, None)
        if future is not None and not future.done():
            future.set_result(ending)

    def refused(self, execution_id: str, error: LoomError) -> None:
        """This node cannot drive it to its end."""
        self.ended(execution_id, Ending("", {}, error))

    def close(self) -> None:
        """Nobody is told anything any more."""
        for future in list(self._futures.values()):
            future.cancel()
        self._futures.clear()
