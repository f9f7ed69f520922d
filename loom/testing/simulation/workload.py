"""What callers do to the simulated fleet: start, send, cancel; each until it is answered."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from loom.errors import ExecutionAlreadyExistsError, ExecutionFinishedError, LoomError
from loom.ids import dedupe_key
from loom.testing.simulation.faults import TTL_S
from loom.testing.simulation.flows import MESSAGES

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from loom.testing.simulation.fleet import Fleet

SENDER: Final = "s"
PAUSE_S: Final = 0.1


class Workload:
    """Orders and their messages. ``expected`` are the results; ``done`` says that every call was answered."""

    def __init__(self, fleet: Fleet, orders: int) -> None:
        self._fleet, self._world = fleet, fleet.world
        self.expected: dict[str, list[Any]] = {}
        self._left = orders
        for n in range(orders):
            self._world.after(0.2 + self._world.rng.random() * 2 * TTL_S, lambda n=n: self._begin(n))  # type: ignore[misc]

    @property
    def done(self) -> bool:
        """Whether every call was answered."""
        return self._left == 0

    def _begin(self, n: int) -> None:
        self._fleet.client.spawn(self._order(n))

    async def _order(self, n: int) -> None:
        rng, world = self._world.rng, self._world
        given = {
            "seen": [],
            "short": rng.uniform(0, 0.05),
            "long": rng.choice([0.1, 0.5, 1.0, 2.0]) * TTL_S,
            "patience": rng.choice([0.05, 0.5, 2.0]),
            "child": world.chance(0.5),
            "continue": world.chance(0.5),
            "continued": False,
        }
        execution_id = f"order-{n}"
        starter = rng.choice(self._fleet.nodes) if world.chance(0.5) else None
        if starter is not None and starter.alive and starter.runtime is not None:
            starter.spawn(self._start_on(starter.runtime, execution_id, given))
        await asyncio.sleep(rng.random())
        await self._until_answered(lambda: self._start(execution_id, given))
        self._fleet.invariants.acknowledged_start(execution_id)
        cancel = world.chance(0.1)
        self.expected[execution_id] = list(range(MESSAGES))
        for k in range(MESSAGES):
            await asyncio.sleep(rng.random() * TTL_S / 2)
            await self._until_answered(lambda k=k: self._send(execution_id, k))  # type: ignore[misc]
            if cancel and k == 1:
                await self._until_answered(lambda: self._cancel(execution_id))
        world.note(f"client has sent everything to {execution_id}")
        self._left -= 1

    async def _start_on(self, runtime: Any, execution_id: str, given: dict[str, Any]) -> None:
        """Start on a node, which may die of it; the client starts it too, under the same id."""
        try:
            await runtime.start("order", given, execution_id=execution_id)
        except (LoomError, AttributeError):
            return
        self._fleet.invariants.acknowledged_start(execution_id)

    async def _start(self, execution_id: str, given: dict[str, Any]) -> None:
        try:
            await self._client.start("order", given, execution_id=execution_id)
        except ExecutionAlreadyExistsError:
            return

    async def _send(self, execution_id: str, k: int) -> None:
        message_id = f"m{k}"
        try:
            await self._client.send(execution_id, "go", k, message_id=message_id, sender=SENDER)
        except ExecutionFinishedError:
            return
        self._fleet.invariants.acknowledged_send(execution_id, "go", dedupe_key(SENDER, message_id))

    async def _cancel(self, execution_id: str) -> None:
        try:
            await self._client.cancel(execution_id, "enough")
        except ExecutionFinishedError:
            return

    @property
    def _client(self) -> Any:
        return self._fleet.client.runtime

    async def _until_answered(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await call()
            except (LoomError, AttributeError) as error:
                self._world.note(f"client is refused: {type(error).__name__}")
                await asyncio.sleep(PAUSE_S)
                continue
            return
