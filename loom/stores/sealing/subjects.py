"""Whose key seals a stream: the subject that the chain's first event names, else the chain's own id (clauses.md, 3)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from loom.ids import routing_id, stream_kind
from loom.schemas.envelope import Envelope, Json, Kind, NewEvent

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from loom.stores.contracts import EventStore

MAX_KNOWN: Final = 65_536

Start = tuple[str, "NewEvent | Envelope"]
"""A log and its first event."""


def subject_in(data: Mapping[str, Json], stream_id: str) -> str:
    """The subject that an EXECUTION_STARTED names."""
    for name in ("subject", "chainId"):
        value = data.get(name)
        if isinstance(value, str) and value:
            return value
    return stream_id


def is_start(stream_id: str, event: NewEvent | Envelope) -> bool:
    """Whether an event is the first of a log, and so names a subject."""
    return event.type == Kind.EXECUTION_STARTED and stream_kind(stream_id) == "executions"


class Named:
    """What first events tell of whose chains are: ``subjects`` by chain or execution, ``own`` those whose first events they are.

    Each tells of itself, of its chain, and of its parent's, whose subject it inherited; of others only the first to do so.
    """

    __slots__ = ("own", "subjects")

    def __init__(self, starts: Sequence[Start]) -> None:
        self.own = {stream_id: subject_in(event.data, stream_id) for stream_id, event in starts}
        self.subjects = subjects = dict(self.own)
        for stream_id, event in starts:
            parent = event.data.get("parent")
            chain = parent.get("chainId") if isinstance(parent, Mapping) else None
            for other in (event.data.get("chainId"), chain):
                if other not in subjects and isinstance(other, str):
                    subjects[other] = self.own[stream_id]


class Subjects:
    """Subjects of streams, remembered; what was never started is asked again each time."""

    def __init__(self, events: EventStore) -> None:
        self._events = events
        self._known: OrderedDict[str, str] = OrderedDict()

    def peek(self, stream_id: str) -> str | None:
        """The subject, if it is known."""
        return self._known.get(routing_id(stream_id))

    async def of(self, stream_id: str) -> str:
        """The subject of a stream; the chain's id where no such chain was started.

        Raises:
            StoreError: the chain's first event cannot be read now.
        """
        known = self.peek(stream_id)
        if known is not None:
            return known
        owner = routing_id(stream_id)
        first = await self._events.read(owner, 0, 1)
        if first and first[0].sequence == 0:
            self.note(first)
        return self._known.get(owner, owner)

    def learn(self, named: Named) -> None:
        """Remember what durable first events tell. What one tells of others gives way to what they say themselves."""
        for stream_id, subject in named.subjects.items():
            if stream_id in named.own or stream_id not in self._known:
                self._known[stream_id] = subject
                if len(self._known) > MAX_KNOWN:
                    self._known.popitem(last=False)

    def note(self, envelopes: Iterable[Envelope]) -> None:
        """Learn from events that were read."""
        for envelope in envelopes:
            if envelope.sequence == 0 and is_start(envelope.stream_id, envelope):
                stream_id = envelope.stream_id
                if self._known.get(stream_id) != subject_in(envelope.data, stream_id):
                    self.learn(Named([(stream_id, envelope)]))
