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
        if known is not None:
            return known
        held = self._sealed.get(execution_id)
        return held[1] if held is not None and held[0] > self._now() else None

    def put(self, started: Envelope, *, sealed: bool = False) -> Envelope:
        """Remember what verbs need of a first event, and return it. ``sealed``: it is at rest, if not marked here."""
        known = started.data
        data: dict[str, Json] = {key: known[key] for key in KEPT if key in known}
        slim = Envelope(
            started.id, started.stream_id, 0, started.type, started.timestamp, data, started.metadata
        )
        if sealed or SEAL in started.metadata:
            self._keep_sealed(slim)
        else:
            self._open[slim.stream_id] = slim
            if len(self._open) > MAX_FIRSTS:
                self._open.popitem(last=False)
        return slim

    def drop(self, execution_id: str) -> None:
        """Forget one."""
        self._open.pop(execution_id, None)
        self._sealed.pop(execution_id, None)

    def _keep_sealed(self, slim: Envelope) -> None:
        """Keep one for a moment, and forget those that stood theirs: the oldest stand first."""
        now, held = self._now(), self._sealed
        held.pop(slim.stream_id, None)
        held[slim.stream_id] = (now + FRESH_S, slim)
        while len(held) > MAX_FIRSTS or next(iter(held.values()))[0] <= now:
            held.popitem(last=False)
