"""The flow that is a schedule: it waits for its next instant, for the ends of what it started, and for its operators.

All that makes a schedule durable is what makes any flow so: its log, one driver under a fence, its wake row, a start that
leaves in the transaction of the event deciding it. Nothing is started twice: the id of a firing's execution follows from
its instant alone.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from typing import TYPE_CHECKING, Any, Final

from loom.errors import StepFailedError
from loom.kernel.arms import ChildHandle, child, receive, timer
from loom.kernel.context import Context  # noqa: TC001 - the flow's own signature
from loom.kernel.flow import flow
from loom.kernel.retry import RetryPolicy
from loom.runtime.schedules.policy import Firing, ScheduleState, begun, decided
from loom.runtime.schedules.spec import EPOCH, Schedule, instant_of, ms_of

if TYPE_CHECKING:
    from loom.kernel.arms import SelectArm
    from loom.schemas.envelope import Json

SCHEDULE_FLOW: Final = "loom.schedule"
CONTROL: Final = "schedule"
"""Topic on which a schedule is told what to do."""

ID_PREFIX: Final = "schedule@"
TURNS: Final = 100
"""Decisions after which it continues as new, so that no log of it grows long."""

RETRY: Final = dt.timedelta(seconds=5)
REFUSED: Final = frozenset({"ExecutionAlreadyExistsError", "InvalidInputError"})
_PATIENT: Final = RetryPolicy(attempts=1_000_000)
"""A node may lack the zones' rules; another has them."""


def base_of(chain_id: str) -> str:
    """What the ids of a schedule's executions begin with."""
    return chain_id.removeprefix(ID_PREFIX)


def begin(definition: Any, now: int, paused: bool, note: str | None) -> Any:
    """Step: the first state."""
    return begun(Schedule.from_json(definition), now, paused=paused, note=note).to_json()


def decide(definition: Any, base: str, state: Any, happening: Any, now: int) -> Any:
    """Step: the next state."""
    schedule, seen = Schedule.from_json(definition), ScheduleState.from_json(state)
    return decided(schedule, base, seen, happening, now).to_json()


@flow(SCHEDULE_FLOW)
async def schedule_flow(ctx: Context, given: Any) -> None:
    """Drive a schedule: ``given`` is its ``schedule``, and its ``state`` once it has one."""
    definition, base = given["schedule"], base_of(ctx.chain_id)
    known = given.get("state")
    if known is None:
        first = (definition, _now(ctx), bool(given.get("paused")), given.get("note"))
        known = await ctx.run(begin, *first, retry=_PATIENT)
    state, refused, turns = ScheduleState.from_json(known), list[str](), 0
    while refused or (turns < TURNS and state.update is None):
        happening = _refusal(refused.pop()) if refused else await _next(ctx, definition, state)
        seen = state.to_json()
        decision = await ctx.run(decide, definition, base, seen, happening, _now(ctx), retry=_PATIENT)
        state, turns = ScheduleState.from_json(decision), turns + 1
        for execution_id in state.cancel:
            with contextlib.suppress(StepFailedError):  # it was never begun
                await _handle(ctx, definition, execution_id).cancel(f"the next firing of {base} is due")
        for firing in state.start:
            if await _start(ctx, definition, firing):
                state = state.runs(firing)
            else:
                refused.append(firing.id)
    ctx.continue_as_new({"schedule": state.update or definition, "state": state.done().to_json()})


async def _next(ctx: Context, definition: Any, state: ScheduleState) -> dict[str, Json]:
    """Wait for what happens next: ends first, then what it is told, then time."""
    arms: list[SelectArm] = [child(_handle(ctx, definition, one.id)) for one in state.running]
    arms.append(receive(CONTROL))
    if state.wake_at is not None:
        arms.append(timer(at=instant_of(state.wake_at)))
    selected = await ctx.select(*arms)
    if selected.kind == "child":
        status = "completed" if selected.error is None else selected.error.status
        return {"kind": "ended", "id": selected.child_id, "status": status}
    if selected.kind == "timer":
        return {"kind": "timer"}
    return {"kind": "told", "message": selected.value}


async def _start(ctx: Context, definition: Any, firing: Firing) -> bool:
    """Start a firing's execution; False where its id is taken, or its input is too large. Stores may be away meanwhile."""
    while True:
        try:
            await ctx.start_child(
                str(definition["flow"]), definition["input"], execution_id=firing.id, cancel_with_parent=False
            )
        except StepFailedError as error:
            if error.error_type in REFUSED:
                return False
            await ctx.sleep(RETRY)
        else:
            return True


def _refusal(execution_id: str) -> dict[str, Json]:
    return {"kind": "refused", "id": execution_id, "status": "refused"}


def _handle(ctx: Context, definition: Any, execution_id: str) -> ChildHandle[Any]:
    return ctx.child(execution_id, str(definition["flow"]))


def _now(ctx: Context) -> int:
    return ms_of(ctx.logical_time - EPOCH)
