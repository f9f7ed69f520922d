"""One execution's log as a person reads it: a line an event, with what happened rather than how it is stored."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loom.schemas.envelope import Envelope, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_STYLES: Final = {
    Kind.EXECUTION_STARTED: ("▶", "cyan"),
    Kind.STEP_COMPLETED: ("✔", "green"),
    Kind.STEP_FAILED: ("✘", "yellow"),
    Kind.EXECUTION_SUSPENDED: ("⏸", "blue"),
    Kind.MESSAGE_CONSUMED: ("✉", "magenta"),
    Kind.EXECUTION_RESUMED: ("⏵", "blue"),
    Kind.INBOX_QUARANTINED: ("⛒", "bold yellow"),
    Kind.INBOX_RELEASED: ("✉", "yellow"),
    Kind.EXECUTION_RECOVERED: ("↻", "bold yellow"),
    Kind.EXECUTION_CONTINUED: ("⇒", "cyan"),
    Kind.EXECUTION_COMPLETED: ("■", "bold green"),
    Kind.EXECUTION_FAILED: ("■", "bold red"),
    Kind.EXECUTION_CANCELLED: ("■", "bold yellow"),
    Kind.EXECUTION_DENIED: ("⛔", "red"),
    Kind.CHILD_STARTED: ("⑂", "cyan"),
    Kind.MESSAGE_SENT: ("➚", "magenta"),
    Kind.RECORD_PUBLISHED: ("➚", "magenta"),
    Kind.PAYLOAD_SHREDDED: ("✂", "bold red"),
}

Data = dict[str, Any]


def timeline(events: Iterable[Envelope], *, payloads: bool = False) -> RenderableType:
    """Render events in order; ``payloads`` adds inputs, outputs and messages, shortened."""
    grid = Table.grid(padding=(0, 2))
    started: int | None = None
    nodes: dict[str, int] = {}
    for event in events:
        started = event.timestamp if started is None else started
        mark, style = _STYLES.get(event.type, ("·", "dim"))
        node = event.metadata.get("node")
        if node is not None:
            nodes.setdefault(node, len(nodes) + 1)
        grid.add_row(
            Text(f"{event.sequence}", style="dim"),
            Text(_elapsed(event.timestamp - started), style="dim"),
            Text(mark, style=style),
            Text(describe(event, payloads=payloads), style=style if style.startswith("bold") else ""),
            Text(f"node {nodes[node]}" if node is not None else "", style="dim"),
        )
    legend = [Text(f"  node {number}: {node}", style="dim") for node, number in nodes.items()]
    head = (
        Text(f"began {_moment(started)}", style="dim")
        if started is not None
        else Text("no events", style="dim")
    )
    return Group(head, grid, *legend)


def describe(event: Envelope, *, payloads: bool = False) -> str:
    """One sentence for an event."""
    teller = _TELLERS.get(event.type)
    sentence = teller(event.data) if teller else event.type.replace("_", " ").lower()
    if payloads:
        shown = next(
            (event.data[key] for key in ("input", "output", "payload", "answer") if key in event.data), None
        )
        if shown is not None:
            sentence += f"  {_short(shown)}"
    return sentence


def _waits(data: Data) -> str:
    return "waits for " + ", and ".join(
        " or ".join(map(_arm, wait.get("arms", ()))) for wait in data.get("waits", ())
    )


def _arm(arm: Data) -> str:
    match arm.get("kind"):
        case "inbox":
            return f"message {arm.get('topic')!r}"
        case "timer":
            return f"timer at {_moment(arm.get('wakeAt'))}"
        case "gate":
            return f"an answer at gate {arm.get('gate')!r}"
        case "child":
            return f"child {arm.get('childId')}"
        case other:
            return str(other)


def _step_failed(data: Data) -> str:
    error = data.get("error", {})
    then = "for good" if data.get("final") else f"again at {_moment(data.get('retryAt'))}"
    return f"step {data.get('name')} failed (attempt {data.get('attempt')}, {error.get('type')}), {then}"


def _consumed(data: Data) -> str:
    if "reason" in data:
        return f"message on {data.get('topic')!r} dropped: {data['reason']}"
    return f"took message {data.get('inboxSeq')} on {data.get('topic')!r}"


def _resumed(data: Data) -> str:
    by = f" by {_actor(data['by'])}" if data.get("by") else ""
    match data.get("kind"):
        case "timer":
            return "timer fired"
        case "gate":
            return f"gate answered{by}"
        case _:
            return f"resumed{by}"


def _actor(by: Any) -> str:
    return str(by.get("actor")) if isinstance(by, dict) else str(by)


_TELLERS: Final[dict[str, Callable[[Data], str]]] = {
    Kind.EXECUTION_STARTED: lambda d: (
        f"started {d.get('workflow')}"
        + (f" for {d['principal'].get('actor')}" if isinstance(d.get("principal"), dict) else "")
    ),
    Kind.EXECUTION_SUSPENDED: _waits,
    Kind.EXECUTION_RESUMED: _resumed,
    Kind.EXECUTION_RECOVERED: lambda d: (
        "recovered from a node that is gone" + (f" ({d['evidence']})" if d.get("evidence") else "")
    ),
    Kind.EXECUTION_CONTINUED: lambda d: f"continued as {d.get('successorId')}",
    Kind.EXECUTION_COMPLETED: lambda _: "completed",
    Kind.EXECUTION_FAILED: lambda d: f"failed: {d.get('error', {}).get('type')}",
    Kind.EXECUTION_CANCELLED: lambda d: "cancelled" + (f": {d['reason']}" if d.get("reason") else ""),
    Kind.EXECUTION_DENIED: lambda d: f"denied {d.get('op')} to {d.get('actor') or 'a caller'}",
    Kind.STEP_COMPLETED: lambda d: (
        f"step {d.get('name')}" + (f" (attempt {d['attempt']})" if d.get("attempt", 1) != 1 else "")
    ),
    Kind.STEP_FAILED: _step_failed,
    Kind.DECISION_RECORDED: lambda d: f"decided {d.get('kind')}",
    Kind.MESSAGE_CONSUMED: _consumed,
    Kind.INBOX_QUARANTINED: lambda d: (
        f"topic {d.get('topic')!r} held at message {d.get('messageId')} by {_actor(d.get('operator'))}"
    ),
    Kind.INBOX_RELEASED: lambda d: (
        f"held message {d.get('messageId')} on {d.get('topic')!r} "
        + ("dropped" if d.get("disposition") == "discard" else "released")
        + (" by itself" if d.get("auto") else f" by {_actor(d.get('operator'))}")
    ),
    Kind.CHILD_STARTED: lambda d: f"started child {d.get('childId')} ({d.get('workflow')})",
    Kind.MESSAGE_SENT: lambda d: f"sent {d.get('topic')!r} to {d.get('executionId')}",
    Kind.RECORD_PUBLISHED: lambda d: f"published to {d.get('topic')}",
    Kind.OUTCOME_RECORDED: lambda _: "outcome recorded",
    Kind.EXECUTION_PURGED: lambda d: f"{d.get('scope')} removed by {_actor(d.get('operator'))}",
    Kind.ERASURE_PENDING: lambda d: f"erasure of {d.get('subjectId')} begun",
    Kind.PAYLOAD_SHREDDED: lambda d: f"{d.get('subjectId')} is erased: the key is destroyed",
}


def _short(value: Any, limit: int = 80) -> str:
    text = str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _elapsed(ms: int) -> str:
    seconds, rest = divmod(max(0, ms), 1000)
    if seconds < 60:  # noqa: PLR2004 - a minute
        return f"+{seconds}.{rest:03d} s"
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"+{hours}:{minutes:02d}:{seconds:02d}" if hours else f"+{minutes}:{seconds:02d} min"


def _moment(ms: int | None) -> str:
    return "?" if ms is None else datetime.fromtimestamp(ms / 1000, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
