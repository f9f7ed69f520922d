"""What is recorded of a subject: which streams, and how each looks from this node. Nothing is written.

Executions are found by their first events, which name their subject in the clear (clauses.md, point 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from loom.errors import ConfigError
from loom.ids import routing_id, stream_kind
from loom.kernel.readable import unreadable
from loom.kernel.state import CLOSING_KINDS
from loom.schemas.envelope import TERMINAL_KINDS, Kind
from loom.stores.sealing.marker import SEAL
from loom.stores.sealing.opener import Opened, Status
from loom.stores.sealing.subjects import subject_in
from loom.stores.sealing.tombstones import erases

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from loom.schemas.envelope import Envelope
    from loom.stores.contracts import EventStore

PAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class LogView:
    """One execution of a subject.

    ``started`` is its first event, what is locked in it redacted; ``sealed``: something of it, or in its chain's inbox and
    quarantine, is sealed; ``closed``: the first such thing that does not open here; ``pending`` and ``erased``: its log
    holds the subject's intent, and its tombstone; ``ended``: it has a terminal event, at ``ended_at`` (ms); ``successor`` goes
    on for it. ``closing`` is the sequence from which on it says how it ended, and what was erased (-1: nowhere); ``purged`` the
    highest one that an operator had removed so far, ``deleting``: one has said that all of the chain goes.
    """

    execution_id: str
    chain_id: str
    started: Envelope
    sealed: bool
    closed: Opened | None
    pending: bool
    erased: bool
    ended: bool
    successor: str | None = None
    ended_at: int | None = None
    closing: int = -1
    purged: int = -1
    deleting: bool = False


@dataclass(slots=True)
class _Look:
    sealed: bool = False
    closed: Opened | None = None
    pending: bool = False
    erased: bool = False
    ended: bool = False
    successor: str | None = None
    ended_at: int | None = None
    closing: int = -1
    purged: int = -1
    deleting: bool = False
    first: Envelope | None = None

    def take(self, opened: Opened, subject: str) -> None:
        envelope = opened.envelope
        if envelope.sequence == 0:
            self.first = envelope
        if SEAL in envelope.metadata or opened.status is not Status.READABLE:
            self.sealed = True
            if opened.status is not Status.READABLE and self.closed is None:
                self.closed = opened
        if envelope.type == Kind.ERASURE_PENDING and envelope.data.get("subjectId") == subject:
            self.pending = True
        self.erased = self.erased or erases(envelope, subject)
        if envelope.type in TERMINAL_KINDS:
            self.ended, self.ended_at = True, envelope.timestamp
            successor = envelope.data.get("successorId")
            self.successor = successor if isinstance(successor, str) else None
        if self.closing < 0 and envelope.type in CLOSING_KINDS:
            self.closing = envelope.sequence
        if envelope.type == Kind.EXECUTION_PURGED:
            self.deleting = self.deleting or envelope.data.get("scope") == "chain"
            self.purged = max(self.purged, int(envelope.data.get("through", -1)))

    def view(self, stream_id: str, inbox: _Look) -> LogView | None:
        """What was seen of a log, and of its chain's inbox; None where it has no first event (any more)."""
        if self.first is None:
            return None
        return LogView(
            stream_id,
            str(self.first.data.get("chainId") or stream_id),
            self.first,
            self.sealed or inbox.sealed,
            self.closed or inbox.closed,
            self.pending,
            self.erased,
            self.ended,
            self.successor,
            self.ended_at,
            self.closing,
            self.purged,
            self.deleting,
        )


async def streams_of(events: EventStore, subject: str) -> list[str]:
    """The streams of a subject's chains, logs first.

    Raises:
        ConfigError: the store cannot find them.
    """
    find: Any = getattr(events, "find_subject", None)
    if find is None:
        raise ConfigError(
            "events",
            "this event store cannot find the executions of a subject",
            "erase with the stores of `storage`",
        )
    found: list[str] = await find(subject)
    return sorted(found, key=lambda stream_id: stream_kind(stream_id) != "executions")


async def surveyed(events: EventStore, subject: str) -> tuple[LogView, ...]:
    """Look at every execution of a subject; raises as ``streams_of``, and ``StoreError``."""
    logs: list[tuple[str, _Look]] = []
    beside: dict[str, _Look] = {}
    for stream_id in await streams_of(events, subject):
        if stream_kind(stream_id) == "executions":
            look = _Look()
            logs.append((stream_id, look))
        else:
            look = beside.setdefault(routing_id(stream_id), _Look())
        async for opened in _opened(events, stream_id):
            look.take(opened, subject)
    views = []
    for stream_id, look in logs:
        chain_id = stream_id if look.first is None else str(look.first.data.get("chainId") or stream_id)
        view = look.view(stream_id, beside.get(chain_id, _Look()))
        if view is not None:
            views.append(view)
    return tuple(views)


async def look_at(events: EventStore, execution_id: str) -> LogView | None:
    """Look at one execution, its inbox left out; None where there is none."""
    look, subject = _Look(), execution_id
    async for opened in _opened(events, execution_id):
        if opened.envelope.sequence == 0:
            subject = subject_in(opened.envelope.data, execution_id)
        look.take(opened, subject)
    return look.view(execution_id, _Look())


async def _opened(events: Any, stream_id: str) -> AsyncIterator[Opened]:
    survey = getattr(events, "survey", None)
    start = 0
    while True:
        if survey is not None:
            page = await survey(stream_id, start, PAGE)
        else:
            page = [_as_stored(envelope) for envelope in await events.read(stream_id, start, PAGE)]
        if not page:
            return
        for opened in page:
            yield opened
        start = page[-1].envelope.sequence + 1


def _as_stored(envelope: Envelope) -> Opened:
    """How a store that opens nothing sees an event."""
    return Opened(envelope, Status.READABLE if unreadable(envelope, None) is None else Status.FOREIGN)
