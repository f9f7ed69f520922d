"""What the suite says things with: the bench, events, appends, and waiting for what must come."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Protocol

from loom.errors import LoomError
from loom.schemas.envelope import EVENT_SCHEMA, Envelope, Kind, NewEvent
from loom.stores.contracts import NO_EVENTS, StreamAppend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from loom.schemas.envelope import Json
    from loom.stores.contracts import EventStore

PATIENCE_S: Final = 30.0
"""How long a test waits for what must come."""

SEAL: Final = {
    "v": 1,
    "cipher": "aes-256-gcm",
    "covers": ["EXECUTION_STARTED.input", "INBOX_MESSAGE.payload"],
}


class EventBench(Protocol):
    """A log under test."""

    too_large: int
    """Bytes of a text that no event can hold."""

    async def open(self) -> EventStore:
        """Return another handle on the one log, as another node has; the bench closes it."""
        ...

    def chain(self) -> str:
        """Return a fresh chain id; all ids of one bench are of one shard."""
        ...

    def elsewhere(self) -> str:
        """Return a fresh chain id of another shard."""
        ...


# -- what the tests say things with ---------------------------------------------------------------------------------


def event(
    event_id: str, kind: str = Kind.STEP_COMPLETED, *, metadata: dict[str, Json] | None = None, **data: Json
) -> NewEvent:
    """An event as a runtime stamps it."""
    return NewEvent(event_id, kind, data, {"schema": EVENT_SCHEMA} | (metadata or {}))


def started(stream_id: str, *, fence: int | None = 1, node: str = "n:1") -> StreamAppend:
    """The append of sequence 0."""
    data: dict[str, Json] = {"workflow": "w", "input": None, "chainId": stream_id}
    first = event(f"{stream_id}#0", Kind.EXECUTION_STARTED, metadata={"node": node}, **data)
    return StreamAppend(stream_id, (first,), expected_head=NO_EVENTS, fence=fence)


def steps(stream_id: str, head: int, count: int = 1, **guards: Any) -> StreamAppend:
    """``count`` more events of a log that ends at ``head``."""
    events = tuple(event(f"{stream_id}#{head + n}", output=n) for n in range(1, count + 1))
    return StreamAppend(stream_id, events, expected_head=head, **guards)


def message(stream_id: str, message_id: str, **options: Any) -> StreamAppend:
    """A message that enters an inbox."""
    sent = event(message_id, Kind.INBOX_MESSAGE, topic="t", payload=message_id, messageId=message_id)
    return StreamAppend(stream_id, (sent,), **options)


async def refused(awaitable: Awaitable[object], kind: type[LoomError]) -> Any:
    """Return the error that ``awaitable`` must raise, of exactly this type."""
    result = await attempt(awaitable)
    assert type(result) is kind, f"{kind.__name__} was not raised, but: {result!r}"
    return result


async def attempt(awaitable: Awaitable[object]) -> object:
    """Return the result or the error."""
    try:
        return await awaitable
    except LoomError as error:
        return error


async def take(events: AsyncIterator[Envelope], count: int) -> list[Envelope]:
    """The next ``count`` events of a subscription."""
    async with asyncio.timeout(PATIENCE_S):
        return [await anext(events) for _ in range(count)]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Return once the condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():  # noqa: ASYNC110 - the condition lies behind the store
            await asyncio.sleep(0.005)


async def sequences(store: EventStore, stream_id: str) -> list[int]:
    """Sequences of what a stream holds."""
    return [e.sequence for e in await store.read(stream_id)]


class LogSuite:
    """What the groups below share."""

    async def log(self, bench: EventBench, count: int = 1) -> tuple[EventStore, str]:
        """A store and a log of ``count`` events, fence 1."""
        store, stream_id = await bench.open(), bench.chain()
        await store.append(started(stream_id))
        if count > 1:
            await store.append(steps(stream_id, 0, count - 1, fence=1))
        return store, stream_id
