"""Live events of a stream: handed over by the writer in this process, or read from the end of the topic elsewhere.

A subscription reads history, then takes what comes live, and reads history again wherever the two do not join: the queue
overflowed, the partition moved, or a sequence is missing. So it never skips, and never holds more than its queue.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence

    from loom.schemas.envelope import Envelope

QUEUE_EVENTS: Final = 1_000
"""Events that wait for one subscriber; past it they are read again from the log."""
PAGE_EVENTS: Final = 500


class LiveQueue:
    """Events of one stream on their way to one subscriber. Of one event loop."""

    def __init__(self, limit: int = QUEUE_EVENTS) -> None:
        self._limit = limit
        self._events: deque[Envelope] = deque()
        self._changed = asyncio.Event()
        self._broken = False
        self.closed = False

    def put(self, envelopes: Iterable[Envelope]) -> None:
        """Add events; an overflow drops all of them, and the subscriber reads the log again."""
        self._events.extend(envelopes)
        if len(self._events) > self._limit:
            self.restart()
        self._changed.set()

    def restart(self) -> None:
        """What comes next does not follow what was put: the subscriber reads the log again."""
        self._events.clear()
        self._broken = True
        self._changed.set()

    def close(self) -> None:
        """No event comes any more."""
        self.closed = True
        self._changed.set()

    async def take(self) -> list[Envelope] | None:
        """Wait for events and take them; None: read the log again."""
        while not self._events and not self._broken and not self.closed:
            self._changed.clear()
            await self._changed.wait()
        if self._broken:
            self._broken = False
            return None
        taken = list(self._events)
        self._events.clear()
        return taken


class LiveFeed:
    """Which subscriber waits for which stream. Of one event loop."""

    def __init__(self) -> None:
        self._queues: dict[str, set[LiveQueue]] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def add(self, stream_id: str, queue: LiveQueue) -> None:
        """Begin to feed ``queue``."""
        self._queues.setdefault(stream_id, set()).add(queue)

    def remove(self, stream_id: str, queue: LiveQueue) -> None:
        """Feed it no more; idempotent."""
        queues = self._queues.get(stream_id)
        if queues is not None:
            queues.discard(queue)
            if not queues:
                del self._queues[stream_id]

    def put(self, stream_id: str, envelopes: Sequence[Envelope]) -> None:
        """Events became durable."""
        for queue in self._queues.get(stream_id, ()):
            queue.put(envelopes)

    def restart(self, concerns: Callable[[str], bool]) -> None:
        """Where events come from has changed for these streams."""
        for stream_id, queues in self._queues.items():
            if concerns(stream_id):
                for queue in queues:
                    queue.restart()

    def close(self) -> None:
        """No event comes any more."""
        for queues in self._queues.values():
            for queue in queues:
                queue.close()


async def follow(
    queue: LiveQueue, read: Callable[[int, int], Awaitable[list[Envelope]]], from_sequence: int
) -> AsyncGenerator[Envelope, None]:
    """Yield events from ``from_sequence`` on: what ``read(from, limit)`` has, then what ``queue`` gets.

    ``queue`` must be fed from before the first call. Ends when the queue is closed.
    """
    sequence = from_sequence
    joined = False
    while not queue.closed:
        if not joined:
            page = await read(sequence, PAGE_EVENTS)
            for envelope in page:
                sequence = envelope.sequence + 1
                yield envelope
            joined = len(page) < PAGE_EVENTS
            continue
        taken = await queue.take()
        if taken is None:
            joined = False
            continue
        for envelope in taken:
            if envelope.sequence > sequence:
                joined = False
                break
            if envelope.sequence == sequence:
                sequence += 1
                yield envelope
