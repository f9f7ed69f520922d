"""What callers do to the simulated fleet: start, send, cancel; each until it is answered. And what the curious ask."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

from loom.errors import (
    ExecutionAlreadyExistsError,
    ExecutionDeniedError,
    ExecutionFinishedError,
    LoomError,
    SealedPayloadUnreadableError,
    StoreError,
)
from loom.ids import dedupe_key
from loom.testing.simulation.capabilities import CAPABLE, OPEN, PLANTED
from loom.testing.simulation.faults import TTL_S
from loom.testing.simulation.fleet import SUBJECTS
from loom.testing.simulation.flows import MESSAGES

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from loom.testing.simulation.fleet import Fleet
    from loom.testing.simulation.node import Node

SENDER: Final = "s"
PAUSE_S: Final = 0.1
CURIOUS: Final = 0.5
ASKED: Final = ("load_state", "history", "status", "send")
"""What the curious ask of an order; the last of these would write."""


class Workload:
    """Orders and their messages. ``expected`` are the results; ``done`` says that every call was answered.

    ``denials`` counts what the curious were not told.
    """

    def __init__(self, fleet: Fleet, orders: int) -> None:
        self._fleet, self._world = fleet, fleet.world
        self.expected: dict[str, Any] = {}
        self.denials = 0
        self._left = orders
        for n in range(orders):
            self._world.after(0.2 + self._world.rng.random() * TTL_S, lambda n=n: self._begin(n))  # type: ignore[misc]

    @property
    def done(self) -> bool:
        """Whether every call was answered."""
        return self._left == 0

    def _begin(self, n: int) -> None:
        self._fleet.client.spawn(self._order(n))

    async def _order(self, n: int) -> None:
        rng, world = self._world.rng, self._world
        seals = self._fleet.capabilities.fleet == "keys" or (
            self._fleet.capabilities.seals and world.chance(0.5)
        )
        word = PLANTED if seals else OPEN
        given = {
            "seen": [],
            "word": word,
            "short": rng.uniform(0, 0.05),
            "long": rng.choice([0.1, 0.5, 1.0, 2.0]) * TTL_S,
            "patience": rng.choice([None, None, 0.05, 0.5, 2.0]),
            "child": world.chance(0.5),
            "continue": world.chance(0.5),
            "continued": False,
        }
        execution_id = f"order-{n}"
        options = {"execution_id": execution_id}
        if self._fleet.capabilities.seals:
            options["subject"] = SUBJECTS[n % len(SUBJECTS)]
        self._perhaps_start_on(rng.choice(self._fleet.nodes), given, options)
        await asyncio.sleep(rng.random())
        await self._until_answered(lambda: self._start(given, options))
        self._fleet.invariants.acknowledged_start(execution_id)
        cancel = world.chance(0.1)
        self.expected[execution_id] = [[k, word] for k in range(MESSAGES)]
        for k in range(MESSAGES):
            await asyncio.sleep(rng.random() * TTL_S / 2)
            if seals and world.chance(CURIOUS):
                self._ask(rng.choice(self._fleet.nodes), execution_id, rng.choice(ASKED))
            if self._perhaps_send_on(execution_id, [k, word]):
                await asyncio.sleep(rng.choice([0, PAUSE_S]) * rng.random())
            await self._until_answered(lambda k=k: self._send(execution_id, [k, word]))  # type: ignore[misc]
            if cancel and k == 1:
                await self._until_answered(lambda: self._cancel(execution_id))
        world.note(f"client has sent everything to {execution_id}")
        self._left -= 1

    def _perhaps_start_on(self, node: Node, given: dict[str, Any], options: dict[str, str]) -> None:
        if self._world.chance(0.5) and _may_give(node, given["word"]):
            node.spawn(self._start_on(node.runtime, given, options))

    def _perhaps_send_on(self, execution_id: str, payload: list[Any]) -> bool:
        """On the node whose flow waits for it, which may die of it; the client sends it too, under the same id."""
        row = self._fleet.log.index.row(execution_id)
        driver = None if row is None else row.node
        drivers = [n for n in self._fleet.nodes if _may_give(n, payload[1]) and n.driver == driver]
        if not drivers or self._world.chance(0.3):
            return False
        node = self._world.rng.choice(drivers)
        node.spawn(self._send_on(node.runtime, execution_id, payload))
        return True

    async def _start_on(self, runtime: Any, given: dict[str, Any], options: dict[str, str]) -> None:
        """Start on a node, which may die of it; the client starts it too, under the same id."""
        try:
            await runtime.start("order", given, **options)
        except (LoomError, AttributeError):
            return
        self._fleet.invariants.acknowledged_start(options["execution_id"])

    async def _start(self, given: dict[str, Any], options: dict[str, str]) -> None:
        try:
            await self._client.start("order", given, **options)
        except ExecutionAlreadyExistsError:
            return

    async def _send_on(self, runtime: Any, execution_id: str, payload: list[Any]) -> None:
        with contextlib.suppress(LoomError, AttributeError):
            await self._send(execution_id, payload, runtime)

    async def _send(self, execution_id: str, payload: list[Any], runtime: Any = None) -> None:
        message_id, sender = f"m{payload[0]}", self._client if runtime is None else runtime
        try:
            await sender.send(execution_id, "go", payload, message_id=message_id, sender=SENDER)
        except ExecutionFinishedError:
            return
        self._fleet.invariants.acknowledged_send(execution_id, "go", dedupe_key(SENDER, message_id))

    async def _cancel(self, execution_id: str) -> None:
        try:
            await self._client.cancel(execution_id, "enough")
        except ExecutionFinishedError:
            return

    def _ask(self, node: Node, execution_id: str, verb: str) -> None:
        if node.alive and node.runtime is not None:
            node.spawn(self._asked(node, node.runtime, execution_id, verb))

    async def _asked(self, node: Node, runtime: Any, execution_id: str, verb: str) -> None:
        """Ask a node of what is sealed: one that cannot open it denies, writes nothing, and tells nothing more."""
        kind, life = node.kind, node.incarnation
        if verb == "send" and not self._fleet.invariants.blind(execution_id, kind):
            return
        arguments = ("aside", "?") if verb == "send" else ()
        try:
            answer = await getattr(runtime, verb)(execution_id, *arguments)
        except (StoreError, AttributeError):
            return
        except (ExecutionDeniedError, SealedPayloadUnreadableError) as error:
            answer = None
            self.denials += 1
            self._world.note(f"{node.name} ({kind}) denies {verb} of {execution_id}: {error}")
        if node.incarnation != life:
            return
        if answer is not None and self._fleet.invariants.blind(execution_id, kind):
            self._fleet.violate(f"{node.name} ({kind}) answers {verb} of {execution_id}")
        self._fleet.invariants.handed(answer, node)

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


def _may_give(node: Node, word: str) -> bool:
    """Whether a node can be asked now; what is to be sealed is given only to who seals it."""
    return node.alive and node.runtime is not None and (word == OPEN or node.kind == CAPABLE)
