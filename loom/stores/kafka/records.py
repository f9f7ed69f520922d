"""Effects of accepted writes as Kafka records, and back (kafka.md, "Topics").

Headers repeat what an index needs, so that it is built without decoding a value. A header's value is text; ``batch`` is
``position/size`` of the event in its append, ``consumed`` a list of ``stream/sequence`` (no stream name holds ``/`` or
``,``: topics in it are percent-encoded).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from loom.ids import RESERVED_PREFIX
from loom.schemas.records import (
    PARTITION_MARK_KEY,
    SCHEMA_NOTE_PREFIX,
    PartitionMark,
    RecentId,
    SchemaNote,
    SnapshotRecord,
    StreamMark,
)
from loom.stores.kafka.wire import PUBLISH, outgoing_request
from loom.stores.ops import DropEvent, DropSnapshot, PutEvent, PutMark, PutSnapshot, SendOut
from loom.stores.rows import StreamRow, new_row
from loom.topics.partitioner import partition_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from loom.schemas.codec import Codec
    from loom.stores.contracts import Clock
    from loom.stores.ops import Effect
    from loom.topics.catalogue import Catalogue

TICK_KEY: Final = "__loom_tick__"
"""Key of the record, without a value, by which a quiet partition rolls its segment so that deletions are carried out."""

FIRST: Final = "transaction"
"""Header of a transaction's first record at a place: ``id;lane;place,place``, a place being ``topic/partition``."""
LAST: Final = "whole"
"""Header of its last record there: its id."""
SEALED: Final[tuple[str, str | bytes]] = ("sealed", "1")
"""Header of an event that bears the marker."""
OUTSIDE: Final = "*"
"""Stands among the places for those outside loom, where nothing may be written but what a flow published."""

ANY_PARTITION: Final = -1
_EVENT_OVERHEAD: Final = 128
"""Names of an event's headers, its numbers, and the framing of a record."""


class Place(NamedTuple):
    """A topic's partition."""

    topic: str
    partition: int


def first_header(transaction_id: str, lane: int, places: Iterable[Place], *, outside: bool) -> str:
    """Return the value of ``FIRST``."""
    names = [f"{place.topic}/{place.partition}" for place in places]
    return f"{transaction_id};{lane};{','.join([*names, OUTSIDE] if outside else names)}"


class Record(NamedTuple):
    """One record to produce, in the order of the client's arguments.

    ``size`` is about what it costs on the wire, near enough for a bound.
    """

    topic: str
    value: bytes | None
    key: str | None
    partition: int
    headers: list[tuple[str, str | bytes]] | None
    size: int


def _record(
    topic: str,
    value: bytes | None,
    key: str | None,
    partition: int,
    headers: list[tuple[str, str | bytes]] | None = None,
) -> Record:
    size = _OVERHEAD + len(value or b"") + len(key or "")
    size += sum(len(name) + len(text) for name, text in headers or ())
    return Record(topic, value, key, partition, headers, size)


_OVERHEAD: Final = 32


