"""Calls of many tasks made as one: what is asked for while a call is under way goes with the next.

A round trip costs this process far more than what it carries, so a thousand tasks that want a row each share a few.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

Ask = TypeVar("Ask")
Answer = TypeVar("Answer")

MAX_TOGETHER: Final = 512
"""Asked for in one call: a script keeps the server from everybody else while it runs."""


class Gathered(Generic[Ask, Answer]):
    """``call`` answers many at once, in order, and is bounded; an error of it is the error of all that it was asked for.

    A task that is cancelled stops waiting; what it asked for is asked nevertheless.
    """

    def __init__(
        self, call: Callable[[Sequence[Ask]], Awaitable[Sequence[Answer]]], most: int = MAX_TOGETHER
    ) -> None:
        self._call, self._most = call, most
        self._waiting: list[tuple[Ask, asyncio.Future[Answer]]] = []
        self._task: asyncio.Task[None] | None = None

    async def ask(self, what: Ask) -> Answer:
        """Return the answer; raises what the call raises."""
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._waiting = []  # of a loop that has ended
            self._task = loop.create_task(self._serve())
        answer: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((what, answer))
        return await answer

    async def _serve(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
            try:
                answers = await self._call([what for what, _ in batch])
            except asyncio.CancelledError:
                for _, waits in (*batch, *self._waiting):
                    waits.cancel()
                raise
            except Exception as error:  # noqa: BLE001 - it is theirs who asked
                for _, waits in batch:
                    if not waits.done():
                        waits.set_exception(error)
                continue
            for (_, waits), answer in zip(batch, answers, strict=True):
                if not waits.done():
                    waits.set_result(answer)
