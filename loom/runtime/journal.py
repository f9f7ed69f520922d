"""The write-behind journal of one execution (system.md 0, "Durability order").

The flow goes on while its events travel: one append is in flight, what follows is batched behind it, in order, under
the run's fence and expected head. A failure latches: nothing more is appended, and the run starts no further effect.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from loom.errors import (
    ExecutionAlreadyExistsError,
    PayloadTooLargeError,
    PublishRefusedError,
    StaleFenceError,
    StoreError,
    WrongHeadError,
)
from loom.schemas.envelope import Envelope, Json, NewEvent
from loom.stores.contracts import Appended, EventStore, Outgoing, StreamAppend

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from loom.runtime.signals import Signals

T = TypeVar("T")

MAX_BATCH_EVENTS: Final = 256
MAX_BATCH_WEIGHT: Final = 512 * 1024
"""Bounds of one append; a transaction of the log has bounds of its own."""

FIRST_DELAY_S: Final = 0.02
MAX_DELAY_S: Final = 2.0

FINAL: Final = (WrongHeadError, StaleFenceError, ExecutionAlreadyExistsError)
"""Answers that no repetition changes."""


class JournalLatched(Exception):  # noqa: N818 - a signal between a run and a verb, never a caller's
    """What was given out did not become durable here."""


class JournalHost(Protocol):
    """What a journal needs of its runtime."""

    @property
    def events(self) -> EventStore:
        """Where to append."""
        ...

    @property
    def signals(self) -> Signals:
        """Whom to tell of trouble."""
        ...

    @property
    def patience_ms(self) -> int:
        """How long to repeat what does not succeed."""
        ...

    def now(self) -> int:
        """Milliseconds since the epoch."""
        ...

    def event_id(self) -> str:
        """A fresh event id, unique in the fleet."""
        ...


@dataclass(slots=True)
class _Entry:
    event: NewEvent
    outgoing: tuple[Outgoing, ...]
    consumed: tuple[tuple[str, int], ...]
    companions: tuple[StreamAppend, ...]
    weight: int


class Journal:
    """Appends one execution's events in order, behind the flow.

    ``head`` is the last durable sequence, ``tail`` the last one given out. ``failed`` is the error that latched it.
    """

    __slots__ = (
        "_buffer",
        "_flight",
        "_host",
        "_loop",
        "_on_failed",
        "_on_settled",
        "_pushed",
        "_settled",
        "_told",
        "_waiting",
        "companions",
        "failed",
        "fence",
        "head",
        "stream_id",
        "tail",
    )

    def __init__(
        self,
        host: JournalHost,
        stream_id: str,
        *,
        head: int,
        fence: int,
        on_settled: Callable[[], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._host = host
        self._loop = asyncio.get_running_loop()
        self.stream_id = stream_id
        self.head = self.tail = head
        self.fence = fence
        self.failed: BaseException | None = None
        self.companions: list[Appended] = []
        self._told: list[asyncio.Future[None]] = []
        self._on_settled = on_settled
        self._on_failed = on_failed
        self._buffer: deque[_Entry] = deque()
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._pushed = 0
        self._settled = 0
        self._flight: asyncio.Task[None] | None = None

    @property
    def behind(self) -> int:
        """Events given out that are not durable yet."""
        return self._pushed - self._settled

    @property
    def position(self) -> int:
        """Count of events given out so far; compare with ``reached``."""
        return self._pushed

    def reached(self, position: int) -> bool:
        """Whether the events given out before ``position`` are durable."""
        return self._settled >= position

    def push(
        self,
        kind: str,
        data: dict[str, Json],
        metadata: dict[str, Json],
        *,
        outgoing: tuple[Outgoing, ...] = (),
        consumed: tuple[tuple[str, int], ...] = (),
        companions: tuple[StreamAppend, ...] = (),
        weight: int = 0,
    ) -> Envelope:
        """Give an event its place; return it as it will stand.

        ``companions`` are appends to other streams of the shard that happen together with it, or not at all.
        ``weight`` is the size of its data in bytes where it may be large.
        """
        self.tail += 1
        self._pushed += 1
        event = NewEvent(self._host.event_id(), kind, data, metadata)
        self._buffer.append(_Entry(event, outgoing, consumed, companions, weight))
        return Envelope(event.id, self.stream_id, self.tail, kind, self._host.now(), data, metadata)

    def when_durable(self, callback: Callable[[], None]) -> None:
        """Call back once everything given out so far is durable; at once where it is. Never after a failure."""
        if self._settled == self._pushed:
            callback()
        else:
            self._waiting.append((self._pushed, callback))

    def durable(self) -> asyncio.Future[None]:
        """A future that is done once everything given out so far is durable; it fails if that never comes."""
        future: asyncio.Future[None] = self._loop.create_future()
        if self.failed is not None:
            future.set_exception(JournalLatched())
        else:
            self._told.append(future)
            self.when_durable(partial(_resolve, future))
        return future

    def latch(self, error: BaseException) -> None:
        """Append nothing more; what was not durable yet is dropped (clauses.md, point 13)."""
        if self.failed is None:
            self.failed = error
        if self._flight is not None:
            self._flight.cancel()  # what it had sent is settled by the fence, not by repeating it
            self._flight = None
        self._buffer.clear()
        self._waiting.clear()
        told, self._told = self._told, []
        for future in told:
            if not future.done():
                future.set_exception(JournalLatched())

    async def alone(
        self, kind: str, data: dict[str, Json], metadata: dict[str, Json], outgoing: tuple[Outgoing, ...]
    ) -> Envelope | None:
        """Append an event by itself and wait for its fate; everything given out before is durable.

        Returns it, or None where the journal failed (the run was told).

        Raises:
            PublishRefusedError: a topic refuses what leaves with it; nothing was written.
        """
        assert not self._buffer, "an event that goes alone has nothing before it"
        if self.failed is not None:
            return None
        event = NewEvent(self._host.event_id(), kind, data, metadata)
        append = StreamAppend(
            self.stream_id, (event,), expected_head=self.head, fence=self.fence, outgoing=outgoing
        )
        try:
            (appended,) = await append_patiently(self._host, [append], self.stream_id)
        except PublishRefusedError:
            raise
        except StoreError as error:
            self._fail(error)
            return None
        if self._is_latched():
            return None
        self.head = self.tail = appended.head
        return Envelope(event.id, self.stream_id, self.head, kind, appended.timestamp, data, metadata)

    def _is_latched(self) -> bool:
        return self.failed is not None

    def _fail(self, error: BaseException) -> None:
        if self.failed is None:
            self.failed = error
            self._on_failed(error)

    def rebase(self, head: int) -> None:
        """Go on behind events that others put into the log and that the flow need not know (control records)."""
        self.failed = None
        self.head = head
        self.tail = head + len(self._buffer)
        self.flush()

    def flush(self) -> None:
        """Let what was given out travel, behind what is on its way; the run calls it when it comes to rest."""
        if self._flight is not None or self.failed is not None or not self._buffer:
            return
        self._flight = self._loop.create_task(self._travel(self._next_batch()))

    def _next_batch(self) -> list[_Entry]:
        batch: list[_Entry] = []
        weight = 0
        for entry in self._buffer:
            weight += entry.weight
            if batch and (len(batch) >= MAX_BATCH_EVENTS or weight > MAX_BATCH_WEIGHT):
                break
            batch.append(entry)
            if entry.companions:
                break
        return batch

    async def _travel(self, batch: list[_Entry]) -> None:
        try:
            while True:
                try:
                    appended = await append_patiently(
                        self._host, [_to_append(self, batch), *batch[-1].companions], self.stream_id
                    )
                    break
                except PayloadTooLargeError:
                    if len(batch) == 1:
                        raise
                    batch = batch[: len(batch) // 2]
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - it latches, and the run is told
            self._flight = None
            self._fail(error)
            return
        self._flight = None
        if self.failed is not None:
            return
        for _ in batch:
            self._buffer.popleft()
        self.head = appended[0].head
        self.companions = appended[1:]
        self._settled += len(batch)
        self.flush()
        while self._waiting and self._waiting[0][0] <= self._settled:
            self._waiting.popleft()[1]()
        if self._told:
            self._told = [future for future in self._told if not future.done()]
        self._on_settled()


def _to_append(journal: Journal, batch: list[_Entry]) -> StreamAppend:
    outgoing: tuple[Outgoing, ...] = ()
    consumed: tuple[tuple[str, int], ...] = ()
    for entry in batch:
        if entry.outgoing:
            outgoing += entry.outgoing
        if entry.consumed:
            consumed += entry.consumed
    return StreamAppend(
        journal.stream_id,
        tuple([entry.event for entry in batch]),
        expected_head=journal.head,
        fence=journal.fence,
        consumed=consumed,
        outgoing=outgoing,
    )


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def append_patiently(host: JournalHost, appends: Sequence[StreamAppend], about: str) -> list[Appended]:
    """Append, and repeat unchanged while the store cannot say, or cannot write (contracts: three outcomes).

    Repeating is safe: the same event ids are appended once. Every trouble is told to ``on_storage_error``.

    Raises:
        WrongHeadError, StaleFenceError, ExecutionAlreadyExistsError: another was first; nothing was written.
        PayloadTooLargeError: no transaction can take it. PublishRefusedError: a topic of the estate does not.
        StoreError: the last trouble, once ``patience_ms`` has passed.
    """
    try:
        if len(appends) == 1:
            return [await host.events.append(appends[0])]
        return await host.events.append_many(appends)
    except StoreError as error:
        return await _again(host, lambda: host.events.append_many(appends), about, error)


async def patiently(host: JournalHost, call: Callable[[], Awaitable[T]], about: str) -> T:
    """Make a call of a store that may be repeated, with back-off, until it answers or patience ends.

    Raises:
        StoreError: one that no repetition cures, or the last one once ``patience_ms`` has passed.
    """
    try:
        return await call()
    except StoreError as error:
        return await _again(host, call, about, error)


async def _again(host: JournalHost, call: Callable[[], Awaitable[T]], about: str, first: StoreError) -> T:
    if not worth_repeating(first):
        raise first
    host.signals.repeated_storage_error(first, about)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + host.patience_ms / 1000
    delay_s = FIRST_DELAY_S
    while True:
        await asyncio.sleep(delay_s)
        delay_s = min(delay_s * 2, MAX_DELAY_S)
        try:
            answer = await call()
        except StoreError as error:
            host.signals.repeated_storage_error(error, about)
            if not worth_repeating(error) or loop.time() >= deadline:
                raise
        else:
            host.signals.settled(about)
            return answer


def worth_repeating(error: StoreError) -> bool:
    """Whether the same call may succeed later."""
    return error.retryable and not isinstance(error, (*FINAL, PayloadTooLargeError))
