"""Sealing on the way in: what is appended, and what leaves for other chains with it (system.md 2.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Final

from loom.errors import InvalidInputError, PayloadShreddedError
from loom.ids import routing_id
from loom.kernel.guard import SEALED_KEY, SHREDDED_KEY, is_sealed_envelope
from loom.schemas.envelope import Json, Kind, NewEvent
from loom.stores.contracts import Outgoing, StreamAppend
from loom.stores.sealing.cipher import CIPHER, seal_value
from loom.stores.sealing.marker import SEAL, SealMarker, read_marker
from loom.stores.sealing.nonces import NoncePlace, NonceSource
from loom.stores.sealing.paths import Node, SensitiveMap, change
from loom.stores.sealing.subjects import Start, Subjects, is_start, named_by

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from loom.stores.keys.contract import DataKey
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
        starts = list(_starts(appends))
        named = named_by(starts)
        return [await self._append(append, named) for append in appends], starts

    async def _append(self, append: StreamAppend, named: Mapping[str, str]) -> StreamAppend:
        first = None
        if append.expected_head is not None:
            first = append.expected_head + 1
        elif append.observation is not None:
            first = append.observation.head + 1
        events = tuple(
            [
                await self._event(append.stream_id, None if first is None else first + place, event, named)
                for place, event in enumerate(append.events)
            ]
        )
        outgoing = tuple([await self._outgoing(out, named) for out in append.outgoing])
        if all(map(is_, (*events, *outgoing), (*append.events, *append.outgoing))):
            return append
        return replace(append, events=events, outgoing=outgoing)

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
        covers = _bare(event, tree)
        if not covers:
            return event
        before = _covers_before(event)
        try:
            key = await self._ring.sealing(await self._subject(stream_id, event, named), len(covers))
        except PayloadShreddedError:
            if event.type not in AFTER_ERASURE:
                raise
            return replace(event, data=change(event.data, tree, _erase))
        place = NoncePlace(stream_id, sequence, event.id, "")
        data = change(event.data, tree, partial(self._seal, key, place, _cipher_before(event)))
        marker = SealMarker(CIPHER, tuple(sorted({*before, *covers})))
        return replace(event, data=data, metadata={**event.metadata, SEAL: marker.to_json()})

    def _seal(
        self, key: DataKey, place: NoncePlace, cipher: str | None, value: Json, _pattern: str, path: str
    ) -> Json:
        if not _is_bare(value, cipher):
            return value
        return seal_value(key, value, self._nonces(replace(place, path=path)))

    async def _subject(self, stream_id: str, event: NewEvent, named: Mapping[str, str]) -> str:
        if is_start(stream_id, event):
            return named[stream_id]
        chain = routing_id(stream_id)
        return self._subjects.peek(chain) or named.get(chain) or await self._subjects.of(chain)


def _starts(appends: Iterable[StreamAppend]) -> Iterator[Start]:
    for append in appends:
        for event in append.events:
            if is_start(append.stream_id, event):
                yield append.stream_id, event
        yield from _starts(out.body for out in append.outgoing if isinstance(out.body, StreamAppend))


def _bare(event: NewEvent, tree: Node) -> list[str]:
    """The patterns of the values still to be sealed, one for each value. Null is none: nothing stands there."""
    cipher = _cipher_before(event)
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
