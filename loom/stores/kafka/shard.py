"""A partition that this process writes: its writer, and reading what the writer keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from loom.stores.contracts import StreamInfo
from loom.stores.rows import StreamRow

if TYPE_CHECKING:
    from loom.stores.kafka.writer import PartitionWriter


class ShardIndex(Protocol):
    """What reading needs of the index, beside the writer's own ``read``. Thread-safe."""

    def row(self, stream_id: str) -> StreamRow | None:
        """Row of a stream; not to be changed."""
        ...

    def open_logs(self, after: str, limit: int) -> list[tuple[str, StreamRow]]:
        """Logs without a terminal event, ordered by id, a page after ``after``."""
        ...

    def inbox_streams(self, chain_id: str) -> list[tuple[str, StreamRow]]:
        """Inbox streams of a chain."""
        ...

    def snapshot(self, execution_id: str) -> bytes | None:
        """Encoded snapshot kept for an execution."""
        ...


@dataclass(frozen=True, slots=True)
class Shard:
    """One tenure's view of a partition. What is read counts only after the writer's ``decide`` (kafka.md, "Reading")."""

    writer: PartitionWriter
    index: ShardIndex

    def read(self, stream_id: str, from_sequence: int, limit: int) -> list[bytes]:
        """Encoded events; raises ``NotOwnerError`` unless serving, ``StreamBrokenError``."""
        return self.writer.read(stream_id, from_sequence, limit)

    def last(self, stream_id: str) -> list[bytes]:
        """The last encoded event, or nothing."""
        row = self.index.row(stream_id)
        if row is None or not row.exists:
            return []
        return self.writer.read(stream_id, row.head if row.first <= row.head else 0, 1)

    def info(self, stream_id: str) -> StreamInfo | None:
        """Row of a stream as the contract shows it; None where nothing was ever appended, or it was deleted."""
        row = self.index.row(stream_id)
        return None if row is None or (not row.exists and row.fence == 0) else row.info(stream_id)

    def snapshot(self, execution_id: str) -> bytes | None:
        """Encoded snapshot, None where there is none."""
        return self.index.snapshot(execution_id)
