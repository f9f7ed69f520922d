"""How facts are written that start, end and connect executions (docs/architecture.md).

With some of them a request leaves for another chain, in the same transaction (clauses.md, point 10). A request has a deterministic id, so whatever is repeated after a crash is applied once by its receiver.
"""

from __future__ import annotations

from base64 import b32encode
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from loom.errors import InvalidInputError
from loom.ids import inbox_stream
from loom.kernel.inbox import CANCEL_TOPIC, child_topic
from loom.kernel.machine import RunInfo
from loom.kernel.quarantine import MAX_TEXT
from loom.schemas.envelope import EVENT_SCHEMA, Json, Kind, NewEvent
from loom.stores.contracts import NO_EVENTS, Outgoing, StreamAppend

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from loom.kernel.commands import PublishRecord
    from loom.kernel.state import ExecutionState
    from loom.schemas.envelope import Envelope

FIRST_FENCE: Final = 1
"""Token that the append of sequence 0 holds (contracts: ``acquire_fence``)."""

MAX_PLACING: Final = 4096

STAMP: Final[dict[str, Json]] = {"schema": EVENT_SCHEMA}
"""Metadata of a fact that no driver wrote: without ``node``, so the owner knows that nobody acts on it yet."""


def stamp(actor: str | None) -> dict[str, Json]:
    """Metadata of a verb's fact: who acted, where somebody did."""
    return STAMP if actor is None else {"schema": EVENT_SCHEMA, "actor": actor}


def started(
    workflow: str,
    data: Json,
    *,
    chain_id: str,
    subject: str | None = None,
    principal: Mapping[str, Json] | None = None,
    parent: Mapping[str, Json] | None = None,
    continued_from: Mapping[str, Json] | None = None,
    forked_from: Mapping[str, Json] | None = None,
) -> dict[str, Json]:
    """Data of EXECUTION_STARTED. ``subject`` names whose key seals the chain, by default the chain's own."""
    fact: dict[str, Json] = {
        "workflow": workflow,
        "input": data,
        "chainId": chain_id,
        "subject": subject or chain_id,
    }
    if principal is not None:
        fact["principal"] = dict(principal)
    if parent is not None:
        fact["parent"] = dict(parent)
    if continued_from is not None:
        fact["continuedFrom"] = dict(continued_from)
    if forked_from is not None:
        fact["forkedFrom"] = dict(forked_from)
    return fact


def info_of(state: ExecutionState, *, workflow: str | None = None) -> RunInfo:
    """What a run of this execution knows of itself; ``workflow`` where it goes on under another name."""
    subject = state.subject
    return RunInfo(
        execution_id=state.execution_id,
        chain_id=state.chain_id,
        workflow=workflow or state.workflow,
        input=state.input,
        started_at=state.started_at,
        subject=subject,
        principal=state.principal,
        parent=state.parent,
        continued_from=state.continued_from,
        erased=subject if subject is not None and subject in state.shredded else None,
    )


def info_of_start(event: Envelope) -> RunInfo:
    """As ``info_of``, from the first event alone: all that a fresh run needs."""
    data = event.data
    continued = data.get("continuedFrom")
    return RunInfo(
        event.stream_id,
        data["chainId"],
        data["workflow"],
        data["input"],
        event.timestamp,
        data["subject"],
        data.get("principal"),
        data.get("parent"),
        continued["executionId"] if continued is not None else None,
    )


def derived_id(parent: str, site: str, fits: Callable[[str], bool]) -> str:
    """A child's id, made of its parent's and the site alone, so that every attempt makes the same.

    ``fits`` says whether an id belongs to the parent's shard: what concerns one family is then one process's work.
    """
    candidate = ""
    for turn in range(MAX_PLACING):
        digest = sha256(f"{parent}\n{site}\n{turn}".encode()).digest()
        candidate = "C" + b32encode(digest[:15]).decode()
        if fits(candidate):
            return candidate
    return candidate


def child_start(parent: RunInfo, site: str, child_id: str, workflow: str, data: Json) -> Outgoing:
    """Request that starts a child in a chain of its own, with its parent's subject and owner."""
    fact = started(
        workflow,
        data,
        chain_id=child_id,
        subject=parent.subject,
        principal=parent.principal,
        parent={"executionId": parent.execution_id, "chainId": parent.chain_id, "siteId": site},
    )
    request = f"child:{parent.execution_id}:{site}"
    event = NewEvent(request, Kind.EXECUTION_STARTED, fact, STAMP)
    body = StreamAppend(child_id, (event,), expected_head=NO_EVENTS, fence=FIRST_FENCE)
    return Outgoing("request", request, child_id, body)


def child_end(info: RunInfo, payload: dict[str, Json]) -> tuple[Outgoing, ...]:
    """Request that tells an execution's end to its parent's chain; none where it has no parent."""
    if info.parent is None:
        return ()
    request = f"end:{info.chain_id}"
    return (
        message_request(
            request,
            str(info.parent["chainId"]),
            child_topic(info.chain_id),
            payload,
            message_id=request,
            sender=info.chain_id,
        ),
    )


def child_cancel(parent_id: str, child_id: str, reason: str | None) -> Outgoing:
    """Request that cancels a child: a message on the reserved topic of its chain."""
    request = f"cancel:{parent_id}:{child_id}"
    return message_request(
        request, child_id, CANCEL_TOPIC, {"reason": reason}, message_id=request, sender=parent_id
    )


def cancel_children(state: ExecutionState, reason: str | None) -> tuple[Outgoing, ...]:
    """Requests that cancel every child whose end is still out, unless it was started to outlive its parent."""
    return tuple(
        child_cancel(state.execution_id, child_id, reason)
        for child_id, child in state.children.items()
        if child.get("cancelWithParent", True)
    )


def message(
    topic: str,
    payload: Json,
    *,
    message_id: str,
    sender: str | None,
    event_id: str,
    metadata: dict[str, Json],
) -> NewEvent:
    """An INBOX_MESSAGE; ``event_id`` tells the store a repeated one from a new one."""
    data: dict[str, Json] = {"topic": topic, "payload": payload, "messageId": message_id}
    if sender is not None:
        data["sender"] = sender
    return NewEvent(event_id, Kind.INBOX_MESSAGE, data, metadata)


def message_request(
    request: str, chain_id: str, topic: str, payload: Json, *, message_id: str, sender: str | None
) -> Outgoing:
    """Request that puts a message into another chain's inbox."""
    event = message(topic, payload, message_id=message_id, sender=sender, event_id=request, metadata=STAMP)
    return Outgoing("request", request, chain_id, StreamAppend(inbox_stream(chain_id, topic), (event,)))


def publication(execution_id: str, command: PublishRecord) -> Outgoing:
    """Record for the estate, leaving in the transaction of its RECORD_PUBLISHED."""
    return Outgoing(
        "publish",
        f"publish:{execution_id}:{command.site_id}",
        command.key or "",
        command.value,
        topic=command.topic,
        headers=command.headers,
    )


def check_reason(reason: str | None) -> None:
    """Refuse a reason that is too long to be kept.

    Raises:
        InvalidInputError: it is.
    """
    if reason is not None and len(reason) > MAX_TEXT:
        raise InvalidInputError("reason", f"it has more than {MAX_TEXT} characters", "shorten it")
