"""A simulated node: a runtime on an event loop of its own, which can be frozen, killed, and started again."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from loom.runtime import Client, Runtime
from loom.runtime.surroundings import Surroundings
from loom.testing.clock import EPOCH_MS
from loom.testing.simulation.network import Link
from loom.testing.simulation.stores import Remote, RemoteLog
from loom.testing.virtual_loop import NEVER, VirtualLoop

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from loom.testing.simulation.fleet import Fleet

TURNS_AT_ONCE: Final = 1_000
GRAIN_S: Final = 1e-6
"""Between two turns of a loop for which only time is the reason, some passes, as on any machine."""


class Node:
    """One process of the fleet. ``incarnation`` counts its lives; what was asked by an earlier one reaches no later one.

    Its clocks are its own: ``wall_off_s`` is added to the true time, ``rate`` is how fast its monotonic clock goes.
    """

    def __init__(self, fleet: Fleet, name: str, *, drives: bool = True, **options: Any) -> None:
        self.fleet, self.world, self.name = fleet, fleet.world, name
        self.drives = drives
        self.options = options
        self.incarnation = 0
        self.loop: VirtualLoop | None = None
        self.runtime: Client | None = None
        self.log = Link(self.world, self, "log")
        self.redis = Link(self.world, self, "redis")
        self.keys = Link(self.world, self, "keys")
        self.kind = "raw"
        self.store: RemoteLog | None = None
        self.frozen = False
        self.frozen_since = 0.0
        self.blocks = False
        self.wall_off_s = 0.0
        self._rate, self._rate_since, self._rate_base = 1.0, 0.0, 0.0
        self._turned = 0.0
        self._graveyard: list[VirtualLoop] = []

    # Clocks -----------------------------------------------------------------------------------------------------------

    def monotonic(self) -> float:
        """Its monotonic clock, in seconds."""
        return self._rate_base + (self.world.now - self._rate_since) * self._rate

    def wall(self) -> float:
        """Its wall clock, in seconds since the epoch."""
        return EPOCH_MS / 1000 + self.world.now + self.wall_off_s

    def wall_ms(self) -> int:
        """Its wall clock, as a runtime reads it."""
        return round(self.wall() * 1000)

    def drift(self, rate: float) -> None:
        """From now on its monotonic clock goes so fast."""
        self._rate_base, self._rate_since, self._rate = self.monotonic(), self.world.now, rate

    # Actor ------------------------------------------------------------------------------------------------------------

    def due(self) -> float:
        """See :class:`loom.testing.simulation.world.Actor`."""
        loop = self.loop
        if loop is None or self.frozen:
            return NEVER
        if loop.is_ready():
            return self.world.now
        due = self._rate_since + (loop.next_timer() - self._rate_base) / self._rate
        sooner = self._turned + GRAIN_S
        return max(sooner, due)

    def turn(self) -> None:
        """See :class:`loom.testing.simulation.world.Actor`. Nobody else can tell what happens here at one instant apart."""
        assert self.loop is not None
        self._turned = self.world.now
        self.loop.turn(TURNS_AT_ONCE)

    # Life -------------------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether it has not been killed; it may be frozen."""
        return self.loop is not None

    @property
    def driver(self) -> str | None:
        """What logs and fences call it in this life; None while no runtime is open."""
        runtime: Any = self.runtime
        return None if runtime is None else runtime.node

    def start(self) -> None:
        """Begin a life."""
        self.incarnation += 1
        self.frozen = False
        self.loop = VirtualLoop(clock=self.monotonic)
        self.loop.set_exception_handler(self._complain)
        self.store = RemoteLog(self.fleet.log, self.log, partial(self.fleet.fenced, self))
        overhear = self.world.overhear if self.world.unspeakable else None
        shared: dict[str, Any] = {
            "events": self.fleet.stored(self, self.store),
            "leases": Remote(self.fleet.leases, self.redis, overhear),
            "wakes": Remote(self.fleet.wakes, self.redis, overhear),
            "clock": self.wall_ms,
            "ids": self.world.fresh_id,
            "on_warn": lambda message, about: self.world.note(f"{self.name} warns {about}: {message}"),
            "on_error": lambda error, about: self.fleet.erred(self, error, about),
            "on_storage_error": lambda error, _about: self.world.overhear(
                str(error)
            ),  # they fail all the time
        }
        config = self.fleet.config(self.name)
        if self.drives:
            self.runtime = Runtime(config, flows=self.fleet.flows(self), **shared, **self.options)
        else:
            self.runtime = Client(config, **shared)
        surroundings = Surroundings(self.monotonic, self.wall, self.world.token, self.world.rng.random)
        self.runtime._surroundings = surroundings  # noqa: SLF001 - what the machine would be
        self.world.note(f"{self.name} starts, life {self.incarnation}")
        self.spawn(self._open())

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Do something on its loop."""
        assert self.loop is not None
        return self.loop.create_task(work)

    def kill(self) -> None:
        """End its life here and now: nothing more runs, nothing is told, what it had sent may still arrive."""
        if self.loop is None:
            return
        self.world.note(f"{self.name} is killed")
        self._graveyard.append(self.loop)
        self.incarnation += 1
        self.loop = self.runtime = self.store = None
        self.frozen = False
        self.fleet.reassign_soon()

    def freeze(self) -> None:
        """Stop its loop, as SIGSTOP does: messages pile up, clocks go on."""
        self.frozen, self.frozen_since = True, self.world.now

    def step_ends(self) -> None:
        """A step of a flow is about to end, on this node's loop: if it is to block that, it does now."""
        if self.blocks and self.loop is not None:
            self.blocks = False
            self.loop.interrupt()
            self.fleet.block(self)

    def thaw(self) -> None:
        """Let it go on."""
        self.frozen = False

    def bury(self) -> None:
        """The simulation is over: let go of everything."""
        self.kill()
        for dead in self._graveyard:
            dead.end()
        self._graveyard.clear()

    async def _open(self) -> None:
        incarnation, runtime = self.incarnation, self.runtime
        while True:
            try:
                assert runtime is not None
                await runtime.open()
            except Exception as error:  # noqa: BLE001 - a node that cannot start is started again, as by its host
                self.world.note(f"{self.name} cannot start: {type(error).__name__}: {error}")
                await asyncio.sleep(0.5)
                continue
            break
        if self.incarnation == incarnation:
            self.fleet.opened(self)

    def _complain(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.world.failure = self.world.failure or (
            f"{self.name}: {context.get('message')}: {type(error).__name__}: {error}"
        )
