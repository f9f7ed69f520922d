"""Settings of the Kafka event store, one value object handed down."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loom.stores.index import DEFAULT_BUDGET_BYTES
from loom.stores.kafka.membership import MembershipSettings
from loom.stores.kafka.writer import WriterSettings
from loom.topics.catalogue import COMPACTION_LAG_MS, Catalogue

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """How to reach the log, and the bounds of the store. Times are milliseconds, sizes bytes.

    ``node`` is the node id: unique in the fleet, the same after a restart. ``data_dir`` holds the local files of owned
    partitions; only a store that owns needs one.
    """

    bootstrap: str
    node: str
    topic_prefix: str = "loom."
    partitions: int = 8
    kafka: Mapping[str, Any] = field(default_factory=dict)
    """Any librdkafka property (TLS, SASL), for every client."""
    data_dir: Path | None = None
    deadline_ms: int = 30_000
    """Of a call that names none."""
    open_ms: int = 5_000
    """Of reaching the brokers at start."""
    close_ms: int = 15_000
    lanes: int = 2
    """Transactional ids of each partition, used in turn."""
    transaction_timeout_ms: int = 10_000
    commit_deadline_ms: int = 8_000
    """Below ``transaction_timeout_ms`` (kafka.md, "The poison rule")."""
    session_timeout_ms: int = 8_000
    max_poll_interval_ms: int = 30_000
    loop_bound_ms: int = 5_000
    max_retakes: int = 6
    """Tenures that a writer may lose to a rival in a row before it gives way."""
    memory_bytes: int = DEFAULT_BUDGET_BYTES
    """Of all owned partitions together."""
    max_record_bytes: int = 1_000_000
    compaction_lag_ms: int = COMPACTION_LAG_MS
    publish_topics: frozenset[str] = frozenset()

    @property
    def catalogue(self) -> Catalogue:
        """Names of the topics."""
        return Catalogue(self.topic_prefix, self.partitions)

    def writer(self) -> WriterSettings:
        """Settings of each partition's writer."""
        return WriterSettings(
            bootstrap=self.bootstrap,
            topic_prefix=self.topic_prefix,
            partitions=self.partitions,
            node=self.node,
            kafka=self.kafka,
            lanes=self.lanes,
            transaction_timeout_ms=self.transaction_timeout_ms,
            commit_deadline_ms=self.commit_deadline_ms,
            max_retakes=self.max_retakes,
            max_record_bytes=self.max_record_bytes,
            compaction_lag_ms=self.compaction_lag_ms,
            publish_topics=self.publish_topics,
        )

    def membership(self) -> MembershipSettings:
        """Settings of the membership in the group of owners."""
        catalogue = self.catalogue
        return MembershipSettings(
            bootstrap=self.bootstrap,
            topic=catalogue.appends,
            group=catalogue.group("owners"),
            node=self.node,
            kafka=self.kafka,
            session_timeout_ms=self.session_timeout_ms,
            max_poll_interval_ms=self.max_poll_interval_ms,
            loop_bound_ms=self.loop_bound_ms,
        )
