"""Calls of the lease store: bounded, told when they fail, and what follows from a failure (system.md 6; clauses.md)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, TypeVar

from loom.errors import LeaseStoreTimeoutError, LoomError
from loom.runtime.surroundings import SYSTEM, Surroundings

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    from loom.runtime.signals import Signals

T = TypeVar("T")

MARGIN_DIVISOR: Final = 6
CALL_BOUND_MS: Final = 1_000
"""A call is bounded by the smaller of this and TTL/6 (clauses.md, "Wake rows, leases")."""


class LeaseCalls:
    """Makes the calls of one node, and knows how its store has been doing.

    ``late`` holds calls that were given up and may be applied yet, by the id that they concern.
    """

    def __init__(self, ttl_ms: int, signals: Signals, surroundings: Surroundings = SYSTEM) -> None:
        self.bound_s = min(ttl_ms / MARGIN_DIVISOR, CALL_BOUND_MS) / 1000
        self.late: dict[str, asyncio.Future[Any]] = {}
        self.failed_at: float | None = None
        self._ttl_s = ttl_ms / 1000
        self._signals = signals
        self._monotonic = surroundings.monotonic
        self._quiet_until = 0.0
        self._given_up: set[asyncio.Future[Any]] = set()

    @property
    def quiet(self) -> bool:
        """Whether the store fails, or answers again since less than one TTL: expired rows count for nothing."""
        return self.failed_at is not None or self._monotonic() < self._quiet_until

    def failed_within(self, seconds: float) -> bool:
        """Whether the last call failed, and not long ago."""
        return self.failed_at is not None and self._monotonic() - self.failed_at < seconds

    async def bounded(self, call: Coroutine[Any, Any, T], about: str, late: Iterable[str] = ()) -> T:
        """Make one call; ``late`` are the ids that it concerns where it may not be overtaken.

        Raises:
            LoomError, TimeoutError: it failed, or was not answered in time: it may be applied all the same.
        """
        work = asyncio.ensure_future(call)
        try:
            await asyncio.wait({work}, timeout=self.bound_s)
        finally:
            if not work.done():
                self._give_up(work, list(late))
        try:
            if not work.done():
                raise LeaseStoreTimeoutError(f"no answer within {round(self.bound_s * 1000)} ms")
            answer = work.result()
        except (LoomError, TimeoutError):
            self.failed_at = self._monotonic()
            raise
        if self.failed_at is not None:
            self.failed_at = None
            self._signals.settled(about)
            self._quiet_until = self._monotonic() + self._ttl_s
        return answer

    async def asked(self, call: Coroutine[Any, Any, T], about: str, late: Iterable[str] = ()) -> T | None:
        """As ``bounded``; None, and told, where it fails."""
        try:
            return await self.bounded(call, about, late)
        except (LoomError, TimeoutError) as error:
            self._signals.repeated_storage_error(error, about)
            return None

    async def overtaking(self, execution_id: str) -> None:
        """Wait, at most so long as one call, for what was given up and concerns this id."""
        late = self.late.get(execution_id)
        if late is not None:
            await asyncio.wait({late}, timeout=self.bound_s)

    async def close(self) -> None:
        """Give up what is still out."""
        out = list(self._given_up)
        for work in out:
            work.cancel()
        await asyncio.gather(*out, return_exceptions=True)

    def _give_up(self, work: asyncio.Future[Any], ids: list[str]) -> None:
        self._given_up.add(work)
        for execution_id in ids:
            self.late[execution_id] = work

        def settled(done: asyncio.Future[Any]) -> None:
            self._given_up.discard(done)
            if not done.cancelled():
                done.exception()  # nobody waits for it any more
            for execution_id in ids:
                if self.late.get(execution_id) is done:
                    del self.late[execution_id]

        work.add_done_callback(settled)
