"""Reading a partition to its end: what stands between the fence and the first answer (kafka.md, "Tenure").

The end is captured after the fence and reached by position: control records and aborted data leave holes, and the last
offset may be one, so nothing is counted. Another's open transaction holds the stable offset below the end; then this
waits, or fails: it never gives less as if it were all.

Marks are read first: a stream's row starts from its mark, and events above the mark's head go on top. So whether a
missing sequence was trimmed or lost is known when it is met.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from loom.errors import DecodeError, IncompleteReadError, StreamBrokenError, TopicsError
from loom.schemas.records import PARTITION_MARK_KEY, SCHEMA_NOTE_PREFIX, PartitionMark, SchemaNote, StreamMark
from loom.stores.contracts import NO_EVENTS
from loom.stores.event_run import Beside
from loom.stores.kafka.continuity import Continuity
from loom.stores.kafka.records import TICK_KEY, row_of, text_of
from loom.stores.kafka.runs import EventHead, runs_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from loom.schemas.codec import Codec
    from loom.stores.index import StreamIndex
    from loom.stores.kafka.deadline import Deadline
    from loom.stores.kafka.reader import Ends, LogReader
    from loom.stores.rows import StreamRow
    from loom.topics.catalogue import Catalogue

_log = logging.getLogger("loom.kafka.takeover")

APPENDS: Final = "appends"
COMMANDS: Final = "commands"

Handler = Callable[[str, list[Any]], None]
"""What takes records of one topic, in log order."""


class UnendedError(Exception):
    """A reading gets no further, although every transaction id of its writer is free; never raised at a caller."""


class _Collections:
    """Readings under way in this process; while there is any, the garbage collector rests."""

    def __init__(self) -> None:
        self.lock, self.resting, self.enabled = threading.Lock(), 0, True


_collections: Final = _Collections()


@contextlib.contextmanager
def no_collection(*, settle: bool) -> Iterator[None]:
    """Let the garbage collector rest: a reading makes millions of objects that stay, and it would walk them every time.

    ``settle``: what stands in the end counts as old, and is not walked before the next full collection. It is not kept
    from that one: what a tenure leaves behind in a cycle, its clients among it, would never be freed.
    """
    with _collections.lock:
        if _collections.resting == 0:
            _collections.enabled = gc.isenabled()
            gc.disable()
        _collections.resting += 1
    try:
        yield
    finally:
        with _collections.lock:
            _collections.resting -= 1
            if settle:
                gc.freeze()
                gc.unfreeze()  # both ways without a walk: from every generation to the oldest
            if _collections.resting == 0 and _collections.enabled:
                gc.enable()


class LogMismatchError(TopicsError):
    """The log was made with another number of partitions: nothing may be written to it with this one."""


class Takeover:
    """Readings of one partition into an index: first everything, or what is new since a checkpoint; then what is new.

    Attributes:
        positions: next offset per topic; advanced as a reading goes.
        applied: highest request offsets applied, per source, by the partition's own mark.
        marked: whether the partition has a mark of its own.
        notes: schemas kept with the log, by fingerprint.
        owed: when deletions are due that the checkpoint kept, per topic.
        tombstones: time (ms) of the last deletion found, per topic, since ``forget``.
        appended: time (ms) of the last record found, per topic, likewise.
        broken: streams in which a gap or a torn batch stands; the index has stopped them.
        found: records of the last reading.
    """

    def __init__(
        self,
        *,
        partition: int,
        catalogue: Catalogue,
        codec: Codec,
        index: StreamIndex,
        ends: Ends,
        make_reader: Callable[[], LogReader],
    ) -> None:
        self._partition, self._catalogue, self._codec, self._index = partition, catalogue, codec, index
        self._ends, self._make_reader = ends, make_reader
        self._continuity: Continuity | None = None
        self._logs: dict[str, Handler] = {
            catalogue.executions: self._events,
            catalogue.inbox: self._events,
            catalogue.quarantine: self._events,
            catalogue.snapshots: _each(self._snapshot),
        }
        self._marks: dict[str, Handler] = {catalogue.marks: _each(self._mark)}
        self._written: set[str] = set()
        self.positions: dict[str, int] = {}
        self.applied: dict[str, int] = {}
        self.marked = False
        self.notes: dict[str, SchemaNote] = {}
        self.owed: dict[str, int] = {}
        self.tombstones: dict[str, int] = {}
        self.appended: dict[str, int] = {}
        self.broken: dict[str, StreamBrokenError] = {}
        self.found = 0

    @property
    def topics(self) -> tuple[str, ...]:
        """Topics that are read, marks first."""
        return (*self._marks, *self._logs)

    # -- checkpoints -----------------------------------------------------------------------------------------

    def resume(self, identity: Mapping[str, Any], now_ms: int, max_age_ms: int) -> None:
        """Before the first reading: begin at the index's checkpoint if it is of this log and young enough."""
        ends = self._ends.written(self.topics)
        position = self._index.load_checkpoint(identity, now_ms, max_age_ms=max_age_ms, ends=ends)
        if position is None:
            return
        extra = self._index.checkpoint_extra()
        self.positions, self.marked = dict(position), True
        self.applied, self.owed = dict(extra["applied"]), dict(extra["owed"])
        for note in extra["notes"]:
            self._learn(SchemaNote(*note))

    def beside(self, owed: Mapping[str, int]) -> dict[str, Any]:
        """What a checkpoint has to keep beside the streams; ``owed`` is of the writer's debts."""
        notes = [[note.fingerprint, note.schema, note.registry_id] for note in self.notes.values()]
        return {"applied": dict(self.applied), "owed": dict(owed), "notes": notes}

    def forget(self) -> None:
        """Deletions found so far are taken care of."""
        self.owed, self.tombstones, self.appended = {}, {}, {}

    # -- reading ---------------------------------------------------------------------------------------------

    def wrote(self, ends: Mapping[str, int]) -> None:
        """The writer committed records up to these offsets: what follows each is the marker of that commit."""
        for topic, offset in ends.items():
            self.positions[topic] = offset + 1
            self._written.add(topic)

    def read(
        self,
        deadline: Deadline,
        wait: Callable[[], None],
        *,
        ends: Mapping[str, int] | None = None,
        patience_s: float = math.inf,
    ) -> None:
        """Read every topic to ``ends``, by default those captured now. ``wait`` is called again and again; it may raise.

        Raises:
            UnendedError: for ``patience_s`` it got no further, below an end.
            IncompleteReadError: an open transaction of another hid the end until ``deadline``.
            LogMismatchError: the log was made with another number of partitions.
            TopicsError: a topic is missing (also for a moment, while its broker starts).
            UnreachableError, BrokerError: the brokers do not answer, or refuse.
            DecodeError: the partition's own mark cannot be read.
        """
        self.found = 0
        # a reading that failed on its way goes on with what it has seen; only a finished one begins anew
        continuity = self._continuity or Continuity(self._row, whole=not self.positions)
        self._continuity = continuity
        ends = ends or self._ends.written(self.topics)
        with self._make_reader() as reader, no_collection(settle=not self.positions):
            for handlers in (self._marks, self._logs):
                self._read_to(
                    {t: ends[t] for t in handlers}, handlers, reader, deadline, wait, patience_s=patience_s
                )
            whole = continuity.end()
            if not whole:
                # judged again: a stream may have been trimmed between the reading of its mark and of its events
                self._read_to(self._ends.written(list(self._marks)), self._marks, reader, deadline, wait)
        self._continuity = None
        for error in () if whole else continuity.broken().values():
            self._stop(error)

    def _row(self, stream_id: str) -> StreamRow | None:
        return None if stream_id in self.broken else self._index.row(stream_id)

    def _read_to(
        self,
        ends: Mapping[str, int],
        handlers: Mapping[str, Handler],
        reader: LogReader,
        deadline: Deadline,
        wait: Callable[[], None],
        *,
        patience_s: float = math.inf,
    ) -> None:
        behind = {
            topic: end
            for topic, end in ends.items()
            if self.positions.setdefault(topic, 0) + (topic in self._written) < end
        }
        if not behind:
            return
        reader.assign({topic: self.positions[topic] for topic in behind})
        moved = time.monotonic()
        while behind:
            wait()
            if deadline.passed:
                topic, end = next(iter(behind.items()))
                raise IncompleteReadError(topic, self._partition, self.positions[topic], end)
            if time.monotonic() - moved > patience_s:
                raise UnendedError
            for topic, position in self._take(reader, handlers).items():
                if position > self.positions[topic]:
                    moved = time.monotonic()
                self.positions[topic] = position
                self._written.discard(topic)
                if topic in behind and position >= behind[topic]:
                    del behind[topic]

    def _take(self, reader: LogReader, handlers: Mapping[str, Handler]) -> dict[str, int]:
        """Load what has come; return how far each topic got."""
        taken = reader.take()
        for topic, messages in taken.records.items():
            handlers[topic](topic, messages)
            self.found += len(messages)
            self.appended[topic] = messages[-1].timestamp()[1]
        return taken.reached

    def _stop(self, error: StreamBrokenError) -> None:
        _log.error("partition %d: %s", self._partition, error)
        self.broken[error.stream_id] = error
        self._index.stop(error)

    # -- records ---------------------------------------------------------------------------------------------

    def _events(self, topic: str, messages: list[Any]) -> None:
        continuity, index = self._continuity, self._index
        assert continuity is not None
        gone, lost = partial(self._gone, topic), partial(self._head_of, topic)
        for run in runs_of(messages, gone=gone, lost=lost):
            continuity.events(run)
            index.load_run(run)

    def _gone(self, topic: str, tombstone: Any) -> None:
        self.tombstones[topic] = tombstone.timestamp()[1]

    def _head_of(self, topic: str, message: Any) -> EventHead | None:
        """Read an event whose headers were lost on its way; what is no event is passed over: its place is a gap."""
        try:
            e = self._codec.decode_envelope(message.value(), topic)
        except DecodeError as error:
            _log.warning("%s[%d] at %d: %s", topic, self._partition, message.offset(), error)
            return None
        return EventHead(e.type, e.sequence, e.id, (0, 1), e.timestamp, Beside(sealed="seal" in e.metadata))

    def _snapshot(self, topic: str, message: Any) -> None:
        key = text_of(message.key())
        value = message.value()
        if value is not None:
            headers = dict(message.headers() or ())
            try:
                sequence = int(headers.get("sequence", NO_EVENTS))
            except (ValueError, TypeError):
                place = f"{topic}[{self._partition}] at {message.offset()}"
                _log.warning("%s: no snapshot, its sequence is no number", place)
            else:
                self._index.load_snapshot(key, sequence, value)
        elif key != TICK_KEY:
            self._gone(topic, message)
            self._index.load_snapshot(key, NO_EVENTS, None)

    def _mark(self, topic: str, message: Any) -> None:
        key = text_of(message.key())
        value = message.value()
        if value is None:
            if key != TICK_KEY:
                self._gone(topic, message)
                self._index.load_mark(key, None)
        elif key == PARTITION_MARK_KEY:
            self._own_mark(self._codec.decode(value, PartitionMark, key))
        elif key.startswith(SCHEMA_NOTE_PREFIX):
            self._learn(self._codec.decode(value, SchemaNote, key))
        else:
            self._stream_mark(key, value)

    def _stream_mark(self, stream_id: str, value: bytes) -> None:
        assert self._continuity is not None
        self._continuity.before_mark(stream_id)
        try:
            row = row_of(self._codec.decode(value, StreamMark, "stream mark"))
        except DecodeError as error:
            self._stop(StreamBrokenError(stream_id, 0, f"its mark cannot be read ({error.problem})"))
            return
        self._continuity.mark(stream_id, row)
        self._index.load_mark(stream_id, row)

    def _learn(self, note: SchemaNote) -> None:
        self._codec.table.add(note.schema, note.registry_id)
        self.notes[note.fingerprint] = note

    def _own_mark(self, mark: PartitionMark) -> None:
        if mark.partitions != self._catalogue.partitions:
            raise LogMismatchError(
                (f"the log was made with {mark.partitions} partitions, not {self._catalogue.partitions}",),
                "set partitions to that number; growing is a migration to a new topic_prefix",
            )
        self.marked = True
        self.applied = {APPENDS: mark.appends_offset, COMMANDS: mark.commands_offset}


def _each(take: Callable[[str, Any], None]) -> Handler:
    """Return what takes records one by one."""

    def take_all(topic: str, messages: list[Any]) -> None:
        for message in messages:
            take(topic, message)

    return take_all
