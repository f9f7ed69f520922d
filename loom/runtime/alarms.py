"""Alarms inside one process: callbacks at an instant of the runtime's clock.

For what does not outlive the process: the delay before a retry, the timeout of a step, a live timer of a flow whose
other branches still run. The clock may be virtual: alarms are looked at again at least every ``POLL_MS`` of real
time, and at once after ``kick``.
"""

from __future__ import annotations

import asyncio
import heapq
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from loom.stores.contracts import Clock

POLL_MS: Final = 100


class Alarm:
    """A callback that waits; ``cancel`` gives it up."""

    __slots__ = ("callback", "due")

    def __init__(self, due: int, callback: Callable[[], None]) -> None:
        self.due = due
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Give it up; idempotent."""
        self.callback = None


class Alarms:
    """A heap of alarms and one timer of the event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._heap: list[tuple[int, int, Alarm]] = []
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def at(self, due: int, callback: Callable[[], None]) -> Alarm:
        """Call back at ``due`` (milliseconds since the epoch), or soon where that has passed."""
        alarm = Alarm(due, callback)
        self._count += 1
        heapq.heappush(self._heap, (due, self._count, alarm))
        if self._heap[0][2] is alarm:
            self._arm()
        return alarm

    def kick(self) -> None:
        """Look at the clock now: it was moved."""
        self._fire()

    @property
    def next_due(self) -> int | None:
        """When the next alarm is due; None where none waits."""
        while self._heap and self._heap[0][2].callback is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def close(self) -> None:
        """Forget every alarm; idempotent."""
        self._closed = True
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self.next_due
        if due is not None and not self._closed:
            wait_ms = min(max(due - self._clock(), 0), POLL_MS)
            self._timer = self._loop.call_later(wait_ms / 1000, self._fire)

    def _fire(self) -> None:
        now = self._clock()
        while (due := self.next_due) is not None and due <= now:
            alarm = heapq.heappop(self._heap)[2]
            callback, alarm.callback = alarm.callback, None
            if callback is not None:
                callback()
        self._arm()
