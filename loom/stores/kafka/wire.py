"""Requests and replies between nodes: what the judge takes and gives, as the records of ``loom.schemas``.

Errors cross as class name and typed fields, and are raised again as what they were at the owner (no payload ever).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from loom import errors as e
from loom.schemas import records as r
from loom.stores import ops
from loom.stores.contracts import Appended, Observation, Outgoing, Snapshot, StreamAppend, StreamInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from loom.schemas.codec import Codec

REQUEST: Final = "request"
PUBLISH: Final = "publish"


# -- writes ------------------------------------------------------------------------------------------------------


def outgoing_request(outgoing: Outgoing, codec: Codec) -> bytes:
    """Return the request that leaves in a writer's own transaction: nobody waits for its reply.

    Raises:
        InvalidInputError: the events of ``outgoing.body`` are no JSON.
    """
    append: StreamAppend = outgoing.body
    return codec.encode(r.AppendRequest(outgoing.id, r.AppendOp((_append(append, codec),))))


def request_op(op: ops.WriteOp, codec: Codec) -> r.RequestOp:
    """Return what asks the owner for ``op``."""
    return _TO_WIRE[type(op)](op, codec)


def write_op(op: r.RequestOp, codec: Codec) -> ops.WriteOp | None:
    """Return the write that a request asks for; None where it asks for something else.

    Raises:
        DecodeError: a request inside it cannot be read.
    """
    convert = _FROM_WIRE.get(type(op))
    return None if convert is None else convert(op, codec)


def _append(append: StreamAppend, codec: Codec) -> r.AppendRecord:
    return r.AppendRecord(
        append.stream_id,
        append.events,
        append.expected_head,
        append.fence,
        _observation(append.observation),
        append.backlog_cap,
        tuple(r.Position(stream, sequence) for stream, sequence in append.consumed),
        tuple(_outgoing(outgoing, codec) for outgoing in append.outgoing),
    )


def _outgoing(outgoing: Outgoing, codec: Codec) -> r.OutgoingRecord:
    body = outgoing_request(outgoing, codec) if outgoing.target == REQUEST else outgoing.body
    headers = tuple(r.Header(name, value) for name, value in outgoing.headers)
    return r.OutgoingRecord(outgoing.target, outgoing.id, outgoing.key, body, outgoing.topic, headers)


def _observation(seen: Observation | None) -> r.ObservationRecord | None:
    return None if seen is None else r.ObservationRecord(seen.head, seen.fence, seen.anchor)


def _seen(record: r.ObservationRecord | None) -> Observation | None:
    return None if record is None else Observation(record.head, record.fence, record.anchor)


def _stream_append(record: r.AppendRecord, codec: Codec) -> StreamAppend:
    return StreamAppend(
        record.stream_id,
        record.events,
        record.expected_head,
        record.fence,
        _seen(record.observation),
        record.backlog_cap,
        tuple((position.stream_id, position.sequence) for position in record.consumed),
        tuple(_leaving(outgoing, codec) for outgoing in record.outgoing),
    )


def _leaving(record: r.OutgoingRecord, codec: Codec) -> Outgoing:
    body: Any = record.body
    if record.target == REQUEST:
        inner: r.AppendRequest = codec.decode(record.body, r.AppendRequest, "outgoing request")
        if not isinstance(inner.op, r.AppendOp) or len(inner.op.appends) != 1:
            raise e.DecodeError("outgoing request", "it is no append to one stream")
        body = _stream_append(inner.op.appends[0], codec)
    elif record.target != PUBLISH:
        raise e.DecodeError("outgoing work", "its target is not known")
    headers = tuple((header.name, header.value) for header in record.headers)
    return Outgoing(record.target, record.id, record.key, body, record.topic, headers)


_TO_WIRE: Final[dict[type, Callable[[Any, Codec], r.RequestOp]]] = {
    ops.AppendOps: lambda op, codec: r.AppendOp(tuple(_append(a, codec) for a in op.appends)),
    ops.AcquireFence: lambda op, _: r.FenceOp(op.stream_id, op.owner, _observation(op.observation)),
    ops.Truncate: lambda op, _: r.TruncateOp(op.stream_id, op.before),
    ops.Delete: lambda op, _: r.DeleteOp(op.stream_id),
    ops.CopyPrefix: lambda op, _: r.CopyOp(op.source, op.target, op.through),
    ops.SaveSnapshot: lambda op, _: r.SnapshotOp(
        op.snapshot.execution_id, op.snapshot.sequence, op.snapshot.state, op.snapshot.metadata or None
    ),
    ops.DeleteSnapshot: lambda op, _: r.DropSnapshotOp(op.execution_id),
}

_FROM_WIRE: Final[dict[type, Callable[[Any, Codec], ops.WriteOp]]] = {
    r.AppendOp: lambda op, codec: ops.AppendOps(tuple(_stream_append(a, codec) for a in op.appends)),
    r.FenceOp: lambda op, _: ops.AcquireFence(op.stream_id, op.owner, _seen(op.observation)),
    r.TruncateOp: lambda op, _: ops.Truncate(op.stream_id, op.before),
    r.DeleteOp: lambda op, _: ops.Delete(op.stream_id),
    r.CopyOp: lambda op, _: ops.CopyPrefix(op.source, op.target, op.through),
    r.SnapshotOp: lambda op, _: ops.SaveSnapshot(
        Snapshot(op.execution_id, op.sequence, op.state, op.metadata or {})
    ),
    r.DropSnapshotOp: lambda op, _: ops.DeleteSnapshot(op.execution_id),
}


def streams_of(op: r.RequestOp) -> tuple[str, ...]:
    """Streams that a request is about; they are all of one chain's partition, or the request is refused."""
    match op:
        case r.AppendOp():
            return tuple(append.stream_id for append in op.appends)
        case r.CopyOp():
            return (op.source, op.target)
        case r.SnapshotOp() | r.DropSnapshotOp() | r.NotifyOp():
            return (op.execution_id,)
        case r.CancelOp():
            return ()
        case _:
            return (op.stream_id,)


