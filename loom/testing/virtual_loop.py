"""An event loop whose time passes only when nothing else can happen, or when whoever steps it says so.

Everything on it is decided by the order of its callbacks: the same program runs the same way each time. It has no
sockets, no processes, no signals; work in threads is not waited for.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from asyncio import events
from typing import TYPE_CHECKING, Any, Final, TypeVar

from loom.errors import DeadlineExceededError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

R = TypeVar("R")

_RESOLUTION_S: Final = 1e-9
_LAST_TURNS: Final = 64
NEVER: Final = float("inf")


class _Selector:
    """Waits for nothing: it lets time pass instead."""

    def __init__(self, wait: Callable[[float | None], None]) -> None:
        self._wait = wait

    def select(self, timeout: float | None = None) -> list[Any]:
        """Let ``timeout`` seconds pass; None: nothing will ever happen."""
        if timeout is None or timeout > 0:
            self._wait(timeout)
        return []

    def close(self) -> None:
        """There is nothing to close."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs on time of its own, from ``start_s``; or, given ``clock``, on that of whoever steps it with ``turn``."""

    def __init__(self, start_s: float = 0.0, clock: Callable[[], float] | None = None) -> None:
        super().__init__()
        self._now_s = start_s
        self._outer = clock
        self._interrupted = False
        self._selector = _Selector(self._pass_time)
        self._clock_resolution = _RESOLUTION_S

    def time(self) -> float:
        """Seconds on its clock."""
        return self._now_s if self._outer is None else self._outer()

    def is_ready(self) -> bool:
        """Whether something is to be run now, timers apart."""
        return bool(self._ready)  # type: ignore[attr-defined]

    def next_timer(self) -> float:
        """When the earliest timer is due; infinite: there is none."""
        scheduled = self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0]._cancelled:  # noqa: SLF001 - as the loop itself drops them
            handle = heapq.heappop(scheduled)
            handle._scheduled = False  # noqa: SLF001
        return scheduled[0]._when if scheduled else NEVER  # noqa: SLF001

    def turn(self, most: int = 1) -> None:
        """Run what is ready or due now, as the loop itself would; up to ``interrupt``, where that is called.

        What becomes ready meanwhile runs too, in up to ``most`` rounds in all.
        """
        self._thread_id = threading.get_ident()
        events._set_running_loop(self)  # noqa: SLF001 - what run_forever does
        ready, scheduled = self._ready, self._scheduled  # type: ignore[attr-defined]
        now, self._interrupted = self.time() + _RESOLUTION_S, False
        try:
            while scheduled and scheduled[0]._when < now:  # noqa: SLF001
                handle = heapq.heappop(scheduled)
                handle._scheduled = False  # noqa: SLF001
                ready.append(handle)
            while ready and most:
                most -= 1
                for _ in range(len(ready)):
                    handle = ready.popleft()
                    if not handle._cancelled:  # noqa: SLF001
                        handle._run()  # noqa: SLF001
                    if self._interrupted:
                        return
        finally:
            self._thread_id = None  # type: ignore[assignment]
            events._set_running_loop(None)  # noqa: SLF001 - what run_forever does

    def interrupt(self) -> None:
        """Let the turn end with the callback that runs now, as if that blocked the loop: the others wait."""
        self._interrupted = True

    def end(self) -> None:
        """Cancel whatever is left, let it end as far as it does at once, and close."""
        self.set_exception_handler(_ignored)
        for _ in range(_LAST_TURNS):
            tasks = asyncio.all_tasks(self)
            if not tasks:
                break
            for task in tasks:
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001 - ended on purpose
                task.cancel()
            self.turn()
        self.close()

    def _check_closed(self) -> None:
        """What ends later than its loop asks for nothing that matters."""

    def _pass_time(self, timeout: float | None) -> None:
        if self._outer is not None:
            return
        if timeout is None:
            raise DeadlineExceededError("anything that could wake this loop", 0)
        self._now_s += timeout

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody waits in a selector."""


def _ignored(_loop: asyncio.AbstractEventLoop, _context: dict[str, Any]) -> None:
    """What ends badly on a loop that ends is nobody's business."""


def run_virtually(main: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine to its end on a virtual loop, in no real time.

    Raises:
        DeadlineExceededError: it waits for something that no time brings.
    """
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.end()
