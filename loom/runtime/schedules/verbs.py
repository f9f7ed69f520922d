"""What a caller does with schedules: each verb is one on the schedule's own execution, judged like any other."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from loom.errors import ExecutionAlreadyExistsError, InvalidIdError, InvalidInputError
from loom.ids import check_execution_id
from loom.runtime.schedules.flow import CONTROL, ID_PREFIX, SCHEDULE_FLOW, base_of
from loom.runtime.schedules.policy import ScheduleState
from loom.runtime.schedules.spec import OVERLAPS, Overlap, Schedule, instant_of
from loom.runtime.wake_rows import open_logs
from loom.schemas.envelope import Kind

if TYPE_CHECKING:
    import datetime as dt

    from loom.kernel.state import ExecutionState
    from loom.runtime.access import Principal
    from loom.runtime.client import Client

MAX_NAME: Final = 120
MAX_GENERATIONS: Final = 1 << 20
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]*")


@dataclass(frozen=True, slots=True)
class ScheduleView:
    """Where a schedule stands.

    ``status`` is ``active``, ``paused``, ``deleted``, or ``failed`` where its own flow did. ``next_at`` is its next instant, ``running`` the executions whose end it does not know yet, ``waiting`` the one that
    starts after them. ``fired``, ``skipped`` (by the overlap policy) and ``missed`` (later than ``catch_up``) count; ``recent``
    are the last firings: ``id``, ``due``, ``status``.
    """

    name: str
    execution_id: str
    schedule: Schedule
    status: str
    note: str | None
    next_at: dt.datetime | None
    running: tuple[str, ...]
    waiting: str | None
    fired: int
    skipped: int
    missed: int
    recent: tuple[dict[str, Any], ...]


class Schedules:
    """The schedules of a fleet, by name: ``client.schedules``.

    What a verb says is durable when it returns; the node that drives the schedule acts on it in its turn, within moments.
    Every verb raises ``ExecutionNotFoundError`` and ``ExecutionDeniedError`` as the verbs of executions do.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    async def create(
        self,
        name: str,
        schedule: Schedule,
        *,
        paused: bool = False,
        note: str | None = None,
        subject: str | None = None,
        principal: Principal | None = None,
    ) -> str:
        """Make a schedule; return the id of its execution. What it starts has its owner and its subject.

        A name that was deleted may be used again: ids of executions then begin with ``<name>~<count>``.

        Raises:
            ExecutionAlreadyExistsError: there is one of that name. InvalidIdError: no schedule may be called so.
            UnknownFlowError: no live node runs its flow, or schedules.
        """
        await self._client._verbs.check_flow(schedule.flow)  # noqa: SLF001 - a part of the client
        given = {"schedule": schedule.to_json(), "paused": paused, "note": note}
        execution_id = _id(name, 1)
        while True:
            try:
                handle = await self._client.start(
                    SCHEDULE_FLOW, given, execution_id=execution_id, subject=subject, principal=principal
                )
            except ExecutionAlreadyExistsError:
                count = await self._count(name)
                last = _id(name, count)
                if execution_id == _id(name, count + 1) or not await self._has_ended(last):
                    raise ExecutionAlreadyExistsError(last) from None
                execution_id = _id(name, count + 1)
            else:
                return handle.execution_id

    async def update(self, name: str, schedule: Schedule, *, principal: Principal | None = None) -> None:
        """Give a schedule another definition, from now on. What runs goes on, and is known to it."""
        await self._client._verbs.check_flow(schedule.flow)  # noqa: SLF001 - a part of the client
        await self._tell(name, {"verb": "update", "schedule": schedule.to_json()}, principal)

    async def pause(self, name: str, *, note: str | None = None, principal: Principal | None = None) -> None:
        """Let it fire no more until it is unpaused. What runs goes on; ``trigger`` still works."""
        await self._tell(name, {"verb": "pause", "note": note}, principal)

    async def unpause(
        self, name: str, *, note: str | None = None, principal: Principal | None = None
    ) -> None:
        """Let it fire again, from now on: what fell into the pause is not made up for."""
        await self._tell(name, {"verb": "unpause", "note": note}, principal)

    async def trigger(
        self,
        name: str,
        *,
        overlap: Overlap | None = None,
        request_id: str | None = None,
        principal: Principal | None = None,
    ) -> str:
        """Fire once now, outside its times; return the id that the execution has where the overlap policy starts it.

        ``overlap`` replaces the schedule's policy this once. The same ``request_id`` fires once, however often it is given.
        """
        if overlap is not None and overlap not in OVERLAPS:
            raise InvalidInputError("overlap", "it is none of its values", f"use one of {sorted(OVERLAPS)}")
        request = request_id or self._client._engine.ids()  # noqa: SLF001 - a part of the client
        current = await self._current(name)
        execution_id = check_execution_id(f"{base_of(current)}+{request}")
        message = {"verb": "trigger", "overlap": overlap, "request": request}
        await self._client.send(current, CONTROL, message, message_id=request, principal=principal)
        return execution_id

    async def delete(
        self, name: str, *, reason: str | None = None, principal: Principal | None = None
    ) -> None:
        """End a schedule. What it started goes on, and its log stays.

        Raises:
            ExecutionFinishedError: it was deleted before.
        """
        await self._client.cancel(await self._current(name), reason or "deleted", principal=principal)

    async def describe(self, name: str, *, principal: Principal | None = None) -> ScheduleView:
        """Where it stands, as its log says now."""
        execution_id = await self._current(name)
        head = await self._client.follow_to_head(execution_id, principal=principal)
        return _view(name, execution_id, await self._client.load_state(head, principal=principal))

    async def list(self) -> list[str]:
        """Names of the schedules that stand in the shards of this process, in order. ``loom schedules list`` lists all.

        Raises:
            ConfigError: it serves no shard.
        """
        engine, names = self._client._engine, set()  # noqa: SLF001 - a part of the client
        async for info in open_logs(engine):
            chain_id = await engine.chain_of(info.stream_id)
            if chain_id is not None and chain_id.startswith(ID_PREFIX):
                names.add(name_of(chain_id))
        return sorted(names)

    async def _tell(self, name: str, message: dict[str, Any], principal: Principal | None) -> None:
        await self._client.send(await self._current(name), CONTROL, message, principal=principal)

    async def _current(self, name: str) -> str:
        """The execution of that name, the last where it was made more than once."""
        return _id(name, max(1, await self._count(name)))

    async def _count(self, name: str) -> int:
        """How often a schedule of that name was made. One is made only where all earlier ones are: so a search halves."""
        there, missing = 0, 1
        while missing < MAX_GENERATIONS and await self._exists(_id(name, missing)):
            there, missing = missing, missing * 2
        while missing - there > 1:
            middle = (there + missing) // 2
            if await self._exists(_id(name, middle)):
                there = middle
            else:
                missing = middle
        return there

    async def _exists(self, execution_id: str) -> bool:
        engine = self._client._engine  # noqa: SLF001 - a part of the client
        return await engine.patiently(lambda: engine.events.info(execution_id), execution_id) is not None

    async def _has_ended(self, execution_id: str) -> bool:
        engine = self._client._engine  # noqa: SLF001 - a part of the client
        head = await engine.driving.current(execution_id)
        info = await engine.patiently(lambda: engine.events.info(head), head)
        return info is not None and info.status in ENDED


