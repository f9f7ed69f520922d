"""A set of names that may say yes wrongly and never no: it spares most questions to a file (a Bloom filter)."""

from __future__ import annotations

from typing import Final

_BITS: Final = 23
_MASK: Final = (1 << _BITS) - 1
_PROBES: Final = (0, 20, 40)


class NameFilter:
    """Names that were added; one megabyte, whatever their number. At a million, one answer in thirty is a wrong yes.

    Not for keeping: it rests on this process's own hashes. ``add`` and ``may_hold`` may run beside each other.
    """

    def __init__(self) -> None:
        self._bits = bytearray(1 << (_BITS - 3))

    def add(self, name: str) -> None:
        """Add a name."""
        h = hash(name)
        bits = self._bits
        for shift in _PROBES:
            at = h >> shift & _MASK
            bits[at >> 3] |= 1 << (at & 7)

    def may_hold(self, name: str) -> bool:
        """Whether the name may have been added; False is certain."""
        h = hash(name)
        bits = self._bits
        for shift in _PROBES:
            at = h >> shift & _MASK
            if not bits[at >> 3] >> (at & 7) & 1:
                return False
        return True
