"""Snapshots in memory: the twin of the Kafka store, for tests and the simulation."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from loom.errors import InvalidInputError
from loom.stores.contracts import Snapshot


@dataclass(slots=True)
class SnapshotTable:
    """What all handles of one snapshot store share: sequence and JSON text per execution."""

    rows: dict[str, tuple[int, str]] = field(default_factory=dict)


class MemorySnapshotStore:
    """One node's handle on a :class:`SnapshotTable`. States rest as JSON text, so no caller can change a saved one."""

    def __init__(self, table: SnapshotTable | None = None) -> None:
        self._table = SnapshotTable() if table is None else table

    async def save(self, snapshot: Snapshot) -> None:
        """See :meth:`loom.stores.contracts.SnapshotStore.save`.

        Raises:
            InvalidInputError: the state is not JSON, or nested too deeply to be written.
        """
        standing = self._table.rows.get(snapshot.execution_id)
        if standing is not None and standing[0] > snapshot.sequence:
            return
        try:
            text = json.dumps({"state": snapshot.state, "metadata": snapshot.metadata}, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInputError(
                f"snapshot of {snapshot.execution_id!r}",
                f"its state is no JSON ({type(error).__name__})",
                "keep only JSON values in the state of an execution",
            ) from None
        self._table.rows[snapshot.execution_id] = snapshot.sequence, text

    async def load_latest(self, execution_id: str) -> Snapshot | None:
        """See :meth:`loom.stores.contracts.SnapshotStore.load_latest`."""
        standing = self._table.rows.get(execution_id)
        if standing is None:
            return None
        return Snapshot(execution_id, standing[0], **json.loads(standing[1]))

    async def delete(self, execution_id: str) -> None:
        """See :meth:`loom.stores.contracts.SnapshotStore.delete`."""
        self._table.rows.pop(execution_id, None)

    async def close(self) -> None:
        """See :meth:`loom.stores.contracts.SnapshotStore.close`. The table outlives its handles."""
