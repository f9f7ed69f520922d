"""Which node of a simulated fleet opens what: other keys, no keys, fewer paths, or no sealing at all (system.md 1 and 2)."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

from loom.schemas.envelope import Kind
from loom.stores.keys.memory import KeyTable, MemoryKeyStore
from loom.stores.keys.wrapping import KekWrapper
from loom.stores.sealing.encrypting import EncryptingEventStore
from loom.stores.sealing.marker import covered, read_marker
from loom.stores.sealing.paths import SensitiveMap

if TYPE_CHECKING:
    from collections.abc import Callable

    from loom.schemas.envelope import Json
    from loom.stores.keys.contract import KeySet, KeyStore
    from loom.testing.simulation.network import Link
    from loom.testing.simulation.world import World

PLANTED: Final = "planted-plaintext"
"""Stands in inputs, messages and results of what is sealed, and nowhere else."""
OPEN: Final = "nothing-to-hide"
SENSITIVE: Final = {
    Kind.EXECUTION_STARTED: ("input",),
    Kind.STEP_COMPLETED: ("output",),
    Kind.EXECUTION_COMPLETED: ("output",),
}
POORER: Final = SensitiveMap().covers

CAPABLE: Final = "capable"
FLEETS: Final[dict[str, tuple[str, ...]]] = {
    "plain": ("raw",),
    "keys": ("no keys", "other keys", "other kek", "raw", "poorer"),
    "paths": ("raw", "poorer"),
}
"""By name of a fleet, what its incapable nodes are. Without keys nobody seals; with all keys shared, any node may start."""


class Capabilities:
    """What each node opens, and the keys that the capable ones share. A test may change ``of`` before a node starts."""

    def __init__(self, world: World, fleet: str) -> None:
        self.fleet = fleet
        self.seals = fleet != "plain"
        self.of: dict[str, str] = {}
        self._world = world
        self._kinds = FLEETS[fleet]
        self._shared, self._others = KeyTable(), KeyTable()
        self._kek, self._other_kek = (
            KekWrapper(hashlib.sha256(name.encode()).digest()) for name in (CAPABLE, "other")
        )

    def draw(self, names: list[str]) -> None:
        """Give every node a kind; one at least is capable."""
        rng = self._world.rng
        for name in names:
            self.of[name] = rng.choice((CAPABLE, rng.choice(self._kinds))) if self.seals else "raw"
        if self.seals:
            self.of[rng.choice(names)] = CAPABLE

    def swap(self, name: str) -> str:
        """Let a node be of another kind from its next start on."""
        others = [kind for kind in (CAPABLE, *self._kinds) if kind != self.of[name]]
        self.of[name] = self._world.rng.choice(others) if self.seals else "raw"
        return self.of[name]

    def is_blind(self, kind: str, covers: tuple[str, ...]) -> bool:
        """Whether a node of this kind cannot open what a marker with these ``covers`` stands on."""
        return kind != CAPABLE and not (kind == "poorer" and covered(covers, POORER))

    def store(self, kind: str, inner: Any, link: Link | None, clock: Callable[[], float]) -> Any:
        """An event store as a node of this kind has it."""
        if kind == "raw":
            return inner
        keys: KeyStore = self._keys(kind)
        if link is not None:
            keys = RemoteKeys(keys, link)
        sensitive = None if kind == "poorer" else SENSITIVE
        return EncryptingEventStore.over(inner, keys, sensitive, clock=clock)

    def _keys(self, kind: str) -> KeyStore:
        ids = self._world.fresh_id
        if kind == "no keys":
            return MemoryKeyStore(KeyTable(), self._kek, ids=ids)
        if kind == "other keys":
            return MemoryKeyStore(self._others, self._kek, ids=ids)
        return MemoryKeyStore(self._shared, self._other_kek if kind == "other kek" else self._kek, ids=ids)

    async def prepare(self, subjects: list[str]) -> None:
        """Make keys of another making for the same subjects."""
        for subject in subjects:
            await MemoryKeyStore(self._others, self._kek, ids=self._world.fresh_id).ensure(subject)


class RemoteKeys:
    """A key store beyond a link. See :class:`loom.stores.keys.contract.KeyStore`."""

    def __init__(self, inner: KeyStore, link: Link) -> None:
        self._inner, self._link = inner, link

    async def get(self, subject: str) -> KeySet | None:
        """See the contract."""
        found: KeySet | None = await self._link.call("get_keys", subject, lambda: self._inner.get(subject))
        return found

    async def ensure(self, subject: str, uses: int = 1) -> KeySet:
        """See the contract."""
        made: KeySet = await self._link.call(
            "ensure_keys", subject, lambda: self._inner.ensure(subject, uses)
        )
        return made

    async def rotate(self, subject: str) -> KeySet:
        """See the contract."""
        made: KeySet = await self._link.call("rotate_keys", subject, lambda: self._inner.rotate(subject))
        return made

    async def destroy(self, subject: str) -> bool:
        """See the contract."""
        done: bool = await self._link.call("destroy_keys", subject, lambda: self._inner.destroy(subject))
        return done

    async def was_destroyed(self, subject: str) -> bool:
        """See the contract."""
        proven: bool = await self._link.call(
            "keys_destroyed", subject, lambda: self._inner.was_destroyed(subject)
        )
        return proven

    def identity(self) -> str:
        """See the contract."""
        return self._inner.identity()

    async def close(self) -> None:
        """The keys outlive every node."""


def covers_of(marker: Json) -> tuple[str, ...]:
    """What the marker of an event covers."""
    read = read_marker(marker)
    return () if read is None else read.covers
