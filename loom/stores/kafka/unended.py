"""Transactions that Kafka left without an end, and how their writer ends them (docs/adr/0015).

A broker that restarts may drop the markers of a transaction that its coordinator then calls complete: the transaction
id is free, yet no consumer can read past the records. Nobody but this partition's writer can tell what was decided, and
by one thing only: a commit is acknowledged only if all of its records are in the log. So each transaction says, on its
first record at every place, where else it writes, and on its last one there that nothing follows.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from loom.errors import IncompleteReadError
from loom.stores.contracts import NO_EVENTS
from loom.stores.kafka.deadline import Deadline
from loom.stores.kafka.records import FIRST, LAST, OUTSIDE, TICK_KEY, Place, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from loom.stores.kafka.lanes import Lane
    from loom.stores.kafka.reader import Ends, LogReader
    from loom.stores.kafka.takeover import Takeover
    from loom.stores.rows import StreamRow

_log = logging.getLogger("loom.kafka.writer")

PATIENCE_S: Final = 2.0
"""How long a reading that gets no further waits before it asks whether a transaction was left without an end."""
_RESOLVE_MS: Final = 15_000
_BACK: Final = 20_000
"""How many records before the stable offset are looked at where a transaction may have its end."""


@dataclass(slots=True)
class OpenTransaction:
    """What the log holds of a transaction without an end.

    Attributes:
        id: as its records say.
        lane: number of the lane that wrote it.
        places: where it writes; ``outside``: whether also outside loom.
        whole: places where its last record stands without an end.
        ended: places where its last record stands before the stable offset: there it has an end.
        events: stream and sequence of the events in it, as far as they are there.
    """

    id: str
    lane: int
    places: tuple[Place, ...]
    outside: bool
    whole: set[Place] = field(default_factory=set)
    ended: set[Place] = field(default_factory=set)
    events: list[tuple[str, int]] = field(default_factory=list)

    def outcome(self, row: Callable[[str], StreamRow | None]) -> bool | None:
        """Whether it is to be committed (True) or aborted (False); None where the log does not say.

        One of which a record is missing was never acknowledged; one that is there whole may have been, unless later
        events took its place.
        """
        if not self.whole.union(self.ended).issuperset(self.places):
            return False
        if self.outside or self.ended:
            return None
        rows = {stream_id: row(stream_id) for stream_id, _ in self.events}
        heads = {stream: found.head if found is not None else NO_EVENTS for stream, found in rows.items()}
        return all(sequence > heads[stream] for stream, sequence in self.events)


def _begun(value: str) -> OpenTransaction | None:
    """What the header of a transaction's first record says; None: it is none of loom's."""
    try:
        transaction_id, lane, names = value.split(";")
        places = [name.rpartition("/") for name in names.split(",") if name != OUTSIDE]
        found = tuple(Place(topic, int(partition)) for topic, _, partition in places)
        return OpenTransaction(transaction_id, int(lane), found, OUTSIDE in names.split(","))
    except ValueError:
        return None


def open_transactions(parts: Mapping[Place, Sequence[Any]]) -> dict[str, OpenTransaction] | None:
    """Return the transactions in the records behind the stable offset of each place, None if some belong to none."""
    found: dict[str, OpenTransaction] = {}
    for place, messages in parts.items():
        current: OpenTransaction | None = None
        for message in messages:
            key = text_of(message.key())
            if key == TICK_KEY and message.value() is None:
                continue
            headers = _said(message)
            if FIRST in headers:
                begun = _begun(headers[FIRST])
                if begun is None:
                    return None
                current = found.setdefault(begun.id, begun)
            if current is None:
                return None
            stream_id, _, sequence = key.rpartition("/")
            if stream_id and sequence.isdigit() and message.value() is not None:
                current.events.append((stream_id, int(sequence)))
            if headers.get(LAST) == current.id:
                current.whole.add(place)
                current = None
    return found


def _said(message: Any) -> dict[str, str]:
    found = (pair for pair in message.headers() or () if pair[0] in {FIRST, LAST})
    return {name: text_of(value) for name, value in found}


class Unended:
    """Ends what Kafka left without an end in one partition's log; on its writer's thread, after its fence."""

    def __init__(
        self,
        *,
        partition: int,
        takeover: Takeover,
        row: Callable[[str], StreamRow | None],
        ends_of: Callable[[int], Ends],
        make_reader: Callable[[int], LogReader],
        make_lane: Callable[[int], Lane],
    ) -> None:
        """Prepare. ``make_reader`` gives a reader of a partition's uncommitted records, ``make_lane`` a new lane."""
        self._partition, self._takeover, self._row = partition, takeover, row
        self._ends_of, self._make_reader, self._make_lane = ends_of, make_reader, make_lane

    def end(self, until: Deadline, wait: Callable[[], None]) -> None:
        """Commit what was there whole, abort what was not; afterwards every lane has to be initialised again.

        Raises:
            IncompleteReadError: the log does not say what was decided; an operator has to.
            LaneFault: another took the partition, or the brokers do not answer.
            StoreError: as a reading.
        """
        deadline = Deadline.after(min(_RESOLVE_MS, until.left_ms))
        ends = self._ends_of(self._partition)
        stable = ends.stable(self._takeover.topics)
        self._takeover.read(deadline, wait, ends=stable)
        written = ends.written(self._takeover.topics)
        spans = {Place(t, self._partition): (at, written[t]) for t, at in stable.items() if at < written[t]}
        if not spans:
            return
        parts = {place: self._records(place, *span, deadline, wait) for place, span in spans.items()}
        found = open_transactions(parts)
        if found is None:
            place, span = next(iter(spans.items()))
            raise IncompleteReadError(place.topic, self._partition, *span)
        for place in {place for transaction in found.values() for place in transaction.places}.difference(
            spans
        ):
            self._look_elsewhere(place, found, deadline, wait)
        for transaction in found.values():
            self._end(transaction, spans, deadline, wait)

    def _look_elsewhere(
        self, place: Place, found: dict[str, OpenTransaction], deadline: Deadline, wait: Callable[[], None]
    ) -> None:
        """See what stands of the transactions where others write, too, or where they have an end."""
        ends, topics = self._ends_of(place.partition), [place.topic]
        stable, written = ends.stable(topics)[place.topic], ends.written(topics)[place.topic]
        for message in self._records(place, max(0, stable - _BACK), written, deadline, wait):
            transaction = found.get(_said(message).get(LAST, ""))
            if transaction is not None:
                (transaction.whole if message.offset() >= stable else transaction.ended).add(place)

    def _end(
        self,
        transaction: OpenTransaction,
        spans: Mapping[Place, tuple[int, int]],
        deadline: Deadline,
        wait: Callable[[], None],
    ) -> None:
        decided = transaction.outcome(self._row)
        if decided is None:
            place = next(p for p in spans if p in transaction.places)
            raise IncompleteReadError(place.topic, self._partition, *spans[place])
        _log.warning(
            "partition %d: Kafka left transaction %s without an end; it is %s",
            self._partition,
            transaction.id,
            "whole, and committed" if decided else "not whole, and aborted",
        )
        lane = self._make_lane(transaction.lane)
        try:
            lane.initialise(deadline, wait)
            lane.begin()
            for place in transaction.places:
                lane.produce(place.topic, None, TICK_KEY, place.partition)
            lane.flush(deadline)
            lane.commit(deadline) if decided else lane.abort(deadline)
        finally:
            lane.close()

    def _records(
        self, place: Place, start: int, end: int, deadline: Deadline, wait: Callable[[], None]
    ) -> list[Any]:
        """Records of a place from ``start`` to ``end``, ended or not."""
        records: list[Any] = []
        position = start
        with self._make_reader(place.partition) as reader:
            reader.assign({place.topic: start})
            while position < end:
                wait()
                if deadline.passed:
                    raise IncompleteReadError(place.topic, place.partition, position, end)
                taken = reader.take()
                records += taken.records.get(place.topic, ())
                position = max(position, taken.reached.get(place.topic, 0))
        return records
