"""Where a run stands."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """PARKED from the moment the park is in the journal, OVER from the moment the end is."""

    RUNNING = "running"
    PARKED = "parked"
    OVER = "over"
    STOPPED = "stopped"
