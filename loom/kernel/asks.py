"""What a flow has asked for and waits on, and which events of the log answer it.

The log names a site; an event answers the ask at that site if kind and name agree. The rules are one table, used on
replay and live alike, so a flow that left its log is found at the first event that it did not ask for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from loom.kernel.commands import (
    Abandon,
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
from loom.schemas.envelope import Envelope, Json, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


Effect = RunStep | Wait | StartChild | SendMessage | PublishRecord
"""Commands that an event of the log answers."""


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


_WORDS: Final[dict[type, Callable[[Any], str]]] = {
    RunStep: lambda c: f"step {c.name!r} at {c.site_id}",
    Wait: lambda c: f"a wait at {c.site_id} for {', '.join(map(_describe_arm, c.arms))}",
    RecordDecision: lambda c: f"decision {c.kind!r} at {c.site_id}",
    StartChild: lambda c: f"child {c.workflow!r} at {c.site_id}",
    SendMessage: lambda c: f"a message to {c.execution_id!r} on {c.topic!r} at {c.site_id}",
    PublishRecord: lambda c: f"a record for {c.topic!r} at {c.site_id}",
    Abandon: lambda c: f"to abandon {c.site_id}",
    ContinueAsNew: lambda c: f"its end (continued as {c.workflow!r})",
    Complete: lambda _: "its end (completed)",
    Fail: lambda c: f"its end (failed with {c.error_type})",
}


def describe(command: Command) -> str:
    """A command in words, names and ids only."""
    return _WORDS[type(command)](command)


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
