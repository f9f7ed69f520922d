"""A reader's own copy of a partition, for a process that reads much and writes nothing (kafka.md, "Reading").

Each answer holds at least everything that was committed when it was asked for: the end is captured at the call and read
to by position. Where another's open transaction hides the end, the answer is an error, never less as if it were all.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from confluent_kafka.admin import AdminClient

from loom.schemas.codec import Codec
from loom.stores.contracts import Observation
from loom.stores.index import StreamIndex
from loom.stores.kafka.client import admin_config, let_go
from loom.stores.kafka.deadline import Deadline
from loom.stores.kafka.reader import Ends, LogReader
from loom.stores.kafka.takeover import Takeover

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from loom.schemas.envelope import Envelope
    from loom.stores.contracts import StreamInfo
    from loom.stores.kafka.settings import KafkaSettings

Found = TypeVar("Found")


class PartitionView:
    """One partition, read on at every call; calls are served one at a time. ``path`` is a local file of its own.

    Every method raises ``IncompleteReadError`` (an open transaction hides the end until the deadline),
    ``UnreachableError``, ``TopicsError``, and for one stream ``StreamBrokenError``.
    """

    def __init__(
        self, settings: KafkaSettings, partition: int, path: Path, *, codec: Codec | None = None
    ) -> None:
        """Prepare; nothing is read before the first call."""
        self._settings = settings
        self._codec = codec if codec is not None else Codec()
        client_id = f"{settings.node}-view-{partition}"
        self._admin = AdminClient(
            admin_config(settings.bootstrap, settings.kafka, client_id=f"{client_id}-admin")
        )
        self._index = StreamIndex(
            path,
            self._codec.encode_envelope,
            self._codec.decode_envelope,
            budget_bytes=max(1, settings.memory_bytes // settings.partitions),
        )
        self._index.clear()  # no checkpoint is kept: what an earlier view left says nothing now
        self._takeover = Takeover(
            partition=partition,
            catalogue=settings.catalogue,
            codec=self._codec,
            index=self._index,
            ends=Ends(self._admin, partition, settings.bootstrap),
            make_reader=lambda: LogReader(settings.bootstrap, settings.kafka, partition, client_id),
        )
        self._turn = asyncio.Lock()

    async def read(
        self, stream_id: str, from_sequence: int = 0, limit: int = 1000, *, deadline_ms: int | None = None
    ) -> list[Envelope]:
        """As ``EventStore.read``."""
        return await self._fresh(lambda index: index.events(stream_id, from_sequence, limit), deadline_ms)

    async def info(self, stream_id: str, *, deadline_ms: int | None = None) -> StreamInfo | None:
        """As ``EventStore.info``."""
        return await self._fresh(lambda index: index.info(stream_id), deadline_ms)

    async def observe(self, stream_id: str, *, deadline_ms: int | None = None) -> Observation:
        """As ``EventStore.observe``."""
        info = await self.info(stream_id, deadline_ms=deadline_ms)
        return Observation(-1, 0, None) if info is None else Observation(info.head, info.fence, info.anchor)

    async def open_logs(
        self, after: str = "", limit: int = 1000, *, deadline_ms: int | None = None
    ) -> list[StreamInfo]:
        """As ``OwningEventStore.open_logs``."""
        return await self._fresh(lambda index: index.open_logs(after, limit), deadline_ms)

    async def inbox_streams(self, chain_id: str, *, deadline_ms: int | None = None) -> list[StreamInfo]:
        """As ``OwningEventStore.inbox_streams``."""
        return await self._fresh(lambda index: index.inbox_streams(chain_id), deadline_ms)

    async def close(self) -> None:
        """Let the copy go; idempotent."""
        async with self._turn:
            self._index.close()
            await asyncio.to_thread(let_go, self._admin)

    async def _fresh(self, look: Callable[[StreamIndex], Found], deadline_ms: int | None) -> Found:
        deadline = Deadline.after(self._settings.deadline_ms if deadline_ms is None else deadline_ms)
        async with self._turn:
            await asyncio.to_thread(self._read, deadline)
            return look(self._index)

    def _read(self, deadline: Deadline) -> None:
        self._takeover.read(deadline, lambda: None)
        if self._index.overdue:
            self._index.maintain()
