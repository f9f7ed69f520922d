"""The nodes of a simulation, what they share, and who writes which shard."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

from loom.config import Config
from loom.errors import LoomError
from loom.kernel.guard import SEALED_KEY
from loom.stores.memory.event_store import MemoryEventStore
from loom.stores.memory.lease_store import LeaseTable, MemoryLeaseStore
from loom.stores.memory.log import MemoryLog
from loom.stores.memory.wake_store import MemoryWakeStore
from loom.testing.simulation.capabilities import CAPABLE, PLANTED, Capabilities
from loom.testing.simulation.flows import make_flows
from loom.testing.simulation.invariants import Invariants
from loom.testing.simulation.network import LATENCY_S, run_now
from loom.testing.simulation.node import Node
from loom.testing.simulation.stores import JudgedWakes
from loom.testing.simulation.world import SimulationError
from loom.testing.virtual_loop import run_virtually

if TYPE_CHECKING:
    from loom.kernel.flow import FlowDefinition
    from loom.schemas.envelope import Envelope
    from loom.stores.contracts import Committed
    from loom.testing.simulation.stores import RemoteLog
    from loom.testing.simulation.world import World

TTL_MS: Final = 2_000
SUBJECTS: Final = ["subject-0", "subject-1"]
SLOW: Final = 10.0
SHARDS: Final = 4
SESSION_S: Final = 1.0
"""How long the group waits for a member that is silent before it gives its shards away."""
GROUP_LOOKS_S: Final = 0.25
STALLS: Final = (0.1, 0.5, 0.9, 1.0, 1.2, 2.0, 3.0)
"""How long a loop stands still, in TTLs."""
MOVED_ALONG: Final = 0.3
DEALT_ANEW: Final = 0.7
"""How likely a shard changes hands when members come or go, and when the group deals anew."""


@cache
def _settings(acquire: str) -> Config:
    """Settings that all nodes share; reading them takes longer than many a simulated second."""
    return Config(
        storage="memory",
        partitions=SHARDS,
        recovery_interval_ms=TTL_MS // 2,
        max_recoveries=1_000,
        max_redrive_attempts=1_000,
        storage_patience_ms=4 * TTL_MS,
        leases={"ttl_ms": TTL_MS, "acquire": acquire},
    )


class Fleet:
    """Nodes over one log, one lease store and one wake store. It is the log's listener, and the group's coordinator."""

    def __init__(
        self, world: World, *, nodes: int, acquire: str = "lazy", kind: str = "plain", **options: Any
    ) -> None:
        """``kind`` is one of ``capabilities.FLEETS``."""
        self.world = world
        self.acquire = acquire
        self.capabilities = Capabilities(world, kind)
        if self.capabilities.seals:
            world.unspeakable = (PLANTED, SEALED_KEY)
            run_now(self.capabilities.prepare(SUBJECTS))
        self._kinds: dict[object, str] = {}
        self.log = MemoryLog(world.wall_ms, shards=SHARDS)
        self.lease_table = LeaseTable(world.wall_ms, world.fresh_id)
        self.wake_table = JudgedWakes(world.wall_ms, SHARDS, world.fresh_id)
        self.leases, self.wakes = MemoryLeaseStore(self.lease_table), MemoryWakeStore(self.wake_table)
        self.invariants = Invariants(self)
        self.wake_table.judge = self.invariants.row_written
        self.owners: dict[int, tuple[Node, int] | None] = dict.fromkeys(range(SHARDS))
        self._members: list[tuple[Node, int]] = []
        self.nodes = [Node(self, f"n{n}", **options) for n in range(nodes)]
        self.capabilities.draw([node.name for node in self.nodes])
        self.client = Node(self, "client", drives=False)
        self.capabilities.of[self.client.name] = CAPABLE if self.capabilities.seals else "raw"
        world.actors += [*self.nodes, self.client]
        self.log.join(self)
        for node in (*self.nodes, self.client):
            node.start()
        self._look_at_group()

    def config(self, name: str) -> Config:
        """Settings of a node."""
        resident = self.world.rng.choice([0, 2, 100])
        return _settings(self.acquire).model_copy(update={"node_id": name, "max_resident": resident})

    def flows(self, node: Node) -> list[FlowDefinition[..., Any]]:
        """What a node drives; its effects are counted as its own."""
        return make_flows(self.invariants, node)

    def stored(self, node: Node, store: RemoteLog) -> Any:
        """The event store of a node, over its link."""
        node.kind = self._kinds[store.handle] = self.capabilities.of[node.name]
        return self.capabilities.store(node.kind, store, node.keys, node.monotonic)

    def opened_last(self, stream_id: str) -> Envelope:
        """The last event of a log, as one reads it who opens everything."""
        inner = MemoryEventStore(self.log, owned=())
        kind = CAPABLE if self.capabilities.seals else "raw"
        reader = self.capabilities.store(kind, inner, None, lambda: self.world.now)
        last: Envelope = run_virtually(reader.read_last(stream_id))
        self.log.leave(inner)
        return last

    def fenced(self, node: Node, stream_id: str) -> None:
        """A node took a fence."""
        self.invariants.fenced(stream_id, node.kind, node.name)

    def opened(self, node: Node) -> None:
        """A node has opened its runtime."""
        self.world.note(f"{node.name} is open")
        if node.drives:
            self.reassign_soon()

    def erred(self, node: Node, error: BaseException, about: str) -> None:
        """A runtime told an error of an execution: nothing of the kind belongs here."""
        self.world.note(f"{node.name} error {about}: {type(error).__name__}: {error}")
        if not isinstance(error, LoomError):
            self.violate(f"{node.name} failed on {about}: {type(error).__name__}: {error}")

    def block(self, node: Node) -> None:
        """A node's loop stands still, for less than a renewal or for several TTLs; then it goes on where it was."""
        seconds = self.world.rng.choice(STALLS) * TTL_MS / 1000
        self.world.note(f"{node.name} stands still for {seconds}")
        node.freeze()
        life = node.incarnation

        def thaw() -> None:
            if node.incarnation == life and node.frozen:
                self.world.note(f"{node.name} goes on")
                node.thaw()
                self.reassign_soon()

        self.world.after(seconds, thaw)

    def violate(self, what: str) -> None:
        """An invariant does not hold: the world ends after this step, in whatever task it was found.

        Raises:
            SimulationError: always.
        """
        self.world.failure = self.world.failure or what
        raise SimulationError(what)

    # The group --------------------------------------------------------------------------------------------------------

    def reassign_soon(self, *, shuffle: bool = False) -> None:
        """A member came or went; or the group deals its shards anew."""
        self.world.after(self.world.rng.uniform(*LATENCY_S), lambda: self._reassign(shuffle=shuffle))

    def _look_at_group(self) -> None:
        self._reassign()
        self.world.after(GROUP_LOOKS_S, self._look_at_group)

    def _reassign(self, *, shuffle: bool = False) -> None:
        """Give the shards to the members that are there; one that is frozen or cut off for a session is not."""
        now = self.world.now
        members = [
            (node, node.incarnation)
            for node in self.nodes
            if node.alive and not (node.frozen and now - node.frozen_since > SESSION_S) and not node.log.cut
        ]
        if not shuffle and members == self._members:
            return
        self._members = members
        rng = self.world.rng
        for shard, owner in self.owners.items():
            if members and (owner not in members or rng.random() < (DEALT_ANEW if shuffle else MOVED_ALONG)):
                self.owners[shard] = rng.choice(members)
            elif not members:
                self.owners[shard] = None
        self._announce()

    def hand_over(self, stream_id: str) -> None:
        """The group gives a stream's shard to another member, which is slow at first."""
        shard = self.log.shard_of(stream_id)
        others = [member for member in self._members if member != self.owners[shard]]
        if not others:
            return
        heir = self.owners[shard] = self.world.rng.choice(others)
        link = heir[0].log
        link.slow = SLOW

        def quick() -> None:
            link.slow = 1.0

        self.world.after(TTL_MS / 1000, quick)
        self._announce()

    def _announce(self) -> None:
        shown = {shard: None if owner is None else owner[0].name for shard, owner in self.owners.items()}
        self.world.note(f"group: {shown}")
        for node in self.nodes:
            store = node.store
            if store is not None:
                mine = (node, node.incarnation)
                shards = frozenset(shard for shard, owner in self.owners.items() if owner == mine)
                node.log.deliver(lambda store=store, shards=shards: store.assigned(shards))  # type: ignore[misc]

    # The log's listener -----------------------------------------------------------------------------------------------

    def committed(self, batch: list[Committed], appender: object) -> None:
        """What became durable: judged, and told to whoever writes its shard."""
        kind = self._kinds.get(appender)
        for one in batch:
            for envelope in one.envelopes:
                node = envelope.metadata.get("node")
                self.world.note(f"log {one.stream_id} {envelope.sequence} {envelope.type} by {node}")
                if self.capabilities.seals:
                    self.invariants.rests(envelope, kind)
            self.invariants.committed(one)
        by_node: dict[str, tuple[Node, list[Committed]]] = {}
        for one in batch:
            owner, life = self.owners[self.log.shard_of(one.stream_id)] or (None, 0)
            if owner is not None and owner.incarnation == life:
                by_node.setdefault(owner.name, (owner, []))[1].append(one)
        for owner, ours in by_node.values():
            store = owner.store
            assert store is not None
            owner.log.deliver(lambda store=store, ours=ours: store.told(ours))  # type: ignore[misc]
