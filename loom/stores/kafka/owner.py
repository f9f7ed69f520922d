"""The side of a store that writes partitions: membership, a writer and an index for each, and the requests of others."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Protocol

from loom.stores.contracts import Committed
from loom.stores.index import StreamIndex
from loom.stores.judge import PutEvent
from loom.stores.kafka.intake import RequestIntake
from loom.stores.kafka.ownership import Ownership
from loom.stores.kafka.shard import Shard
from loom.stores.kafka.writer import PartitionWriter, WriterState

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from confluent_kafka.admin import AdminClient

    from loom.schemas.codec import Codec
    from loom.schemas.envelope import Envelope
    from loom.stores.contracts import Clock
    from loom.stores.kafka.deadline import Deadline
    from loom.stores.kafka.ownership import StateCallback
    from loom.stores.kafka.sender import BrokerClock, Sender
    from loom.stores.kafka.settings import KafkaSettings
    from loom.stores.kafka.writer import CommittedTransaction, WriterHealth

_log = logging.getLogger("loom.kafka.owner")

SATURATED: Final = 1.0


class OwnerListener(Protocol):
    """Who hears what happens. Called on threads of their own: it hands over and returns."""

    def committed(self, batch: Sequence[Committed]) -> None:
        """A transaction became durable."""
        ...

    def gained(self, partition: int) -> None:
        """A tenure serves."""
        ...

    def lost(self, partition: int) -> None:
        """The writer has ended."""
        ...

    def notified(self, execution_id: str) -> None:
        """Another node asks to look at an execution's inbox again."""
        ...

    def fatal(self, error: Exception) -> None:
        """This node can own nothing any more."""
        ...


class Owner:
    """The partitions that this process writes."""

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        folder: Path,
        codec: Codec,
        clock: Clock,
        admin: AdminClient,
        sender: Sender,
        broker_clock: BrokerClock,
        listener: OwnerListener,
    ) -> None:
        """Prepare; nothing happens before ``start``. ``folder`` is locked by the caller; the clients are lent."""
        self._settings = settings
        self._writer_settings = settings.writer()
        self._folder = folder
        self._codec = codec
        self._clock = clock
        self._admin = admin
        self._listener = listener
        self._shards: dict[PartitionWriter, Shard] = {}
        self._intake = RequestIntake(
            catalogue=settings.catalogue,
            codec=codec,
            sender=sender,
            broker_clock=broker_clock,
            shard_of=self._shards.__getitem__,
            on_notify=listener.notified,
        )
        self._ownership = Ownership(
            settings.membership(), make_writer=self._make_writer, intake=self._intake, listener=listener
        )
        self._minting: int | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Join the group of owners; called on the event loop."""
        self._ownership.start(loop)

    def stop(self, deadline: Deadline) -> bool:
        """Finish what is in flight and leave the group; blocks. False if something had not ended at ``deadline``."""
        ended = self._ownership.stop(deadline)
        self._intake.close()
        return ended

    def silence(self) -> None:
        """Stop saying that the event loop runs; called on the loop."""
        self._ownership.silence()

    def shard(self, partition: int) -> Shard | None:
        """The partition's shard where it may be written or read here now."""
        writer = self._ownership.writer(partition)
        return None if writer is None else self._shards.get(writer)

    def owned(self) -> frozenset[int]:
        """Partitions whose writer serves now."""
        return self._ownership.owned()

    def health(self) -> list[WriterHealth]:
        """How each writer is, by partition."""
        return sorted((w.health() for w in self._shards.copy()), key=lambda health: health.partition)

    def mint_shard(self) -> int | None:
        """One owned partition, the same one until its writer is saturated (kafka.md, "Minted ids")."""
        writer = None if self._minting is None else self._ownership.writer(self._minting)
        if writer is not None and writer.state is WriterState.SERVING and writer.saturation < SATURATED:
            return self._minting
        owned = sorted(self.owned())
        if not owned:
            return None
        if self._minting not in owned:
            self._minting = owned[0]
        at = owned.index(self._minting)
        for partition in (*owned[at:], *owned[:at]):
            shard = self.shard(partition)
            if shard is not None and shard.writer.saturation < SATURATED:
                self._minting = partition
                break
        return self._minting

    def _make_writer(
        self, partition: int, confirm: Callable[[], bool], on_state: StateCallback
    ) -> PartitionWriter:
        index = StreamIndex(
            self._folder / f"{partition}.index",
            self._codec.encode_envelope,
            self._codec.decode_envelope,
            budget_bytes=max(1, self._settings.memory_bytes // self._settings.partitions),
        )

        def changed(writer: PartitionWriter, state: WriterState) -> None:
            on_state(writer, state)
            if state is WriterState.STOPPED:
                self._shards.pop(writer, None)
                index.close()

        writer = PartitionWriter(
            partition,
            self._writer_settings,
            index=index,
            codec=self._codec,
            admin=self._admin,
            confirm_ownership=confirm,
            on_committed=self._committed,
            on_state=changed,
            clock=self._clock,
        )
        self._shards[writer] = Shard(writer, index)
        return writer

    def _committed(self, transaction: CommittedTransaction) -> None:
        batch = committed_streams(transaction)
        if batch:
            self._listener.committed(batch)


def committed_streams(transaction: CommittedTransaction) -> list[Committed]:
    """Return what a transaction made durable: per write, the events of each stream, in log order."""
    batch: list[Committed] = []
    for op in transaction.ops:
        streams: dict[str, list[Envelope]] = {}
        for effect in op.effects:
            if type(effect) is PutEvent:
                streams.setdefault(effect.envelope.stream_id, []).append(effect.envelope)
        batch += [
            Committed(stream_id, tuple(envelopes), op.origin) for stream_id, envelopes in streams.items()
        ]
    return batch
