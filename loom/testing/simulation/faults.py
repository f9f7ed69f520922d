"""What can go wrong, by name. A schedule draws from these; a test may call one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from loom.testing.simulation.capabilities import CAPABLE
from loom.testing.simulation.fleet import TTL_MS

if TYPE_CHECKING:
    from collections.abc import Callable

    from loom.testing.simulation.fleet import Fleet
    from loom.testing.simulation.network import Link
    from loom.testing.simulation.node import Node

TTL_S: Final = TTL_MS / 1000
OVERTAKEN_S: Final = 0.3
CUTS: Final = tuple(part * TTL_S for part in (0.2, 0.5, 0.9, 1.1, 2.0))


def freeze(fleet: Fleet, node: Node) -> None:
    """Stop a node's loop, for less than a renewal or for several TTLs."""
    if not node.frozen and node.alive:
        fleet.block(node)


def block(fleet: Fleet, node: Node) -> None:
    """Let the next step that ends on a node block its loop: what follows the step runs before any timer."""
    node.blocks = True
    fleet.world.note(f"fault block {node.name}")


def kill(fleet: Fleet, node: Node) -> None:
    """Kill a node; it comes back some time, as another incarnation."""
    if node.alive:
        fleet.world.note(f"fault kill {node.name}")
        node.kill()
    fleet.world.after(fleet.world.rng.uniform(0.05, 3) * TTL_S, lambda: restart(fleet, node))


def restart(fleet: Fleet, node: Node) -> None:
    """Start a dead node again."""
    del fleet
    if not node.alive:
        node.start()


def cut_log(fleet: Fleet, node: Node) -> None:
    """Cut a node from the log."""
    _cut(fleet, node, node.log, "log", fleet.world.rng.choice(CUTS))


def cut_leases(fleet: Fleet, node: Node) -> None:
    """Cut a node from the lease and wake stores."""
    _cut(fleet, node, node.redis, "leases", fleet.world.rng.choice(CUTS))


def isolate(fleet: Fleet, node: Node) -> None:
    """Cut a node from everything: it goes on by itself, as long as it may."""
    seconds = fleet.world.rng.choice(CUTS)
    _cut(fleet, node, node.log, "log", seconds)
    _cut(fleet, node, node.redis, "leases", seconds)


def rebalance(fleet: Fleet, node: Node) -> None:
    """Let the group give shards to others, though nobody came or went."""
    fleet.world.note(f"fault rebalance, near {node.name}")
    fleet.reassign_soon(shuffle=True)


def lose_reply(fleet: Fleet, node: Node) -> None:
    """Lose the next replies of a store: what was asked is done, and nobody hears so."""
    link = _either(fleet, node)
    link.lose_replies = fleet.world.rng.randrange(1, 4)
    fleet.world.note(f"fault lose_reply {node.name}")


def lose_request(fleet: Fleet, node: Node) -> None:
    """Lose the next requests to a store."""
    link = _either(fleet, node)
    link.lose_requests = fleet.world.rng.randrange(1, 4)
    fleet.world.note(f"fault lose_request {node.name}")


def delay(fleet: Fleet, node: Node) -> None:
    """Make a way slow for a while."""
    link, slow = _either(fleet, node), fleet.world.rng.choice([10.0, 100.0, 200.0])
    link.slow = slow
    fleet.world.note(f"fault delay {node.name} {slow}")

    def quick() -> None:
        link.slow = 1.0

    fleet.world.after(fleet.world.rng.uniform(0.1, 2) * TTL_S, quick)


def duplicate(fleet: Fleet, node: Node) -> None:
    """Deliver the next requests twice."""
    link = _either(fleet, node)
    link.duplicate = fleet.world.rng.randrange(1, 6)
    fleet.world.note(f"fault duplicate {node.name}")


