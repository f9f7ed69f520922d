"""The folded state of an execution's own log.

``fold`` is O(1) per event, works in place, and ignores kinds and metadata that it does not know. Wire names of the
folded record (``to_json``) are those of the seed: ``_waitAnswers``, ``_inbox.cursors``, ``_quarantined``, ``_erasure``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from loom.errors import DecodeError, StreamBrokenError
from loom.kernel.inbox import CHILD_TOPIC_PREFIX, remember, seed_inbox
from loom.kernel.quarantine import fold_quarantined, fold_released, seed_holds, settle_consumed
from loom.schemas.envelope import TERMINAL_KINDS, Envelope, Json, Kind

STATE_VERSION: Final = 1

RUNNING: Final = "running"
SUSPENDED: Final = "suspended"
FINISHED: Final = frozenset({"completed", "failed", "cancelled", "continued"})


@dataclass(slots=True)
class ExecutionState:
    """What an execution's log says, up to and with ``head`` (-1: nothing yet).

    ``status`` is ``running``, ``suspended`` (parked, its ``waits`` unanswered), ``completed``, ``failed``,
    ``cancelled`` or ``continued``; ``""`` before the first event. ``answers`` holds each site's recorded event, by
    site, so that a flow can be replayed from a state alone (None: a lean state, which cannot). ``cursors`` and
    ``dedupe`` are the inbox (insertion-ordered, oldest first). ``children`` are those whose end was not consumed.
    ``unproductive`` counts recoveries since the last progress. ``erasure`` (intent) and ``shredded`` (tombstone) give the
    sequence at which each subject's stands. Payloads are shared with the log's envelopes: readers
    never change them.
    """

    execution_id: str = ""
    head: int = -1
    timestamp: int = 0
    status: str = ""
    workflow: str = ""
    chain_id: str = ""
    subject: str | None = None
    principal: Mapping[str, Json] | None = None
    input: Json = None
    started_at: int = 0
    parent: Mapping[str, Json] | None = None
    continued_from: str | None = None
    forked_from: str | None = None
    waits: tuple[Mapping[str, Json], ...] = ()
    answers: dict[str, Envelope] | None = field(default_factory=dict)
    cursors: dict[str, int] = field(default_factory=dict)
    dedupe: dict[str, None] = field(default_factory=dict)
    quarantined: dict[str, list[dict[str, Json]]] = field(default_factory=dict)
    children: dict[str, dict[str, Json]] = field(default_factory=dict)
    steps: int = 0
    patched: dict[str, None] = field(default_factory=dict)
    output: Json = None
    error: Mapping[str, Json] | None = None
    reason: str | None = None
    successor: str | None = None
    recovered: int = 0
    unproductive: int = 0
    erasure: dict[str, int] = field(default_factory=dict)
    shredded: dict[str, int] = field(default_factory=dict)
    outcome: Json = None
    held_once: bool = field(default=False, compare=False, repr=False)
    """Whether this log ever held a message: copies may rest when nothing is held any more. Not part of the state."""

    copied_through: int = field(default=0, compare=False, repr=False)
    """Place of the last copy that a fork brought along. Not part of the state."""

    @property
    def finished(self) -> bool:
        """Whether the execution has ended."""
        return self.status in FINISHED


def history(state: ExecutionState) -> list[Envelope]:
    """The recorded results and decisions that a state holds, in log order: what ``FlowMachine.replay`` takes.

    Raises:
        ValueError: the state is lean.
    """
    if state.answers is None:
        raise ValueError("a lean state holds no answers; read the log")
    return sorted(state.answers.values(), key=lambda e: e.sequence)


def fold(state: ExecutionState, envelope: Envelope) -> bool:
    """Fold one event of the log into ``state``, in place.

    Returns:
        Whether it was applied. An event at or below the head is ignored (feeds may overlap); so is, but for the head,
        an event of an unknown kind, or one that cannot follow the execution's end.

    Raises:
        StreamBrokenError: the event does not follow the head. Behind sequence 0 a purged log goes on at its end, or at
            what was erased of it.
    """
    sequence = envelope.sequence
    if sequence <= state.head:
        return False
    if sequence != state.head + 1 and (state.head != 0 or envelope.type not in CLOSING_KINDS):
        raise StreamBrokenError(envelope.stream_id, sequence, f"it follows {state.head}")
    state.head = sequence
    state.timestamp = envelope.timestamp
    handler = _HANDLERS.get(envelope.type)
    if handler is not None and (envelope.type in _AFTER_THE_END or state.status not in FINISHED):
        handler(state, envelope)
    return True


def _started(state: ExecutionState, envelope: Envelope) -> None:
    data = envelope.data
    state.execution_id = envelope.stream_id
    state.status = RUNNING
    state.workflow = data.get("workflow", "")
    state.chain_id = data.get("chainId") or envelope.stream_id
    state.subject = data.get("subject")
    state.principal = data.get("principal")
    state.input = data.get("input")
    state.started_at = envelope.timestamp
    state.parent = data.get("parent")
    forked = data.get("forkedFrom")
    if isinstance(forked, Mapping):
        state.forked_from = forked.get("executionId")
        carried = forked.get("carried")
        if isinstance(carried, Mapping):
            seed_holds(state, carried.get("quarantined"), forked=True)
    continued = data.get("continuedFrom")
    if isinstance(continued, Mapping):
        state.continued_from = continued.get("executionId")
        carried = continued.get("carried")
        if isinstance(carried, Mapping):
            seed_inbox(state, carried)


def _suspended(state: ExecutionState, envelope: Envelope) -> None:
    state.status = SUSPENDED
    state.waits = tuple(envelope.data.get("waits", ()))
    state.unproductive = 0


def _resumed(state: ExecutionState, envelope: Envelope) -> None:
    state.status = RUNNING
    state.waits = ()
    if envelope.data.get("kind") in {"timer", "gate"}:
        _keep(state, envelope)


def _recovered(state: ExecutionState, _envelope: Envelope) -> None:
    state.status = RUNNING
    state.waits = ()
    state.recovered += 1
    state.unproductive += 1


def _step_completed(state: ExecutionState, envelope: Envelope) -> None:
    state.steps += 1
    _keep(state, envelope)


def _step_failed(state: ExecutionState, envelope: Envelope) -> None:
    if envelope.data.get("final"):
        state.steps += 1
    _keep(state, envelope)


def _decided(state: ExecutionState, envelope: Envelope) -> None:
    site = envelope.data.get("siteId")
    if envelope.data.get("kind") == "patched" and isinstance(site, str):
        state.patched[site.partition(":")[2]] = None
    _keep(state, envelope)


def _child_started(state: ExecutionState, envelope: Envelope) -> None:
    data = envelope.data
    state.children[data.get("childId", "")] = {
        "workflow": data.get("workflow"),
        "cancelWithParent": data.get("cancelWithParent", True),
    }
    _keep(state, envelope)


def _consumed(state: ExecutionState, envelope: Envelope) -> None:
    data = envelope.data
    topic, position, key = data.get("topic"), data.get("inboxSeq"), data.get("messageId")
    if isinstance(topic, str) and isinstance(position, int):
        was_held = bool(state.quarantined) and settle_consumed(state, topic, key, position)
        if not was_held and position > state.cursors.get(topic, -1):
            state.cursors[topic] = position
        if topic.startswith(CHILD_TOPIC_PREFIX):
            state.children.pop(topic[len(CHILD_TOPIC_PREFIX) :], None)
    if isinstance(key, str):
        remember(state, key)
    if "siteId" in data and not data.get("reason"):
        state.status = RUNNING
        state.waits = ()
        _keep(state, envelope)


def _quarantined(state: ExecutionState, envelope: Envelope) -> None:
    fold_quarantined(state, envelope)


def _released(state: ExecutionState, envelope: Envelope) -> None:
    disposed_of = fold_released(state, envelope)
    if disposed_of is not None:
        remember(state, disposed_of)


def _kept(state: ExecutionState, envelope: Envelope) -> None:
    _keep(state, envelope)


def _keep(state: ExecutionState, envelope: Envelope) -> None:
    """Keep a site's recorded event; a failed attempt gives way to the next."""
    state.unproductive = 0
    site = envelope.data.get("siteId")
    if state.answers is not None and isinstance(site, str):
        state.answers[site] = envelope


