"""What is remembered of a stream between appends: the row that every write is judged by.

A row is a fold of the stream's records alone: its events (with what their records say beside the value: fence, driver,
consumed positions) and its marks. So a rebuilt index holds the same rows as the one that wrote the records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from loom.ids import stream_kind
from loom.schemas.envelope import TERMINAL_KINDS, Envelope, Kind
from loom.stores.contracts import NO_EVENTS, Observation, StreamInfo

if TYPE_CHECKING:
    from loom.stores.event_run import EventRun

RECENT_IDS: Final = 256
"""How many ids of an inbox stream's last events are kept to tell a repeated message from a new one."""

SIDE_KINDS: Final = frozenset(
    {
        Kind.EXECUTION_DENIED,
        Kind.OUTCOME_RECORDED,
        Kind.EXECUTION_PURGED,
        Kind.PAYLOAD_SHREDDED,
        Kind.ERASURE_PENDING,
        Kind.INBOX_QUARANTINED,
        Kind.INBOX_RELEASED,
    }
)
"""Records beside the flow's course: they leave ``status`` as it was, so a parked log still reads as parked."""

_STILL_KINDS: Final = SIDE_KINDS | {Kind.MESSAGE_CONSUMED}
"""Records that leave ``status`` as it was. What is taken from an inbox may be passed over, by a verb or a parked run: a park
that it does end is ended by the EXECUTION_RESUMED beside it."""

REBASABLE_KINDS: Final = SIDE_KINDS - {Kind.INBOX_QUARANTINED, Kind.INBOX_RELEASED}
"""Those behind which a driver's events may go unseen. A hold or a release changes what may be delivered."""


