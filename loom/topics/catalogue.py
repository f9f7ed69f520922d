"""The topics of one prefix, as data: names, partitions, settings (kafka.md "Topics").

Provisioning, the Strimzi export, the checks of every role and the documentation work from what stands here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from loom.errors import ConfigError
from loom.ids import stream_kind

if TYPE_CHECKING:
    from collections.abc import Mapping

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS

CLUSTER_REPLICAS: Final = 3
"""Replicas on a cluster that has as many brokers."""

COMPACTION_LAG_MS: Final = DAY_MS
"""How long after a deletion its record may still rest in a segment file, once a later record has rolled the segment."""

DELETE_RETENTION_MS: Final = 7 * DAY_MS
"""How long a tombstone stays readable after compaction; a local checkpoint older than half of it is not used."""

MAX_MESSAGE_BYTES: Final = 1_048_588
"""Largest record batch; the writer's own bound is below."""

_MIB: Final = 1024 * 1024
_LEGAL_PREFIX: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")
MAX_PARTITIONS: Final = 10_000

_EVERY_TOPIC: Final = {
    # A producer with a wrong clock would be refused, or skew what retention sees.
    "message.timestamp.type": "LogAppendTime",
    "unclean.leader.election.enable": "false",
    "max.message.bytes": str(MAX_MESSAGE_BYTES),
}
_COMPACTED: Final = {
    "cleanup.policy": "compact",
    # The horizon of an erasure: at the latest then a quiet segment is rolled and cleaned.
    "max.compaction.lag.ms": str(COMPACTION_LAG_MS),
    "segment.ms": str(COMPACTION_LAG_MS),
    "delete.retention.ms": str(DELETE_RETENTION_MS),
}
_EVENTS: Final = {
    **_COMPACTED,
    # Each event has a key of its own, so compaction rewrites all and gains nothing but what was deleted: once a day.
    "min.compaction.lag.ms": str(COMPACTION_LAG_MS),
    "segment.bytes": str(256 * _MIB),
}
_LATEST: Final = {
    **_COMPACTED,
    # Keys are overwritten all the time and a takeover reads everything: clean as soon as a segment is full.
    "min.compaction.lag.ms": "0",
    "segment.bytes": str(64 * _MIB),
}