def _completed(state: ExecutionState, envelope: Envelope) -> None:
    _ended(state, "completed")
    state.output = envelope.data.get("output")


def _failed(state: ExecutionState, envelope: Envelope) -> None:
    _ended(state, "failed")
    state.error = envelope.data.get("error")


def _cancelled(state: ExecutionState, envelope: Envelope) -> None:
    _ended(state, "cancelled")
    state.reason = envelope.data.get("reason")


def _continued(state: ExecutionState, envelope: Envelope) -> None:
    _ended(state, "continued")
    state.successor = envelope.data.get("successorId")


def _ended(state: ExecutionState, status: str) -> None:
    state.status = status
    state.waits = ()


def _erasure_pending(state: ExecutionState, envelope: Envelope) -> None:
    state.erasure.setdefault(_subject(envelope), envelope.sequence)


def _shredded(state: ExecutionState, envelope: Envelope) -> None:
    state.shredded.setdefault(_subject(envelope), envelope.sequence)


def _subject(envelope: Envelope) -> str:
    return str(envelope.data.get("subjectId", envelope.data.get("subject", "")))


def _outcome(state: ExecutionState, envelope: Envelope) -> None:
    state.outcome = envelope.data.get("outcome")


_HANDLERS: Final[dict[str, Callable[[ExecutionState, Envelope], None]]] = {
    Kind.EXECUTION_STARTED: _started,
    Kind.EXECUTION_SUSPENDED: _suspended,
    Kind.EXECUTION_RESUMED: _resumed,
    Kind.EXECUTION_RECOVERED: _recovered,
    Kind.EXECUTION_COMPLETED: _completed,
    Kind.EXECUTION_FAILED: _failed,
    Kind.EXECUTION_CANCELLED: _cancelled,
    Kind.EXECUTION_CONTINUED: _continued,
    Kind.STEP_COMPLETED: _step_completed,
    Kind.STEP_FAILED: _step_failed,
    Kind.DECISION_RECORDED: _decided,
    Kind.CHILD_STARTED: _child_started,
    Kind.MESSAGE_SENT: _kept,
    Kind.RECORD_PUBLISHED: _kept,
    Kind.MESSAGE_CONSUMED: _consumed,
    Kind.INBOX_QUARANTINED: _quarantined,
    Kind.INBOX_RELEASED: _released,
    Kind.ERASURE_PENDING: _erasure_pending,
    Kind.PAYLOAD_SHREDDED: _shredded,
    Kind.OUTCOME_RECORDED: _outcome,
}