@dataclass(slots=True)
class StreamRow:
    """State of one stream.

    ``first`` is the lowest sequence still there above 0 (1 where nothing was trimmed), ``fence`` the current token
    (0: never), ``fence_owner`` who took it (None: by the append of sequence 0), ``anchor`` the id at sequence 0,
    ``status`` the type of the last event of a log that moved its flow (a terminal one stays), ``node`` the
    ``metadata.node`` of the last event that carried a fence, ``consumed`` the highest position of an inbox that was
    disposed of (-1: none), ``timestamp`` that of the last event. ``recent`` maps the ids of an inbox stream's last
    ``RECENT_IDS`` events to their sequences, oldest first; other streams have None. ``sealed`` says whether any event
    bears the marker; a mark does not tell, the events above and below it do.

    Once a row stands in an index or in ``Staged`` only its owner changes it; others copy.
    """

    kind: str
    head: int = NO_EVENTS
    first: int = 1
    fence: int = 0
    fence_owner: str | None = None
    anchor: str | None = None
    status: str | None = None
    node: str | None = None
    consumed: int = -1
    timestamp: int = 0
    deleted: bool = False
    recent: dict[str, int] | None = None
    sealed: bool = False

    def copy(self) -> StreamRow:
        """Return an independent row of the same content."""
        recent = self.recent
        return StreamRow(
            self.kind,
            self.head,
            self.first,
            self.fence,
            self.fence_owner,
            self.anchor,
            self.status,
            self.node,
            self.consumed,
            self.timestamp,
            self.deleted,
            None if recent is None else recent.copy(),
            self.sealed,
        )

    def put(
        self,
        sequence: int,
        event_id: str,
        event_type: str,
        timestamp: int,
        *,
        fence: int | None,
        node: str | None,
        sealed: bool = False,
    ) -> None:
        """Take the next event of the stream; ``fence`` is the token that its append carried."""
        self.head = sequence
        if sealed:
            self.sealed = True
        self.timestamp = timestamp
        if sequence == 0:
            self._begin(event_id, fence)
        if fence is not None:
            self.node = node
        if self.recent is not None:
            self._remember(event_id, sequence)
        elif self.kind == "executions":
            self._move(event_type)

    def _begin(self, event_id: str, fence: int | None) -> None:
        self.anchor = event_id
        if fence == 1 and self.fence == 0:
            self.fence = 1

    def _remember(self, event_id: str, sequence: int) -> None:
        assert self.recent is not None
        self.recent[event_id] = sequence
        if len(self.recent) > RECENT_IDS:
            del self.recent[next(iter(self.recent))]

    def _move(self, event_type: str) -> None:
        if self.status not in TERMINAL_KINDS and event_type not in _STILL_KINDS:
            self.status = event_type

    def put_run(self, run: EventRun) -> None:
        """As ``put`` of each event of a run that is above the head; a deleted stream takes none."""
        if run.sealed:  # of a known event, too: a mark does not tell
            self.sealed = True
        above = max(self.head + 1, run.first)
        if above >= run.end or self.deleted:
            return
        skip = above - run.first
        self.head, self.timestamp = run.end - 1, run.timestamp
        if above == 0:
            self._begin(run.ids[0], run.fence)
        if run.driven_at >= above:
            self.node = run.node
        if self.recent is not None:
            for sequence, event_id in enumerate(run.ids[skip:], above):
                self._remember(event_id, sequence)
        elif self.kind == "executions":
            for kind in run.kinds[skip:]:
                self._move(kind)

    def take(self, envelope: Envelope, fence: int | None) -> None:
        """As ``put``, of an event that is at hand."""
        metadata = envelope.metadata
        self.put(
            envelope.sequence,
            envelope.id,
            envelope.type,
            envelope.timestamp,
            fence=fence,
            node=metadata.get("node"),
            sealed="seal" in metadata,
        )

    def consume(self, sequence: int) -> None:
        """Inbox: everything at or below ``sequence`` waits no longer."""
        if not self.deleted:
            self.consumed = max(self.consumed, sequence)

    @property
    def waiting(self) -> int:
        """Inbox: how many messages wait."""
        trimmed = self.first - 1 if self.first > 1 else -1
        return max(0, self.head - max(self.consumed, trimmed))

    @property
    def finished(self) -> bool:
        """Whether a log has a terminal event."""
        return self.status in TERMINAL_KINDS

    @property
    def exists(self) -> bool:
        """Whether the stream has (or had, before trimming) events and is not deleted."""
        return self.head > NO_EVENTS

    def observation(self) -> Observation:
        """Head, fence and anchor."""
        return Observation(self.head, self.fence, self.anchor)

    def info(self, stream_id: str) -> StreamInfo:
        """The row as the contract shows it."""
        return StreamInfo(
            stream_id,
            self.head,
            self.first,
            self.fence,
            self.anchor,
            self.status,
            self.node,
            self.fence_owner,
            self.sealed,
        )


def new_row(stream_id: str) -> StreamRow:
    """Row of a stream that has no events yet."""
    kind = stream_kind(stream_id)
    return StreamRow(kind, recent={} if kind == "inbox" else None)


def deleted_row(row: StreamRow) -> StreamRow:
    """Row of a stream that is deleted now: nothing is left but the fence, and its id refuses reuse."""
    return StreamRow(row.kind, fence=row.fence, fence_owner=row.fence_owner, deleted=True)


def merge_rows(row: StreamRow, mark: StreamRow) -> StreamRow:
    """Return what a row, folded from events, and a mark of its stream say together; ``mark`` may be used up.

    A mark is the whole row as of its head, so one at or above the row's head replaces it. An older one may still tell of
    a fence, and of what was trimmed, since these move without events. Nothing is taken back.
    """
    if mark.deleted:
        return mark
    merged, latest = (
        (mark if mark.head >= row.head else row.copy()),
        (row if row.fence > mark.fence else mark),
    )
    merged.fence, merged.fence_owner = latest.fence, latest.fence_owner
    merged.first = max(row.first, mark.first)
    merged.consumed = max(row.consumed, mark.consumed)
    merged.sealed = row.sealed or mark.sealed
    return merged


def observation_of(row: StreamRow | None) -> Observation:
    """Observation of a stream that may be unknown."""
    return Observation(NO_EVENTS, 0, None) if row is None else row.observation()
