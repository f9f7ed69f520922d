"""How an execution ends: completed, failed, cancelled, or continued as new."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from loom.kernel.commands import Complete, ContinueAsNew, Fail
from loom.kernel.inbox import carried_inbox
from loom.runtime import facts
from loom.runtime.claims import claim_successor
from loom.runtime.sizes import json_size
from loom.schemas.envelope import Json, Kind, NewEvent
from loom.stores.contracts import NO_EVENTS, Outgoing, StreamAppend

if TYPE_CHECKING:
    from loom.runtime.claims import Claim
    from loom.runtime.run import Run

TOO_LARGE = "InvalidInputError"


def end(run: Run, command: Complete | Fail | ContinueAsNew) -> None:
    """The flow has come to its end: journal it, and tell whoever waits once it is durable."""
    limit = run.engine.config.max_payload_bytes
    if isinstance(command, Complete):
        weight = json_size(command.output)
        if weight <= limit:
            data = {"output": command.output}
            told = facts.child_end(run.info, {"status": "completed", "output": command.output})
            _finish(run, Kind.EXECUTION_COMPLETED, data, told, weight)
            return
        command = Fail(TOO_LARGE, f"the result's {weight} bytes exceed {limit}; return a reference instead")
    elif isinstance(command, ContinueAsNew):
        weight = json_size(command.input)
        if weight <= limit:
            _continue(run, command, weight)
            return
        command = Fail(
            TOO_LARGE, f"the successor's input of {weight} bytes exceeds {limit}; pass a reference"
        )
    error: dict[str, Json] = {"type": command.error_type, "message": command.message}
    if command.details:
        error["details"] = command.details
    told = facts.child_end(run.info, {"status": "failed", "error": error})
    _finish(run, Kind.EXECUTION_FAILED, {"error": error}, told, 0)


def cancel(run: Run, reason: str | None, by: str | None) -> bool:
    """Cancel a run of this node: terminal at once, whatever its effects are doing. Only called in ``run.perform``."""
    told = facts.cancel_children(run.state, reason) + facts.child_end(run.info, cancelled_payload(reason))
    _finish(run, Kind.EXECUTION_CANCELLED, cancelled_data(reason, by), told, 0)
    return True


def cancelled_data(reason: str | None, by: str | None) -> dict[str, Json]:
    """Data of EXECUTION_CANCELLED."""
    return {key: value for key, value in (("reason", reason), ("by", by)) if value is not None}


def cancelled_payload(reason: str | None) -> dict[str, Json]:
    """What a parent is told of a cancelled child."""
    return {"status": "cancelled", "error": {"type": "FlowCancelledError", "message": reason or ""}}


def _finish(run: Run, kind: str, data: dict[str, Json], told: tuple[Outgoing, ...], weight: int) -> None:
    run.record(kind, data, outgoing=told, weight=weight)
    _close(run, kind, data)


def _close(run: Run, kind: str, data: dict[str, Json]) -> None:
    for complaint in run.machine.complaints:
        run.engine.signals.warn(f"an error that the flow did not look at: {complaint}", run.id)
    run.over()
    run.journal.when_durable(lambda: run.engine.ended(run, kind, data))


def _continue(run: Run, command: ContinueAsNew, weight: int) -> None:
    successor = run.engine.mint_beside(run.chain_id)
    if run.engine.leasing is None:
        _continued(run, command, weight, successor, None)
    else:
        run.hold()
        run.engine.spawn(_leased(run, command, weight, successor), run.id)


async def _leased(run: Run, command: ContinueAsNew, weight: int, successor: str) -> None:
    """The successor is leased before it exists, while its predecessor still holds (D11, 1)."""
    claim = await claim_successor(run, successor)
    if run.active:
        run.first(partial(_continued, run, command, weight, successor, claim))
        run.release()
    elif claim is not None:
        run.engine.leave(claim)


def _continued(run: Run, command: ContinueAsNew, weight: int, successor: str, claim: Claim | None) -> None:
    """Both events in one transaction: no message can fall between two executions of one chain."""
    engine, info = run.engine, run.info
    fact = facts.started(
        command.workflow,
        command.input,
        chain_id=info.chain_id,
        subject=info.subject,
        principal=info.principal,
        parent=info.parent,
        continued_from={"executionId": run.id, "carried": carried_inbox(run.state)},
    )
    # Without a driver's name: if this node does not come to drive it, the owner does at once.
    event = NewEvent(engine.event_id(), Kind.EXECUTION_STARTED, fact, facts.STAMP)
    append = StreamAppend(successor, (event,), expected_head=NO_EVENTS, fence=facts.FIRST_FENCE)
    data: dict[str, Json] = {"successorId": successor, "workflow": command.workflow}
    run.successor = successor
    engine.starting.add(successor)
    run.note(
        run.journal.push(Kind.EXECUTION_CONTINUED, data, engine.stamp, companions=(append,), weight=weight)
    )
    _close(run, Kind.EXECUTION_CONTINUED, data | {"event": event, "claim": claim})
