"""A caller's hold on an execution."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from loom.errors import (
    DeadlineExceededError,
    ExecutionNotFoundError,
    FlowCancelledError,
    FlowFailedError,
    StoreError,
)
from loom.runtime.sealed import refused_to_holder
from loom.runtime.waiters import Ending
from loom.schemas.envelope import TERMINAL_KINDS, Envelope, Kind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from loom.kernel.flow import FlowDefinition
    from loom.runtime.engine import Engine

R = TypeVar("R")


class Handle(Generic[R]):
    """An execution that was started, or is named: wait for its result, or ask where it stands."""

    def __init__(
        self,
        engine: Engine,
        execution_id: str,
        flow: FlowDefinition[..., R] | None = None,
        future: asyncio.Future[Ending] | None = None,
    ) -> None:
        self.execution_id = execution_id
        self._engine = engine
        self._flow = flow
        self._future = future
        self._result: Ending | None = None
        self._signals = engine.signals

    def __repr__(self) -> str:
        return f"<execution {self.execution_id}>"

    @refused_to_holder("load_state")
    async def result(self, timeout: float | None = None) -> R:  # noqa: ASYNC109 - a bound that callers name
        """Wait for the end and return the result, typed by the flow where it is known here.

        Follows continue-as-new. ``timeout`` is in seconds.

        Raises:
            FlowFailedError: the flow failed. FlowCancelledError: it was cancelled.
            DeadlineExceededError: it has not ended in time. ExecutionNotFoundError: there is no such execution.
            FlowDivergedError, SealedPayloadUnreadableError: this node drives it and cannot go on.
            SealedStreamUnreadableError: something of its log cannot be opened here, though the result might be.
        """
        if self._result is None and timeout is None:
            self._result = await self._ending()
        elif self._result is None and timeout is not None:
            try:
                async with asyncio.timeout(timeout):
                    self._result = await self._ending()
            except TimeoutError:
                what = f"the end of execution {self.execution_id!r}"
                raise DeadlineExceededError(what, round(timeout * 1000)) from None
        assert self._result is not None
        return self._open(self._result)

    @refused_to_holder("query")
    async def status(self) -> str:
        """``running``, ``suspended``, ``completed``, ``failed``, ``cancelled`` or ``continued``.

        Raises:
            ExecutionNotFoundError: there is no such execution. SealedStreamUnreadableError: its log cannot be opened here.
        """
        info = await self._engine.driving.assert_opens(self.execution_id)
        if info is None:
            raise ExecutionNotFoundError(self.execution_id)
        return status_of(info.status)

    def _open(self, ending: Ending) -> R:
        if ending.error is not None:
            raise ending.error
        data = ending.data
        if ending.kind == Kind.EXECUTION_COMPLETED:
            output = data.get("output")
            result: Any = self._flow.load_output(output) if self._flow is not None else output
            return cast("R", result)
        if ending.kind == Kind.EXECUTION_FAILED:
            error: Any = data.get("error") or {}
            raise FlowFailedError(self.execution_id, str(error.get("type")), str(error.get("message")))
        raise FlowCancelledError(self.execution_id, data.get("reason"))

    async def _ending(self) -> Ending:
        current, future = self.execution_id, self._future
        while True:
            ending = await self._ending_of(current, future)
            if ending.kind != Kind.EXECUTION_CONTINUED:
                return ending
            current, future = str(ending.data["successorId"]), None

    async def _ending_of(self, execution_id: str, future: asyncio.Future[Ending] | None) -> Ending:
        engine = self._engine
        while True:
            if future is None or future.cancelled():
                # Whoever asks later than the end finds it in the log; whoever asks earlier is told.
                future = engine.waiters.of(execution_id)
                ended = await self._recorded(execution_id)
                if ended is not None:
                    return ended
            if not future.done() and not engine.hears(execution_id):
                return await self._followed(execution_id)
            ending = await _awaited(future)
            if not ending.moved:
                return ending
            future = None

    async def _recorded(self, execution_id: str) -> Ending | None:
        info = await self._engine.driving.assert_opens(execution_id)
        if info is None:
            raise ExecutionNotFoundError(execution_id)
        if info.status not in TERMINAL_KINDS:
            return None
        last = await terminal_of(self._engine.events, execution_id, info.head)
        return None if last is None else Ending(last.type, last.data)

    async def _followed(self, execution_id: str) -> Ending:
        """Read along: this process does not hear of the execution."""
        engine, sequence = self._engine, 0
        while True:
            try:
                async for envelope in _subscription(engine, execution_id, sequence):
                    sequence = envelope.sequence + 1
                    if envelope.type in TERMINAL_KINDS:
                        return Ending(envelope.type, envelope.data)
            except StoreError as error:
                if not error.retryable:
                    raise
                engine.signals.repeated_storage_error(error, execution_id)
            await asyncio.sleep(0.1)


async def _awaited(future: asyncio.Future[Ending]) -> Ending:
    """The future's result. It is shared: whoever gives up waiting leaves it to the others."""
    return await future if future.done() else await asyncio.shield(future)


async def _subscription(engine: Engine, execution_id: str, sequence: int) -> AsyncIterator[Envelope]:
    stream = engine.events.subscribe(execution_id, sequence)
    try:
        async for envelope in stream:
            yield envelope
    finally:
        close = getattr(stream, "aclose", None)
        if close is not None:
            await close()


async def terminal_of(
    events: Any, execution_id: str, head: int, kinds: frozenset[str] = TERMINAL_KINDS
) -> Envelope | None:
    """The last event of these kinds, by default the end of a finished log; control records may stand behind it."""
    end = head
    while end >= 0:
        start = max(0, end - 63)
        for envelope in reversed(await events.read(execution_id, start, end - start + 1)):
            if envelope.type in kinds:
                found: Envelope = envelope
                return found
        end = start - 1
    return None


_STATUS = {
    Kind.EXECUTION_SUSPENDED: "suspended",
    Kind.EXECUTION_COMPLETED: "completed",
    Kind.EXECUTION_FAILED: "failed",
    Kind.EXECUTION_CANCELLED: "cancelled",
    Kind.EXECUTION_CONTINUED: "continued",
}


def status_of(kind: str | None) -> str:
    """The status that the last event of a log says."""
    return _STATUS.get(kind or "", "running")