def _queue(retention_ms: int) -> dict[str, str]:
    return {
        "cleanup.policy": "delete",
        "retention.ms": str(retention_ms),
        "segment.ms": str(max(HOUR_MS // 4, min(DAY_MS, retention_ms // 4))),
        "segment.bytes": str(64 * _MIB),
    }


@dataclass(frozen=True, slots=True)
class TopicKind:
    """What is the same under every prefix. ``records`` are the full names of the Avro records of its values."""

    name: str
    key: str
    records: tuple[str, ...]
    settings: Mapping[str, str]
    written_by: str
    co_partitioned: bool = True


TOPICS: Final = (
    TopicKind("executions", "<stream>/<sequence>", ("loom.Envelope",), _EVENTS, "the partition's writer"),
    TopicKind("inbox", "<stream>/<sequence>", ("loom.Envelope",), _EVENTS, "the partition's writer"),
    TopicKind("quarantine", "<stream>/<sequence>", ("loom.Envelope",), _EVENTS, "the partition's writer"),
    TopicKind("snapshots", "<execution_id>", ("loom.Snapshot",), _LATEST, "the partition's writer"),
    TopicKind(
        "marks",
        "<stream>",
        ("loom.StreamMark", "loom.PartitionMark", "loom.SchemaNote"),
        _LATEST,
        "the partition's writer",
    ),
    TopicKind("appends", "<chain_id>", ("loom.AppendRequest",), _queue(7 * DAY_MS), "nodes"),
    TopicKind("commands", "<chain_id>", ("loom.Command",), _queue(7 * DAY_MS), "any producer of the estate"),
    TopicKind("states", "<execution_id>", ("loom.ExecutionSummary",), _LATEST, "the fold processor"),
    TopicKind(
        "replies",
        "<requester>",
        ("loom.AppendReply", "loom.ReadReply"),
        _queue(HOUR_MS),
        "nodes",
        co_partitioned=False,
    ),
    TopicKind(
        "signals",
        "<execution_id>",
        ("loom.OperatorSignal",),
        _queue(7 * DAY_MS),
        "nodes",
        co_partitioned=False,
    ),
    TopicKind("dead", "<source>", (), _queue(30 * DAY_MS), "nodes", co_partitioned=False),
)
"""Every topic, the co-partitioned ones first."""


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic as it shall be on the cluster. ``settings`` are Kafka's own names and values."""

    name: str
    partitions: int
    replicas: int
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The topics under a prefix.

    Every topic has ``partitions`` partitions, so that one function places everything; the co-partitioned ones keep all of
    a chain in one partition number. ``replicas`` is 1 for a single broker, 3 for a cluster (``sized_for``).

    Raises:
        ConfigError: no topic can have such a prefix, or there cannot be that many partitions or replicas.
    """

    prefix: str = "loom."
    partitions: int = 8
    replicas: int = 1

    def __post_init__(self) -> None:
        if not _LEGAL_PREFIX.fullmatch(self.prefix):
            raise ConfigError(
                "topic_prefix",
                f"{self.prefix[:64]!r} cannot start the name of a topic",
                "use 1 to 100 letters, digits and ._-",
            )
        if not 1 <= self.partitions <= MAX_PARTITIONS:
            raise ConfigError("partitions", f"{self.partitions} cannot be", f"use 1 to {MAX_PARTITIONS}")
        if self.replicas < 1:
            raise ConfigError(
                "replicas", f"{self.replicas} cannot be", "use 1 for one broker, 3 for a cluster"
            )

    def sized_for(self, brokers: int) -> Catalogue:
        """Return the catalogue with the replicas that a cluster of that many brokers can hold, at most 3."""
        return replace(self, replicas=max(1, min(CLUSTER_REPLICAS, brokers)))

    @property
    def min_in_sync(self) -> int:
        """Replicas that must have a record before it counts as written: 2 of 3, else one less than there are."""
        return max(1, self.replicas - 1)

    def topics(self) -> tuple[Topic, ...]:
        """Return every topic, the co-partitioned ones first."""
        common = {**_EVERY_TOPIC, "min.insync.replicas": str(self.min_in_sync)}
        return tuple(
            Topic(
                self.prefix + kind.name,
                self.partitions,
                self.replicas,
                MappingProxyType(dict(sorted({**common, **kind.settings}.items()))),
            )
            for kind in TOPICS
        )

    def subjects(self) -> dict[str, str]:
        """Return the registry's subjects (``<topic>-<record>``) with the full name of the record of each."""
        return {f"{self.prefix}{kind.name}-{record}": record for kind in TOPICS for record in kind.records}

    def log_transactional_id(self, partition: int, lane: int = 0) -> str:
        """Return the transactional id that fences the writer of a partition; a second lane has a suffix."""
        return f"{self.prefix}log.{partition}" + (f".{lane}" if lane else "")

    def fold_transactional_id(self, partition: int) -> str:
        """Return the transactional id of the fold processor for a partition."""
        return f"{self.prefix}fold.{partition}"

    def group(self, role: str) -> str:
        """Return the name of a consumer group of this prefix."""
        return self.prefix + role

    @property
    def executions(self) -> str:
        """Logs of executions."""
        return self.prefix + "executions"

    @property
    def inbox(self) -> str:
        """Inbox streams."""
        return self.prefix + "inbox"

    @property
    def quarantine(self) -> str:
        """Copies of held messages."""
        return self.prefix + "quarantine"

    @property
    def snapshots(self) -> str:
        """Folded states."""
        return self.prefix + "snapshots"

    @property
    def marks(self) -> str:
        """Stream marks, the partitions' own marks, and the schemas of the log."""
        return self.prefix + "marks"

    @property
    def appends(self) -> str:
        """Requests of nodes to a partition's writer."""
        return self.prefix + "appends"

    @property
    def commands(self) -> str:
        """Commands of foreign producers."""
        return self.prefix + "commands"

    @property
    def states(self) -> str:
        """Execution summaries, published by the fold processor."""
        return self.prefix + "states"

    @property
    def replies(self) -> str:
        """Answers to requests."""
        return self.prefix + "replies"

    @property
    def signals(self) -> str:
        """Operator signals."""
        return self.prefix + "signals"

    @property
    def dead(self) -> str:
        """What could not be used."""
        return self.prefix + "dead"

    def topic_of_stream(self, stream_id: str) -> str:
        """Return the topic in which a stream's events stand."""
        return self.prefix + stream_kind(stream_id)
