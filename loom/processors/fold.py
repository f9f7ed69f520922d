"""The fold service: publishes where every execution stands, as ``ExecutionSummary`` on ``states`` (kafka.md "Processors").

A plain consumer in batches, not an agent: 5,700 executions a second are 17,000 events. Each batch of a partition is one
transaction of ``<prefix>fold.<p>`` that carries the summaries and the input offsets; the producer is fenced when the
partition is taken, and what it committed is restored from ``states`` first, so that neither a restart nor a process that
comes back from a long sleep ever puts "running" over "completed".
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from loom.errors import LoomError, StoreError
from loom.processors.fold_partition import FoldPartition, FoldSettings
from loom.processors.host import STALL_S, end_process
from loom.schemas.codec import Codec
from loom.stores.kafka.client import name_of
from loom.stores.kafka.deadline import Deadline
from loom.stores.kafka.lanes import LaneFault
from loom.stores.kafka.reader import END_OF_PARTITION

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("loom.processors.fold")

ROLE: Final = "fold"
TAKE_MS: Final = 30_000
STOP_TIMEOUT_S: Final = 15.0
_ASK_S: Final = 10.0
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 10.0
_SEEKS: Final = 50


class _Stopped(Exception):  # noqa: N818 - leaves a takeover when the service is stopped
    pass


@dataclass(frozen=True, slots=True)
class FoldStats:
    """What the service has done since it started. ``lag`` is, per partition, offsets not yet folded."""

    events: int = 0
    summaries: int = 0
    transactions: int = 0
    faults: int = 0
    lag: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Part:
    fold: FoldPartition
    due: float = 0.0
    pause_s: float = _FIRST_PAUSE_S
    ended: bool = False


class FoldService:
    """The consumer and its thread. ``start`` and ``stop`` may be called from any thread, the rest is its own."""

    def __init__(
        self,
        settings: FoldSettings,
        *,
        codec: Codec | None = None,
        on_death: Callable[[str], None] = end_process,
        stall_s: float = STALL_S,
    ) -> None:
        """Prepare; ``on_death`` is called with the reason if the thread ends, or stands still, untold."""
        self._settings, self._codec, self._on_death = settings, codec or Codec(), on_death
        self._stopping = threading.Event()
        self._parts: dict[int, _Part] = {}
        self._counts = dict.fromkeys(("events", "summaries", "transactions", "faults"), 0)
        self._lag: dict[int, int] = {}
        self._stall_s = stall_s
        self._moved_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="loom-fold", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="loom-fold-watch", daemon=True)

    def start(self) -> None:
        """Start folding; returns at once."""
        self._moved_at = time.monotonic()
        self._thread.start()
        self._watcher.start()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """Finish the batch in flight and leave the group; False if that took too long. Idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stats(self) -> FoldStats:
        """Return the counts so far."""
        counts = self._counts
        return FoldStats(
            counts["events"], counts["summaries"], counts["transactions"], counts["faults"], dict(self._lag)
        )

    def _run(self) -> None:
        try:
            consumer = Consumer(self._consumer_config())
            try:
                consumer.subscribe(
                    [self._settings.catalogue.executions],
                    on_assign=self._assigned,
                    on_revoke=self._revoked,
                    on_lost=self._revoked,
                )
                while not self._stopping.is_set():
                    self._moved_at = time.monotonic()
                    self._take_due(consumer)
                    self._batch(consumer)
            finally:
                for part in self._parts.values():
                    part.fold.release()
                consumer.close()
        except Exception as error:  # noqa: BLE001 - whatever ends this thread, it must not end unseen
            reason = str(error) if isinstance(error, LoomError) else name_of(error)
            _log.critical("the fold service has ended: %s", reason)
            if not self._stopping.is_set():
                self._on_death(f"the fold service: {reason}")

    def _watch(self) -> None:
        """A call of a client that never returns, whatever its timeout, must not pass for a quiet log."""
        while not self._stopping.wait(self._stall_s / 10):
            still_s = time.monotonic() - self._moved_at
            if still_s > self._stall_s and self._thread.is_alive():
                self._on_death(f"the fold service has stood still for {still_s:.0f} s")
                return

    def _consumer_config(self) -> dict[str, Any]:
        settings = self._settings
        return {
            "fetch.wait.max.ms": 50,
            "queued.max.messages.kbytes": 32_768,
            "log_level": 3,
            **settings.kafka,
            "bootstrap.servers": settings.bootstrap,
            "client.id": f"{settings.client_id}-fold",
            "group.id": settings.catalogue.group(ROLE),
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": settings.session_ms,
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "allow.auto.create.topics": False,
        }

    # -- assignment -------------------------------------------------------------------------------------------------

    def _assigned(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        consumer.incremental_assign(places)
        consumer.pause(places)  # until what was committed is restored
        for place in places:
            self._parts[place.partition] = _Part(FoldPartition(self._settings, place.partition, self._codec))

    def _revoked(self, _consumer: Consumer, places: list[TopicPartition]) -> None:
        """Between two batches: nothing is in flight. A partition lost is fenced by whoever takes it."""
        for place in places:
            part = self._parts.pop(place.partition, None)
            self._lag.pop(place.partition, None)
            if part is not None:
                part.fold.release()

    def _take_due(self, consumer: Consumer) -> None:
        for number, part in list(self._parts.items()):
            if part.fold.taken or part.due > time.monotonic():
                continue
            try:
                self._confirm(consumer, number)
                part.fold.take(partial(self._where, consumer, number), Deadline.after(TAKE_MS), self._go_on)
                self._seek(consumer, number, part.fold.offset)
            except _Stopped:
                return
            except (LaneFault, StoreError, KafkaException) as error:
                self._put_off(part, error)
            else:
                part.pause_s, part.ended = _FIRST_PAUSE_S, False

    def _go_on(self) -> None:
        self._moved_at = time.monotonic()
        if self._stopping.is_set():
            raise _Stopped

    def _confirm(self, consumer: Consumer, number: int) -> None:
        """Commit what is committed: only a member of the present generation can, so no other may fence an owner."""
        place = self._place(number, max(0, self._committed(consumer, number)))
        consumer.commit(offsets=[place], asynchronous=False)

    def _committed(self, consumer: Consumer, number: int) -> int:
        [place] = consumer.committed([self._place(number)], timeout=_ASK_S)
        if place.error is not None:
            raise KafkaException(place.error)
        return place.offset if place.offset >= 0 else OFFSET_BEGINNING

    def _where(self, consumer: Consumer, number: int) -> tuple[int, int]:
        _, end = consumer.get_watermark_offsets(self._place(number), timeout=_ASK_S)
        return self._committed(consumer, number), end

    def _seek(self, consumer: Consumer, number: int, offset: int) -> None:
        place = self._place(number, offset)
        for attempt in range(_SEEKS):
            try:
                consumer.seek(place)
                break
            except KafkaException:  # its fetcher has not started yet
                if attempt == _SEEKS - 1:
                    raise
                self._stopping.wait(0.02)
        consumer.resume([place])

    def _put_off(self, part: _Part, error: Exception) -> None:
        """Try again later: with jitter, so that two processes that fence each other settle."""
        self._counts["faults"] += 1
        part.fold.release()
        part.due = time.monotonic() + part.pause_s * random.uniform(0.5, 1.5)  # noqa: S311 - jitter
        part.pause_s = min(part.pause_s * 2, _LONGEST_PAUSE_S)
        what = error.code if isinstance(error, LaneFault) else name_of(error)
        _log.warning("partition %s of the fold is taken again: %s", part.fold.partition, what)

    # -- folding ----------------------------------------------------------------------------------------------------

    def _batch(self, consumer: Consumer) -> None:
        settings = self._settings
        batches: dict[int, list[Message]] = defaultdict(list)
        ends: dict[int, int] = {}
        for message in consumer.consume(settings.max_batch, settings.interval_ms / 1000):
            error = message.error()
            number = message.partition() or 0
            if error is None:
                batches[number].append(message)
            elif error.code() == END_OF_PARTITION:
                ends[number] = message.offset() or 0
            elif error.fatal() or error.code() in _LASTING:
                raise KafkaException(error)
        for number, messages in batches.items():
            part = self._parts.get(number)
            if part is not None and part.fold.taken:
                self._fold(consumer, part, messages)
        self._measure(consumer, ends)

    def _fold(self, consumer: Consumer, part: _Part, messages: list[Message]) -> None:
        try:
            events, summaries = part.fold.fold(messages, consumer.consumer_group_metadata())
        except (LaneFault, KafkaException) as error:
            with contextlib.suppress(KafkaException):  # it may be another's by now
                consumer.pause([self._place(part.fold.partition)])
            self._put_off(part, error)
            return
        part.ended = False
        self._counts["events"] += events
        self._counts["summaries"] += summaries
        self._counts["transactions"] += 1

    def _measure(self, consumer: Consumer, ends: dict[int, int]) -> None:
        """Note the lag. Only the end that the client reports tells a lag of 0: control records hold offsets, too."""
        for number, part in self._parts.items():
            reached = number in ends and ends[number] >= part.fold.offset
            part.ended = part.fold.taken and (part.ended or reached)
            if part.ended:
                self._lag[number] = 0
                continue
            with contextlib.suppress(KafkaException):
                _, high = consumer.get_watermark_offsets(self._place(number), cached=True)
                self._lag[number] = max(1, high - max(0, part.fold.offset))

    def _place(self, number: int, offset: int | None = None) -> TopicPartition:
        topic = self._settings.catalogue.executions
        return TopicPartition(topic, number) if offset is None else TopicPartition(topic, number, offset)


_LASTING: Final = frozenset({KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED})
