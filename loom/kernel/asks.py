"""What a flow has asked for and waits on, and which events of the log answer it.

The log names a site; an event answers the ask at that site if kind and name agree. The rules are one table, used on
replay and live alike, so a flow that left its log is found at the first event that it did not ask for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from loom.kernel.commands import (
    Arm,
    Command,
    Complete,
    ContinueAsNew,
    Fail,
    PublishRecord,
    RecordDecision,
    RunStep,
    SendMessage,
    StartChild,
    Wait,
)
from loom.kernel.loop import FlowTimer
from loom.schemas.envelope import Envelope, Json, Kind

Effect = RunStep | Wait | StartChild | SendMessage | PublishRecord
"""Commands that an event of the log answers."""


class Ask:
    """An open site: the command asked, where its result goes, and when it was asked (``order``, ``turn``)."""

    __slots__ = ("command", "order", "sink", "turn")

    def __init__(self, command: Effect, sink: asyncio.Future[Any] | FlowTimer, order: int, turn: int) -> None:
        self.command = command
        self.sink = sink
        self.order = order
        self.turn = turn


@dataclass(frozen=True, slots=True)
class Answer:
    """How a wait was answered: the arm's index, and what came with it."""

    index: int
    value: Json = None


def _step(command: Effect, data: Mapping[str, Json]) -> bool:
    return isinstance(command, RunStep) and command.name == data.get("name")


def _step_failed(command: Effect, data: Mapping[str, Json]) -> bool:
    if isinstance(command, RunStep):
        return command.name == data.get("name")
    return not isinstance(command, Wait) and bool(data.get("final"))


def _child(command: Effect, data: Mapping[str, Json]) -> bool:
    return isinstance(command, StartChild) and command.workflow == data.get("workflow")


def _sent(command: Effect, data: Mapping[str, Json]) -> bool:
    return (
        isinstance(command, SendMessage)
        and command.execution_id == data.get("executionId")
        and command.topic == data.get("topic")
    )


def _published(command: Effect, data: Mapping[str, Json]) -> bool:
    return isinstance(command, PublishRecord) and command.topic == data.get("topic")


def _consumed(command: Effect, data: Mapping[str, Json]) -> bool:
    arm = arm_of(command, data)
    return arm is not None and arm.topic is not None and arm.topic == data.get("topic")


def _resumed(command: Effect, data: Mapping[str, Json]) -> bool:
    arm = arm_of(command, data)
    return arm is not None and arm.kind == data.get("kind")


def arm_of(command: Effect, data: Mapping[str, Json]) -> Arm | None:
    """The arm of a wait that an event names, None where it has no such arm."""
    index = data.get("arm", 0)
    if isinstance(command, Wait) and isinstance(index, int) and 0 <= index < len(command.arms):
        return command.arms[index]
    return None


_RULES: Final[dict[str, Callable[[Effect, Mapping[str, Json]], bool]]] = {
    Kind.STEP_COMPLETED: _step,
    Kind.STEP_FAILED: _step_failed,
    Kind.CHILD_STARTED: _child,
    Kind.MESSAGE_SENT: _sent,
    Kind.RECORD_PUBLISHED: _published,
    Kind.MESSAGE_CONSUMED: _consumed,
    Kind.EXECUTION_RESUMED: _resumed,
}

_ENDINGS: Final[dict[str, type[Command] | None]] = {
    Kind.EXECUTION_COMPLETED: Complete,
    Kind.EXECUTION_FAILED: Fail,
    Kind.EXECUTION_CONTINUED: ContinueAsNew,
    Kind.EXECUTION_CANCELLED: None,
}


def enters(envelope: Envelope) -> bool:
    """Whether an event brings a result into the flow, or ends it.

    Control records, parks, recoveries and decisions do not; nor does a message that answered no wait, nor the
    EXECUTION_RESUMED beside a consumed message (it has given the answer already).
    """
    kind = envelope.type
    if kind == Kind.MESSAGE_CONSUMED:
        return "siteId" in envelope.data and not envelope.data.get("reason")
    if kind == Kind.EXECUTION_RESUMED:
        return envelope.data.get("kind") in {"timer", "gate"} and "siteId" in envelope.data
    return kind in _RULES or kind in _ENDINGS


def answers(command: Effect, envelope: Envelope) -> bool:
    """Whether an event that enters may answer this command."""
    return _RULES[envelope.type](command, envelope.data)


def is_ending(envelope: Envelope) -> bool:
    """Whether an event ends the execution."""
    return envelope.type in _ENDINGS


def ends_alike(envelope: Envelope, outcome: Command | None) -> bool:
    """Whether the code's own end, None while it has none, agrees with the end in the log."""
    expected = _ENDINGS[envelope.type]
    if expected is None:
        return True  # a cancellation comes from outside
    if isinstance(outcome, ContinueAsNew) and isinstance(envelope.data.get("workflow"), str):
        return expected is ContinueAsNew and outcome.workflow == envelope.data["workflow"]
    return outcome is not None and isinstance(outcome, expected)


def describe(command: Command) -> str:
    """A command in words, names and ids only."""
    match command:
        case RunStep():
            return f"step {command.name!r} at {command.site_id}"
        case Wait():
            return f"a wait at {command.site_id} for {', '.join(map(_describe_arm, command.arms))}"
        case RecordDecision():
            return f"decision {command.kind!r} at {command.site_id}"
        case StartChild():
            return f"child {command.workflow!r} at {command.site_id}"
        case SendMessage():
            return f"a message to {command.execution_id!r} on {command.topic!r} at {command.site_id}"
        case PublishRecord():
            return f"a record for {command.topic!r} at {command.site_id}"
        case ContinueAsNew():
            return f"its end (continued as {command.workflow!r})"
        case Complete():
            return "its end (completed)"
        case Fail():
            return f"its end (failed with {command.error_type})"
        case _:
            return f"to abandon {command.site_id}"


def _describe_arm(arm: Arm) -> str:
    return f"{arm.kind} {arm.topic or arm.gate or ''}".strip()


def describe_event(envelope: Envelope) -> str:
    """An event in words, names and ids only."""
    data = envelope.data
    named = next(
        (data[k] for k in ("name", "workflow", "topic", "kind") if isinstance(data.get(k), str)), None
    )
    site = data.get("siteId")
    return (
        envelope.type
        + (f" {named[:64]!r}" if named else "")
        + (f" at {site}" if isinstance(site, str) else "")
    )
