"""First events of executions, as verbs need them: a bounded cache in which nothing that was sealed outlives an erasure.

A first event never changes, so it is remembered. One that was sealed at rest is remembered for a moment only, as its key is:
an erasure is felt within a second, on nodes too that hear nothing of the log (system.md 0, "Erasure").
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from loom.schemas.envelope import Envelope

if TYPE_CHECKING:
    from collections.abc import Callable

    from loom.schemas.envelope import Json

MAX_FIRSTS: Final = 16_384
FRESH_S: Final = 0.25
"""With the half second for which keys are used from memory: less than a second."""
KEPT: Final = ("workflow", "chainId", "subject", "principal", "parent")
SEAL: Final = "seal"


class Firsts:
    """First events without their inputs. ``now`` is a monotonic clock in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._open: OrderedDict[str, Envelope] = OrderedDict()
        self._sealed: OrderedDict[str, tuple[float, Envelope]] = OrderedDict()

    def get(self, execution_id: str) -> Envelope | None:
        """The first event, None where it is not known (any more)."""
        known = self._open.get(execution_id)
        if known is None and self._sealed:
            self._expire()
            held = self._sealed.get(execution_id)
            known = None if held is None else held[1]
        return known

    def put(self, started: Envelope, *, sealed: bool = False) -> Envelope:
        """Remember what verbs need of a first event, and return it. ``sealed``: it is at rest, if not marked here."""
        known = started.data
        data: dict[str, Json] = {key: known[key] for key in KEPT if key in known}
        slim = Envelope(
            started.id, started.stream_id, 0, started.type, started.timestamp, data, started.metadata
        )
        if sealed or SEAL in started.metadata:
            self._expire()
            self._sealed.pop(started.stream_id, None)
            self._sealed[started.stream_id] = (self._now() + FRESH_S, slim)
        else:
            self._open[started.stream_id] = slim
        for held in (self._open, self._sealed):
            if len(held) > MAX_FIRSTS:
                held.popitem(last=False)
        return slim

    def drop(self, execution_id: str) -> None:
        """Forget one."""
        self._open.pop(execution_id, None)
        self._sealed.pop(execution_id, None)

    def _expire(self) -> None:
        """Forget what stood its time; the oldest stand first."""
        now = self._now()
        while self._sealed and next(iter(self._sealed.values()))[0] <= now:
            self._sealed.popitem(last=False)
