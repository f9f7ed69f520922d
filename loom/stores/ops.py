"""The values that pass through the judge: write operations, their effects, and verdicts on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loom.errors import LoomError
    from loom.schemas.envelope import Envelope
    from loom.stores.contracts import Observation, Outgoing, Snapshot, StreamAppend
    from loom.stores.rows import StreamRow


@dataclass(frozen=True, slots=True)
class AppendOps:
    """Append to one or several streams, all or nothing. Result: ``list[Appended]``, one per append."""

    appends: tuple[StreamAppend, ...]


@dataclass(frozen=True, slots=True)
class AcquireFence:
    """Take the next fence token, only if the stream is as observed where an observation is given. Result: the token."""

    stream_id: str
    owner: str
    observation: Observation | None = None


@dataclass(frozen=True, slots=True)
class Truncate:
    """Delete the events with 0 < sequence < ``before``. Result: None."""

    stream_id: str
    before: int


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a stream and its snapshot for good; an id that was never used is refused from now on, too. Result: None."""

    stream_id: str


@dataclass(frozen=True, slots=True)
class CopyPrefix:
    """Copy the stored events 0..``through`` of ``source`` into the new stream ``target``. Result: its head."""

    source: str
    target: str
    through: int


@dataclass(frozen=True, slots=True)
class SaveSnapshot:
    """Keep a snapshot unless a later one stands. Result: None."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class DeleteSnapshot:
    """Delete a snapshot. Result: None."""

    execution_id: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Change nothing, but be part of a transaction that commits (a deciding read waits for one). Result: None."""


WriteOp = AppendOps | AcquireFence | Truncate | Delete | CopyPrefix | SaveSnapshot | DeleteSnapshot | Tick


@dataclass(slots=True)
class PutEvent:
    """A new event. ``position`` and ``size`` place it in the batch of its append.

    ``fence`` is the token that its append carried, ``consumed`` the inbox positions its append disposes of (on the last
    event of the append): a rebuilt index needs both, so they are written beside the value. ``encoded`` is free for the
    store's ``admit`` hook.
    """

    envelope: Envelope
    position: int
    size: int
    fence: int | None = None
    consumed: tuple[tuple[str, int], ...] = ()
    encoded: bytes | None = None


@dataclass(slots=True)
class DropEvent:
    """A tombstone for one event."""

    stream_id: str
    sequence: int


@dataclass(slots=True)
class PutMark:
    """The stream's mark becomes ``row`` (kafka.md, "Topics": StreamMark); the row is not changed any more."""

    stream_id: str
    row: StreamRow


@dataclass(slots=True)
class PutSnapshot:
    """The snapshot of its execution becomes this one. ``encoded`` is free for the store's ``admit`` hook."""

    snapshot: Snapshot
    encoded: bytes | None = None


@dataclass(slots=True)
class DropSnapshot:
    """A tombstone for a snapshot."""

    execution_id: str


@dataclass(slots=True)
class SendOut:
    """Work that leaves with the event at ``stream_id``/``sequence`` (the last of the append that decided it)."""

    outgoing: Outgoing
    stream_id: str
    sequence: int


Effect = PutEvent | DropEvent | PutMark | PutSnapshot | DropSnapshot | SendOut


@dataclass(slots=True)
class Accepted:
    """The op is staged: answer ``result`` once its transaction has committed."""

    effects: list[Effect]
    result: Any


@dataclass(slots=True)
class Repeated:
    """The op had been done before; nothing was staged. ``on_staged``: answer only once this transaction has committed."""

    result: Any
    on_staged: bool = False


@dataclass(slots=True)
class Rejected:
    """The op cannot be done; nothing was staged. ``on_staged``: answer only once this transaction has committed."""

    error: LoomError
    on_staged: bool = False


Verdict = Accepted | Repeated | Rejected
