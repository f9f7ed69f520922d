"""Tenures of a writer: how one begins, when it may begin again, and how long it waits before it does (kafka.md, "Tenure").

Two owners of one partition would fence each other for ever. So a writer that is fenced again and again, each time
before it has settled, gives way after a bounded number of tenures; the other then stays.
"""

from __future__ import annotations

import logging
import random
import time
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from loom.errors import BrokerError, StoreError
from loom.stores.kafka.client import Fault, producer_config
from loom.stores.kafka.deadline import Deadline
from loom.stores.kafka.lanes import Lane, LaneFault, Lanes
from loom.stores.kafka.takeover import LogMismatchError, UnendedError
from loom.stores.kafka.unended import PATIENCE_S, Unended
from loom.stores.kafka.writer_types import StopReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from loom.errors import LoomError
    from loom.stores.contracts import Clock
    from loom.stores.kafka.reader import Ends
    from loom.stores.kafka.takeover import Takeover
    from loom.stores.kafka.writer_types import WriterSettings

_log = logging.getLogger("loom.kafka.writer")

FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 5.0


class TenureEnd(Enum):
    """Why a tenure ended."""

    POISONED = "poisoned"
    """Something happened that the client may have answered by sending a request twice."""
    DOUBTFUL = "doubtful"
    """A commit failed, or nothing answered: this node may have been cut off, or stopped, for longer than its membership."""
    FENCED = "fenced"
    """Another producer has the transactional id, or the broker ended a transaction that outlived its timeout."""
    STOPPED = "stopped"
    """The writer was told to stop."""


class Backoff:
    """Pauses between attempts: exponential with jitter, from the first again after ``reset``."""

    def __init__(self, draw: Callable[[float, float], float] = random.uniform) -> None:
        self._draw = draw
        self._attempts = 0

    def next_s(self) -> float:
        """Seconds to wait before the next attempt."""
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._attempts, 16))
        self._attempts += 1
        return self._draw(pause / 2, pause)

    def reset(self) -> None:
        """All is well again."""
        self._attempts = 0


class Rivalry:
    """Counts tenures that a rival ended before they had settled. Times are seconds on a monotonic clock."""

    def __init__(
        self, most: int, settled_s: float, draw: Callable[[float, float], float] = random.uniform
    ) -> None:
        self._most, self._settled_s = most, settled_s
        self._backoff = Backoff(draw)
        self._fenced = 0
        self._serving_since: float | None = None

    def serving(self, now: float) -> None:
        """A tenure began to serve."""
        self._serving_since = now

    def fenced(self, now: float) -> float | None:
        """A tenure, or the attempt to begin one, was fenced: seconds to wait before the next, None to give way."""
        settled = self._serving_since is not None and now - self._serving_since >= self._settled_s
        self._serving_since = None
        if settled:
            self._fenced = 0
            self._backoff.reset()
        self._fenced += 1
        return None if self._fenced > self._most else self._backoff.next_s()


class StopError(Exception):
    """The writer is to stop; what its thread tells itself, never raised at a caller."""

    def __init__(self, reason: StopReason, error: LoomError | None = None) -> None:
        self.reason, self.error = reason, error
        super().__init__(reason.value + (f" ({error})" if error else ""))


