"""The node's leases: one timer, calls in groups, and a clock that says when one no longer counts (system.md 6).

A lease is evidence of life and never a permission to write; the fence is. What the keeper holds counts until a sixth of
the TTL before it expires, on the monotonic and on the wall clock, from the instant before the request was sent: so a
holder that cannot renew stops before anybody may take its execution over.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from enum import Enum
from typing import TYPE_CHECKING, Final

from loom.errors import LoomError
from loom.runtime.lease_calls import MARGIN_DIVISOR, LeaseCalls
from loom.runtime.surroundings import SYSTEM, Surroundings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from typing import Any

    from loom.runtime.signals import Signals
    from loom.stores.contracts import LeaseStore

RENEWALS_PER_TTL: Final = 3
ABOUT: Final = "leases"
IDS_PER_CALL: Final = 1_000
MAX_DOUBTS: Final = 16_384
"""Rows whose release is not known to have happened; past this many the oldest is left to expire unwatched."""
SHORTEST_S: Final = 0.001
"""Sleeps no shorter: the sum of a deadline may be rounded to an instant at which it has not quite passed."""
WATCH_S: Final = 0.25
"""How soon a renewal that failed is tried again."""


class Grant(Enum):
    """How an ``acquire`` ended."""

    GRANTED = "granted"
    HELD = "held"
    """Another owner's row stands unexpired: the store said so."""
    LATE = "late"
    """The answer came after what it granted had passed; a row may stand."""
    UNKNOWN = "unknown"
    """No answer, or an error: a row may stand."""
    UNSENT = "unsent"
    """Nothing was sent: the store failed a moment ago."""
    CANCELLED = "cancelled"
    """A release came first."""
    CLOSED = "closed"


class _Held:
    __slots__ = ("lost", "monotonic", "wall")

    def __init__(self, sent: tuple[float, float], lost: Callable[[str], None]) -> None:
        self.monotonic, self.wall = sent
        self.lost = lost


class _Asked:
    __slots__ = ("answer", "cancelled", "lost", "sent", "settled")

    def __init__(self, loop: asyncio.AbstractEventLoop, lost: Callable[[str], None]) -> None:
        self.answer: asyncio.Future[Grant] = loop.create_future()
        self.settled: asyncio.Future[None] = loop.create_future()
        self.lost = lost
        self.sent = self.cancelled = False


async def _nobody_knows(_execution_id: str) -> bool:
    return False


