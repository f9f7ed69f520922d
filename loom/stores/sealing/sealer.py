"""Sealing on the way in: what is appended, and what leaves for other chains with it (system.md 2.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import is_
from typing import TYPE_CHECKING, Final

from loom.errors import InvalidInputError, PayloadShreddedError
from loom.ids import routing_id
from loom.kernel.guard import SEALED_KEY, SHREDDED_KEY, is_sealed_envelope
from loom.schemas.envelope import Json, Kind, NewEvent
from loom.schemas.quick import changer
from loom.stores.contracts import NO_EVENTS, Outgoing, StreamAppend
from loom.stores.sealing.cipher import CIPHER, seal_value
from loom.stores.sealing.keyring import NotAtHand
from loom.stores.sealing.marker import SEAL, read_marker, written_marker
from loom.stores.sealing.paths import Node, SensitiveMap, change
from loom.stores.sealing.subjects import Named, Start, Subjects, is_start

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from loom.stores.keys.contract import DataKey
    from loom.stores.sealing.keyring import KeyRing
    from loom.stores.sealing.nonces import NonceSource

AFTER_ERASURE: Final = frozenset(
    {Kind.EXECUTION_CANCELLED, Kind.EXECUTION_FAILED, Kind.EXECUTION_DENIED, Kind.OUTCOME_RECORDED}
)
"""Kinds that an erased execution may still get: with its keys gone, their sensitive fields are erased at birth."""


_NOTHING: Final = Named(())
_with_events: Final = changer(StreamAppend, "events", "outgoing")


class _Missing(Exception):  # noqa: N818 - a signal between the parts of a sealer
    """A chain's subject, or a subject's key, has to be asked for."""

    def __init__(self, chain_id: str, subject: str | None) -> None:
        super().__init__()
        self.chain_id, self.subject = chain_id, subject


class _Pass:
    """One call's way through its appends: the event it is at, and what was asked for on the way.

    ``named`` is what first events among them tell of whose chains are, ``asked`` what had to be asked. ``keys`` bear uses
    enough for all of the call.
    """

    __slots__ = (
        "_nonces",
        "_ring",
        "asked",
        "cipher",
        "covers",
        "erased",
        "event_id",
        "keys",
        "named",
        "sequence",
        "stream_id",
        "subject",
    )

    event_id: str
    covers: list[str]

    def __init__(self, ring: KeyRing, nonces: NonceSource, named: Named) -> None:
        self._ring, self._nonces = ring, nonces
        self.named = named
        self.asked: dict[str, str] = {}
        self.keys: dict[str, DataKey] = {}
        self.erased: dict[str, PayloadShreddedError] = {}
        self.stream_id = ""
        self.subject: str | None = None
        self.sequence: int | None = None
        self.cipher: str | None = None

    def seal(self, value: Json, pattern: str, path: str) -> Json:
        """Seal one value of the event; raises as ``KeyRing.use``."""
        if value is None or (self.cipher is not None and not _is_bare(value, self.cipher)):
            return value
        subject = self.subject
        key = self.keys[subject] if subject in self.keys else self._ring.use(subject)
        self.covers.append(pattern)
        return seal_value(key, value, self._nonces((self.stream_id, self.sequence, self.event_id, path)))


class Sealer:
    """Seals the sensitive fields of appends."""

    def __init__(
        self, sensitive: SensitiveMap, ring: KeyRing, subjects: Subjects, nonces: NonceSource
    ) -> None:
        self._tree, self._ring, self._subjects, self._nonces = sensitive.tree, ring, subjects, nonces

    async def seal(self, appends: Sequence[StreamAppend]) -> tuple[list[StreamAppend], Named]:
        """Return what is to be stored, and what first events among it tell ``Subjects`` once it is durable.

        With everything at hand nothing is waited for. Else it begins again with one subject or key more, so often at most
        as there are of them.

        Raises:
            PayloadShreddedError: the subject was erased. KeyUnavailableError: its current key cannot be had here.
            InvalidInputError: a sensitive value is no JSON, or stands bare under another cipher's marker.
            StoreError: key store, or the receiver's chain, cannot be read now. In all cases nothing is stored.
        """
        starts: list[Start] = []
        for append in appends:
            _gather_starts(append, starts)
        named = Named(starts) if starts else _NOTHING
        way = _Pass(self._ring, self._nonces, named)
        if len(starts) == 1:
            # Most executions are their own subject, whose key has to be made: no use in trying first.
            (subject,) = named.own.values()
            if self._ring.peek(subject) is None and (uses := self._uses(appends, subject, way)):
                await self._ask(subject, uses, way)
        while True:
            try:
                return [self._append(append, way) for append in appends], named
            except _Missing as missing:
                chain_id, asked = missing.chain_id, missing.subject
            if asked is None:
                way.asked[chain_id] = await self._subjects.of(chain_id)
            else:
                await self._ask(asked, max(1, self._uses(appends, asked, way)), way)

    async def _ask(self, subject: str, uses: int, way: _Pass) -> None:
        """Have a key in hand for the rest of the call, whatever the outcome: nobody is asked for this subject again."""
        try:
            way.keys[subject] = await self._ring.sealing(subject, uses)
        except PayloadShreddedError as erased:
            way.erased[subject] = erased

    def _uses(self, appends: Iterable[StreamAppend], subject: str, way: _Pass) -> int:
        """How many values of the subject appends still have to seal."""
        uses = 0
        for append in appends:
            if self._subject(append.stream_id, way) == subject:
                for event in append.events:
                    tree = self._tree(event.type)
                    uses += 0 if tree is None else _count_bare(event, tree)
            if append.outgoing:
                bodies = [out.body for out in append.outgoing if isinstance(out.body, StreamAppend)]
                uses += self._uses(bodies, subject, way)
        return uses

    def _append(self, append: StreamAppend, way: _Pass) -> StreamAppend:
        way.stream_id, way.subject = append.stream_id, self._subject(append.stream_id, way)
        way.sequence = None
        if append.expected_head is not None:
            way.sequence = append.expected_head + 1
        elif append.observation is not None:
            way.sequence = append.observation.head + 1
        events, changed = [], False
        for event in append.events:
            sealed = self._event(event, way)
            changed = changed or sealed is not event
            events.append(sealed)
            if way.sequence is not None:
                way.sequence += 1
        outgoing = append.outgoing
        if outgoing:
            outgoing = tuple([self._outgoing(out, way) for out in outgoing])
            changed = changed or not all(map(is_, outgoing, append.outgoing))
        if not changed:
            return append
        return _with_events(append, tuple(events), outgoing)

    def _outgoing(self, outgoing: Outgoing, way: _Pass) -> Outgoing:
        if not isinstance(outgoing.body, StreamAppend):
            return outgoing
        body = self._append(outgoing.body, way)
        return outgoing if body is outgoing.body else replace(outgoing, body=body)

    def _event(self, event: NewEvent, way: _Pass) -> NewEvent:
        tree, metadata = self._tree(event.type), event.metadata
        if tree is None or "quarantine" in metadata:
            # The copy of a held message is what was stored, byte for byte.
            return event
        if way.subject in way.erased:
            return _after(way.erased[way.subject], event, tree)
        marked = SEAL in metadata
        way.event_id, way.cipher = event.id, _cipher_before(event) if marked else None
        covers = way.covers = []
        try:
            data = change(event.data, tree, way.seal)
        except NotAtHand:
            raise _Missing(routing_id(way.stream_id), way.subject) from None
        if not covers:
            return event
        if marked or len(covers) > 1:
            covers = sorted({*_covers_before(event), *covers})
        return NewEvent(event.id, event.type, data, {**metadata, SEAL: written_marker(CIPHER, tuple(covers))})

    def _subject(self, stream_id: str, way: _Pass) -> str | None:
        """Whose key seals a stream: as its own first event says, if that is sealed in this call; None: to be asked for."""
        own = way.named.own.get(stream_id) or self._subjects.peek(stream_id)
        if own is not None:
            return own
        chain_id = routing_id(stream_id)
        return way.named.subjects.get(chain_id) or way.asked.get(chain_id)


def _gather_starts(append: StreamAppend, starts: list[Start]) -> None:
    if append.expected_head is None or append.expected_head == NO_EVENTS:
        starts += [(append.stream_id, e) for e in append.events if is_start(append.stream_id, e)]
    for outgoing in append.outgoing:
        if isinstance(outgoing.body, StreamAppend):
            _gather_starts(outgoing.body, starts)


def _after(erased: PayloadShreddedError, event: NewEvent, tree: Node) -> NewEvent:
    """What of an erased subject may still be stored, erased at birth."""
    if not _count_bare(event, tree):
        return event
    if event.type not in AFTER_ERASURE:
        raise erased
    return replace(event, data=change(event.data, tree, _erase))


def _count_bare(event: NewEvent, tree: Node) -> int:
    """How many values are still to be sealed. Null is none: nothing stands there."""
    cipher, count = _cipher_before(event), 0

    def look(value: Json, _pattern: str, _path: str) -> Json:
        nonlocal count
        count += _is_bare(value, cipher)
        return value

    change(event.data, tree, look)
    return count


def _is_bare(value: Json, cipher: str | None) -> bool:
    """Whether a value is still to be sealed; beside a marker, an envelope is not (beside ours, one of ours)."""
    if value is None:
        return False
    if cipher is None or not is_sealed_envelope(value):
        return True
    return cipher == CIPHER and value[SEALED_KEY] != CIPHER


def _cipher_before(event: NewEvent) -> str | None:
    """The cipher of an event's own marker: the event was sealed before."""
    marker = event.metadata.get(SEAL)
    if marker is None:
        return None
    cipher = marker.get("cipher") if isinstance(marker, Mapping) else None
    return cipher if isinstance(cipher, str) else None


def _covers_before(event: NewEvent) -> tuple[str, ...]:
    """What an event's own marker covers already."""
    if SEAL not in event.metadata:
        return ()
    marker = read_marker(event.metadata[SEAL])
    if marker is None or marker.cipher != CIPHER:
        raise InvalidInputError(
            f"event {event.type}",
            "a sensitive value stands bare beside the marker of another cipher",
            "append it unmarked, or as it was stored",
        )
    return marker.covers


def _erase(value: Json, _pattern: str, _path: str) -> Json:
    return None if value is None else {SHREDDED_KEY: True}
