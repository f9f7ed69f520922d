"""Reads whole topics for people: ``states`` for ``loom list``, ``quarantine`` for ``loom held``."""

from __future__ import annotations

import heapq
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from loom.errors import ConfigError, DeadlineExceededError, TopicsError
from loom.ids import routing_id, stream_kind
from loom.schemas.codec import Codec
from loom.schemas.records import ExecutionSummary
from loom.stores.kafka.deadline import Deadline
from loom.stores.kafka.reader import END_OF_PARTITION, LogReader
from loom.topics.catalogue import Catalogue
from loom.topics.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterable

    from loom.config import Config

READ_TIMEOUT_MS = 60_000


def read_summaries(
    config: Config,
    *,
    status: str | None = None,
    workflow: str | None = None,
    limit: int = 50,
    codec: Codec | None = None,
    timeout_ms: int = READ_TIMEOUT_MS,
) -> list[dict[str, Any]]:
    """Return at most ``limit`` executions, the last started first, as ``ExecutionSummary`` fields.

    The topic is read once through, in memory bounded by the summaries of one partition; what it says trails the log by
    the lag of the fold processor.

    Raises:
        ConfigError: no bootstrap. UnreachableError: the brokers do not answer. TopicsError: the topic is missing, or has
            another number of partitions.
        DeadlineExceededError: not read in ``timeout_ms``.
        DecodeError: a record is none of ours.
    """
    if not config.bootstrap:
        raise ConfigError("bootstrap", "it is not set", "name the brokers, host:port")
    catalogue, codec = Catalogue(config.topic_prefix, config.partitions), codec or Codec()
    _look(config, catalogue, catalogue.states)
    deadline = Deadline.after(timeout_ms)
    newest: list[ExecutionSummary] = []
    for partition in range(catalogue.partitions):
        rows = _read(config, catalogue.states, partition, deadline)
        summaries = (codec.decode(row, ExecutionSummary, "summary") for row in rows.values())
        wanted = [s for s in summaries if status in {None, s.status} and workflow in {None, s.workflow}]
        newest = heapq.nlargest(limit, [*newest, *wanted], key=lambda s: (s.started_at, s.execution_id))
    return [asdict(summary) for summary in newest]


def read_quarantined(
    config: Config, *, partitions: Iterable[int] | None = None, timeout_ms: int = READ_TIMEOUT_MS
) -> list[str]:
    """Return the chains that keep copies of held messages, told by the keys of ``quarantine`` alone.

    ``partitions`` are read; by default all are.

    Copies are freed soon after they are needed no more, so a chain may be listed that holds nothing any longer.

    Raises:
        as ``read_summaries``.
    """
    if not config.bootstrap:
        raise ConfigError("bootstrap", "it is not set", "name the brokers, host:port")
    catalogue, deadline = Catalogue(config.topic_prefix, config.partitions), Deadline.after(timeout_ms)
    _look(config, catalogue, catalogue.quarantine)
    chains: dict[str, None] = {}
    for partition in range(catalogue.partitions) if partitions is None else partitions:
        for key in _read(config, catalogue.quarantine, partition, deadline, keys_only=True):
            stream_id, _, sequence = key.rpartition("/")
            if stream_kind(stream_id) == "quarantine" and sequence != "0":
                chains[routing_id(stream_id)] = None
    return list(chains)


def _look(config: Config, catalogue: Catalogue, topic: str) -> None:
    """Make sure that the topic is there: a consumer waits for one that is not, or for brokers, as if they were to come."""
    found = Cluster(config.bootstrap or "", config.kafka).partitions([topic]).get(topic)
    if found is None:
        raise TopicsError((f"there is no topic {topic}",), "correct topic_prefix, or run `loom topics apply`")
    if found != catalogue.partitions:
        problem = f"{topic} has {found} partitions, not {catalogue.partitions}"
        raise TopicsError((problem,), "set partitions to that number")


def _read(
    config: Config, topic: str, partition: int, deadline: Deadline, *, keys_only: bool = False
) -> dict[str, bytes]:
    """The last value of every key of a partition of a compacted topic; ``keys_only`` keeps none of the values."""
    rows: dict[str, bytes] = {}
    with LogReader(config.bootstrap or "", config.kafka, partition, f"{config.node_id}-list") as reader:
        reader.assign({topic: 0})
        while True:
            if deadline.passed:
                raise DeadlineExceededError(f"reading {topic}", deadline.budget_ms)
            for message in reader.take():
                error, key, value = message.error(), message.key(), message.value()
                if error is not None:
                    if error.code() == END_OF_PARTITION:
                        return rows
                elif key is not None and value is not None:
                    rows[key.decode("utf-8", "replace")] = b"" if keys_only else value
                elif key is not None:
                    rows.pop(key.decode("utf-8", "replace"), None)
