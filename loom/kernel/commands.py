"""What a flow asks for: the commands that a flow machine hands to its driver.

A command names a *site*: ``site_id`` is the scope of the task that asked and the order of its call within that scope
(``0:3``, ``0.1:0``), so a race between tasks can never swap two of them (system.md 0, "Flow context").
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from loom.kernel.retry import RetryPolicy
    from loom.schemas.envelope import Json
from loom.schemas.quick import quick


@dataclass(frozen=True, slots=True)
class Arm:
    """One way a wait can be answered. ``kind`` is ``inbox``, ``timer``, ``gate`` or ``child``.

    ``topic`` (inbox, child: the reserved topic on which its end arrives), ``wake_at`` (timer: ms since the epoch, from
    the flow's logical time, so replay computes the same), ``gate``, ``child_id``. ``model`` is the type the answer is
    validated into; it never reaches the log.
    """

    kind: str
    topic: str | None = None
    wake_at: int | None = None
    gate: str | None = None
    child_id: str | None = None
    model: Any = None


@quick
@dataclass(frozen=True, slots=True)
class RunStep:
    """Run an effect and journal its result. ``attempt`` is the next attempt (1 first), ``not_before`` its earliest ms."""

    site_id: str
    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    retry: RetryPolicy
    timeout_ms: int | None
    attempt: int = 1
    not_before: int = 0


@quick
@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until one arm is answered; arms in park order, the first satisfiable wins."""

    site_id: str
    arms: tuple[Arm, ...]


@dataclass(frozen=True, slots=True)
class Abandon:
    """The flow no longer wants this step or wait (its task was cancelled): stop it, journal nothing for it."""

    site_id: str


@quick
@dataclass(frozen=True, slots=True)
class RecordDecision:
    """Journal a decision already taken (``now``, ``random``, ``uuid``, ``patched``)."""

    site_id: str
    kind: str
    value: Json


@dataclass(frozen=True, slots=True)
class StartChild:
    """Start a child; the driver mints its id unless ``execution_id`` is given, and journals CHILD_STARTED."""

    site_id: str
    workflow: str
    input: Json
    execution_id: str | None = None
    cancel_with_parent: bool = True


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a message to another execution; journaled as MESSAGE_SENT with the request in the same transaction."""

    site_id: str
    execution_id: str
    topic: str
    payload: Json
    message_id: str | None = None


@dataclass(frozen=True, slots=True)
class PublishRecord:
    """Write a record to an allowed topic in the transaction of RECORD_PUBLISHED."""

    site_id: str
    topic: str
    key: str | None
    value: bytes
    headers: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class ContinueAsNew:
    """End this execution and start its successor in the same chain."""

    workflow: str
    input: Json


@quick
@dataclass(frozen=True, slots=True)
class Complete:
    """The flow returned."""

    output: Json


@dataclass(frozen=True, slots=True)
class Fail:
    """The flow raised. ``error_type`` is the class name, ``message`` its text, capped."""

    error_type: str
    message: str
    details: dict[str, Json] = field(default_factory=dict)


Command = (
    RunStep
    | Wait
    | Abandon
    | RecordDecision
    | StartChild
    | SendMessage
    | PublishRecord
    | ContinueAsNew
    | Complete
    | Fail
)
