"""Random bytes of the operating system, drawn in blocks: a draw for each use would let go of the interpreter each time."""

from __future__ import annotations

import os
from typing import Final

_A_BLOCK: Final = 1024


class Entropy:
    """Gives out pieces of ``size`` random bytes, each once, to any thread.

    A forked child starts afresh, or it and its parent would give out the same ones.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._pieces: list[bytes] = []
        os.register_at_fork(after_in_child=self._pieces.clear)

    def __call__(self) -> bytes:
        """Return the next piece."""
        while True:
            try:
                return self._pieces.pop()
            except IndexError:  # another thread may take what this one draws
                block = os.urandom(self._size * _A_BLOCK)
                self._pieces.extend(block[at : at + self._size] for at in range(0, len(block), self._size))
