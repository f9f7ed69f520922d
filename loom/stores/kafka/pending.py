"""What waits for a transaction, and how answers go back to event loops."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loom.errors import DeadlineExceededError, NotOwnerError, OutcomeUnknownError
from loom.stores.kafka.wire import PUBLISH
from loom.stores.ops import AppendOps
from loom.stores.rules import streams_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from loom.errors import LoomError
    from loom.stores.ops import WriteOp

_log = logging.getLogger("loom.kafka.writer")


@dataclass(slots=True, eq=False)
class Pending:
    """A write that waits for its verdict, or for the transaction that its answer rests on.

    Exactly one of ``future`` (of ``loop``) and ``source`` is set: a request of another node has the ``source`` topic and
    ``offset`` it was read from, and an op of None where it is only to be recorded as done with.
    """

    op: WriteOp | None
    deadline: float
    origin: str | None = None
    future: asyncio.Future[Any] | None = None
    loop: asyncio.AbstractEventLoop | None = None
    source: str | None = None
    offset: int = -1
    reply: Callable[[Any, Exception | None], None] | None = None
    failures: int = 0
    """Transactions with it that did not commit."""
    tried: bool = False
    """Whether one of them may have committed after all: it may stand in the log."""
    unknown: bool = False
    """Whether the log has not been read since."""
    refusal: LoomError | None = None
    """Why it is not to be tried again."""

    @property
    def stream_id(self) -> str:
        """A stream that it is about, for messages."""
        return next(iter(self.streams()), "")

    def streams(self) -> tuple[str, ...]:
        """Streams that it is about."""
        return () if self.op is None else tuple(streams_of(self.op))

    @property
    def published(self) -> set[str]:
        """Topics outside loom that it writes to."""
        if not isinstance(self.op, AppendOps):
            return set()
        leaving = (out for append in self.op.appends for out in append.outgoing)
        return {out.topic or "" for out in leaving if out.target == PUBLISH}

    def fail(self, error: LoomError) -> None:
        """Answer at once; on the loop's thread, before it was queued or where nobody else will."""
        if self.future is not None and not self.future.done():
            self.future.set_exception(error)

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for it any more, and it may be left out."""
        return self.future is not None and self.future.cancelled()

    @property
    def expired(self) -> bool:
        """Whether its deadline has passed."""
        return self.deadline <= time.monotonic()


@dataclass(slots=True, eq=False)
class Decider:
    """A read that decides: it waits for a transaction of the present tenure."""

    future: asyncio.Future[None]
    loop: asyncio.AbstractEventLoop
    deadline: float
    budget_ms: int


class Answers:
    """Answers on their way: gathered by the writer, and given to each event loop in one call.

    It also knows who still waits: ``sweep`` answers those whose deadline passed while the writer waited for a broker.
    """

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, list[_Answer]] = {}
        self._replies: list[tuple[Callable[[Any, Exception | None], None], Any, Exception | None]] = []
        self._open: dict[Pending | Decider, None] = {}

    def expect(self, waiting: Pending | Decider) -> None:
        """Somebody waits for an answer. From any thread."""
        self._open[waiting] = None

    def give(self, pending: Pending, result: Any, error: Exception | None = None) -> None:
        """Answer a write."""
        if pending.future is not None and pending.loop is not None:
            self._open.pop(pending, None)
            self._by_loop.setdefault(pending.loop, []).append((pending.future, result, error))
        elif pending.reply is not None:
            self._replies.append((pending.reply, result, error))

    def decide(self, decider: Decider, error: Exception | None = None) -> None:
        """Answer a read that decides."""
        self._open.pop(decider, None)
        self._by_loop.setdefault(decider.loop, []).append((decider.future, None, error))

    def forget(self, waiting: Pending | Decider) -> None:
        """Nobody waits any more."""
        self._open.pop(waiting, None)

    def send(self) -> None:
        """Deliver what was gathered."""
        if self._by_loop:
            by_loop, self._by_loop = self._by_loop, {}
            for loop, answers in by_loop.items():
                _deliver(loop, answers)
        if self._replies:
            replies, self._replies = self._replies, []
            for reply, result, error in replies:
                try:
                    reply(result, error)
                except Exception:  # noqa: BLE001 - another's fault, and logged
                    _log.exception("the reply to a request could not be given; its requester asks again")

    def abandon(self, partition: int) -> None:
        """The writer has ended: whoever still waits was in its hands, and it cannot tell."""
        for waiting in list(self._open):
            if isinstance(waiting, Decider):
                self.decide(waiting, NotOwnerError(partition))
            else:
                self.give(waiting, None, OutcomeUnknownError(waiting.stream_id, "its writer ended"))
        self.send()

    def sweep(self, late_s: float) -> None:
        """Answer whoever should have been answered ``late_s`` ago; from a thread beside the writer's.

        The writer may be about to write what is swept, so nothing is known of it; it does not begin with it any more.
        """
        limit = time.monotonic() - late_s
        for waiting in [w for w in list(self._open) if w.deadline < limit]:
            self._open.pop(waiting, None)
            error: LoomError
            if isinstance(waiting, Decider):
                error = DeadlineExceededError(
                    "the proof that this node still is the writer", waiting.budget_ms
                )
            else:
                error = OutcomeUnknownError(waiting.stream_id, "the log did not answer before the deadline")
            if waiting.future is not None and waiting.loop is not None:
                _deliver(waiting.loop, [(waiting.future, None, error)])


_Answer = tuple["asyncio.Future[Any]", Any, "Exception | None"]


def _deliver(loop: asyncio.AbstractEventLoop, answers: list[_Answer]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(_settle, answers)


def _settle(answers: list[_Answer]) -> None:
    for future, result, error in answers:
        if future.done():
            continue
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
