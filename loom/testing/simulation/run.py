"""One simulation: chaos for so many steps, then everything is healed, and everything must come to its end."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from loom.testing.simulation.faults import FAULTS, TTL_S, heal
from loom.testing.simulation.fleet import Fleet
from loom.testing.simulation.workload import Workload
from loom.testing.simulation.world import LINES_KEPT, SimulationError, World

if TYPE_CHECKING:
    import random

DEFAULT_STEPS: Final = 12_000
SETTLE_S: Final = 60 * TTL_S
"""How long, in the world's time, a healed fleet may take to bring everything to its end."""
LOOK_EVERY: Final = 64
MOST_AT_ONCE: Final = 6


@dataclass(frozen=True, slots=True)
class Report:
    """What a simulation came to. ``digest`` is of its whole log: the same seed gives the same."""

    seed: int
    steps: int
    seconds: float
    executions: int
    effects: int
    doubled: int
    takeovers: int
    digest: str


def simulate(
    seed: int,
    steps: int = DEFAULT_STEPS,
    *,
    nodes: int = 3,
    orders: int = 5,
    acquire: str | None = None,
    faults: tuple[str, ...] | None = None,
) -> Report:
    """Run one seed; ``faults`` limits what may go wrong.

    Raises:
        SimulationError: an invariant does not hold; the message says which, and how to repeat it.
    """
    world = World(seed)
    mode = acquire or world.rng.choice(["lazy", "lazy", "eager"])
    fleet = Fleet(world, nodes=nodes, acquire=mode)
    chosen = _chosen(world.rng, faults)
    world.note(f"seed {seed}, {mode}, faults {', '.join(chosen)}")
    workload = Workload(fleet, orders)
    collecting = gc.isenabled()
    gc.disable()  # nothing ends at a moment of the collector's choice
    try:
        _schedule(fleet, chosen, steps)
        while world.steps < steps and _step(world):
            pass
        heal(fleet)
        _settle(world, fleet, workload)
        fleet.invariants.at_rest(workload.expected)
        return _report(world, fleet, workload)
    except SimulationError as error:
        raise SimulationError(_explained(world, steps, error)) from error
    finally:
        for node in (*fleet.nodes, fleet.client):
            node.bury()
        if collecting:
            gc.enable()


def _report(world: World, fleet: Fleet, workload: Workload) -> Report:
    judged = fleet.invariants
    return Report(
        world.seed,
        world.steps,
        round(world.now, 3),
        len(workload.expected),
        sum(judged.effects.values()),
        judged.doubled,
        judged.takeovers,
        world.digest.hexdigest(),
    )


def _chosen(rng: random.Random, faults: tuple[str, ...] | None) -> list[str]:
    """Some of the faults: where all go on at once, none has its time."""
    names = list(FAULTS if faults is None else faults)
    return names if faults is not None else sorted(rng.sample(names, rng.randrange(1, MOST_AT_ONCE)))


def _schedule(fleet: Fleet, chosen: list[str], steps: int) -> None:
    world = fleet.world
    pause_s = world.rng.uniform(0.1, 1.0) * TTL_S

    def strike() -> None:
        if world.steps >= steps:
            return
        node = world.rng.choice(fleet.nodes)
        FAULTS[world.rng.choice(chosen)](fleet, node)
        world.after(world.rng.uniform(0.2, 2) * pause_s, strike)

    if chosen:
        world.after(pause_s, strike)


def _step(world: World) -> bool:
    going = world.step()
    if world.failure is not None:
        raise SimulationError(world.failure)
    return going


def _settle(world: World, fleet: Fleet, workload: Workload) -> None:
    until = world.now + SETTLE_S
    while world.now < until and _step(world):
        if world.steps % LOOK_EVERY == 0 and workload.done and not fleet.invariants.open_executions():
            return


def _explained(world: World, steps: int, error: SimulationError) -> str:
    lines = "\n".join(world.lines[-LINES_KEPT:])
    return f"{lines}\nseed {world.seed}, step {world.steps}: {error}\nrepeat it: loom sim --seed {world.seed} --steps {steps}"
