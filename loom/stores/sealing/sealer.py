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
from loom.stores.contracts import Outgoing, StreamAppend
from loom.stores.sealing.cipher import CIPHER, seal_value
from loom.stores.sealing.keyring import NotAtHand
from loom.stores.sealing.marker import SEAL, read_marker, written_marker
from loom.stores.sealing.nonces import NoncePlace, NonceSource
from loom.stores.sealing.paths import Node, SensitiveMap, change
from loom.stores.sealing.subjects import Start, Subjects, is_start, named_by

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loom.stores.sealing.keyring import KeyRing

AFTER_ERASURE: Final = frozenset(
    {Kind.EXECUTION_CANCELLED, Kind.EXECUTION_FAILED, Kind.EXECUTION_DENIED, Kind.OUTCOME_RECORDED}
)
"""Kinds that an erased execution may still get: with its keys gone, their sensitive fields are erased at birth."""


class Sealer:
    """Seals the sensitive fields of appends."""

    def __init__(
        self, sensitive: SensitiveMap, ring: KeyRing, subjects: Subjects, nonces: NonceSource
    ) -> None:
        self._sensitive, self._ring, self._subjects, self._nonces = sensitive, ring, subjects, nonces

    async def seal(self, appends: Sequence[StreamAppend]) -> tuple[list[StreamAppend], list[Start]]:
        """Return what is to be stored, and the first events of logs among it, for ``Subjects`` once it is durable.

        Raises:
            PayloadShreddedError: the subject was erased. KeyUnavailableError: its current key cannot be had here.
            InvalidInputError: a sensitive value is no JSON, or stands bare under another cipher's marker.
            StoreError: key store, or the receiver's chain, cannot be read now. In all cases nothing is stored.
        """
        starts: list[Start] = []
        for append in appends:
            _gather_starts(append, starts)
        named = named_by(starts) if starts else {}
        return [await self._append(append, named) for append in appends], starts

    async def _append(self, append: StreamAppend, named: Mapping[str, str]) -> StreamAppend:
        place = None
        if append.expected_head is not None:
            place = append.expected_head + 1
        elif append.observation is not None:
            place = append.observation.head + 1
        events, changed = [], False
        for event in append.events:
            sealed = await self._event(append.stream_id, place, event, named)
            changed = changed or sealed is not event
            events.append(sealed)
            place = None if place is None else place + 1
        outgoing = append.outgoing
        if outgoing:
            outgoing = tuple([await self._outgoing(out, named) for out in outgoing])
            changed = changed or not all(map(is_, outgoing, append.outgoing))
        return replace(append, events=tuple(events), outgoing=outgoing) if changed else append

    async def _outgoing(self, outgoing: Outgoing, named: Mapping[str, str]) -> Outgoing:
        if not isinstance(outgoing.body, StreamAppend):
            return outgoing
        body = await self._append(outgoing.body, named)
        return outgoing if body is outgoing.body else replace(outgoing, body=body)

    async def _event(
        self, stream_id: str, sequence: int | None, event: NewEvent, named: Mapping[str, str]
    ) -> NewEvent:
        tree = self._sensitive.tree(event.type)
        if tree is None or "quarantine" in event.metadata:
            # The copy of a held message is what was stored, byte for byte.
            return event
        cipher = _cipher_before(event)
        subject, key = self._known_subject(stream_id, event, named), None
        covers: list[str] = []

        def seal(value: Json, pattern: str, path: str) -> Json:
            if value is None or (cipher is not None and not _is_bare(value, cipher)):
                return value
            covers.append(pattern)
            nonce = self._nonces(NoncePlace(stream_id, sequence, event.id, path))
            return seal_value(key or self._ring.use(subject), value, nonce)

        try:
            data = change(event.data, tree, seal)
        except NotAtHand:
            covers = _bare(event, tree, cipher)
            try:
                key = await self._ring.sealing(
                    subject or await self._subjects.of(routing_id(stream_id)), len(covers)
                )
            except PayloadShreddedError:
                if event.type not in AFTER_ERASURE:
                    raise
                return replace(event, data=change(event.data, tree, _erase))
            covers.clear()
            data = change(event.data, tree, seal)
        if not covers:
            return event
        if SEAL in event.metadata or len(covers) > 1:
            covers = sorted({*_covers_before(event), *covers})
        marker = written_marker(CIPHER, tuple(covers))
        return NewEvent(event.id, event.type, data, {**event.metadata, SEAL: marker})

    def _known_subject(self, stream_id: str, event: NewEvent, named: Mapping[str, str]) -> str | None:
        if is_start(stream_id, event):
            return named[stream_id]
        chain = routing_id(stream_id)
        return self._subjects.peek(chain) or named.get(chain)


def _gather_starts(append: StreamAppend, starts: list[Start]) -> None:
    starts += [(append.stream_id, event) for event in append.events if is_start(append.stream_id, event)]
    for outgoing in append.outgoing:
        if isinstance(outgoing.body, StreamAppend):
            _gather_starts(outgoing.body, starts)


def _bare(event: NewEvent, tree: Node, cipher: str | None) -> list[str]:
    """The patterns of the values still to be sealed, one for each value. Null is none: nothing stands there."""
    covers: list[str] = []

    def look(value: Json, pattern: str, _path: str) -> Json:
        if _is_bare(value, cipher):
            covers.append(pattern)
        return value

    change(event.data, tree, look)
    return covers


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