class Records:
    """Makes the records of one partition's writer."""

    def __init__(self, codec: Codec, catalogue: Catalogue, partition: int, node: str, clock: Clock) -> None:
        self._codec, self._catalogue, self._partition, self._node, self._clock = (
            codec,
            catalogue,
            partition,
            node,
            clock,
        )
        self._executions = catalogue.executions
        self._makers: dict[type, Callable[[Any], Record]] = {
            PutEvent: self._put_event,
            DropEvent: self._drop_event,
            PutMark: self._put_mark,
            PutSnapshot: self._put_snapshot,
            DropSnapshot: self._drop_snapshot,
            SendOut: self._send_out,
        }

    def of(self, effects: Iterable[Effect]) -> list[Record]:
        """Return the records of effects, in their order; ``PutEvent.encoded`` is set on the way.

        Raises:
            InvalidInputError: a value is no JSON.
        """
        makers = self._makers
        return [makers[type(effect)](effect) for effect in effects]

    def partition_mark(self, applied: dict[str, int]) -> Record:
        """Return the partition's own mark: P, and the highest request offsets applied."""
        mark = PartitionMark(
            self._partition,
            self._catalogue.partitions,
            self._clock(),
            self._node,
            applied.get("appends", -1),
            applied.get("commands", -1),
        )
        return _record(self._catalogue.marks, self._codec.encode(mark), PARTITION_MARK_KEY, self._partition)

    def schema_note(self, note: SchemaNote) -> Record:
        """Return the record that keeps a schema with the log."""
        key = SCHEMA_NOTE_PREFIX + note.fingerprint
        return _record(self._catalogue.marks, self._codec.encode(note), key, self._partition)

    def tick(self, topic: str) -> Record:
        """Return the record that rolls a quiet segment of ``topic``."""
        return _record(topic, None, TICK_KEY, self._partition)

    def _put_event(self, put: PutEvent) -> Record:
        """The one that is made for every event, so it does no more than it must."""
        envelope = put.envelope
        encoded = put.encoded
        if encoded is None:
            encoded = put.encoded = self._codec.encode_envelope(envelope)
        stream_id, event_id, kind = envelope.stream_id, envelope.id, envelope.type
        sequence = str(envelope.sequence)
        headers: list[tuple[str, str | bytes]] = [
            ("type", kind),
            ("sequence", sequence),
            ("id", event_id),
            ("batch", f"{put.position}/{put.size}"),
            ("timestamp", str(envelope.timestamp)),
        ]
        size = _EVENT_OVERHEAD + len(encoded) + len(stream_id) + len(event_id) + len(kind)
        if put.fence is not None:
            headers.append(("fence", str(put.fence)))
            node = envelope.metadata.get("node")
            if isinstance(node, str):
                headers.append(("node", node))
                size += len(node)
        if "seal" in envelope.metadata:
            headers.append(SEALED)
        if put.consumed:
            consumed = ",".join(f"{stream}/{at}" for stream, at in put.consumed)
            headers.append(("consumed", consumed))
            size += len(consumed)
        topic = self._executions
        if stream_id.startswith(RESERVED_PREFIX):
            topic = self._catalogue.topic_of_stream(stream_id)
        return Record(topic, encoded, f"{stream_id}/{sequence}", self._partition, headers, size)

    def _drop_event(self, drop: DropEvent) -> Record:
        topic = self._catalogue.topic_of_stream(drop.stream_id)
        return _record(topic, None, f"{drop.stream_id}/{drop.sequence}", self._partition)

    def _put_mark(self, put: PutMark) -> Record:
        value = self._codec.encode(mark_of(put.stream_id, put.row))
        return _record(self._catalogue.marks, value, put.stream_id, self._partition)

    def _put_snapshot(self, put: PutSnapshot) -> Record:
        snapshot = put.snapshot
        record = SnapshotRecord(
            snapshot.execution_id, snapshot.sequence, self._clock(), snapshot.state, snapshot.metadata or None
        )
        headers: list[tuple[str, str | bytes]] = [("sequence", str(snapshot.sequence))]
        topic = self._catalogue.snapshots
        put.encoded = self._codec.encode(record)
        return _record(topic, put.encoded, snapshot.execution_id, self._partition, headers)

    def _drop_snapshot(self, drop: DropSnapshot) -> Record:
        return _record(self._catalogue.snapshots, None, drop.execution_id, self._partition)

    def _send_out(self, send: SendOut) -> Record:
        outgoing = send.outgoing
        if outgoing.target == PUBLISH:
            if outgoing.topic is None:
                raise ValueError("a record to publish names its topic")
            return _record(
                outgoing.topic, outgoing.body, outgoing.key, ANY_PARTITION, list(outgoing.headers) or None
            )
        partition = partition_of(outgoing.key, self._catalogue.partitions)
        value = outgoing_request(outgoing, self._codec)
        return _record(self._catalogue.appends, value, outgoing.key, partition, [("id", outgoing.id)])


def mark_of(stream_id: str, row: StreamRow) -> StreamMark:
    """Return a row as the mark that is written."""
    recent = () if row.recent is None else tuple(RecentId(i, at) for i, at in row.recent.items())
    return StreamMark(
        stream_id,
        row.head,
        row.first,
        row.timestamp,
        row.fence,
        row.fence_owner,
        row.anchor,
        row.status,
        row.node,
        row.consumed,
        row.deleted,
        recent,
    )


def row_of(mark: StreamMark) -> StreamRow:
    """Return the row that a mark tells of."""
    row = new_row(mark.stream_id)
    row.head, row.first, row.timestamp = mark.head, mark.first, mark.timestamp
    row.fence, row.fence_owner, row.anchor = mark.fence, mark.fence_owner, mark.anchor
    row.status, row.node, row.consumed, row.deleted = mark.status, mark.node, mark.consumed, mark.deleted
    if row.recent is not None:
        row.recent.update((entry.id, entry.sequence) for entry in mark.recent)
    return row


def text_of(raw: bytes | None) -> str:
    """A key, or a header's value, as text, whoever wrote it; empty where there is none."""
    return (raw or b"").decode("utf-8", "replace")
