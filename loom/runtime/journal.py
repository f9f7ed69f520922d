"""The write-behind journal of one execution (system.md 0, "Durability order").

The flow goes on while its events travel: one append is in flight, what follows is batched behind it, in order, under
the run's fence and expected head. A failure latches: nothing more is appended, and the run starts no further effect.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from loom.errors import LeaseLostError, PayloadTooLargeError, PublishRefusedError, StoreError
from loom.runtime.patience import Patient, append_patiently
from loom.schemas.envelope import Envelope, Json, Kind, NewEvent
from loom.stores.contracts import Appended, Outgoing, StreamAppend

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_BATCH_EVENTS: Final = 256
MAX_BATCH_WEIGHT: Final = 512 * 1024
"""Bounds of one append; a transaction of the log has bounds of its own."""


class JournalLatched(Exception):  # noqa: N818 - a signal between a run and a verb, never a caller's
    """What was given out did not become durable here."""


class JournalHost(Patient, Protocol):
    """What a journal needs of its runtime."""

    def now(self) -> int:
        """Milliseconds since the epoch."""
        ...

    def event_id(self) -> str:
        """A fresh event id, unique in the fleet."""
        ...


@dataclass(slots=True)
class _Beside:
    """What travels with an event: requests, what it consumes, appends to other streams; and its size."""

    outgoing: tuple[Outgoing, ...]
    consumed: tuple[tuple[str, int], ...]
    companions: tuple[StreamAppend, ...]
    weight: int


def _always() -> bool:
    """Stands in where nobody judges."""
    return True


def _nothing(*_ignored: object) -> None:
    """Stands in once nobody listens."""


class Journal:
    """Appends one execution's events in order, behind the flow.

    ``head`` is the last durable sequence, ``tail`` the last one given out, ``failed`` the error that latched it.
    ``companions`` are the places of the appends that went beside the last one.
    """

    __slots__ = (
        "_beside",
        "_buffer",
        "_flight",
        "_gate",
        "_host",
        "_loop",
        "_on_failed",
        "_on_settled",
        "_settled",
        "_told",
        "_waiting",
        "companions",
        "failed",
        "fence",
        "head",
        "position",
        "stream_id",
        "tail",
    )

    def __init__(
        self,
        host: JournalHost,
        loop: asyncio.AbstractEventLoop,
        stream_id: str,
        *,
        head: int,
        fence: int,
        on_settled: Callable[[], None],
        on_failed: Callable[[BaseException], None],
        gate: Callable[[], bool] = _always,
    ) -> None:
        self._host = host
        self._gate = gate
        self._loop = loop
        self.stream_id = stream_id
        self.head = self.tail = head
        self.fence = fence
        self.failed: BaseException | None = None
        self.companions: list[Appended] = []
        self.position = 0
        """Count of events given out so far; compare with ``reached``."""
        self._settled = 0
        self._on_settled = on_settled
        self._on_failed = on_failed
        self._buffer: list[NewEvent] = []
        self._beside: dict[str, _Beside] = {}
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self._told: list[asyncio.Future[None]] = []
        self._flight: asyncio.Task[None] | None = None

    @property
    def behind(self) -> int:
        """Events given out that are not durable yet."""
        return self.position - self._settled

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
        """Give an event its place; return it as it will stand. It travels at the next ``flush``.

        ``companions`` are appends to other streams of the shard that happen together with it, or not at all.
        ``weight`` is the size of its data in bytes where it may be large.
        """
        self.tail += 1
        self.position += 1
        host = self._host
        event_id = host.event_id()
        self._buffer.append(NewEvent(event_id, kind, data, metadata))
        if outgoing or consumed or companions or weight > SMALL:
            self._beside[event_id] = _Beside(outgoing, consumed, companions, weight)
        return Envelope(event_id, self.stream_id, self.tail, kind, host.now(), data, metadata)

    def when_durable(self, callback: Callable[[], None]) -> None:
        """Call back once everything given out so far is durable; at once where it is. Never after a failure."""
        if self._settled == self.position:
            callback()
        else:
            self._waiting.append((self.position, callback))

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
        self._beside.clear()
        self._waiting.clear()
        told, self._told = self._told, []
        for future in told:
            if not future.done():
                future.set_exception(JournalLatched())

    def detach(self) -> None:
        """Tell the run nothing more: it is gone."""
        self._on_settled = self._on_failed = _nothing
        self._gate = _always

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
        if not self._gate():
            self._fail(LeaseLostError(self.stream_id, "not shown to be alive"))
            return None
        event = NewEvent(self._host.event_id(), kind, data, metadata)
        append = StreamAppend(
            self.stream_id, (event,), expected_head=self.head, fence=self.fence, outgoing=outgoing
        )
        try:
            (appended,) = await append_patiently(self._host, (append,), self.stream_id)
        except PublishRefusedError:
            raise
        except StoreError as error:
            self._fail(error)
            return None
        if self._is_latched():
            return None
        self.head = self.tail = appended.head
        return Envelope(event.id, self.stream_id, self.head, kind, appended.timestamp, data, metadata)

    def rebase(self, head: int) -> None:
        """Go on behind events that others put into the log and that the flow need not know (control records)."""
        self.failed = None
        self.head = head
        self.tail = head + len(self._buffer)
        self.flush()

    def flush(self) -> None:
        """Let what was given out travel, behind what is on its way; the run calls it when it comes to rest."""
        if self._flight is None and self.failed is None and self._buffer:
            if self._gate():
                self._flight = self._loop.create_task(self._travel())
            else:
                self._loop.call_soon(self._fail, LeaseLostError(self.stream_id, "not shown to be alive"))

    async def _travel(self) -> None:
        count = self._batch()
        try:
            while True:
                try:
                    appended = await append_patiently(self._host, self._appends(count), self.stream_id)
                    break
                except PayloadTooLargeError:
                    fewer = self._whole(count // 2) if count > 1 else count
                    if fewer == count:
                        raise
                    count = fewer
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - it latches, and the run is told
            self._flight = None
            self._fail(error)
            return
        self._flight = None
        if self.failed is None:
            self._arrived(count, appended)

    def _batch(self) -> int:
        """How many events go in the next append."""
        count = min(len(self._buffer), MAX_BATCH_EVENTS)
        return self._whole(count if not self._beside else self._within_weight(count))

    def _whole(self, count: int) -> int:
        """What belongs together travels together: a release, the delivery that it is for, and the end of the park."""
        buffer = self._buffer
        while 0 < count < len(buffer) and (buffer[count - 1].type, buffer[count].type) in _TOGETHER:
            count += 1
        return count

    def _within_weight(self, count: int) -> int:
        weight = 0
        for place, event in enumerate(self._buffer[:count]):
            beside = self._beside.get(event.id)
            weight += 0 if beside is None else beside.weight
            if weight > MAX_BATCH_WEIGHT and place:
                return place
        return count

    def _appends(self, count: int) -> list[StreamAppend]:
        """The next append, and those that go with it."""
        events = tuple(self._buffer[:count])
        outgoing: tuple[Outgoing, ...] = ()
        consumed: tuple[tuple[str, int], ...] = ()
        companions: tuple[StreamAppend, ...] = ()
        if self._beside:
            for event in events:
                beside = self._beside.get(event.id)
                if beside is not None:
                    outgoing += beside.outgoing
                    consumed += beside.consumed
                    companions += beside.companions
        own = StreamAppend(self.stream_id, events, self.head, self.fence, None, None, consumed, outgoing)
        return [own, *companions]

    def _arrived(self, count: int, appended: list[Appended]) -> None:
        if self._beside:
            for event in self._buffer[:count]:
                self._beside.pop(event.id, None)
        del self._buffer[:count]
        self.head = appended[0].head
        self.companions = appended[1:]
        self._settled += count
        self.flush()
        while self._waiting and self._waiting[0][0] <= self._settled:
            self._waiting.pop(0)[1]()
        if self._told:
            self._told = [future for future in self._told if not future.done()]
        self._on_settled()

    def _is_latched(self) -> bool:
        return self.failed is not None

    def _fail(self, error: BaseException) -> None:
        if self.failed is None:
            self.failed = error
            self._on_failed(error)


_TOGETHER: Final = {
    (Kind.INBOX_RELEASED, Kind.MESSAGE_CONSUMED),
    (Kind.MESSAGE_CONSUMED, Kind.EXECUTION_RESUMED),
}

SMALL: Final = 1_024
"""Weight below which an event counts for nothing in the bound of a batch."""


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
