"""What each happening means to a schedule: a pure function from one state to the next (docs/adr/0033).

Its result is journaled, so a replay decides nothing anew: neither another release of the zones' rules nor of this module
can make a schedule leave its log.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from loom.errors import InvalidIdError, InvalidInputError
from loom.ids import check_execution_id
from loom.runtime.schedules.calendar import cron_instants, interval_instants
from loom.runtime.schedules.spec import EPOCH, OVERLAPS, Schedule, instant_of, ms_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from loom.schemas.envelope import Json

MAX_RUNNING: Final = 100
"""Executions of one schedule at once, where they may overlap."""

MAX_LATE_AT_ONCE: Final = 100
"""Instants that one decision deals with; what is left is dealt with at once by the next."""

MAX_MISSED: Final = 10_000
"""Missed instants that are counted one by one in one decision; more are passed over uncounted."""

RECENT: Final = 10
MAX_NOTE: Final = 512


@dataclass(frozen=True, slots=True)
class Firing:
    """One start: the execution it has, or will have, and the instant it is for."""

    id: str
    due: int


@dataclass(frozen=True, slots=True)
class ScheduleState:
    """Where a schedule stands.

    Instants up to ``cursor`` are dealt with; ``wake_at`` is the next (None: paused, or no more come). ``start`` and ``cancel``
    are what this state has its flow do, once; ``update`` is the definition that takes over. ``running`` are firings whose
    end is not known yet. ``fired``, ``skipped`` (overlap) and ``missed`` (too late) count. ``recent`` are the last firings.
    """

    cursor: int
    wake_at: int | None = None
    paused: bool = False
    note: str | None = None
    running: tuple[Firing, ...] = ()
    buffered: Firing | None = None
    start: tuple[Firing, ...] = ()
    cancel: tuple[str, ...] = ()
    update: dict[str, Any] | None = None
    fired: int = 0
    skipped: int = 0
    missed: int = 0
    recent: tuple[dict[str, Any], ...] = field(default_factory=tuple)

    def to_json(self) -> dict[str, Json]:
        """As it is journaled."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ScheduleState:
        """What ``to_json`` gave."""
        buffered = data["buffered"]
        return cls(
            **{
                **data,
                "running": tuple(Firing(**one) for one in data["running"]),
                "start": tuple(Firing(**one) for one in data["start"]),
                "cancel": tuple(data["cancel"]),
                "buffered": None if buffered is None else Firing(**buffered),
                "recent": tuple(data["recent"]),
            }
        )

    def runs(self, firing: Firing) -> ScheduleState:
        """The state once a firing's execution has begun."""
        return replace(self, running=(*self.running, firing))

    def done(self) -> ScheduleState:
        """The state once all that it asks for is done."""
        return replace(self, start=(), cancel=(), update=None)

    @property
    def busy(self) -> bool:
        """Whether an execution of it runs, or is about to."""
        return bool(self.running or self.start)


def firing_id(base: str, due: int) -> str:
    """The execution of an instant: whoever starts it, however often, it is this one."""
    return f"{base}@{instant_of(due):%Y%m%dT%H%M%S}{f'.{due % 1000:03d}' if due % 1000 else ''}Z"


def begun(schedule: Schedule, now: int, *, paused: bool, note: str | None) -> ScheduleState:
    """A fresh schedule: what lies before its creation is none of its business."""
    return _planned(schedule, ScheduleState(cursor=now, paused=paused, note=note))


def decided(
    schedule: Schedule, base: str, state: ScheduleState, happening: Mapping[str, Any], now: int
) -> ScheduleState:
    """What follows from a happening: ``timer``, ``ended``, ``refused`` (a start) or ``told`` (a message).

    ``base`` begins the ids of its executions. A message that means nothing changes nothing.
    """
    state = state.done()
    now = max(now, state.cursor)  # another node's clock may be behind
    kind = happening["kind"]
    if kind == "timer":
        state = _due(schedule, base, state, max(now, state.wake_at or now))
    elif kind in {"ended", "refused"}:
        state = _ended(state, str(happening["id"]), str(happening["status"]))
    else:
        schedule, state = _told(schedule, base, state, happening.get("message"), now)
    return _planned(schedule, state)


def instants(schedule: Schedule, after: int) -> Iterator[int]:
    """Its instants after one, rising, none past ``until``."""
    found = (
        cron_instants(schedule.cron, schedule.time_zone, after)
        if schedule.cron is not None
        else interval_instants(ms_of(schedule.every), ms_of(schedule.offset), after)  # type: ignore[arg-type]
    )
    end = None if schedule.until is None else ms_of(schedule.until - EPOCH)
    for at in found:
        if end is not None and at > end:
            return
        yield at


