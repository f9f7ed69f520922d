"""What is written beside envelopes: one frozen class for each record of the schema files.

Attributes are the schema's fields in snake case; the files say what each means. ``Json`` attributes are values, turned
into UTF-8 JSON on the way. Nothing here knows who writes it, or when.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from loom.schemas.envelope import Json, NewEvent

PARTITION_MARK_KEY: Final = "__loom_partition__"
"""Key of a partition's own mark in ``marks``."""

SCHEMA_NOTE_PREFIX: Final = "__loom_schema__:"
"""Start of the key of a SchemaNote in ``marks``; the fingerprint follows."""


@dataclass(frozen=True, slots=True)
class RecentId:
    """Id and sequence of a message that an inbox took lately."""

    id: str
    sequence: int


@dataclass(frozen=True, slots=True)
class StreamMark:
    """What outlives the events of a stream (``stream-mark.avsc``)."""

    stream_id: str
    head: int
    first: int
    timestamp: int
    fence: int = 0
    fence_owner: str | None = None
    anchor: str | None = None
    status: str | None = None
    node: str | None = None
    consumed: int = -1
    deleted: bool = False
    recent: tuple[RecentId, ...] = ()


@dataclass(frozen=True, slots=True)
class PartitionMark:
    """A partition's own mark (``partition-mark.avsc``)."""

    partition: int
    partitions: int
    timestamp: int
    node: str | None = None
    appends_offset: int = -1
    commands_offset: int = -1


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """Folded state of an execution (``snapshot.avsc``)."""

    execution_id: str
    sequence: int
    timestamp: int
    state: dict[str, Json]
    metadata: dict[str, Json] | None = None


@dataclass(frozen=True, slots=True)
class ObservationRecord:
    """What a stream must look like."""

    head: int
    fence: int
    anchor: str | None = None


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a stream."""

    stream_id: str
    sequence: int


@dataclass(frozen=True, slots=True)
class Header:
    """A record header."""

    name: str
    value: bytes


@dataclass(frozen=True, slots=True)
class OutgoingRecord:
    """Work that leaves in the transaction of an append; ``body`` is the value of the record to be written."""

    target: str
    id: str
    key: str
    body: bytes
    topic: str | None = None
    headers: tuple[Header, ...] = ()


@dataclass(frozen=True, slots=True)
class AppendRecord:
    """An append to one stream."""

    stream_id: str
    events: tuple[NewEvent, ...]
    expected_head: int | None = None
    fence: int | None = None
    observation: ObservationRecord | None = None
    backlog_cap: int | None = None
    consumed: tuple[Position, ...] = ()
    outgoing: tuple[OutgoingRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class AppendOp:
    """Append to streams of one partition, all or nothing."""

    appends: tuple[AppendRecord, ...]


@dataclass(frozen=True, slots=True)
class FenceOp:
    """Take the next fence token of a stream."""

    stream_id: str
    owner: str
    observation: ObservationRecord | None = None


@dataclass(frozen=True, slots=True)
class TruncateOp:
    """Delete the events with 0 < sequence < ``before``."""

    stream_id: str
    before: int


@dataclass(frozen=True, slots=True)
class DeleteOp:
    """Delete a stream for good."""

    stream_id: str


@dataclass(frozen=True, slots=True)
class CopyOp:
    """Copy events 0..``through`` of a stream into a new one."""

    source: str
    target: str
    through: int


@dataclass(frozen=True, slots=True)
class SnapshotOp:
    """Keep a snapshot unless a later one stands."""

    execution_id: str
    sequence: int
    state: dict[str, Json]
    metadata: dict[str, Json] | None = None


@dataclass(frozen=True, slots=True)
class DropSnapshotOp:
    """Delete a snapshot."""

    execution_id: str


@dataclass(frozen=True, slots=True)
class ReadOp:
    """Read: ``query`` is ``events``, ``last``, ``observe``, ``info``, ``snapshot`` or ``inboxes``."""

    query: str
    stream_id: str
    from_sequence: int = 0
    limit: int = 1000


@dataclass(frozen=True, slots=True)
class NotifyOp:
    """Look at an execution's inbox again."""

    execution_id: str


