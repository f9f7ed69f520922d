"""Which partitions this node writes: a writer for each one that the group gives it (kafka.md, "Ownership").

Assigned: begin a tenure; ``appends`` of the partition stays paused until the takeover ends. Revoked: finish the
transaction in flight and stop. Lost: stop at once. A writer that ends by itself (fenced, contended, unfinished takeover)
means that this node should not have the partition now: it leaves the group, and joins again after a back-off.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from loom.stores.kafka.membership import Membership, MembershipSettings
from loom.stores.kafka.writer import PartitionWriter, StopReason, WriterState

if TYPE_CHECKING:
    import asyncio

    from confluent_kafka import Message

    from loom.stores.kafka.deadline import Deadline
    from loom.stores.kafka.offsets import OffsetTracker

_log = logging.getLogger("loom.kafka.ownership")

APPENDS: Final = "appends"
OPEN_HIGH: Final = 4_000
"""Requests of a partition that may be open before its reading pauses; it goes on at a quarter."""
_TICK_S: Final = 0.25
_HOLD_S: Final = 1.0
_BACKOFF_S: Final = 1.0
_MAX_BACKOFF_S: Final = 15.0
_SETTLED_S: Final = 30.0

StateCallback = Callable[[PartitionWriter, WriterState], None]
MakeWriter = Callable[[int, Callable[[], bool], StateCallback], PartitionWriter]
"""``(partition, confirm_ownership, on_state)`` -> a writer that is not started."""


class PartitionIntake(Protocol):
    """Who serves the requests of one partition in one tenure."""

    offsets: OffsetTracker

    def serve(self, message: Message) -> bool:
        """Serve one request; False: it cannot be dealt with now, so it is read again later."""
        ...


class Intake(Protocol):
    """Who serves the requests of owned partitions."""

    def open(self, writer: PartitionWriter, start: int) -> PartitionIntake:
        """Serve a partition whose requests are read from ``start`` on."""
        ...


class OwnershipListener(Protocol):
    """Who wants to know. Called on threads of their own: it hands over and returns."""

    def gained(self, partition: int) -> None:
        """A tenure serves: everything committed before it is readable."""
        ...

    def lost(self, partition: int) -> None:
        """The writer has ended."""
        ...

    def fatal(self, error: Exception) -> None:
        """This node can own nothing any more."""
        ...


@dataclass(slots=True)
class _Slot:
    """A partition that the group gave to this node."""

    partition: int
    committed: int
    writer: PartitionWriter
    intake: PartitionIntake | None = None
    paused: bool = False
    held_at: int | None = None
    held_until: float = 0.0
    served_since: float | None = field(default=None)


class Ownership:
    """The writers of this node, kept in step with its membership in the group."""

    def __init__(
        self,
        settings: MembershipSettings,
        *,
        make_writer: MakeWriter,
        intake: Intake,
        listener: OwnershipListener,
    ) -> None:
        """Prepare; nothing happens before ``start``."""
        self._settings = settings
        self._make_writer = make_writer
        self._intake = intake
        self._listener = listener
        self._member = Membership(settings, self, self._on_fatal)
        self._slots: dict[int, _Slot] = {}
        self._retiring: dict[int, list[PartitionWriter]] = {}
        self._waiting: dict[int, int] = {}
        self._failures = 0
        self._ticker: asyncio.TimerHandle | None = None

    # -- the node ------------------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Join the group; called on ``loop``, whose ticks keep the membership alive."""
        self._member.start()
        self._tick(loop)

    def stop(self, deadline: Deadline) -> bool:
        """Finish what is in flight and leave the group; blocks. False if something had not ended at the deadline."""
        ended = self._member.stop(deadline)
        for writers in list(self._retiring.values()):
            for writer in writers:
                ended = writer.stop(deadline.left_ms) and ended
        return ended

    def silence(self) -> None:
        """Stop saying that the event loop runs; called on the loop."""
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None

    def writer(self, partition: int) -> PartitionWriter | None:
        """The writer to which a write may be given now; None where this node has none."""
        slot = self._slots.get(partition)
        if slot is None or slot.writer.state not in (WriterState.SERVING, WriterState.TAKING_OVER):
            return None
        return slot.writer

    def owned(self) -> frozenset[int]:
        """Partitions whose writer serves now."""
        return frozenset(
            p for p, slot in self._slots.copy().items() if slot.writer.state is WriterState.SERVING
        )

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._member.tick()
        self._ticker = loop.call_later(_TICK_S, self._tick, loop)

    # -- the group's opinion (the membership's thread) -----------------------------------------------------------

    def assigned(self, committed: Mapping[int, int]) -> None:
        """Begin a tenure for each, once an earlier writer of the same partition has ended."""
        self._waiting |= committed
        self._begin_waiting()

    def revoked(self, partitions: Sequence[int], deadline: Deadline) -> Mapping[int, int]:
        """Finish the transaction in flight of each; return where the next owner has to begin reading."""
        slots = self._remove(partitions)
        for slot in slots:
            if not slot.writer.stop(deadline.left_ms):
                _log.warning("partition %d: the transaction in flight did not end in time", slot.partition)
                slot.writer.abandon()
                self._retire(slot)
        return {slot.partition: slot.intake.offsets.position for slot in slots if slot.intake is not None}

    def lost(self, partitions: Sequence[int]) -> None:
        """Stop each at once."""
        for slot in self._remove(partitions):
            slot.writer.abandon()
            self._retire(slot)

    def received(self, message: Message) -> None:
        """Hand a request to the intake."""
        partition, offset = message.partition(), message.offset()
        if partition is None or offset is None:
            return
        slot = self._slots.get(partition)
        if slot is None or slot.intake is None or offset < slot.intake.offsets.start:
            return
        if slot.held_at is not None and offset > slot.held_at:
            return  # read again from there, in order
        if not slot.intake.serve(message):
            slot.held_at, slot.held_until = offset, time.monotonic() + _HOLD_S
            self._member.pause(slot.partition)

    def positions(self) -> Mapping[int, int]:
        """Where a reader that shall miss nothing has to begin, for each partition that is served."""
        return {
            slot.partition: slot.intake.offsets.position
            for slot in self._slots.copy().values()
            if slot.intake is not None
        }

    def idle(self) -> None:
        """Begin what had to wait, and keep the requests in memory bounded."""
        if self._waiting:
            self._begin_waiting()
        for slot in self._slots.values():
            if slot.intake is None:
                continue
            if slot.held_at is not None:
                if time.monotonic() >= slot.held_until:
                    self._member.resume(slot.partition, slot.held_at)
                    slot.held_at, slot.paused = None, False
            elif not slot.paused and slot.intake.offsets.open > OPEN_HIGH:
                slot.paused = True
                self._member.pause(slot.partition)
            elif slot.paused and slot.intake.offsets.open < OPEN_HIGH // 4:
                slot.paused = False
                self._member.resume(slot.partition)

    def _begin_waiting(self) -> None:
        for partition, committed in list(self._waiting.items()):
            running = [w for w in self._retiring.get(partition, ()) if w.state is not WriterState.STOPPED]
            if running:
                self._retiring[partition] = running
                continue
            self._retiring.pop(partition, None)
            del self._waiting[partition]
            writer = self._make_writer(partition, lambda p=partition: self._member.confirm(p), self._on_state)  # type: ignore[misc]
            self._slots = {**self._slots, partition: _Slot(partition, committed, writer)}
            writer.start()

    def _remove(self, partitions: Sequence[int]) -> list[_Slot]:
        for partition in partitions:
            self._waiting.pop(partition, None)
        removed = [self._slots[p] for p in partitions if p in self._slots]
        self._slots = {p: slot for p, slot in self._slots.items() if p not in set(partitions)}
        return removed

    def _retire(self, slot: _Slot) -> None:
        self._retiring.setdefault(slot.partition, []).append(slot.writer)

    # -- what the writers say (their threads) --------------------------------------------------------------------

    def _on_state(self, writer: PartitionWriter, state: WriterState) -> None:
        if state is WriterState.SERVING:
            self._listener.gained(writer.partition)
            self._member.call(lambda: self._serves(writer))
        elif state is WriterState.STOPPED:
            self._listener.lost(writer.partition)
            self._member.call(lambda: self._ended(writer))

    def _serves(self, writer: PartitionWriter) -> None:
        slot = self._slots.get(writer.partition)
        if slot is None or slot.writer is not writer:
            return
        slot.served_since = slot.served_since or time.monotonic()
        if slot.intake is None:
            start = max(slot.committed, writer.applied(APPENDS) + 1, 0)
            slot.intake = self._intake.open(writer, start)
            known = slot.committed >= 0 or start > 0
            self._member.resume(slot.partition, start if known else None)

    def _ended(self, writer: PartitionWriter) -> None:
        slot = self._slots.get(writer.partition)
        reason = writer.stop_reason
        if slot is None or slot.writer is not writer or reason in (StopReason.REVOKED, StopReason.LOST):
            return
        if reason is StopReason.MISMATCH and writer.error is not None:
            raise writer.error
        settled = slot.served_since is not None and time.monotonic() - slot.served_since > _SETTLED_S
        self._failures = 1 if settled else self._failures + 1
        delay_s = min(_MAX_BACKOFF_S, _BACKOFF_S * 2 ** min(self._failures, 16)) * random.uniform(0.5, 1)  # noqa: S311 - jitter
        _log.warning(
            "partition %d: its writer ended (%s); leaving the group for %.1f s",
            slot.partition,
            reason.value if reason is not None else "unknown",
            delay_s,
        )
        self._member.rejoin(delay_s)

    def _on_fatal(self, error: Exception) -> None:
        self._listener.fatal(error)