ENDED: Final = frozenset({Kind.EXECUTION_CANCELLED, Kind.EXECUTION_FAILED, Kind.EXECUTION_COMPLETED})


def name_of(chain_id: str) -> str:
    """Name of the schedule whose chain it is."""
    return base_of(chain_id).partition("~")[0]


def _id(name: str, count: int) -> str:
    if not isinstance(name, str) or len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise InvalidIdError(
            str(name)[:MAX_NAME], f"a schedule's name is 1 to {MAX_NAME} letters, digits and ._=-"
        )
    return f"{ID_PREFIX}{name}" if count <= 1 else f"{ID_PREFIX}{name}~{count}"


def _view(name: str, execution_id: str, state: ExecutionState) -> ScheduleView:
    given = cast("dict[str, Any]", state.input)
    steps = [
        event
        for event in (state.answers or {}).values()
        if event.type == Kind.STEP_COMPLETED and isinstance(event.data.get("output"), dict)
    ]
    last = max(steps, key=lambda event: event.sequence).data["output"] if steps else given.get("state")
    known = ScheduleState(cursor=state.started_at) if last is None else ScheduleState.from_json(last)
    ended = "failed" if state.status == "failed" else "deleted"
    status = ended if state.finished else "paused" if known.paused else "active"
    return ScheduleView(
        name=name,
        execution_id=execution_id,
        schedule=Schedule.from_json(known.update or given["schedule"]),
        status=status,
        note=known.note,
        next_at=None if known.wake_at is None or state.finished else instant_of(known.wake_at),
        running=tuple(one.id for one in (*known.running, *known.start)),
        waiting=None if known.buffered is None else known.buffered.id,
        fired=known.fired,
        skipped=known.skipped,
        missed=known.missed,
        recent=known.recent,
    )
