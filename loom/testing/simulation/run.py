"""One simulation: chaos for so many steps, then everything is healed, and everything must come to its end."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Final

from loom.testing.simulation.faults import FAULTS, OF_SEALING, TTL_S, heal
from loom.testing.simulation.fleet import Fleet
from loom.testing.simulation.workload import Workload
from loom.testing.simulation.world import LINES_KEPT, SimulationError, World

DEFAULT_STEPS: Final = 12_000
SETTLE_S: Final = 60 * TTL_S
"""How long, in the world's time, a healed fleet may take to bring everything to its end."""
LOOK_EVERY: Final = 64
MOST_AT_ONCE: Final = 6
KINDS: Final = ("plain", "plain", "keys", "paths")


@dataclass(frozen=True, slots=True)
class Report:
    """What a simulation came to. ``digest`` is of its whole log: the same seed gives the same."""

    seed: int
    kind: str
    steps: int
    seconds: float
    executions: int
    effects: int
    doubled: int
    takeovers: int
    denials: int
    digest: str


def simulate(
    seed: int,
    steps: int = DEFAULT_STEPS,
    *,
    nodes: int = 3,
    orders: int = 5,
    acquire: str | None = None,
    kind: str | None = None,
    faults: tuple[str, ...] | None = None,
) -> Report:
    """Run one seed; ``kind`` is who can open what (``capabilities.FLEETS``), ``faults`` limits what may go wrong.

    Raises:
        SimulationError: an invariant does not hold; the message says which, and how to repeat it.
    """
    world = World(seed)
    mode = acquire or world.rng.choice(["lazy", "lazy", "eager"])
    kinds = ("keys", "paths") if OF_SEALING.intersection(faults or ()) else KINDS
    fleet = Fleet(world, nodes=nodes, acquire=mode, kind=kind or world.rng.choice(kinds))
    chosen = _chosen(fleet, faults)
    world.note(f"seed {seed}, {mode}, {fleet.capabilities.of}, faults {', '.join(chosen)}")
    workload = Workload(fleet, orders)
    collecting = gc.isenabled()
    gc.disable()  # nothing ends at a moment of the collector's choice
    try:
        _schedule(fleet, chosen, steps)
        while world.steps < steps and not _finished(world, fleet, workload) and _step(world):
            pass
        heal(fleet)
        _settle(world, fleet, workload)
        fleet.invariants.at_rest(workload.expected)
        return _report(world, fleet, workload)
    except Exception as error:
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
        fleet.capabilities.fleet,
        world.steps,
        round(world.now, 3),
        len(workload.expected),
        sum(judged.effects.values()),
        judged.doubled,
        judged.takeovers,
        workload.denials,
        world.digest.hexdigest(),
    )


def _chosen(fleet: Fleet, faults: tuple[str, ...] | None) -> list[str]:
    """Some of the faults: where all go on at once, none has its time."""
    if faults is not None:
        return list(faults)
    rng = fleet.world.rng
    names = [name for name in FAULTS if fleet.capabilities.seals or name not in OF_SEALING]
    return sorted(rng.sample(names, rng.randrange(1, MOST_AT_ONCE)))


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
        if _finished(world, fleet, workload):
            return


def _finished(world: World, fleet: Fleet, workload: Workload) -> bool:
    """Whether there is nothing left to do; looked at now and then."""
    return world.steps % LOOK_EVERY == 0 and workload.done and not fleet.invariants.open_executions()


def _explained(world: World, steps: int, error: Exception) -> str:
    lines = "\n".join(world.lines[-LINES_KEPT:])
    what = str(error) if isinstance(error, SimulationError) else f"{type(error).__name__}: {error}"
    return f"{lines}\nseed {world.seed}, step {world.steps}: {what}\nrepeat it: loom sim --seed {world.seed} --steps {steps}"
