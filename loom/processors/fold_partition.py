"""One partition of the fold: what it reads, what it has folded, and the transactional producer that fences its rivals."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import KafkaException, TopicPartition

from loom.errors import DecodeError
from loom.ids import stream_kind
from loom.processors.summary_table import RESIDENT, SummaryTable
from loom.stores.kafka.client import Fault, classify, name_of, producer_config
from loom.stores.kafka.deadline import Deadline
from loom.stores.kafka.lanes import Lane, LaneFault
from loom.stores.kafka.reader import LogReader
from loom.stores.kafka.records import TICK_KEY, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from confluent_kafka import Message

    from loom.processors.summary import Summary
    from loom.schemas.codec import Codec
    from loom.topics.catalogue import Catalogue

_log = logging.getLogger("loom.processors.fold")

MAX_RECORD_BYTES: Final = 1_048_576


@dataclass(frozen=True, slots=True)
class FoldSettings:
    """Where the fold reads and writes. Times in milliseconds.

    ``interval_ms`` is how long a batch may fill, hence the usual lag; ``resident`` bounds summaries in memory per
    partition; ``session_ms`` is how soon the partitions of a process that died are another's. ``commit_ms`` bounds the
    commit of a batch, and is below ``transaction_ms`` (kafka.md, "The poison rule").
    """

    bootstrap: str
    catalogue: Catalogue
    client_id: str
    kafka: Mapping[str, Any] = field(default_factory=dict, repr=False)
    interval_ms: int = 100
    max_batch: int = 20_000
    resident: int = RESIDENT
    session_ms: int = 10_000
    transaction_ms: int = 10_000
    commit_ms: int = 8_000


class FoldLane(Lane):
    """A lane whose transactions carry the offsets that were read."""

    def commit_with(self, offsets: list[TopicPartition], group: object, deadline: Deadline) -> None:
        """Wait until the records of this transaction are written, add the offsets read, and commit.

        In this order, an offset is never committed without what was folded from the records below it, whatever ends the
        transaction early. A client whose connection was cut while records were on their way is not asked to add
        offsets: it writes the records again, and then never returns from that call, whatever its timeout.

        Raises:
            LaneFault: it is not committed, or that is not known.
        """
        try:
            unwritten = self._client.flush(deadline.left_s)
        except KafkaException as error:
            raise LaneFault("write summaries", classify(error), name_of(error)) from None
        if unwritten:
            raise LaneFault("write summaries", Fault.ABORT, "TIMED_OUT")
        self._trust()
        self._repeat(
            "send offsets",
            lambda client, left_s: client.send_offsets_to_transaction(offsets, group, left_s),
            deadline,
        )
        self.commit(deadline)
        self._trust()  # a resent EndTxn may settle a later transaction: a new tenure first

    def _trust(self) -> None:
        disturbance = self.disturbance()
        if disturbance is not None:
            raise LaneFault("trust the producer", Fault.FATAL, disturbance)


class FoldPartition:
    """Takes over a partition, folds batches into ``states``, and lets go. One thread makes every call."""

    def __init__(self, settings: FoldSettings, partition: int, codec: Codec) -> None:
        self._settings, self.partition, self._codec = settings, partition, codec
        self._lane: FoldLane | None = None
        self._table: SummaryTable | None = None
        self.offset = 0
        """Where the next batch begins."""
        self._known_below = 0
        """Executions that begin at or above this offset stand in nothing that was restored."""

    @property
    def taken(self) -> bool:
        """Whether this process is the one that folds the partition."""
        return self._table is not None

    def take(
        self, place: Callable[[], tuple[int, int]], deadline: Deadline, wait: Callable[[], None]
    ) -> None:
        """Fence every older fold of the partition, then restore what it committed.

        ``place`` tells the offset that the group has committed, and the end of the log; it is asked after the fence.
        ``wait`` is called now and then, and may raise to stop.

        Raises:
            LaneFault: it cannot be fenced now. StoreError: ``states`` cannot be read.
        """
        self.release()
        settings, states = self._settings, self._settings.catalogue.states
        config = producer_config(
            settings.bootstrap,
            settings.kafka,
            transactional_id=settings.catalogue.fold_transactional_id(self.partition),
            client_id=f"{settings.client_id}-fold-{self.partition}",
            timeout_ms=settings.transaction_ms,
            max_record_bytes=MAX_RECORD_BYTES,
        )
        lane = self._lane = FoldLane(config, states)
        lane.initialise(deadline, wait)
        self._close_what_is_open(lane, deadline)
        table = SummaryTable(self._codec, settings.resident)
        try:
            self._restore(table, wait)
            self.offset, end = place()
        except BaseException:
            table.close()
            raise
        self._known_below = end if len(table) else 0
        self._table = table

    def _close_what_is_open(self, lane: FoldLane, deadline: Deadline) -> None:
        """Commit a record of no meaning: where Kafka left the last transaction without an end, this is its end.

        What such a one wrote may stand: it is folded from what is in the log, and folding that again changes nothing.
        """
        lane.begin()
        lane.produce(self._settings.catalogue.states, None, TICK_KEY, self.partition)
        lane.commit(deadline)

    def fold(self, messages: Sequence[Message], group: object) -> tuple[int, int]:
        """Fold one batch and commit it with its offsets; return how many events and summaries that were.

        Raises:
            LaneFault: another has taken the partition, or what was written is unknown: release it.
        """
        assert self._table is not None
        assert self._lane is not None
        changed: dict[str, Summary | None] = {}
        for message in messages:
            self._fold_one(message, changed)
        values = [
            (execution_id, None if summary is None else self._codec.encode(summary.record()))
            for execution_id, summary in changed.items()
        ]
        lane, catalogue = self._lane, self._settings.catalogue
        offset = (messages[-1].offset() or 0) + 1
        lane.begin()
        for execution_id, value in values:
            try:
                lane.produce(catalogue.states, value, execution_id, self.partition)
            except (BufferError, KafkaException) as error:
                raise LaneFault("write summaries", classify(error), name_of(error)) from None
        lane.commit_with(
            [TopicPartition(catalogue.executions, self.partition, offset)],
            group,
            Deadline.after(self._settings.commit_ms),
        )
        self._table.committed(values)
        self.offset = offset
        return len(messages), len(values)

    def release(self) -> None:
        """Let go of the partition; idempotent."""
        if self._lane is not None:
            self._lane.close()
            self._lane = None
        if self._table is not None:
            self._table.close()
            self._table = None

    def _restore(self, table: SummaryTable, wait: Callable[[], None]) -> None:
        settings = self._settings
        states = settings.catalogue.states
        client_id = f"{settings.client_id}-fold-restore"
        with LogReader(settings.bootstrap, settings.kafka, self.partition, client_id) as reader:
            reader.assign({states: 0})
            ended = False
            while not ended:
                wait()
                taken = reader.take()
                rows: dict[str, bytes | None] = {}
                for message in taken.records.get(states, ()):
                    if (key := message.key()) is not None and key != TICK_KEY.encode():
                        rows[text_of(key)] = message.value()
                table.committed(rows.items())
                ended = bool(taken.ends)

    def _fold_one(self, message: Message, changed: dict[str, Summary | None]) -> None:
        """Fold one record. What is no event of an execution is passed over: the log's own readers judge the log."""
        execution_id, _, sequence = text_of(message.key()).rpartition("/")
        if not execution_id or not sequence.isdecimal() or stream_kind(execution_id) != "executions":
            return
        value = message.value()
        if value is None:
            if sequence == "0":  # only a deleted stream loses its sequence 0
                changed[execution_id] = None
            return
        try:
            summary = (
                changed[execution_id]
                if execution_id in changed
                else self._find(execution_id, sequence, message)
            )
            applied = summary is not None and _apply(
                summary, int(sequence), message, _Data(self._codec, value)
            )
        except (DecodeError, KeyError, ValueError, AttributeError) as error:
            _log.error(
                "event %s at %s/%s cannot be folded: %s",
                f"{execution_id}/{sequence}",
                self.partition,
                message.offset(),
                type(error).__name__,
            )
            return
        if applied:
            changed[execution_id] = summary

    def _find(self, execution_id: str, sequence: str, message: Message) -> Summary | None:
        """The summary of an execution, a new one at its start; None where its start was never seen."""
        table = self._table
        assert table is not None
        if sequence != "0":
            return table.get(execution_id)
        known = table.get(execution_id) if (message.offset() or 0) < self._known_below else None
        return known or table.add(execution_id)


def _apply(summary: Summary, sequence: int, message: Message, data: _Data) -> bool:
    """Fold one event by its headers."""
    headers: dict[str, Any] = dict(message.headers() or ())
    node = headers.get("node")
    applied = summary.apply(
        headers["type"].decode(),
        sequence,
        int(headers["timestamp"]),
        None if node is None else node.decode(),
        data,
    )
    summary.sealed = summary.sealed or (applied and "sealed" in headers)
    return applied


class _Data:
    """An event's data, decoded when it is first asked for."""

    __slots__ = ("_codec", "_data", "_raw")

    def __init__(self, codec: Codec, raw: bytes) -> None:
        self._codec, self._raw = codec, raw
        self._data: Mapping[str, Any] | None = None

    def __call__(self) -> Mapping[str, Any]:
        if self._data is None:
            self._data = self._codec.decode_envelope(self._raw).data
        return self._data
