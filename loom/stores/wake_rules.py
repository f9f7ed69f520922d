"""What every wake store checks before it writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from loom.stores.contracts import WakeRow

KIND_RANK: Final = {"inbox": 0, "refusal": 1, "timer": 2}
"""Which kind a key keeps when rows meet on it: a timer stays a timer, a refusal keeps its stamp (system.md 5)."""


def check_kinds(rows: Iterable[WakeRow]) -> None:
    """Refuse a kind that no store knows how to merge, before anything is written.

    Raises:
        ValueError: the kind of a row is none of :data:`KIND_RANK`.
    """
    for row in rows:
        if row.kind not in KIND_RANK:
            raise ValueError(f"unknown kind of wake row {row.kind!r}; use one of {', '.join(KIND_RANK)}")


def check_same_execution(execution_id: str, row: WakeRow) -> None:
    """Refuse to move a row to another execution: it may lie in another shard, where no step is atomic with this one.

    Raises:
        ValueError: the row belongs to another execution.
    """
    if row.execution_id != execution_id:
        raise ValueError(f"a wake row of {execution_id!r} cannot become one of {row.execution_id!r}")
