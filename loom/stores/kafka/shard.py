"""A partition that this process writes: its writer, and reading what the writer keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loom.stores.contracts import Observation
from loom.stores.rows import observation_of

if TYPE_CHECKING:
    from loom.stores.contracts import StreamInfo
    from loom.stores.index import StreamIndex
    from loom.stores.kafka.writer import PartitionWriter


@dataclass(frozen=True, slots=True)
class Shard:
    """One tenure's view of a partition. What is read counts only after the writer's ``decide`` (kafka.md, "Reading").

    Every method raises ``StreamBrokenError`` for a stream that was stopped, and ``NotOwnerError`` once the writer ended.
    """

    writer: PartitionWriter
    index: StreamIndex

    def read(self, stream_id: str, from_sequence: int, limit: int) -> list[bytes]:
        """Encoded events, in order."""
        return self.writer.read(stream_id, from_sequence, limit)

    def last(self, stream_id: str) -> list[bytes]:
        """The last encoded event, or nothing."""
        info = self.index.info(stream_id)
        if info is None:
            return []
        return self.writer.read(stream_id, info.head if info.first <= info.head else 0, 1)

    def info(self, stream_id: str) -> StreamInfo | None:
        """What is known of a stream; None where it was never appended to, or is deleted."""
        return self.index.info(stream_id)

    def observe(self, stream_id: str) -> Observation:
        """Head, fence and anchor; a deleted stream keeps its fence."""
        info = self.index.info(stream_id)
        if info is not None:
            return Observation(info.head, info.fence, info.anchor)
        return observation_of(self.index.row(stream_id))  # no events: the row is not changed under us

    def inboxes(self, chain_id: str) -> list[bytes]:
        """Names of the chain's inbox streams."""
        return [info.stream_id.encode() for info in self.index.inbox_streams(chain_id)]

    def snapshot(self, execution_id: str) -> bytes | None:
        """Encoded snapshot, None where there is none."""
        found = self.index.snapshot(execution_id)
        return None if found is None else found[1]
