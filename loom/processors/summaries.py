"""Reads whole topics for people: ``states`` for ``loom list``, ``quarantine`` for ``loom held``."""

from __future__ import annotations

import heapq
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from loom.errors import ConfigError, DeadlineExceededError, TopicsError
from loom.ids import routing_id, stream_kind
from loom.schemas.codec import Codec
from loom.schemas.records import ExecutionSummary
from loom.stores.kafka.deadline import Deadline
from loom.stores.kafka.reader import LogReader
from loom.stores.kafka.records import TICK_KEY, text_of
from loom.topics.catalogue import Catalogue
from loom.topics.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from loom.config import Config

READ_TIMEOUT_MS: Final = 60_000
ENDED: Final = frozenset({"completed", "failed", "cancelled"})
MAX_GONE: Final = 100_000
"""Executions that are kept in mind although they may prove to be gone further on in the topic."""


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


def read_finished(
    config: Config, partition: int, before_ms: int, limit: int, *, timeout_ms: int = READ_TIMEOUT_MS
) -> list[tuple[str, str]]:
    """Return at most ``limit`` chains of a partition whose last execution ended before ``before_ms``, each with that.

    The topic is read through, in memory bounded by the limit. It trails the log, so the log is to be asked.

    Raises:
        as ``read_summaries``.
    """
    catalogue, codec = Catalogue(config.topic_prefix, config.partitions), Codec()
    deadline = Deadline.after(timeout_ms)
    found: dict[str, str] = {}
    for execution_id, value in _records(config, catalogue.states, partition, deadline):
        if value is None:
            found.pop(execution_id, None)
        elif execution_id not in found and execution_id != TICK_KEY:
            summary = codec.decode(value, ExecutionSummary, "summary")
            if (
                summary.status in ENDED
                and summary.finished_at is not None
                and summary.finished_at < before_ms
            ):
                found[execution_id] = summary.chain_id
                if len(found) > limit + MAX_GONE:
                    break
    return [(chain_id, execution_id) for execution_id, chain_id in found.items()][:limit]


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
    for key, value in _records(config, topic, partition, deadline):
        if value is None:
            rows.pop(key, None)
        else:
            rows[key] = b"" if keys_only else value
    return rows


def _records(
    config: Config, topic: str, partition: int, deadline: Deadline
) -> Iterator[tuple[str, bytes | None]]:
    """Keys and values of a partition, in order, to its end."""
    with LogReader(config.bootstrap or "", config.kafka, partition, f"{config.node_id}-list") as reader:
        reader.assign({topic: 0})
        while True:
            if deadline.passed:
                raise DeadlineExceededError(f"reading {topic}", deadline.budget_ms)
            taken = reader.take()
            for message in taken.records.get(topic, ()):
                if (key := message.key()) is not None:
                    yield text_of(key), message.value()
            if taken.ends:
                return