@dataclass(frozen=True, slots=True)
class CancelOp:
    """Never apply the request of that id, if it was not applied before; ``since`` is the offset of its first copy."""

    request_id: str
    since: int | None = None


RequestOp = (
    AppendOp
    | FenceOp
    | TruncateOp
    | DeleteOp
    | CopyOp
    | SnapshotOp
    | DropSnapshotOp
    | ReadOp
    | NotifyOp
    | CancelOp
)


@dataclass(frozen=True, slots=True)
class AppendRequest:
    """What a node asks of the writer of a partition (``append-request.avsc``). ``op`` is the one field that is set."""

    id: str
    op: RequestOp
    requester: str | None = None
    reply_partition: int | None = None
    timeout_ms: int | None = None


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """A refusal: the error's class and its typed fields, never a payload."""

    name: str
    fields: dict[str, Json]


@dataclass(frozen=True, slots=True)
class AppendedRecord:
    """Where events came to stand."""

    stream_id: str
    first: int
    head: int
    timestamp: int
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class AppendReply:
    """Outcome of a request that writes (``append-reply.avsc``)."""

    request_id: str
    error: ErrorReport | None = None
    appended: tuple[AppendedRecord, ...] = ()
    number: int | None = None


@dataclass(frozen=True, slots=True)
class StreamInfoRecord:
    """What is known of a stream without reading events."""

    stream_id: str
    head: int
    first: int
    fence: int
    anchor: str | None = None
    status: str | None = None
    node: str | None = None
    sealed: bool = False


@dataclass(frozen=True, slots=True)
class ReadReply:
    """Answer to a request that reads, or a part of it (``read-reply.avsc``); ``values`` are as stored."""

    request_id: str
    error: ErrorReport | None = None
    part: int = 0
    more: bool = False
    values: tuple[bytes, ...] = ()
    info: StreamInfoRecord | None = None


@dataclass(frozen=True, slots=True)
class StartVerb:
    """Start an execution."""

    workflow: str
    input: Json
    execution_id: str | None = None
    subject: str | None = None


@dataclass(frozen=True, slots=True)
class SendVerb:
    """Send a message to an execution."""

    execution_id: str
    topic: str
    payload: Json
    message_id: str | None = None
    sender: str | None = None


@dataclass(frozen=True, slots=True)
class ResumeVerb:
    """Answer a gate."""

    execution_id: str
    gate: str
    answer: Json


@dataclass(frozen=True, slots=True)
class CancelVerb:
    """Cancel an execution."""

    execution_id: str
    reason: str | None = None


CommandVerb = StartVerb | SendVerb | ResumeVerb | CancelVerb


@dataclass(frozen=True, slots=True)
class Command:
    """What a producer of the estate asks for (``command.avsc``). ``verb`` is the one field that is set."""

    verb: CommandVerb
    id: str | None = None
    actor: str | None = None
    identity: Json = None


@dataclass(frozen=True, slots=True)
class ExecutionSummary:
    """Where an execution stands (``execution-summary.avsc``); times are milliseconds since the epoch."""

    execution_id: str
    chain_id: str
    workflow: str
    status: str
    head: int
    started_at: int
    updated_at: int
    finished_at: int | None = None
    owner: str | None = None
    parent_id: str | None = None
    successor_id: str | None = None
    node: str | None = None
    waits: tuple[str, ...] = ()
    steps: int = 0
    sealed: bool = False
    error_type: str | None = None


@dataclass(frozen=True, slots=True)
class OperatorSignal:
    """Something that an operator should know (``operator-signal.avsc``)."""

    code: str
    severity: str
    timestamp: int
    node: str
    execution_id: str | None = None
    text: str = ""
    count: int = 1
    details: dict[str, Json] | None = None


@dataclass(frozen=True, slots=True)
class SchemaNote:
    """A schema that records of this log were written with (``schema-note.avsc``)."""

    fingerprint: str
    schema: str
    registry_id: int | None = None
