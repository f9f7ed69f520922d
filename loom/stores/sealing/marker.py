"""The capability marker, and what a node can open (system.md 2.1 and 2.2; clauses.md, point 4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from loom.stores.sealing.paths import is_below

if TYPE_CHECKING:
    from loom.schemas.envelope import Json

VERSION: Final = 1
SEAL: Final = "seal"
"""Key of the marker in an event's metadata."""

_FIELDS: Final = frozenset({"v", "cipher", "covers"})


@dataclass(frozen=True, slots=True)
class SealMarker:
    """What was sealed in one envelope: ``covers`` is sorted, without repeats, patterns as configured."""

    cipher: str
    covers: tuple[str, ...]
    v: int = VERSION

    def is_of(self, kind: str) -> bool:
        """Whether it speaks of this type of event, and of no other."""
        return all(entry.partition(".")[0] == kind for entry in self.covers)

    def to_json(self) -> dict[str, Json]:
        """As it stands in metadata."""
        return {"v": self.v, "cipher": self.cipher, "covers": list(self.covers)}


_MOST_WRITTEN: Final = 4096
_written: dict[tuple[str, tuple[str, ...]], dict[str, Json]] = {}
_read: dict[int, tuple[Json, SealMarker]] = {}


def written_marker(cipher: str, covers: tuple[str, ...]) -> dict[str, Json]:
    """A marker as it stands in metadata: one object for all events that it is of, which nobody changes."""
    made = _written.get((cipher, covers))
    if made is None:
        if len(_written) >= _MOST_WRITTEN:
            _written.clear()
            _read.clear()
        marker = SealMarker(cipher, covers)
        made = _written[cipher, covers] = marker.to_json()
        _read[id(made)] = made, marker  # held, so that no other object comes to its place
    return made


def read_marker(value: Json) -> SealMarker | None:
    """Return the marker that metadata holds; None where it is of another version or malformed, so not to be opened."""
    written = _read.get(id(value))
    if written is not None and written[0] is value:
        return written[1]
    if not isinstance(value, Mapping) or value.keys() != _FIELDS:
        return None
    version, cipher, covers = value["v"], value["cipher"], value["covers"]
    if type(version) is not int or version != VERSION or not isinstance(cipher, str):
        return None
    if not isinstance(covers, list | tuple) or not all(type(entry) is str for entry in covers):
        return None
    return _marker(cipher, tuple(covers))


@lru_cache(4096)
def _marker(cipher: str, covers: tuple[str, ...]) -> SealMarker | None:
    """A fleet writes few markers, many times over."""
    return SealMarker(cipher, covers) if covers and all(map(_is_pattern, covers)) else None


def _is_pattern(entry: str) -> bool:
    return "." in entry and all(entry.split("."))


@dataclass(frozen=True, slots=True)
class SealingCapability:
    """What this node seals and therefore opens: the cipher, and every ``EVENT_TYPE.path``.

    It is judged when it is asked: ``covers`` may have grown since.
    """

    _cipher: str
    _covers: Callable[[], tuple[str, ...]]

    @property
    def cipher(self) -> str:
        """Id of the cipher."""
        return self._cipher

    @property
    def covers(self) -> tuple[str, ...]:
        """Every pattern, sorted."""
        return self._covers()

    def opens(self, marker: Json | SealMarker) -> bool:
        """Whether an envelope with this marker can be opened here: same cipher, every entry equal to or below ours."""
        read = marker if isinstance(marker, SealMarker) else read_marker(marker)
        return (
            read is not None
            and read.v == VERSION
            and read.cipher == self._cipher
            and covered(read.covers, self._covers())
        )


@lru_cache(4096)
def covered(entries: tuple[str, ...], ours: tuple[str, ...]) -> bool:
    """Whether every entry, and there is one, is equal to or below one of ours."""
    return bool(entries) and all(any(is_below(entry, mine) for mine in ours) for entry in entries)
