"""What a node takes from the machine that it runs on: clocks and chance. Injected, so that a simulation repeats itself."""

from __future__ import annotations

import random
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Clocks in seconds (``monotonic`` never goes back, ``wall`` may), hex tokens of so many bytes, draws from [0, 1)."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    token: Callable[[int], str] = secrets.token_hex
    draw: Callable[[], float] = random.random


SYSTEM: Final = Surroundings()
