"""A thread that waits for commits, so that the writer's own can form the next transaction meanwhile."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Outcome:
    """What became of one call: ``done``, and then ``result`` raises what it raised."""

    def __init__(self, call: Callable[[], None], told: Callable[[], None]) -> None:
        self._call, self._told = call, told
        self._error: BaseException | None = None
        self.done = False

    def run(self) -> None:
        """Make the call, and say so."""
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001 - raised again where the outcome is asked for
            self._error = error
        self.done = True
        self._told()

    def result(self) -> None:
        """Raise what the call raised."""
        assert self.done
        if self._error is not None:
            raise self._error


class Committer:
    """The thread, from ``start`` to ``stop``; one call at a time."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Outcome | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"loom-commit-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after the call that it makes."""
        self._calls.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def begin(self, call: Callable[[], None], told: Callable[[], None]) -> Outcome:
        """Make ``call`` on the thread; ``told`` is called there once its outcome is known."""
        outcome = Outcome(call, told)
        self._calls.put(outcome)
        return outcome

    def _run(self) -> None:
        while (outcome := self._calls.get()) is not None:
            outcome.run()
