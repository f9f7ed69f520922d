"""The stores of a node from its settings: events and snapshots on Kafka, leases and alarms on Redis."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loom.errors import ConfigError, StoreError
from loom.schemas.codec import Codec
from loom.schemas.registry import SchemaRegistry
from loom.schemas.table import SchemaTable
from loom.stores.kafka.event_store import KafkaEventStore
from loom.stores.kafka.settings import KafkaSettings
from loom.stores.kafka.snapshots import KafkaSnapshotStore
from loom.stores.redis.lease_store import RedisLeaseStore
from loom.stores.redis.wake_store import RedisWakeStore
from loom.topics.provisioning import registered_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from loom.config import Config
    from loom.stores.contracts import Clock
    from loom.topics.catalogue import Catalogue

_log = logging.getLogger("loom.kafka.store")


@dataclass(frozen=True, slots=True)
class OpenStores:
    """The stores of a node; ``leases`` and ``wakes`` are None where no Redis is named."""

    events: KafkaEventStore
    snapshots: KafkaSnapshotStore
    leases: RedisLeaseStore | None
    wakes: RedisWakeStore | None


async def open_stores(
    config: Config,
    *,
    clock: Clock,
    drives: bool,
    node: str | None = None,
    on_fatal: Callable[[Exception], None] | None = None,
) -> OpenStores:
    """Open the stores that ``config`` names, on the running event loop; the caller closes each.

    With ``drives`` the node joins the owners and writes the partitions it is given. ``node`` labels its own appends to
    its listener. ``on_fatal`` hears once why the node can own nothing any more.

    Raises:
        ConfigError: a setting is missing. UnreachableError: the brokers, or Redis, do not answer.
        TopicsError: topics are missing, or have another shape.
    """
    settings = kafka_settings(config)
    codec = await asyncio.to_thread(make_codec, config.registry_url, settings.catalogue)
    leases, wakes = _redis_stores(config)
    events = KafkaEventStore(
        settings, owns=drives, clock=clock, codec=codec, origin=node or config.node_id, on_fatal=on_fatal
    )
    try:
        if wakes is not None:
            await wakes.epoch()  # says now, and not in the middle of a run, that Redis does not answer
        await events.open()
    except BaseException:
        for store in (leases, wakes):
            if store is not None:
                await store.close()
        raise
    return OpenStores(events, KafkaSnapshotStore(events, codec), leases, wakes)


def kafka_settings(config: Config) -> KafkaSettings:
    """Return the settings of the log.

    Raises:
        ConfigError: no brokers are named.
    """
    if config.bootstrap is None:
        raise ConfigError("bootstrap", "it is not set", "name the brokers, say LOOM_BOOTSTRAP=localhost:9092")
    return KafkaSettings(
        bootstrap=config.bootstrap,
        node=config.node_id,
        topic_prefix=config.topic_prefix,
        partitions=config.partitions,
        kafka=config.kafka,
        data_dir=config.data_dir if config.data_dir is not None else default_data_dir(),
        publish_topics=frozenset(config.publish_topics),
        lanes=config.lanes,
    )


def default_data_dir() -> Path:
    """Return where local files go when no setting says so: the user's cache folder, since they are a cache."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "loom"


def make_codec(registry_url: str | None, catalogue: Catalogue) -> Codec:
    """Return the codec of the log: in the Confluent format where its schemas are registered. Blocks.

    A registry that does not answer now is no reason to stop: the log explains its own schemas, and both formats may
    stand in it.
    """
    if registry_url is None:
        return Codec()
    registry = SchemaRegistry(registry_url)
    table = SchemaTable(registry.schema_text)
    try:
        return Codec(table, registered_ids(catalogue, registry))
    except StoreError as failed:
        _log.warning("writing without the registry's ids: %s", failed)
        return Codec(table)


def _redis_stores(config: Config) -> tuple[RedisLeaseStore | None, RedisWakeStore | None]:
    if config.redis_url is None:
        return None, None
    url, prefix = config.redis_url, config.topic_prefix
    leases = RedisLeaseStore(url, prefix) if config.leases.enabled else None
    return leases, RedisWakeStore(url, prefix, partitions=config.partitions)