# -- replies -----------------------------------------------------------------------------------------------------


def append_reply(request_id: str, result: Any, error: Exception | None) -> r.AppendReply:
    """Return the reply to a write: its result (appended places, a number, or nothing) or its refusal."""
    if error is not None:
        return r.AppendReply(request_id, report(error))
    if isinstance(result, int):
        return r.AppendReply(request_id, number=result)
    places = tuple(
        r.AppendedRecord(a.stream_id, a.first, a.head, a.timestamp, a.repeated) for a in result or ()
    )
    return r.AppendReply(request_id, appended=places)


def append_result(reply: r.AppendReply) -> Any:
    """Return what a write's reply says; raise its refusal."""
    if reply.error is not None:
        raise raised(reply.error)
    if reply.number is not None:
        return reply.number
    return [Appended(a.stream_id, a.first, a.head, a.timestamp, a.repeated) for a in reply.appended] or None


def stream_info(info: StreamInfo) -> r.StreamInfoRecord:
    """Return the record of what is known of a stream."""
    return r.StreamInfoRecord(
        info.stream_id,
        info.head,
        info.first,
        info.fence,
        info.anchor,
        info.status,
        info.node,
        info.sealed,
    )


def observed(stream_id: str, seen: Observation) -> r.StreamInfoRecord:
    """Return the record of an observation: of the rest it tells nothing."""
    return r.StreamInfoRecord(stream_id, seen.head, 1, seen.fence, seen.anchor)


def info_of(record: r.StreamInfoRecord) -> StreamInfo:
    """Return what a reply tells of a stream."""
    return StreamInfo(
        record.stream_id,
        record.head,
        record.first,
        record.fence,
        record.anchor,
        record.status,
        record.node,
        sealed=record.sealed,
    )


class RequestExpiredError(e.StoreError):
    """A copy of a request reached the owner after its time; that copy is not applied."""

    retryable = True

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        super().__init__(f"request {request_id!r} reached the owner after its time and was not applied")


class RequestUnsettledError(e.StoreError):
    """The owner cannot tell what became of a request that was cancelled."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        super().__init__(f"what became of request {request_id!r} is not known; read the stream")


AGAIN: Final = (e.NotOwnerError, e.OutcomeUnknownError, RequestExpiredError)
"""Answers that say: ask again. The request is the same, so it is still applied once."""

MAX_READ: Final = 10_000
"""Most events of one reply; a longer read asks again."""


class OwnerRefusedError(e.StoreError):
    """The owner refused with an error that this node does not know."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"the owner refused the request ({name[:64]}); run the same release on every node")


_ERRORS: Final[dict[str, tuple[type[e.LoomError], tuple[str, ...]]]] = {
    cls.__name__: (cls, names)
    for cls, names in (
        (e.WrongHeadError, ("stream_id", "expected", "head")),
        (e.StaleFenceError, ("stream_id", "token", "current")),
        (e.ExecutionAlreadyExistsError, ("execution_id",)),
        (e.ExecutionNotFoundError, ("execution_id",)),
        (e.InboxFullError, ("execution_id", "topic", "backlog", "cap")),
        (e.InvalidInputError, ("what", "problem", "remedy")),
        (e.InvalidIdError, ("given", "remedy")),
        (e.PayloadTooLargeError, ("stream_id", "size", "limit")),
        (e.StorageWriteError, ("stream_id", "problem")),
        (e.OutcomeUnknownError, ("stream_id", "problem")),
        (e.NotOwnerError, ("partition",)),
        (e.StreamBrokenError, ("stream_id", "sequence", "problem")),
        (e.DecodeError, ("what", "problem")),
        (e.PublishRefusedError, ("topic", "reason", "remedy")),
        (e.BrokerError, ("doing", "code")),
        (e.IncompleteReadError, ("topic", "partition", "stable", "end")),
        (RequestExpiredError, ("request_id",)),
        (RequestUnsettledError, ("request_id",)),
    )
}
"""Errors that keep their type across nodes, with the constructor's arguments, which are their fields."""


def report(error: Exception) -> r.ErrorReport:
    """Return an error for the wire; one without an entry crosses by its name alone."""
    name = type(error).__name__
    fields = _ERRORS[name][1] if name in _ERRORS else ()
    return r.ErrorReport(name, {field: getattr(error, field) for field in fields})


def raised(record: r.ErrorReport) -> e.LoomError:
    """Return the error that the owner reported."""
    known = _ERRORS.get(record.name)
    if known is None:
        return OwnerRefusedError(record.name)
    cls, names = known
    try:
        return cls(*(record.fields[name] for name in names))
    except (KeyError, TypeError, ValueError):
        return OwnerRefusedError(record.name)