class LeaseKeeper:
    """Acquires, renews and releases the leases of one node, whose incarnation is ``owner``.

    ``still_ours(execution_id)`` is asked when a renewal finds a row missing: True where the execution's fence is
    unchanged, and then the row is written again (clauses.md, point 8). In mode ``continue`` nothing lapses by itself: only
    a row that another took ends a hold. Used on one event loop.
    """

    def __init__(
        self,
        store: LeaseStore,
        owner: str,
        ttl_ms: int,
        *,
        signals: Signals,
        still_ours: Callable[[str], Awaitable[bool]] = _nobody_knows,
        surroundings: Surroundings = SYSTEM,
        on_store_error: str = "stop",
    ) -> None:
        self.store, self.owner, self.ttl_ms = store, owner, ttl_ms
        self.renew_s = ttl_ms / RENEWALS_PER_TTL / 1000
        self.lasts_s = (ttl_ms - ttl_ms // MARGIN_DIVISOR) / 1000
        self.calls = LeaseCalls(ttl_ms, signals, surroundings)
        self._signals, self._still_ours = signals, still_ours
        self._monotonic, self._wall = surroundings.monotonic, surroundings.wall
        self._stops = on_store_error == "stop"
        self._held: dict[str, _Held] = {}
        self._asked: dict[str, _Asked] = {}
        self._releasing: dict[str, asyncio.Future[None]] = {}
        self._doubts: OrderedDict[str, None] = OrderedDict()
        self._due_releases: list[str] = []
        self._due_acquires: list[str] = []
        self._flushing: set[str] = set()
        self._tasks: set[asyncio.Future[Any]] = set()
        self._timer: asyncio.Task[None] | None = None
        self._closed = False

    # What counts ----------------------------------------------------------------------------------------------------

    def valid(self, execution_id: str) -> bool:
        """Whether the lease is held and still counts: two comparisons of clocks, no I/O."""
        held = self._held.get(execution_id)
        return held is not None and (not self._stops or self._stands(held))

    def doubts(self, execution_id: str) -> bool:
        """Whether a row of ours may stand though nobody here drives: a release whose fate is unknown."""
        return (
            execution_id in self._doubts or execution_id in self.calls.late or execution_id in self._releasing
        )

    @property
    def held(self) -> frozenset[str]:
        """What is held now."""
        return frozenset(self._held)

    def now(self) -> tuple[float, float]:
        """Both clocks: the instant before a request is sent."""
        return self._monotonic(), self._wall()

    def passed(self, sent: tuple[float, float]) -> bool:
        """Whether a row asked for then no longer counts, on either clock."""
        return self._monotonic() - sent[0] >= self.lasts_s or abs(self._wall() - sent[1]) >= self.lasts_s

    def _stands(self, held: _Held) -> bool:
        lasts_s = self.lasts_s
        return self._monotonic() - held.monotonic < lasts_s and abs(self._wall() - held.wall) < lasts_s

    # Beginning and end ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Renew from now on."""
        self._timer = asyncio.get_running_loop().create_task(self._keep(), name="loom-leases")

    async def close(self) -> None:
        """Renew no more; whoever still holds is told ``closed``, its rows are left to expire. Idempotent."""
        self._closed = True
        tasks = [*self._tasks, *([] if self._timer is None else [self._timer])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.calls.close()
        for asked in list(self._asked.values()):
            _tell(asked.answer, Grant.CLOSED)
            _tell(asked.settled, None)
        for releasing in list(self._releasing.values()):
            _tell(releasing, None)
        for execution_id in list(self._held):
            self._lose(execution_id, "closed")

    # Acquire and release --------------------------------------------------------------------------------------------

    async def acquire(self, execution_id: str, lost: Callable[[str], None], *, urgent: bool = False) -> Grant:
        """Ask for a lease, in a group with whatever else is asked for now; ``lost(reason)`` hears of its loss.

        It is held from GRANTED until ``release``, ``forget`` or its loss. ``urgent`` is for one whose row may stand
        already: it is sent even while the store fails. Never raises a store's error: it is told, and is UNKNOWN here.
        """
        if self._closed:
            return Grant.CLOSED
        if not urgent and self.calls.failed_within(self.renew_s):
            return Grant.UNSENT
        while (earlier := self._asked.get(execution_id)) is not None:  # somebody gave it up; it is on its way
            await asyncio.wait({earlier.settled})
        held = self._held.get(execution_id)
        if held is not None and self.valid(execution_id):
            held.lost = lost
            return Grant.GRANTED
        asked = self._asked[execution_id] = _Asked(asyncio.get_running_loop(), lost)
        try:
            await self._settled_release(execution_id)
            if not asked.cancelled:
                self._due_acquires.append(execution_id)
                self._flush("acquire")
            return await asyncio.shield(asked.answer)
        finally:
            if not asked.answer.done():
                self._cancel(execution_id, asked)

    async def steal(self, execution_id: str, lost: Callable[[str], None]) -> bool:
        """Take a lease whoever holds it; only for who has won the fence on the proof that nobody drives."""
        await self._settled_release(execution_id)
        sent = self.now()
        taken = await self.calls.asked(self.store.steal(execution_id, self.owner, self.ttl_ms), ABOUT)
        if taken is None or self._closed or self.passed(sent):
            self._doubt(execution_id)
            return False
        self._held[execution_id] = _Held(sent, lost)
        self._doubts.pop(execution_id, None)
        return True

    async def release(self, execution_id: str) -> None:
        """Give a lease back and wait for it, at most so long as one call may take; a failure is no error."""
        asked = self._asked.get(execution_id)
        if asked is not None:
            self._cancel(execution_id, asked)
        held = self._held.pop(execution_id, None) is not None
        if (held or execution_id in self._doubts) and not self._closed:
            await asyncio.shield(self._give_back(execution_id))

    def _cancel(self, execution_id: str, asked: _Asked) -> None:
        """Nobody wants the answer; what was sent may be granted all the same, and is given back then."""
        asked.cancelled = True
        if not asked.sent and self._asked.get(execution_id) is asked:
            del self._asked[execution_id]
            _tell(asked.settled, None)
        _tell(asked.answer, Grant.CANCELLED)

    def _give_back(self, execution_id: str) -> asyncio.Future[None]:
        done = self._releasing.get(execution_id)
        if done is None:
            done = self._releasing[execution_id] = asyncio.get_running_loop().create_future()
            self._due_releases.append(execution_id)
            self._flush("release")
        return done

    def forget(self, execution_id: str) -> None:
        """Renew it no more and leave its row to expire: evidence for a node that can do what this one could not."""
        self._held.pop(execution_id, None)
        self._doubts.pop(execution_id, None)

    # Groups ---------------------------------------------------------------------------------------------------------

    def _flush(self, kind: str) -> None:
        """Send what gathered, once what is on its way has been answered: a group is what came meanwhile."""
        if kind not in self._flushing and not self._closed:
            self._flushing.add(kind)
            self._spawn(self._send_acquires() if kind == "acquire" else self._send_releases())

    async def _send_acquires(self) -> None:
        try:
            while self._due_acquires:
                ids = list(dict.fromkeys(i for i in self._due_acquires[:IDS_PER_CALL] if self._unsent(i)))
                del self._due_acquires[:IDS_PER_CALL]
                if not ids:
                    continue
                for execution_id in ids:
                    self._asked[execution_id].sent = True
                sent = self.now()
                granted = await self.calls.asked(self.store.acquire_many(ids, self.owner, self.ttl_ms), ABOUT)
                for execution_id in ids:
                    self._answer(execution_id, sent, granted)
        finally:
            self._flushing.discard("acquire")

    def _unsent(self, execution_id: str) -> bool:
        asked = self._asked.get(execution_id)
        return asked is not None and not asked.sent

    def _answer(self, execution_id: str, sent: tuple[float, float], granted: set[str] | None) -> None:
        asked = self._asked.pop(execution_id)
        _tell(asked.settled, None)
        ours = granted is not None and execution_id in granted
        if asked.cancelled:
            if (ours or granted is None) and not self._closed:
                self._give_back(execution_id)
            return
        if granted is None:
            self._doubt(execution_id)
            answer = Grant.UNKNOWN
        elif not ours:
            self._doubts.pop(execution_id, None)
            answer = Grant.HELD
        elif self._stops and self.passed(sent):
            self._doubt(execution_id)
            answer = Grant.LATE
        else:
            self._held[execution_id] = _Held(sent, asked.lost)
            self._doubts.pop(execution_id, None)
            answer = Grant.GRANTED
        _tell(asked.answer, answer)

    async def _send_releases(self) -> None:
        try:
            while self._due_releases:
                ids = self._due_releases[:IDS_PER_CALL]
                del self._due_releases[:IDS_PER_CALL]
                released = await self.calls.asked(self.store.release_many(ids, self.owner), ABOUT, ids)
                for execution_id in ids:
                    if released is None:
                        self._doubt(execution_id)
                    else:
                        self._doubts.pop(execution_id, None)
                    _tell(self._releasing.pop(execution_id, None), None)
        finally:
            self._flushing.discard("release")

    async def _settled_release(self, execution_id: str) -> None:
        """A release on its way is applied before the row is taken anew, or would take it away from under the holder."""
        while (releasing := self._releasing.get(execution_id)) is not None:
            await asyncio.wait({releasing})
        await self.calls.overtaking(execution_id)

    def _doubt(self, execution_id: str) -> None:
        self._doubts[execution_id] = None
        if len(self._doubts) > MAX_DOUBTS:
            self._doubts.popitem(last=False)

    # The timer ------------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        due = self._monotonic() + self.renew_s
        while True:
            await asyncio.sleep(min(max(0.0, due - self._monotonic()), self._until_deadline()))
            self._watch()
            if self._monotonic() < due:
                continue
            renewed = await self._renew(list(self._held))
            await self._retry_releases()
            due = self._monotonic() + (self.renew_s if renewed else min(WATCH_S, self.renew_s))

    def _until_deadline(self) -> float:
        """Seconds until the earliest hold lapses; none lapse where an outage is outlived."""
        if not self._stops or not self._held:
            return self.renew_s
        earliest = min(held.monotonic for held in self._held.values())
        return max(SHORTEST_S, earliest + self.lasts_s - self._monotonic())

    def _watch(self) -> None:
        if not self._stops:
            return
        for execution_id, held in list(self._held.items()):
            if not self._stands(held):
                self._lose(execution_id, "not renewed in time")

    async def _renew(self, ids: list[str]) -> bool:
        """Renew in chunks; whether every one was answered."""
        whole = True
        for start in range(0, len(ids), IDS_PER_CALL):
            chunk = [i for i in ids[start : start + IDS_PER_CALL] if i in self._held]
            if not chunk:
                continue
            before = {i: self._held[i] for i in chunk}
            sent = self.now()
            kept = await self.calls.asked(self.store.renew_many(chunk, self.owner, self.ttl_ms), ABOUT)
            if kept is None:
                whole = False
                continue
            missing = [i for i in chunk if self._note_renewal(i, before[i], sent, i in kept)]
            if missing:
                whole &= await self._rewrite(missing)
        return whole

    def _note_renewal(self, execution_id: str, before: _Held, sent: tuple[float, float], kept: bool) -> bool:
        """Take a renewal's answer into account; whether the row of a lease that is still held is missing."""
        held = self._held.get(execution_id)
        if held is not before:
            return False  # released, or taken anew, meanwhile
        if not kept:
            return True
        if not self._stops or self._stands(held):  # one that has lapsed meanwhile is not brought back
            held.monotonic, held.wall = sent
        return False

    async def _rewrite(self, ids: list[str]) -> bool:
        """Rows are missing: emptied with the store, or taken by others. The fence tells which (clauses.md, point 8)."""
        ours = []
        for execution_id in ids:
            try:
                unchanged = await self._still_ours(execution_id)
            except (LoomError, TimeoutError) as error:
                self._signals.repeated_storage_error(error, execution_id)
                unchanged = False
            if unchanged:
                ours.append(execution_id)
            else:
                self._lose(execution_id, "taken over")
        if not ours:
            return True
        sent = self.now()
        written = await self.calls.asked(self.store.acquire_many(ours, self.owner, self.ttl_ms), ABOUT)
        for execution_id in ours if written is not None else ():
            held = self._held.get(execution_id)
            if held is not None and execution_id in (written or ()):
                if not self._stops or self._stands(held):  # as in a renewal
                    held.monotonic, held.wall = sent
            elif held is not None:
                self._lose(execution_id, "taken over")
        return written is not None

    async def _retry_releases(self) -> None:
        """A row left behind by a failed release would be false evidence one day: try again, a group at a time."""
        ids = [i for i in self._doubts if i not in self._held and i not in self._asked][:IDS_PER_CALL]
        if not ids:
            return
        for execution_id in ids:
            self._releasing[execution_id] = asyncio.get_running_loop().create_future()
        released = await self.calls.asked(self.store.release_many(ids, self.owner), ABOUT, ids)
        for execution_id in ids:
            if released is not None:
                self._doubts.pop(execution_id, None)
            _tell(self._releasing.pop(execution_id, None), None)

    def _lose(self, execution_id: str, reason: str) -> None:
        held = self._held.pop(execution_id, None)
        if held is not None:
            held.lost(reason)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _tell(future: asyncio.Future[Any] | None, answer: object) -> None:
    if future is not None and not future.done():
        future.set_result(answer)
