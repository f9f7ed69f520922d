"""Python's garbage collector in a process that drives executions."""

from __future__ import annotations

import gc
from typing import Final

ALLOCATIONS: Final = 100_000
"""New containers before a young collection; events are made by the thousand and freed by reference counts."""


def calm_collector() -> None:
    """Leave what stands now out of collections, and collect seldom: called once, before a node opens its stores.

    With the defaults a third of a busy writer's time went into collections that found nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(ALLOCATIONS, 50, 100)
