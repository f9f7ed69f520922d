"""Whose streams are whose, in the log in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loom.ids import routing_id, stream_kind
from loom.stores.sealing.subjects import is_start, subject_in

if TYPE_CHECKING:
    from loom.stores.memory.log import MemoryIndex


def find_subject(index: MemoryIndex, subject: str) -> list[str]:
    """Every stream of the chains whose first event names the subject."""
    found: list[str] = []
    chains: set[str] = set()
    standing = [stream_id for stream_id, row in index.rows().items() if row.exists]
    for stream_id in standing:
        first = index.events(stream_id, 0, 1) if stream_kind(stream_id) == "executions" else []
        if first and is_start(stream_id, first[0]) and subject_in(first[0].data, stream_id) == subject:
            found.append(stream_id)
            chains.add(str(first[0].data.get("chainId") or stream_id))
    beside = (s for s in standing if stream_kind(s) != "executions")
    return found + [s for s in beside if routing_id(s) in chains]
