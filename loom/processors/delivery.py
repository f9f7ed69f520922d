"""Delivery: what stands in ``inbox`` and ``commands`` reaches the runtime, whatever the fast path did (kafka.md).

Agents are at-least-once: a record is acknowledged only after the bridge answered, so the bridge must take the same one
again without harm. Records of one chain are handed over in order, those of different chains side by side.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from loom.errors import (
    BrokerError,
    DeadlineExceededError,
    DecodeError,
    LeaseError,
    LoomError,
    NotOwnerError,
    OutcomeUnknownError,
    StorageWriteError,
    UnreachableError,
)
from loom.ids import routing_id
from loom.schemas.envelope import Kind
from loom.schemas.records import Command
from loom.stores.kafka.records import text_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from loom.schemas.codec import Codec

_log = logging.getLogger("loom.processors.delivery")

WINDOW: Final = 256
"""Records at work at one time, over all partitions."""

MAX_MERGED: Final = 1024
"""Messages of one stream that one call of the bridge settles at most."""

PATIENCE_S: Final = 60.0
"""How long a refusal that may pass by itself (a full inbox, a gate not yet open) is tried again."""

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 5.0
_REPORT_EVERY: Final = 16

_OUTAGE: Final = (
    BrokerError,
    DeadlineExceededError,
    LeaseError,
    NotOwnerError,
    OutcomeUnknownError,
    StorageWriteError,
    UnreachableError,
)
"""Errors that say nothing about the record: tried again for as long as it takes, if they are retryable."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a record stood."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"


class DeliveryBridge(Protocol):
    """What delivery asks of the runtime. Both may be called again for what they already did (at least once)."""

    async def notify(self, chain_id: str, stream: str, sequence: int) -> None:
        """Take note of a message at ``sequence`` of an inbox stream: wake the chain's parked execution, if one waits.

        A refusal (a sealed head on a node without the key) is no error here: it leaves a wake row and returns.

        Raises:
            LoomError: retryable: not done, call again. Otherwise the message stays in the inbox for the next pass.
        """
        ...

    async def command(self, command: Command, source: Source) -> None:
        """Do what a foreign producer asks for; ``command.id`` is set, and makes it apply once.

        Raises:
            LoomError: retryable: not done, call again. Otherwise it cannot be done, and goes to ``dead``.
        """
        ...


