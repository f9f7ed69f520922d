"""Sealing on the way in: what is appended, and what leaves for other chains with it (system.md 2.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import is_
from typing import TYPE_CHECKING, Final

from loom.errors import InvalidInputError, PayloadShreddedError
from loom.ids import routing_id
from loom.kernel.guard import SEALED_KEY, SHREDDED_KEY, is_sealed_envelope
from loom.schemas.envelope import Json, Kind, NewEvent
from loom.stores.contracts import Outgoing, StreamAppend
from loom.stores.sealing.cipher import CIPHER, seal_value
from loom.stores.sealing.keyring import NotAtHand
from loom.stores.sealing.marker import SEAL, read_marker, written_marker
from loom.stores.sealing.nonces import NoncePlace, NonceSource
from loom.stores.sealing.paths import Node, SensitiveMap, change
from loom.stores.sealing.subjects import Start, Subjects, is_start, named_by

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loom.stores.keys.contract import DataKey
    from loom.stores.sealing.keyring import KeyRing

AFTER_ERASURE: Final = frozenset(
    {Kind.EXECUTION_CANCELLED, Kind.EXECUTION_FAILED, Kind.EXECUTION_DENIED, Kind.OUTCOME_RECORDED}
)
"""Kinds that an erased execution may still get: with its keys gone, their sensitive fields are erased at birth."""


@dataclass(slots=True)
class _Given:
    """What one call goes by: the subjects of chains, keys asked for with uses enough for all of it, and who was erased."""

    subjects: dict[str, str]
    keys: dict[str, DataKey] = field(default_factory=dict)
    erased: dict[str, PayloadShreddedError] = field(default_factory=dict)


class _Missing(Exception):  # noqa: N818 - a signal between the parts of a sealer
    """A chain's subject, or a subject's key, has to be asked for."""

    def __init__(self, chain_id: str, subject: str | None) -> None:
        super().__init__()
        self.chain_id, self.subject = chain_id, subject


class Sealer:
    """Seals the sensitive fields of appends."""

    def __init__(
        self, sensitive: SensitiveMap, ring: KeyRing, subjects: Subjects, nonces: NonceSource
    ) -> None:
        self._sensitive, self._ring, self._subjects, self._nonces = sensitive, ring, subjects, nonces

    async def seal(self, appends: Sequence[StreamAppend]) -> tuple[list[StreamAppend], list[Start]]:
        """Return what is to be stored, and the first events of logs among it, for ``Subjects`` once it is durable.

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
        given = _Given(named_by(starts) if starts else {})
        while True:
            try:
                return [self._append(append, given) for append in appends], starts
            except _Missing as missing:
                asked = missing
            await self._ask(asked, appends, given)

    async def _ask(self, missing: _Missing, appends: Sequence[StreamAppend], given: _Given) -> None:
        subject = missing.subject
        if subject is None:
            given.subjects[missing.chain_id] = await self._subjects.of(missing.chain_id)
            return
        uses = sum(self._uses(append, subject, given) for append in appends)
        try:
            given.keys[subject] = await self._ring.sealing(subject, uses)
        except PayloadShreddedError as erased:
            given.erased[subject] = erased

    def _uses(self, append: StreamAppend, subject: str, given: _Given) -> int:
        """How many values of the subject an append still has to seal."""
        uses = 0
        for event in append.events:
            tree = self._sensitive.tree(event.type)
            if tree is not None and self._subject(append.stream_id, event, given) == subject:
                uses += _count_bare(event, tree)
        bodies = (out.body for out in append.outgoing if isinstance(out.body, StreamAppend))
        return uses + sum(self._uses(body, subject, given) for body in bodies)

    def _append(self, append: StreamAppend, given: _Given) -> StreamAppend:
        stream_id = append.stream_id
        place = None
        if append.expected_head is not None:
            place = append.expected_head + 1
        elif append.observation is not None:
            place = append.observation.head + 1
        events, changed = [], False
        for event in append.events:
            sealed = self._event(stream_id, place, event, given)
            changed = changed or sealed is not event
            events.append(sealed)
            place = None if place is None else place + 1
        outgoing = append.outgoing
        if outgoing:
            outgoing = tuple([self._outgoing(out, given) for out in outgoing])
            changed = changed or not all(map(is_, outgoing, append.outgoing))
        if not changed:
            return append
        return StreamAppend(
            stream_id,
            tuple(events),
            append.expected_head,
            append.fence,
            append.observation,
            append.backlog_cap,
            append.consumed,
            outgoing,
        )

    def _outgoing(self, outgoing: Outgoing, given: _Given) -> Outgoing:
        if not isinstance(outgoing.body, StreamAppend):
            return outgoing
        body = self._append(outgoing.body, given)
        return outgoing if body is outgoing.body else replace(outgoing, body=body)

    def _event(self, stream_id: str, sequence: int | None, event: NewEvent, given: _Given) -> NewEvent:
        tree = self._sensitive.tree(event.type)
        if tree is None or "quarantine" in event.metadata:
            # The copy of a held message is what was stored, byte for byte.
            return event
        metadata = event.metadata
        cipher = _cipher_before(event)
        subject = self._subject(stream_id, event, given)
        covers: list[str] = []

        def seal(value: Json, pattern: str, path: str) -> Json:
            if value is None or (cipher is not None and not _is_bare(value, cipher)):
                return value
            covers.append(pattern)
            key = given.keys.get(subject) if subject is not None and given.keys else None
            if key is None:
                key = self._ring.use(subject)
            return seal_value(key, value, self._nonces(NoncePlace(stream_id, sequence, event.id, path)))

        if given.erased and subject in given.erased:
            return _after(given.erased[subject], event, tree)
        try:
            data = change(event.data, tree, seal)
        except NotAtHand:
            raise _Missing(routing_id(stream_id), subject) from None
        if not covers:
            return event
        if len(covers) > 1 or SEAL in metadata:
            covers = sorted({*_covers_before(event), *covers})
        marker = written_marker(CIPHER, tuple(covers))
        return NewEvent(event.id, event.type, data, {**metadata, SEAL: marker})

    def _subject(self, stream_id: str, event: NewEvent, given: _Given) -> str | None:
        if is_start(stream_id, event):
            return given.subjects[stream_id]
        chain = routing_id(stream_id)
        return self._subjects.peek(chain) or given.subjects.get(chain)


def _gather_starts(append: StreamAppend, starts: list[Start]) -> None:
    starts += [(append.stream_id, event) for event in append.events if is_start(append.stream_id, event)]
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
