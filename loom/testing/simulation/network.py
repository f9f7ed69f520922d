"""Calls between a node and a shared store: they take time, get lost on either way, come twice, or never in time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from loom.errors import (
    DeadlineExceededError,
    LeaseStoreTimeoutError,
    LoomError,
    OutcomeUnknownError,
    UnreachableError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from loom.testing.simulation.node import Node
    from loom.testing.simulation.world import World

LATENCY_S: Final = (0.0002, 0.004)
LOG_DEADLINE_S: Final = 2.0
REDIS_DEADLINE_S: Final = 0.5
WRITES: Final = frozenset({"append_many", "acquire_fence", "acquire_fence_if"})
REPEATABLE: Final = frozenset(
    {"append_many", "acquire_many", "renew_many", "release_many", "schedule", "complete"}
)
"""Calls that a network may deliver twice: the contracts say that repeating them changes nothing."""


def run_now(call: Coroutine[Any, Any, Any]) -> Any:
    """What a store in memory answers: it only gives way, it never waits."""
    try:
        while True:
            call.send(None)
    except StopIteration as done:
        return done.value


class Link:
    """One node's way to one shared store: ``log``, ``redis`` or ``keys``. A test of faults sets its fields."""

    def __init__(self, world: World, node: Node, service: str) -> None:
        self._world, self._node, self._service = world, node, service
        self.cut = False
        self.slow = 1.0
        self.lose_requests = 0
        self.lose_replies = 0
        self.duplicate = 0
        self.crash: str | None = None
        self.overtaken: Callable[[str], float] | None = None
        """Told of the next write, and says how much later that arrives."""

    async def call(self, name: str, about: str, act: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Make a call from the node's loop; ``act`` makes the store's coroutine, on arrival."""
        world, node = self._world, self._node
        incarnation, loop = node.incarnation, asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def arrive() -> None:
            if self.crash == "before" and name in WRITES:
                self._die(f"before {name} of {about}")
            if node.incarnation != incarnation and name not in WRITES:
                return
            try:
                result = run_now(act())
            except LoomError as error:
                self._reply(answer, loop, incarnation, name, error)
            else:
                self._reply(answer, loop, incarnation, name, result)
            if self.crash == "after" and name in WRITES:
                self._die(f"after {name} of {about}")

        if self._lost("lose_requests") or self.cut:
            world.note(f"{node.name} {self._service} {name} {about}: request lost")
        else:
            late = 0.0
            if self.overtaken is not None and name in WRITES:
                overtaken, self.overtaken = self.overtaken, None
                late = overtaken(about)
            world.after(self._delay() + late, arrive)
            if name in REPEATABLE and self._lost("duplicate"):
                world.note(f"{node.name} {self._service} {name} {about}: comes twice")
                world.after(self._delay() * 3, lambda: _ignored(act))
        return await self._in_time(answer, name, about)

    def deliver(self, call: Callable[[], None]) -> None:
        """Tell the node something, in order with what it was told before; it hears once it runs, unless it died."""
        incarnation, node = self._node.incarnation, self._node

        def arrive() -> None:
            if node.incarnation == incarnation and node.loop is not None:
                node.loop.call_soon(call)

        self._world.after(LATENCY_S[0], arrive)

    def _reply(
        self,
        answer: asyncio.Future[Any],
        loop: asyncio.AbstractEventLoop,
        incarnation: int,
        name: str,
        result: Any,
    ) -> None:
        if self._lost("lose_replies") or self.cut:
            self._world.note(f"{self._node.name} {self._service} {name}: reply lost")
            return

        def arrive() -> None:
            if self._node.incarnation == incarnation:
                loop.call_soon(_settle, answer, result)

        self._world.after(self._delay(), arrive)

    def _die(self, where: str) -> None:
        self.crash = None
        self._world.note(f"{self._node.name} crashes {where}")
        self._node.kill()

    def _lost(self, kind: str) -> bool:
        left = getattr(self, kind)
        if left:
            setattr(self, kind, left - 1)
        return bool(left)

    def _delay(self) -> float:
        return self._world.rng.uniform(*LATENCY_S) * self.slow

    async def _in_time(self, answer: asyncio.Future[Any], name: str, about: str) -> Any:
        deadline_s = LOG_DEADLINE_S if self._service == "log" else REDIS_DEADLINE_S
        late = answer.get_loop().call_later(deadline_s, _settle, answer, TimeoutError())
        try:
            return await answer
        except TimeoutError:
            what = f"{name} of {about}"
            if self._service == "redis":
                raise LeaseStoreTimeoutError(f"{what} was not answered") from None
            if self._service == "keys":
                raise UnreachableError("the key store", self._node.name, "sealing.keys") from None
            if name in WRITES:
                raise OutcomeUnknownError(about, "no answer") from None
            raise DeadlineExceededError(what, round(deadline_s * 1000)) from None
        finally:
            late.cancel()


def _ignored(act: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """The second delivery of one request: whatever it says, nobody hears."""
    try:
        run_now(act())
    except LoomError:
        return


def _settle(answer: asyncio.Future[Any], result: Any) -> None:
    if answer.done():
        return
    if isinstance(result, BaseException):
        answer.set_exception(result)
    else:
        answer.set_result(result)
