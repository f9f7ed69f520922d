"""What ``loom doctor`` finds about sealing: where a state would rest in plaintext, and what no live node can open.

Rules: system.md 3.4 and 8.2; clauses.md, "Snapshots". Nothing of a payload is read, and nothing is opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from loom.errors import ShardSealingMismatchError
from loom.stores.findings import Finding
from loom.stores.sealing.checkpoints import plaintext_reason, seals
from loom.stores.sealing.marker import SEAL, read_marker
from loom.stores.sealing.paths import is_below

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from loom.stores.contracts import EventStore, SnapshotStore

PAGE: Final = 1000
NAMED: Final = 5
"""Executions, or nodes, that one finding names."""
MESSAGE: Final = "INBOX_MESSAGE.payload"


class SealingDoctor:
    """Looks at the stores of a node, as they were made."""

    def __init__(
        self, events: EventStore, snapshots: SnapshotStore | None, *, allow_plaintext: bool = False
    ) -> None:
        self._events: Any = events
        self._snapshots = snapshots
        self._allow_plaintext = allow_plaintext

    def stores(self) -> list[Finding]:
        """What is wrong with the stores of this node."""
        try:
            sealing = seals(self._events)
            reason = plaintext_reason(self._events, self._snapshots)
        except ShardSealingMismatchError as differ:
            return [Finding("shards-differ", "error", str(differ), "give every shard the same sensitive map")]
        found = []
        if reason is not None:
            why = "does not seal whole states" if reason == "not-sealed" else "has other keys than the log"
            found.append(
                Finding(
                    "snapshot-plaintext-under-encrypting-events",
                    "info" if self._allow_plaintext else "error",
                    f"the log is sealed, and its snapshot store {why}: folded states rest readable without the log's keys",
                    "use EncryptingSnapshotStore(inner, keys) on the log's keys, or set "
                    "sealing.allow_plaintext_checkpoints where the volume is encrypted",
                )
            )
        if getattr(self._snapshots, "seals_whole_state", None) is False:
            found.append(
                Finding(
                    "snapshot-static-paths",
                    "warning",
                    "snapshots are sealed by static paths: answers of waits have keys that no path can name, and rest in "
                    "the clear",
                    "leave `sensitive` out of EncryptingSnapshotStore: it then seals whole states",
                )
            )
        if sealing:
            found.append(
                Finding(
                    "commands-rest-as-written",
                    "info",
                    "payloads in the topic `commands` rest as their producers wrote them, for its retention",
                    "let producers use `loom send` or a Client where payloads are sensitive",
                )
            )
        return found

    async def coverage(self, fleet: Mapping[str, Sequence[str]], waiting: Iterable[str]) -> list[Finding]:
        """What the live nodes can open, and which of the refused executions none can.

        ``fleet`` is what each live node announces (its covers); ``waiting`` are executions that were refused somewhere.
        """
        found = list(_differences(fleet))
        nobody: dict[str, tuple[str, ...]] = {}
        waits_all_the_same: list[str] = []
        for execution_id in waiting:
            needed = await self._needed(execution_id)
            if not any(_opens(covers, needed) for covers in fleet.values()):
                nobody[execution_id] = needed
            else:
                waits_all_the_same.append(execution_id)
        if nobody:
            paths = sorted({path for needed in nobody.values() for path in needed})
            found.append(
                Finding(
                    "sealed-nobody-opens",
                    "error",
                    f"no live node can open {_names(nobody)}: sealed at {', '.join(paths[:NAMED])}",
                    "start a node with sealing.keys, and these paths in sealing.sensitive",
                )
            )
        if waits_all_the_same:
            found.append(
                Finding(
                    "sealed-waits-for-a-key",
                    "warning",
                    f"{_names(waits_all_the_same)} were refused, though a live node announces their paths",
                    "wait a moment; if it stays, that node lacks their keys: check its sealing.keys and sealing.kek",
                )
            )
        return found

    async def _needed(self, execution_id: str) -> tuple[str, ...]:
        """Patterns that are sealed in a log; where none is, it is a message that waits."""
        read = getattr(self._events, "read_at_rest", self._events.read)
        needed: set[str] = set()
        start = 0
        while page := await read(execution_id, start, PAGE):
            for envelope in page:
                marker = read_marker(envelope.metadata.get(SEAL))
                needed.update(() if marker is None else marker.covers)
            start = page[-1].sequence + 1
        return tuple(sorted(needed)) or (MESSAGE,)


def covers_of(store: Any) -> tuple[str, ...]:
    """What a store opens, as its node announces it; nothing where its shards disagree."""
    asked = getattr(store, "sealing_capability", None)
    try:
        capability = None if asked is None else asked()
    except ShardSealingMismatchError:
        return ()
    return () if capability is None else tuple(capability.covers)


def _opens(covers: Sequence[str], needed: Sequence[str]) -> bool:
    return all(any(is_below(path, ours) for ours in covers) for path in needed)


def _differences(fleet: Mapping[str, Sequence[str]]) -> Iterable[Finding]:
    everything = {path for covers in fleet.values() for path in covers}
    lacking = {
        node: [path for path in sorted(everything) if not _opens(covers, (path,))]
        for node, covers in fleet.items()
    }
    for node in sorted(node for node, paths in lacking.items() if paths):
        yield Finding(
            "fleet-covers-differ",
            "warning",
            f"node {node} does not open {', '.join(lacking[node][:NAMED])}, which others seal: it refuses what they wrote",
            "give all nodes the same sealing.keys and sealing.sensitive, unless this is meant",
        )


def _names(execution_ids: Iterable[str]) -> str:
    listed = sorted(execution_ids)
    more = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    return ", ".join(listed[:NAMED]) + more