def _planned(schedule: Schedule, state: ScheduleState) -> ScheduleState:
    if state.buffered is not None and not state.busy:
        state = _started(replace(state, buffered=None), state.buffered)
    wake_at = None if state.paused else next(instants(schedule, state.cursor), None)
    return replace(state, wake_at=wake_at)


# Time ---------------------------------------------------------------------------------------------------------------


def _due(schedule: Schedule, base: str, state: ScheduleState, now: int) -> ScheduleState:
    """Deal with what has come: what is too late is missed, the rest meets the overlap policy, oldest first."""
    if state.paused:
        return state
    floor = now - ms_of(schedule.catch_up)
    state = _missed(schedule, state, floor)
    for count, at in enumerate(instants(schedule, state.cursor)):
        if at > now or count >= MAX_LATE_AT_ONCE:
            break
        state = _fire(replace(state, cursor=at), Firing(firing_id(base, at), at), schedule.overlap)
    return state


def _missed(schedule: Schedule, state: ScheduleState, floor: int) -> ScheduleState:
    count, cursor = 0, state.cursor
    for at in instants(schedule, state.cursor):
        if at >= floor or count >= MAX_MISSED:
            break
        count, cursor = count + 1, at
    if count >= MAX_MISSED:
        cursor = max(cursor, floor - 1)
    return replace(state, cursor=cursor, missed=state.missed + count)


# Overlap ------------------------------------------------------------------------------------------------------------


def _fire(state: ScheduleState, firing: Firing, overlap: str) -> ScheduleState:
    if not state.busy or (overlap == "allow" and len(state.running) + len(state.start) < MAX_RUNNING):
        return _started(state, firing)
    if overlap == "buffer_one" and state.buffered is None:
        return replace(state, buffered=firing)
    if overlap == "cancel_other":
        return _instead(state, firing)
    return replace(state, skipped=state.skipped + 1)


def _instead(state: ScheduleState, firing: Firing) -> ScheduleState:
    """The newest takes the place of all others: of one that waits, of one about to start, of those that run."""
    dropped = len(state.start) + (state.buffered is not None)
    gone = {one.id for one in state.start}
    state = replace(
        state,
        start=(),
        buffered=None,
        fired=state.fired - len(state.start),
        skipped=state.skipped + dropped,
        recent=tuple(one for one in state.recent if one["id"] not in gone),
    )
    if not state.running:
        return _started(state, firing)
    return replace(state, buffered=firing, cancel=tuple(one.id for one in state.running))


def _started(state: ScheduleState, firing: Firing) -> ScheduleState:
    entry = {"id": firing.id, "due": firing.due, "status": "running"}
    return replace(
        state,
        start=(*state.start, firing),
        fired=state.fired + 1,
        recent=(*state.recent, entry)[-RECENT:],
    )


def _ended(state: ScheduleState, execution_id: str, status: str) -> ScheduleState:
    refused = status == "refused"
    return replace(
        state,
        running=tuple(one for one in state.running if one.id != execution_id),
        fired=state.fired - refused,
        skipped=state.skipped + refused,
        recent=tuple(one | {"status": status} if one["id"] == execution_id else one for one in state.recent),
    )


# Messages -----------------------------------------------------------------------------------------------------------


def _told(
    schedule: Schedule, base: str, state: ScheduleState, message: Any, now: int
) -> tuple[Schedule, ScheduleState]:
    if not isinstance(message, dict):
        return schedule, state
    verb, note = message.get("verb"), message.get("note")
    note = note[:MAX_NOTE] if isinstance(note, str) else None
    if verb == "pause":
        state = replace(state, paused=True, note=note)
    elif verb == "unpause" and state.paused:
        state = replace(
            state, paused=False, note=note, cursor=now
        )  # what fell into the pause is not made up for
    elif verb == "trigger":
        overlap = message.get("overlap")
        firing = Firing(f"{base}+{message.get('request')}", now)
        if _possible(firing.id):
            state = _fire(state, firing, overlap if overlap in OVERLAPS else schedule.overlap)
    elif verb == "update":
        updated = _schedule_of(message.get("schedule"))
        if updated is not None:
            schedule = updated
            state = replace(state, cursor=max(state.cursor, now), update=updated.to_json())
    return schedule, state


def _possible(execution_id: str) -> bool:
    try:
        check_execution_id(execution_id)
    except InvalidIdError:
        return False
    return True


def _schedule_of(data: Any) -> Schedule | None:
    try:
        return Schedule.from_json(data)
    except InvalidInputError:
        return None
