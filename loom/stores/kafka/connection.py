"""What a store holds towards the brokers, opened and closed in order: each later part uses the earlier ones."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Protocol

from confluent_kafka.admin import AdminClient

from loom.errors import ConfigError
from loom.stores.kafka.client import admin_config, let_go
from loom.stores.kafka.deadline import Deadline
from loom.stores.kafka.folder import FolderLock, sweep
from loom.stores.kafka.owner import Owner, OwnerListener
from loom.stores.kafka.requests import Requester
from loom.stores.kafka.sender import BrokerClock, Sender
from loom.stores.kafka.tail import TailReader
from loom.topics import provisioning
from loom.topics.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loom.ids import IdSource
    from loom.schemas.codec import Codec
    from loom.schemas.envelope import Envelope
    from loom.stores.contracts import Clock
    from loom.stores.kafka.settings import KafkaSettings
    from loom.stores.kafka.shard import Shard
    from loom.stores.kafka.writer import WriterHealth

_log = logging.getLogger("loom.kafka.store")

_TOLD: Final = 6
"""Severities of the client's lines (syslog's: INFO and worse) that go to the store's log, for all of the node's clients."""


class StoreListener(OwnerListener, Protocol):
    """Who hears what happens, here and elsewhere."""

    def followed(self, stream_id: str, envelopes: Sequence[Envelope]) -> None:
        """Events of a followed stream, written by another process; called on the loop."""
        ...


class Connection:
    """The clients of one store."""

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        owns: bool,
        codec: Codec,
        clock: Clock,
        ids: IdSource,
        listener: StoreListener,
    ) -> None:
        self._settings, self._owns, self._codec, self._clock = settings, owns, codec, clock
        self._ids, self._listener = ids, listener
        self._admin: AdminClient | None = None
        self._sender: Sender | None = None
        self._requester: Requester | None = None
        self._folder: FolderLock | None = None
        self._owner: Owner | None = None
        self._tail: TailReader | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Open everything; what is open when it fails is closed by ``close``.

        Raises:
            UnreachableError, TopicsError, ConfigError: see ``KafkaEventStore.open``.
        """
        settings, deadline = self._settings, Deadline.after(self._settings.open_ms)
        self._loop = loop
        asks = admin_config(
            settings.bootstrap,
            {"log_level": _TOLD, **settings.kafka},
            client_id=f"{settings.node}-admin",
            timeout_ms=settings.transaction_timeout_ms,
        )
        self._admin = AdminClient(asks, logger=_log)
        cluster = Cluster(settings.bootstrap, settings.kafka, timeout_ms=settings.open_ms)
        for remark in await asyncio.to_thread(provisioning.check, cluster, settings.catalogue):
            _log.info("topics: %s", remark)
        broker_clock = BrokerClock(self._clock)
        self._sender = Sender(
            settings.bootstrap,
            settings.kafka,
            client_id=f"{settings.node}-sender",
            broker_clock=broker_clock,
            max_record_bytes=settings.max_record_bytes,
        )
        self._requester = Requester(
            settings.bootstrap,
            settings.kafka,
            catalogue=settings.catalogue,
            node=settings.node,
            codec=self._codec,
            sender=self._sender,
            ids=self._ids,
            max_request_bytes=settings.max_record_bytes,
        )
        await self._requester.start(deadline)
        if self._owns:
            self._open_owner(self._admin, self._sender, broker_clock, loop)

    def _open_owner(
        self,
        admin: AdminClient,
        sender: Sender,
        broker_clock: BrokerClock,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        settings = self._settings
        if settings.data_dir is None:
            raise ConfigError(
                "data_dir", "a node that owns partitions needs a folder", "name one, outside any backup"
            )
        parent = settings.data_dir / settings.catalogue.prefix.strip(".")
        self._folder = FolderLock(parent / settings.node)
        sweep(parent)
        self._owner = Owner(
            settings,
            folder=self._folder.path,
            codec=self._codec,
            clock=self._clock,
            admin=admin,
            sender=sender,
            broker_clock=broker_clock,
            listener=self._listener,
        )
        self._owner.start(loop)

    async def close(self) -> None:
        """Finish what is in flight, leave the group, and end every thread, within ``close_ms``."""
        deadline = Deadline.after(self._settings.close_ms)
        ended = True
        if self._owner is not None:
            ended = await asyncio.to_thread(self._owner.stop, deadline)
            self._owner.silence()
        if self._tail is not None:
            ended = await asyncio.to_thread(self._tail.close, deadline) and ended
        if self._requester is not None:
            ended = await self._requester.close(deadline) and ended
        if self._sender is not None:
            ended = await asyncio.to_thread(self._sender.close, deadline) and ended
        if self._folder is not None:
            self._folder.close()
        if self._admin is not None and ended:  # else a writer may ask it yet; it goes with the store
            await asyncio.to_thread(let_go, self._admin)
        if not ended:
            _log.warning("the store was closed before all of its threads had ended")

    @property
    def requester(self) -> Requester:
        """Who asks other owners."""
        assert self._requester is not None
        return self._requester

    @property
    def tail(self) -> TailReader:
        """Who follows partitions of other owners; begun when first needed."""
        if self._tail is None:
            assert self._admin is not None
            assert self._loop is not None
            self._tail = TailReader(
                self._settings.bootstrap,
                self._settings.kafka,
                client_id=f"{self._settings.node}-tail",
                admin=self._admin,
                codec=self._codec,
                loop=self._loop,
                deliver=self._listener.followed,
            )
        return self._tail

    def shard(self, partition: int) -> Shard | None:
        """The partition's shard where this process may write and read it now."""
        return None if self._owner is None else self._owner.shard(partition)

    def owned(self) -> frozenset[int]:
        """Partitions whose writer serves in this process."""
        return frozenset() if self._owner is None else self._owner.owned()

    def mint_shard(self) -> int | None:
        """See ``Owner.mint_shard``; None where nothing is owned."""
        return None if self._owner is None else self._owner.mint_shard()

    def health(self) -> list[WriterHealth]:
        """How the writers are, by partition."""
        return [] if self._owner is None else self._owner.health()
