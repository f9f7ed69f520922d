"""Where an execution stands, folded from its log at rest: no key is asked for, and no payload is kept.

The kernel's fold (``loom.kernel.state``) says what each event means; this one says the same of the few fields that a
summary has, and asks for an event's data only where a field comes from it. A test holds the two to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from loom.schemas.envelope import Kind
from loom.schemas.records import ExecutionSummary

if TYPE_CHECKING:
    from loom.schemas.envelope import Json

RUNNING: Final = "running"
SUSPENDED: Final = "suspended"
FINISHED: Final = frozenset({"completed", "failed", "cancelled", "continued"})

MAX_TEXT: Final = 512
"""Characters of a name that is copied into a summary: names are short, and nothing long is a name."""

MAX_WAITS: Final = 64
"""Arms that a summary lists; a flow may wait on more."""

Data = Callable[[], Mapping[str, "Json"]]
"""Gives an event's data, decoded at the first call only."""


class Summary:
    """The mutable state behind an ``ExecutionSummary``; same fields."""

    __slots__ = (
        "chain_id",
        "error_type",
        "execution_id",
        "finished_at",
        "head",
        "node",
        "owner",
        "parent_id",
        "sealed",
        "started_at",
        "status",
        "steps",
        "successor_id",
        "updated_at",
        "waits",
        "workflow",
    )

    def __init__(self, execution_id: str) -> None:
        self.execution_id = self.chain_id = execution_id
        self.workflow = self.status = ""
        self.head = -1
        self.started_at = self.updated_at = self.steps = 0
        self.finished_at: int | None = None
        self.owner: str | None = None
        self.parent_id: str | None = None
        self.successor_id: str | None = None
        self.node: str | None = None
        self.error_type: str | None = None
        self.waits: tuple[str, ...] = ()
        self.sealed = False

    @classmethod
    def of(cls, record: ExecutionSummary) -> Summary:
        """Return the state that a record tells of."""
        summary = cls(record.execution_id)
        for name in cls.__slots__:
            setattr(summary, name, getattr(record, name))
        return summary

    def record(self) -> ExecutionSummary:
        """Return the record that is published."""
        return ExecutionSummary(
            self.execution_id,
            self.chain_id,
            self.workflow,
            self.status,
            self.head,
            self.started_at,
            self.updated_at,
            self.finished_at,
            self.owner,
            self.parent_id,
            self.successor_id,
            self.node,
            self.waits,
            self.steps,
            self.sealed,
            self.error_type,
        )

    def apply(self, kind: str, sequence: int, timestamp: int, node: str | None, data: Data) -> bool:
        """Fold one event; False if it stands at or below the head, which changes nothing.

        Raises:
            DecodeError: its data is needed and cannot be read.
        """
        if sequence <= self.head:
            return False
        handler = _HANDLERS.get(kind)
        if handler is not None and self.status not in FINISHED:
            handler(self, timestamp, data)
        self.head, self.updated_at = sequence, timestamp
        if node is not None:
            self.node = node
        return True


def _started(summary: Summary, timestamp: int, data: Data) -> None:
    start = data()
    summary.status, summary.started_at = RUNNING, timestamp
    summary.workflow = _text(start.get("workflow")) or ""
    summary.chain_id = _text(start.get("chainId")) or summary.execution_id
    summary.owner = _text(_member(start, "principal", "actor"))
    summary.parent_id = _text(_member(start, "parent", "executionId"))


def _suspended(summary: Summary, _timestamp: int, data: Data) -> None:
    summary.status, summary.waits = SUSPENDED, _waits(data().get("waits"))


def _running(summary: Summary, _timestamp: int, _data: Data) -> None:
    summary.status, summary.waits = RUNNING, ()


def _consumed(summary: Summary, timestamp: int, data: Data) -> None:
    """A message that answers a wait wakes its execution; the data is needed only where it sleeps."""
    if summary.status == SUSPENDED and "siteId" in data() and not data().get("reason"):
        _running(summary, timestamp, data)


def _step_completed(summary: Summary, _timestamp: int, _data: Data) -> None:
    summary.steps += 1


def _step_failed(summary: Summary, _timestamp: int, data: Data) -> None:
    summary.steps += 1 if data().get("final") else 0


def _ended(status: str) -> Callable[[Summary, int, Data], None]:
    def handler(summary: Summary, timestamp: int, _data: Data) -> None:
        summary.status, summary.finished_at, summary.waits = status, timestamp, ()

    return handler


def _failed(summary: Summary, timestamp: int, data: Data) -> None:
    summary.error_type = _text(_member(data(), "error", "type"))
    _ended("failed")(summary, timestamp, data)


def _continued(summary: Summary, timestamp: int, data: Data) -> None:
    summary.successor_id = _text(data().get("successorId"))
    _ended("continued")(summary, timestamp, data)


_HANDLERS: Final[dict[str, Callable[[Summary, int, Data], None]]] = {
    Kind.EXECUTION_STARTED: _started,
    Kind.EXECUTION_SUSPENDED: _suspended,
    Kind.EXECUTION_RESUMED: _running,
    Kind.EXECUTION_RECOVERED: _running,
    Kind.MESSAGE_CONSUMED: _consumed,
    Kind.STEP_COMPLETED: _step_completed,
    Kind.STEP_FAILED: _step_failed,
    Kind.EXECUTION_COMPLETED: _ended("completed"),
    Kind.EXECUTION_FAILED: _failed,
    Kind.EXECUTION_CANCELLED: _ended("cancelled"),
    Kind.EXECUTION_CONTINUED: _continued,
}


def _waits(waits: Any) -> tuple[str, ...]:
    """Name what is waited for: ``inbox:TOPIC``, ``gate:NAME``, ``child:ID``, ``timer:MILLISECONDS``."""
    named: list[str] = []
    for wait in waits if isinstance(waits, list | tuple) else ():
        for arm in _member({"wait": wait}, "wait", "arms") or ():
            kind = arm.get("kind") if isinstance(arm, Mapping) else None
            field = _ARM_FIELD.get(str(kind))
            if field is not None and len(named) < MAX_WAITS:
                named.append(f"{kind}:{_text(str(arm.get(field)))}")
    return tuple(named)


_ARM_FIELD: Final = {"inbox": "topic", "gate": "gate", "child": "childId", "timer": "wakeAt"}


def _member(data: Mapping[str, Json], name: str, field: str) -> Json:
    """A field of a mapping inside ``data``; None where either is something else, as where it is sealed."""
    inner = data.get(name)
    return inner.get(field) if isinstance(inner, Mapping) else None


def _text(value: Json) -> str | None:
    """A name, cut to size; None for whatever else stands there: what is no text may be a payload, or sealed."""
    return value[:MAX_TEXT] if isinstance(value, str) else None