class Record(Protocol):
    """The part of Faust's message that delivery reads."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Any


class Bury(Protocol):
    """Writes a record to ``dead``; returns once it is there."""

    async def __call__(self, source: str, value: bytes, headers: Sequence[tuple[str, bytes]]) -> None:
        """Raises whatever the client raises if it may not be there."""
        ...


@dataclass(slots=True)
class _Job:
    """One call of the bridge, and the records that it settles."""

    source: Source
    work: Callable[[], Awaitable[None]]
    acknowledge: list[Callable[[], object]]
    record: Record | None = None
    """Goes to ``dead`` if it cannot be done; None: there is nothing to bury."""
    stream: str | None = None
    sequence: int = -1


class Delivery:
    """Hands records to the bridge: in order per chain, at most ``window`` calls at a time, each until it is settled.

    Messages of one stream that wait for their turn are handed over as one: a pass for the last is a pass for all.
    """

    def __init__(
        self,
        bridge: DeliveryBridge,
        codec: Codec,
        bury: Bury,
        *,
        window: int = WINDOW,
        patience_s: float = PATIENCE_S,
        report: Callable[[Source, Exception], None] | None = None,
    ) -> None:
        """Prepare; ``report`` hears of errors, the first of a record and then every 16th (default: the log)."""
        self._bridge, self._codec, self._bury = bridge, codec, bury
        self._patience_s, self._report = patience_s, report or _to_log
        self._room = asyncio.Semaphore(window)
        self._tails: dict[str, asyncio.Task[None]] = {}
        self._waiting: dict[str, _Job] = {}
        self.attempts = 0
        """How often the bridge has answered anything at all: it moves while delivery lives."""

    async def inbox(self, record: Record, acknowledge: Callable[[], object]) -> None:
        """Take a record of ``inbox``; returns when it is at work, and acknowledges it when it is settled."""
        source = Source(record.topic, record.partition, record.offset)
        if record.value is None or dict(record.headers or ()).get("type") != Kind.INBOX_MESSAGE.encode():
            acknowledge()
            return
        stream, _, sequence = text_of(record.key).rpartition("/")
        if not stream or not sequence.isdecimal():
            self._report(source, DecodeError(f"key of {source}", "it is no <stream>/<sequence>"))
            acknowledge()
            return
        waiting = self._waiting.get(stream)
        if waiting is not None and len(waiting.acknowledge) < MAX_MERGED:
            waiting.sequence = max(waiting.sequence, int(sequence))
            waiting.acknowledge.append(acknowledge)
            return
        chain_id = routing_id(stream)
        job = _Job(source, lambda: self._bridge.notify(chain_id, stream, job.sequence), [acknowledge])
        job.stream, job.sequence = stream, int(sequence)
        await self._start(chain_id, job)

    async def commands(self, record: Record, acknowledge: Callable[[], object]) -> None:
        """Take a record of ``commands``; as :meth:`inbox`."""
        source = Source(record.topic, record.partition, record.offset)
        value = record.value
        if value is None:
            acknowledge()
            return

        async def work() -> None:
            command = self._codec.decode(value, Command, "command")
            await self._bridge.command(replace(command, id=command.id or str(source)), source)

        chain = text_of(record.key or str(source).encode())
        await self._start(chain, _Job(source, work, [acknowledge], record))

    async def close(self) -> None:
        """Stop what is at work; unsettled records are delivered again, here or elsewhere. Idempotent."""
        tails = list(self._tails.values())
        for task in tails:
            task.cancel()
        await asyncio.gather(*tails, return_exceptions=True)

    async def _start(self, chain: str, job: _Job) -> None:
        await self._room.acquire()
        if job.stream is not None:
            self._waiting[job.stream] = job
        task = asyncio.create_task(self._settle(self._tails.get(chain), job))
        self._tails[chain] = task

        def ended(task: asyncio.Task[None]) -> None:
            self._room.release()
            if self._tails.get(chain) is task:
                del self._tails[chain]
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.error("delivery of %s ended: %s", job.source, type(error).__name__)

        task.add_done_callback(ended)

    async def _settle(self, before: asyncio.Task[None] | None, job: _Job) -> None:
        try:
            if before is not None:
                await asyncio.wait([before])
        finally:  # from here on, a message that arrives may have been missed: it waits for a pass of its own
            if job.stream is not None and self._waiting.get(job.stream) is job:
                del self._waiting[job.stream]
        error = await self._try(job.source, job.work)
        if error is not None and job.record is not None:
            await self._to_dead(job.source, job.record, error)
        for acknowledge in job.acknowledge:
            acknowledge()

    async def _try(self, source: Source, work: Callable[[], Awaitable[None]]) -> Exception | None:
        """Work until it is done (None) or cannot be done (why)."""
        clock = asyncio.get_running_loop().time
        give_up = clock() + self._patience_s
        pause, tries = _FIRST_PAUSE_S, 0
        while True:
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - one record's fault must not stop its neighbours
                self.attempts += 1
                if tries % _REPORT_EVERY == 0:
                    self._report(source, error)
                if not _may_pass(error) or (not isinstance(error, _OUTAGE) and clock() > give_up):
                    return error
            else:
                self.attempts += 1
                return None
            tries += 1
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    async def _to_dead(self, source: Source, record: Record, why: Exception) -> None:
        headers = [
            ("source", str(source).encode()),
            ("key", record.key or b""),
            ("error", type(why).__name__.encode()),
            ("why", (str(why) if isinstance(why, LoomError) else "an unexpected error on the node").encode()),
        ]
        pause, tries = _FIRST_PAUSE_S, 0
        while True:
            try:
                await self._bury(str(source), record.value or b"", headers)
            except Exception as error:  # noqa: BLE001 - whatever the client raises, the record is not lost
                self.attempts += 1
                if tries % _REPORT_EVERY == 0:
                    self._report(source, error)
            else:
                return
            tries += 1
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)


def _may_pass(error: Exception) -> bool:
    """Whether the same call may succeed later; what loom did not raise is taken for a passing fault, within patience."""
    return error.retryable if isinstance(error, LoomError) else True


def _to_log(source: Source, error: Exception) -> None:
    said = str(error) if isinstance(error, LoomError) else "unexpected"
    _log.warning("delivery of %s: %s: %s", source, type(error).__name__, said)
