"""What this process seals and appends, as it was given, until the append is answered.

A listener is told of it when it is durable, and would open what was sealed a moment before. Only the very objects that
were sealed are known here: whatever was encoded on its way, or comes from elsewhere, is opened with its key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loom.stores.sealing.marker import SEAL

if TYPE_CHECKING:
    from collections.abc import Iterable

    from loom.schemas.envelope import Envelope, Json, NewEvent
    from loom.stores.contracts import StreamAppend

_Data = dict[str, "Json"]
Kept = list[int]


class OwnEvents:
    """The data of sealed events and what it was sealed from; as many as appends are under way."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[_Data, _Data]] = {}

    def keep(self, given: Iterable[StreamAppend], sealed: Iterable[StreamAppend]) -> Kept:
        """Remember what these appends seal; what is returned is for :meth:`drop`."""
        kept: Kept = []
        for append, made in zip(given, sealed, strict=True):
            if made is append:
                continue
            for before, now in zip(append.events, made.events, strict=True):
                if now is not before and _is_all_sealed_here(before, now):
                    key = id(now.data)
                    # Held, so that no other object comes to its place.
                    self._kept[key] = now.data, before.data
                    kept.append(key)
        return kept

    def drop(self, kept: Kept) -> None:
        """Forget them: their append was answered."""
        for key in kept:
            self._kept.pop(key, None)

    def of(self, envelope: Envelope) -> _Data | None:
        """What an envelope's data was sealed from, if it is the very object that was sealed here."""
        found = self._kept.get(id(envelope.data))
        return found[1] if found is not None and found[0] is envelope.data else None


def _is_all_sealed_here(before: NewEvent, now: NewEvent) -> bool:
    """Whether an event was sealed whole just now: one with a marker before may hold what others sealed."""
    return now.data is not before.data and SEAL in now.metadata and SEAL not in before.metadata