def skew_clock(fleet: Fleet, node: Node) -> None:
    """Let a node's wall clock jump, or its monotonic clock run a little fast or slow."""
    rng = fleet.world.rng
    if fleet.world.chance(0.5):
        node.wall_off_s = rng.uniform(-2, 2) * TTL_S
        fleet.world.note(f"fault skew_clock {node.name} wall {node.wall_off_s:.3f}")
    else:
        rate = rng.uniform(0.98, 1.02)
        node.drift(rate)
        fleet.world.note(f"fault skew_clock {node.name} rate {rate:.4f}")


def crash_at_write(fleet: Fleet, node: Node) -> None:
    """Crash a node before or after its next write to the log."""
    node.log.crash = fleet.world.rng.choice(["before", "after"])
    fleet.world.note(f"fault crash_at_write {node.name} {node.log.crash}")
    fleet.world.after(fleet.world.rng.uniform(0.5, 3) * TTL_S, lambda: restart(fleet, node))


def overtake(fleet: Fleet, node: Node) -> None:
    """Let the next write of a node arrive late, when the group has given the stream's shard to another."""
    fleet.world.note(f"fault overtake {node.name}")

    def overtaken(stream_id: str) -> float:
        fleet.hand_over(stream_id)
        return fleet.world.rng.uniform(0, OVERTAKEN_S)

    node.log.overtaken = overtaken


def cut_keys(fleet: Fleet, node: Node) -> None:
    """Cut a node from the key store."""
    _cut(fleet, node, node.keys, "keys", fleet.world.rng.choice(CUTS))


def swap_keys(fleet: Fleet, node: Node) -> None:
    """Start a node anew with other keys, with none, or with other paths."""
    fleet.world.note(f"fault swap_keys {node.name}: {fleet.capabilities.swap(node.name)}")
    node.kill()
    fleet.world.after(fleet.world.rng.uniform(0.05, 1) * TTL_S, lambda: restart(fleet, node))


def flush_leases(fleet: Fleet, node: Node) -> None:
    """Empty the lease and wake stores under everybody."""
    fleet.world.note(f"fault flush_leases, near {node.name}")
    fleet.lease_table.flush()
    fleet.wake_table.flush()


FAULTS: Final[dict[str, Callable[[Fleet, Node], None]]] = {
    fault.__name__: fault
    for fault in (
        freeze,
        block,
        kill,
        cut_log,
        cut_leases,
        isolate,
        rebalance,
        lose_reply,
        lose_request,
        delay,
        duplicate,
        skew_clock,
        crash_at_write,
        overtake,
        flush_leases,
        cut_keys,
        swap_keys,
    )
}
OF_SEALING: Final = frozenset({"cut_keys", "swap_keys"})
"""Faults of fleets that seal."""


def heal(fleet: Fleet) -> None:
    """Nothing is broken any more."""
    fleet.world.note("heal")
    capabilities = fleet.capabilities
    if capabilities.seals and CAPABLE not in [capabilities.of[node.name] for node in fleet.nodes]:
        capable = fleet.world.rng.choice(fleet.nodes)
        capabilities.of[capable.name] = CAPABLE
        capable.kill()
    for node in (*fleet.nodes, fleet.client):
        for link in (node.log, node.redis, node.keys):
            link.cut, link.slow, link.crash, link.overtaken = False, 1.0, None, None
            link.lose_requests = link.lose_replies = link.duplicate = 0
        node.wall_off_s = 0.0
        node.drift(1.0)
        node.blocks = False
        if node.frozen:
            node.thaw()
        if not node.alive:
            node.start()
    fleet.reassign_soon()


def _cut(fleet: Fleet, node: Node, link: Link, what: str, seconds: float) -> None:
    link.cut = True
    fleet.world.note(f"fault cut_{what} {node.name} for {seconds}")

    def mend() -> None:
        link.cut = False
        fleet.reassign_soon()

    fleet.world.after(seconds, mend)


def _either(fleet: Fleet, node: Node) -> Link:
    links = (node.log, node.redis, node.keys) if fleet.capabilities.seals else (node.log, node.redis)
    return fleet.world.rng.choice(links)