CLOSING_KINDS: Final = TERMINAL_KINDS | {Kind.ERASURE_PENDING, Kind.PAYLOAD_SHREDDED}
"""Where a log whose history was purged goes on behind its first event (docs/adr/0036)."""

_AFTER_THE_END: Final = frozenset({Kind.ERASURE_PENDING, Kind.PAYLOAD_SHREDDED, Kind.OUTCOME_RECORDED})
"""Control records that may follow the end."""


# Snapshots ----------------------------------------------------------------------------------------------------------

_WAIT_KINDS: Final = frozenset({Kind.MESSAGE_CONSUMED, Kind.EXECUTION_RESUMED})
_PLAIN: Final = {
    "execution_id": "executionId",
    "head": "head",
    "timestamp": "timestamp",
    "status": "status",
    "workflow": "workflow",
    "chain_id": "chainId",
    "subject": "subject",
    "principal": "principal",
    "input": "input",
    "started_at": "startedAt",
    "parent": "parent",
    "continued_from": "continuedFrom",
    "forked_from": "forkedFrom",
    "children": "children",
    "steps": "steps",
    "output": "output",
    "error": "error",
    "reason": "reason",
    "successor": "successor",
    "recovered": "recovered",
    "unproductive": "unproductive",
    "outcome": "outcome",
}
_VARIABLES: Final = {"erasure": "_erasure", "shredded": "_shredded", "quarantined": "_quarantined"}


def to_json(state: ExecutionState) -> dict[str, Json]:
    """The state as JSON, for snapshots. Containers may be shared with the state: serialise before folding on.

    Raises:
        ValueError: the state is lean.
    """
    waiting: dict[str, Json] = {}
    results: dict[str, Json] = {}
    for envelope in history(state):
        target = waiting if envelope.type in _WAIT_KINDS else results
        target[envelope.data["siteId"]] = {
            **envelope.data,
            "type": envelope.type,
            "sequence": envelope.sequence,
            "timestamp": envelope.timestamp,
        }
    record: dict[str, Json] = {"version": STATE_VERSION}
    record.update((wire, getattr(state, attribute)) for attribute, wire in _PLAIN.items())
    variables: dict[str, Json] = {
        "_inbox": {"cursors": dict(state.cursors), "keys": list(state.dedupe)},
        "_waitAnswers": waiting,
        "_results": results,
        "_patched": list(state.patched),
    }
    variables.update(
        (wire, value) for attribute, wire in _VARIABLES.items() if (value := getattr(state, attribute))
    )
    record["waits"] = list(state.waits)
    record["variables"] = variables
    return record


def from_json(record: Mapping[str, Json]) -> ExecutionState:
    """The state that ``to_json`` wrote.

    Raises:
        DecodeError: it is no state, or one of a later version.
    """
    version = record.get("version")
    variables = record.get("variables")
    if version != STATE_VERSION or not isinstance(variables, Mapping):
        raise DecodeError("a snapshot", f"its version is {version!r}, this node reads {STATE_VERSION}")
    try:
        state = ExecutionState(**{a: record[wire] for a, wire in _PLAIN.items()})
        for attribute, wire in _VARIABLES.items():
            setattr(state, attribute, dict(variables.get(wire, {})))
        state.waits = tuple(record["waits"])
        state.cursors = dict(variables["_inbox"]["cursors"])
        state.dedupe = dict.fromkeys(variables["_inbox"]["keys"])
        state.patched = dict.fromkeys(variables["_patched"])
        state.answers = {}
        for name in ("_waitAnswers", "_results"):
            for site, answer in variables[name].items():
                state.answers[site] = _answer(state.execution_id, answer)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DecodeError("a snapshot", f"its shape is wrong ({type(error).__name__})") from None
    return state


def _answer(execution_id: str, answer: Mapping[str, Json]) -> Envelope:
    data = dict(answer)
    kind, sequence, timestamp = data.pop("type"), data.pop("sequence"), data.pop("timestamp")
    return Envelope(f"{execution_id}:{sequence}", execution_id, sequence, kind, timestamp, data)
