"""One transaction of a writer, from its first verdict to its records at the broker's door."""

from __future__ import annotations

import logging
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaException

from loom.errors import LoomError, PayloadTooLargeError, StorageWriteError
from loom.stores.judge import Staged
from loom.stores.kafka.client import classify, name_of
from loom.stores.kafka.records import ANY_PARTITION, FIRST, LAST, TICK_KEY, Place, first_header
from loom.stores.ops import Accepted, Rejected

if TYPE_CHECKING:
    from loom.stores.kafka.client import Fault
    from loom.stores.kafka.lanes import Lane
    from loom.stores.kafka.pending import Decider, Pending
    from loom.stores.kafka.publish import PublishTargets
    from loom.stores.kafka.records import Record, Records
    from loom.stores.ops import Effect, Repeated, Verdict, WriteOp
    from loom.stores.view import View

_log = logging.getLogger("loom.kafka.writer")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a transaction: requests in it, encoded bytes, and of one request and one record."""

    max_ops: int
    max_bytes: int
    max_request_bytes: int
    max_record_bytes: int


class ProduceFault(Exception):  # noqa: N818 - what a transaction tells its writer; never raised at a caller
    """``produce`` did not take a record of ``size`` bytes; ``pending`` is whose it was, None for the writer's own.

    ``fault`` is None where it was no error of the client: then the record itself is at fault.
    """

    def __init__(self, pending: Pending | None, error: Exception, size: int) -> None:
        of_client = isinstance(error, KafkaException | BufferError)
        self.fault: Fault | None = classify(error) if of_client else None
        self.pending, self.code, self.size = pending, name_of(error), size
        super().__init__(self.code)


class _NoRoomError(LoomError):
    """The request is for the next transaction."""


class Transaction:
    """A transaction being formed.

    Attributes:
        accepted: requests that it makes true, each with its verdict.
        held: requests whose answer rests on it: on something that it stages, or on an offset that it records.
        members: all of these, as they came.
        records: what it writes.
        offsets: per source, the highest request offset that it is done with.
        ends: per topic of loom's own, the last offset written; known once it has committed.
    """

    def __init__(self, view: View, records: Records, targets: PublishTargets, limits: Limits) -> None:
        self.staged = Staged(view)
        self._maker, self._targets, self._limits = records, targets, limits
        self.accepted: list[tuple[Pending, Accepted]] = []
        self.held: list[tuple[Pending, Repeated | Rejected]] = []
        self.members: list[Pending] = []
        self.deciders: list[Decider] = []
        self.records: list[Record] = []
        self.offsets: dict[str, int] = {}
        self.ends: dict[str, int] = {}
        self._starts: list[int] = []
        self._owners: list[Pending | None] = []
        self._drafted: list[Record] = []
        self._drafted_bytes = 0
        self._bytes = 0
        self._closed = False

    def close(self) -> None:
        """Take nothing more, until ``reopen``: the next request has no room here."""
        self._closed = True

    def reopen(self) -> None:
        """Take more again."""
        self._closed = False

    @property
    def full(self) -> bool:
        """Whether no further request is to be tried."""
        return (
            self._closed or len(self.members) >= self._limits.max_ops or self._bytes >= self._limits.max_bytes
        )

    def judge(self, pending: Pending, now_ms: int) -> Verdict | None:
        """Decide a request as of everything accepted so far; None where it has to wait for the next transaction.

        An accepted one is a member from now on; what becomes of any other verdict is the caller's to say.
        """
        if pending.op is None:
            verdict: Verdict = Accepted([], None)
            self._drafted, self._drafted_bytes = [], 0
        else:
            verdict = self._decide(pending, pending.op, now_ms)
        if type(verdict) is Accepted:
            self.accepted.append((pending, verdict))
            self._join(pending)
            self._starts.append(len(self.records))
            self._owners.append(pending)
            self.records += self._drafted
            self._bytes += self._drafted_bytes
        elif type(verdict) is Rejected and type(verdict.error) is _NoRoomError:
            return None
        return verdict

    def _decide(self, pending: Pending, op: WriteOp, now_ms: int) -> Verdict:
        try:
            return self.staged.judge(op, now_ms, self._admit)
        except LoomError as error:  # a stream that is stopped, or a file that cannot be read
            return Rejected(error)
        except Exception as error:  # noqa: BLE001
            # a fault of loom's own must not take the whole partition down, again and again wherever it is tried
            _log.exception("judging a write to %s failed", pending.stream_id)
            return Rejected(
                StorageWriteError(pending.stream_id, f"it cannot be judged ({type(error).__name__})")
            )

    def hold(self, pending: Pending, verdict: Repeated | Rejected) -> None:
        """Answer this request only once the transaction has committed."""
        self.held.append((pending, verdict))
        self._join(pending)

    def add(self, record: Record) -> None:
        """Write a record of the writer's own."""
        self._starts.append(len(self.records))
        self._owners.append(None)
        self.records.append(record)

    def produce(self, lane: Lane) -> None:
        """Give every record to the lane's producer, whose transaction has begun.

        Raises:
            ProduceFault: one was not taken; the transaction has to be aborted as a whole.
        """
        first: dict[Place, int] = {}
        last: dict[Place, int] = {}
        outside = False
        for at, (topic, _, _, partition, _, _) in enumerate(self.records):
            if partition == ANY_PARTITION:
                outside = True
            else:
                place = Place(topic, partition)
                first.setdefault(place, at)
                last[place] = at
        transaction_id = lane.next_id()
        begins, ends = set(first.values()), set(last.values())
        begun = (FIRST, first_header(transaction_id, lane.number, first, outside=outside))
        produce = lane.produce
        for at, record in enumerate(self.records):
            try:
                topic, value, key, partition, headers, _ = record
                if at in begins:
                    headers = [*(headers or ()), begun]
                if at in ends:
                    headers = [*(headers or ()), (LAST, transaction_id)]
                    produce(topic, value, key, partition, self._written, headers=headers)
                else:
                    produce(topic, value, key, partition, headers=headers)
            except Exception as error:  # noqa: BLE001
                # whatever it is: librdkafka does not poison a transaction whose record it refused, half would commit
                owner = self._owners[bisect_right(self._starts, at) - 1]
                raise ProduceFault(owner, error, record.size) from None

    def _join(self, pending: Pending) -> None:
        self.members.append(pending)
        if pending.source is not None:
            self.offsets[pending.source] = max(self.offsets.get(pending.source, -1), pending.offset)

    def _written(self, error: Any, message: Any) -> None:
        if error is None:
            self.ends[message.topic()] = message.offset()

    def _admit(self, effects: list[Effect]) -> None:
        """Encode what a request writes, and see that it fits; part of its verdict."""
        limits = self._limits
        drafted = self._maker.of(effects)
        total = 0
        for record in drafted:
            size = record.size
            total += size
            if record.partition == ANY_PARTITION:
                self._targets.check(record)
            elif size > limits.max_record_bytes:
                raise PayloadTooLargeError(record.key or record.topic, size, limits.max_record_bytes)
        if total > limits.max_request_bytes:
            raise PayloadTooLargeError(drafted[0].key or drafted[0].topic, total, limits.max_request_bytes)
        if self._bytes > 0 and self._bytes + total > limits.max_bytes:
            raise _NoRoomError
        self._drafted, self._drafted_bytes = drafted, total

    @property
    def written(self) -> set[str]:
        """Topics that it writes to."""
        return {record.topic for record in self.records}

    @property
    def deleted(self) -> set[str]:
        """Topics of loom's own in which it deletes."""
        return {
            record.topic
            for record in self.records
            if record.value is None and record.partition != ANY_PARTITION and record.key != TICK_KEY
        }
