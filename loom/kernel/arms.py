"""The arms of a select, what it answers, and the handles of children."""

from __future__ import annotations

import datetime as dt
from asyncio import CancelledError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from loom.errors import ChildFailedError, InvalidInputError
from loom.ids import RESERVED_PREFIX
from loom.kernel.commands import Arm, SendMessage, Wait
from loom.kernel.inbox import CANCEL_TOPIC, child_topic
from loom.kernel.values import load_json

if TYPE_CHECKING:
    from collections.abc import Generator

    from loom.kernel.board import Answer
    from loom.kernel.machine import FlowMachine
    from loom.schemas.envelope import Json

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TimerArm:
    """A timer arm not yet placed: ``delay_ms`` from the select's logical time."""

    delay_ms: int


SelectArm = Arm | TimerArm


def receive(topic: str, model: Any = None) -> Arm:
    """Arm: the next message on a topic, validated into ``model`` (None: plain JSON)."""
    return Arm("inbox", topic=user_topic(topic), model=model)


def timer(
    delay: float | dt.timedelta = 0,
    *,
    days: float = 0,
    hours: float = 0,
    minutes: float = 0,
    seconds: float = 0,
    milliseconds: float = 0,
    at: dt.datetime | None = None,
) -> SelectArm:
    """Arm: a durable timer, after a delay (seconds, or a sum of units) or ``at`` an instant (with a time zone)."""
    if at is not None:
        if at.tzinfo is None:
            raise InvalidInputError("timer(at=)", "the instant has no time zone", "pass an aware datetime")
        return Arm("timer", wake_at=round(at.timestamp() * 1000))
    units = dt.timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds, milliseconds=milliseconds)
    return TimerArm(max(0, as_ms(delay) + as_ms(units)))


def gate(name: str, model: Any = None) -> Arm:
    """Arm: a human's answer at a named gate, validated into ``model``."""
    return Arm("gate", gate=checked_name("gate", name), model=model)


def child(handle: ChildHandle[Any]) -> Arm:
    """Arm: the end of a child."""
    return Arm("child", topic=child_topic(handle.id), child_id=handle.id, model=handle.model)


@dataclass(frozen=True, slots=True)
class Selected:
    """The arm that was answered: ``index`` in the order given, its ``kind`` (inbox, timer, gate, child) and value."""

    index: int
    arm: Arm
    error: ChildFailedError | None
    _value: Any

    @property
    def kind(self) -> str:
        """``inbox``, ``timer``, ``gate`` or ``child``."""
        return self.arm.kind

    @property
    def topic(self) -> str | None:
        """Topic of an inbox arm."""
        return self.arm.topic

    @property
    def gate(self) -> str | None:
        """Name of a gate arm."""
        return self.arm.gate

    @property
    def child_id(self) -> str | None:
        """Execution id of a child arm."""
        return self.arm.child_id

    @property
    def value(self) -> Any:
        """Payload, gate answer or child's result; None for a timer.

        Raises:
            ChildFailedError: the child did not complete (``error`` tells without raising).
        """
        if self.error is not None:
            raise self.error
        return self._value


class ChildHandle(Generic[T]):
    """A child execution. ``await handle.result()`` (or ``await handle``), as often as wanted."""

    __slots__ = ("_machine", "id", "model", "workflow")

    def __init__(self, machine: FlowMachine, execution_id: str, workflow: str, model: Any) -> None:
        self._machine = machine
        self.id = execution_id
        self.workflow = workflow
        self.model = model

    async def result(self) -> T:
        """Wait for the child's end and return its result.

        Raises:
            ChildFailedError: it failed, or was cancelled.
        """
        selected = await select(self._machine, (child(self),))
        value: T = selected.value
        return value

    async def cancel(self, reason: str | None = None) -> None:
        """Ask for its cancellation; returns once that is in the log. Its end says whether it came in time.

        Raises:
            StepFailedError: there is no such execution.
        """
        machine = self._machine
        site = machine.next_site()
        given = f"{machine.info.execution_id}/{site}"
        future = machine.ask(SendMessage(site, self.id, CANCEL_TOPIC, {"reason": reason}, given))
        try:
            await future
        except CancelledError:
            machine.abandon(site)
            raise

    def __await__(self) -> Generator[Any, Any, T]:
        return self.result().__await__()

    def __repr__(self) -> str:
        return f"<child {self.workflow!r} {self.id}>"


async def select(machine: FlowMachine, given: tuple[SelectArm, ...]) -> Selected:
    """Ask for the first of these arms to be answered; an arm of a child that has ended is answered already."""
    if not given:
        raise InvalidInputError("select", "it has no arms", "give at least one")
    site = machine.next_site()
    now_ms = machine.logical_ms
    arms = tuple(Arm("timer", wake_at=now_ms + a.delay_ms) if isinstance(a, TimerArm) else a for a in given)
    for index, arm in enumerate(arms):
        if arm.child_id is not None and (end := machine.child_end(arm.child_id)) is not None:
            return _selected(index, arm, end[0])
    future = machine.ask(Wait(site, arms))
    try:
        answer: Answer = await future
    except CancelledError:
        machine.abandon(site)
        raise
    return _selected(answer.index, arms[answer.index], answer.value)


def _selected(index: int, arm: Arm, value: Json) -> Selected:
    if arm.kind == "child":
        return _selected_child(index, arm, value)
    what = f"message on topic {arm.topic!r}" if arm.kind == "inbox" else f"answer at gate {arm.gate!r}"
    return Selected(index, arm, None, None if arm.kind == "timer" else load_json(value, arm.model, what))


def _selected_child(index: int, arm: Arm, end: Json) -> Selected:
    child_id = arm.child_id or ""
    if not isinstance(end, dict):
        return Selected(index, arm, ChildFailedError(child_id, "ended without a record"), None)
    if end.get("status") == "completed":
        value = load_json(end.get("output"), arm.model, f"result of child {child_id!r}")
        return Selected(index, arm, None, value)
    error = end.get("error") or {}
    failed = ChildFailedError(
        child_id, str(end.get("status", "failed")), str(error.get("type", "")), str(error.get("message", ""))
    )
    return Selected(index, arm, failed, None)


def as_ms(duration: float | dt.timedelta) -> int:
    """Seconds, or a timedelta, in whole milliseconds."""
    seconds = duration.total_seconds() if isinstance(duration, dt.timedelta) else duration
    return round(seconds * 1000)


def user_topic(topic: str) -> str:
    """Return a topic that users may name, or raise ``InvalidInputError``."""
    if topic.startswith(RESERVED_PREFIX):
        raise InvalidInputError(
            f"topic {topic[:64]!r}", f"{RESERVED_PREFIX} is reserved", "choose another name"
        )
    return checked_name("topic", topic)


def checked_name(what: str, name: str) -> str:
    """Return a name that is not empty, or raise ``InvalidInputError``."""
    if not isinstance(name, str) or not name:
        raise InvalidInputError(what, "its name is empty", "give it one")
    return name