class Tenures:
    """Begins tenures, on the writer's thread.

    ``confirm`` asks the group whether this node still is the owner. ``look_up`` is called between two waits, and raises
    ``StopError`` to stop; ``step_back`` once it shows that a tenure does not begin at once; ``pause`` waits.

    Attributes:
        number: how many began.
        lanes: of the present one.
        after: how the one before it ended.
        identity: what makes the log this log; known once the first has begun.
    """

    def __init__(
        self,
        *,
        partition: int,
        settings: WriterSettings,
        takeover: Takeover,
        ends: Ends,
        confirm: Callable[[], bool],
        look_up: Callable[[], None],
        step_back: Callable[[], None],
        pause: Callable[[float], object],
        clock: Clock,
        make_unended: Callable[[Callable[[int], Lane]], Unended],
    ) -> None:
        self._partition, self._settings, self._takeover, self._ends = partition, settings, takeover, ends
        self._unended = make_unended(self._make_lane)
        self._confirm, self._look_up, self._step_back, self._pause = confirm, look_up, step_back, pause
        self._clock = clock
        self._rivalry = Rivalry(settings.max_retakes, settings.settled_ms / 1000)
        self.number = 0
        self.lanes = Lanes(self._make_lane, settings.lanes)
        self.after = TenureEnd.POISONED
        self.identity: dict[str, Any] = {}

    def begin(self, after: TenureEnd) -> None:
        """Fence, and read to the end; again until it is done.

        Raises:
            StopError: told to stop, no more the owner, fenced too often, or not done within ``takeover_deadline_ms``.
        """
        deadline, backoff = Deadline.after(self._settings.takeover_deadline_ms), Backoff()
        while True:
            self.after = after
            problem: LoomError
            try:
                self._look_up()  # brokers that are away must not keep a writer that is to stop
                self._await_turn()
                self._begin(deadline)
            except LogMismatchError as error:
                raise StopError(StopReason.MISMATCH, error) from None
            except LaneFault as fault:
                after = TenureEnd.FENCED if fault.fault is Fault.FENCED else TenureEnd.DOUBTFUL
                problem = BrokerError(fault.doing, fault.code)
            except StoreError as error:
                after, problem = TenureEnd.DOUBTFUL, error
            else:
                self.number += 1
                self._rivalry.serving(time.monotonic())
                return
            _log.info("partition %d: %s", self._partition, problem)
            if deadline.passed:
                raise StopError(StopReason.INCOMPLETE, problem)
            self._step_back()
            if after is TenureEnd.DOUBTFUL:
                self._pause(min(backoff.next_s(), deadline.left_s))

    def close(self) -> None:
        """Let the lanes go."""
        self.lanes.close()

    def _await_turn(self) -> None:
        """Go on only as the owner, and not for ever."""
        if self.after is TenureEnd.FENCED:
            self._step_back()
            pause_s = self._rivalry.fenced(time.monotonic())
            if pause_s is None:
                raise StopError(StopReason.CONTENDED)
            if not self._confirm():
                raise StopError(StopReason.FENCED)
            self._pause(pause_s)
        elif self.after is TenureEnd.DOUBTFUL and self.number > 0:
            self._ends.written(
                [self._settings.catalogue.marks]
            )  # the brokers answer again; so the group can, too
            if not self._confirm():
                raise StopError(StopReason.FENCED)

    def _begin(self, deadline: Deadline) -> None:
        self._look_up()
        self._open_lanes(deadline)
        if not self._takeover.positions:
            self.identity = self._ends.identity(self._takeover.topics, self._settings.partitions)
            self._takeover.resume(self.identity, self._clock(), self._settings.checkpoint_max_age_ms)
        try:
            self._takeover.read(deadline, self._look_up, patience_s=PATIENCE_S)
        except UnendedError:
            self._unended.end(deadline, self._look_up)
            self._open_lanes(deadline)
            self._takeover.read(deadline, self._look_up)

    def _open_lanes(self, deadline: Deadline) -> None:
        self.lanes.close()
        self.lanes = Lanes(self._make_lane, self._settings.lanes)
        self.lanes.open(deadline, self._look_up)

    def _make_lane(self, number: int) -> Lane:
        settings = self._settings
        return Lane(
            producer_config(
                settings.bootstrap,
                settings.kafka,
                transactional_id=settings.catalogue.log_transactional_id(self._partition, number),
                client_id=f"{settings.node}-log-{self._partition}.{number}",
                timeout_ms=settings.transaction_timeout_ms,
                max_record_bytes=settings.max_record_bytes,
            ),
            settings.catalogue.marks,
            number,
        )
