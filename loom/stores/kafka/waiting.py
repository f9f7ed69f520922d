"""The line before a writer: requests that wait for a transaction, and reads that wait for one to commit."""

from __future__ import annotations

import queue
from collections import deque
from typing import TYPE_CHECKING

from loom.errors import NotOwnerError, OutcomeUnknownError, StorageWriteError
from loom.stores.kafka.pending import Answers, Decider, Pending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from loom.errors import LoomError


class Waiting:
    """What waits. Only ``put``, ``wake`` and ``length`` are for other threads than the writer's.

    ``stands`` says (and answers) whether a request of a transaction that seemed to fail stands in the log all the same.

    Attributes:
        line: requests in the order in which they came; those of a transaction that failed are in front again.
        alone: requests to be tried alone, each in a transaction of its own.
        deciders: reads for the next commit.
        answers: what is on its way back.
    """

    def __init__(self, partition: int, stands: Callable[[Pending], bool]) -> None:
        self._partition, self._stands = partition, stands
        self._queue: queue.SimpleQueue[Pending | Decider | None] = queue.SimpleQueue()
        self.line: deque[Pending] = deque()
        self.alone: deque[Pending] = deque()
        self.deciders: list[Decider] = []
        self.answers = Answers()

    def put(self, item: Pending | Decider) -> None:
        """Queue a write or a deciding read."""
        if item.future is not None:
            self.answers.expect(item)
        self._queue.put(item)

    def wake(self) -> None:
        """End an ``intake`` that waits."""
        self._queue.put(None)

    def length(self) -> int:
        """How much waits, roughly."""
        return self._queue.qsize() + len(self.line) + len(self.alone)

    def intake(self, patience_s: float = 0.0) -> None:
        """Take what was queued; wait for something up to ``patience_s`` if nothing was."""
        try:
            item = self._queue.get(timeout=patience_s) if patience_s > 0 else self._queue.get_nowait()
            while True:
                if type(item) is Pending:
                    self.line.append(item)
                elif type(item) is Decider:
                    self.deciders.append(item)
                item = self._queue.get_nowait()
        except queue.Empty:
            return

    def put_back(self, requests: Iterable[Pending]) -> None:
        """Put requests in front again, in their order."""
        self.line.extendleft(reversed([*requests]))

    def gone(self, pending: Pending) -> bool:
        """Whether a request is no longer to be tried; it is answered."""
        if pending.cancelled:
            self.answers.forget(pending)
            return True
        if not pending.expired:
            return False
        problem = "its deadline passed while it waited for the log"
        if pending.unknown:
            self.answers.give(pending, None, OutcomeUnknownError(pending.stream_id, problem))
        elif not self._stands(pending):
            self.answers.give(pending, None, StorageWriteError(pending.stream_id, problem))
        return True

    def expire(self) -> None:
        """Answer whatever waited past its deadline, and send the answers."""
        self._keep(lambda pending: not self.gone(pending))
        self.deciders = [decider for decider in self.deciders if not decider.future.done()]
        self.answers.send()

    def reread(self) -> None:
        """The log was read to its end behind a fence: nothing that waits is unknown any more, it is there or not."""
        for pending in (*self.line, *self.alone):
            pending.unknown = False

    def settle(self, *, fenced: bool) -> None:
        """The log was read to its end: answer what is there. Behind a rival's fence, the rest was not written."""
        if fenced:
            self.reread()
        self._keep(lambda pending: not self._stands(pending))
        self.answers.send()

    @property
    def unsettled(self) -> bool:
        """Whether the outcome of anything that waits is unknown."""
        return any(pending.unknown for pending in (*self.line, *self.alone))

    def close(self) -> None:
        """Answer everything: this writer will not write it. What is in the writer's hands yet, it cannot tell."""
        self.intake()
        for pending in (*self.line, *self.alone):
            if pending.source is not None:
                continue  # the next owner reads the request again
            error: LoomError = NotOwnerError(self._partition)
            if pending.unknown:
                error = OutcomeUnknownError(pending.stream_id, "its writer stopped meanwhile")
            self.answers.give(pending, None, error)
        self.line.clear()
        self.alone.clear()
        self.deciders.clear()
        self.answers.abandon(self._partition)

    def _keep(self, wanted: Callable[[Pending], bool]) -> None:
        self.line = deque(pending for pending in self.line if wanted(pending))
        self.alone = deque(pending for pending in self.alone if wanted(pending))
