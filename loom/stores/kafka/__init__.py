"""The log on Kafka (``docs/architecture.md``, "Stores")."""

from loom.stores.kafka.event_store import KafkaEventStore
from loom.stores.kafka.factory import OpenStores, kafka_settings, open_stores
from loom.stores.kafka.settings import KafkaSettings
from loom.stores.kafka.snapshots import KafkaSnapshotStore

__all__ = [
    "KafkaEventStore",
    "KafkaSettings",
    "KafkaSnapshotStore",
    "OpenStores",
    "kafka_settings",
    "open_stores",
]
