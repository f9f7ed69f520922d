"""Effects of a flow that are requests: children, messages to other executions, records for the estate.

Each is one event with the request in the same transaction (clauses.md, point 10). What cannot be done becomes a failed
step at that site, so the flow sees a typed error, and a replay sees the same.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from loom.errors import (
    ExecutionAlreadyExistsError,
    ExecutionNotFoundError,
    InboxMessageRefusedError,
    InvalidInputError,
    LoomError,
    PublishRefusedError,
    StoreError,
)
from loom.kernel.commands import PublishRecord, SendMessage, StartChild
from loom.kernel.guard import check_ingest
from loom.runtime import facts
from loom.runtime.sizes import json_size
from loom.runtime.steps import describe_error
from loom.schemas.envelope import Kind
from loom.stores.contracts import NO_EVENTS

if TYPE_CHECKING:
    from loom.runtime.run import Run

Request = StartChild | SendMessage | PublishRecord


def start_child(run: Run, command: StartChild) -> None:
    """Start a child: CHILD_STARTED carries the request that makes the child's first event."""
    run.pending[command.site_id] = command
    if command.execution_id is None:
        child_id = facts.derived_id(run.id, command.site_id, run.engine.beside(run.chain_id))
        run.do(partial(_child_started, run, command, child_id))
    else:
        run.engine.spawn(_start_chosen(run, command, command.execution_id), run.id)


async def _start_chosen(run: Run, command: StartChild, child_id: str) -> None:
    error: LoomError | None = None
    try:
        seen = await run.engine.patiently(lambda: run.engine.events.observe(child_id), run.id)
        if seen.head != NO_EVENTS:
            error = ExecutionAlreadyExistsError(child_id)
    except StoreError as unknown:
        error = unknown
    if error is None:
        run.do(partial(_child_started, run, command, child_id))
    else:
        run.do(partial(_failed, run, command, "start_child", error))


def _child_started(run: Run, command: StartChild, child_id: str) -> None:
    if run.pending.pop(command.site_id, None) is None:
        return
    weight = json_size(command.input)
    limit = run.engine.config.max_payload_bytes
    if weight > limit:
        _fail(run, command, "start_child", _too_large(f"input of child {command.workflow!r}", weight, limit))
        return
    run.enter(
        Kind.CHILD_STARTED,
        {
            "siteId": command.site_id,
            "childId": child_id,
            "workflow": command.workflow,
            "cancelWithParent": command.cancel_with_parent,
        },
        outgoing=(facts.child_start(run.info, command.site_id, child_id, command.workflow, command.input),),
        weight=weight,
    )


def send_message(run: Run, command: SendMessage) -> None:
    """Send a message: MESSAGE_SENT carries the request that puts it into the other chain's inbox."""
    run.pending[command.site_id] = command
    run.engine.spawn(_send(run, command), run.id)


async def _send(run: Run, command: SendMessage) -> None:
    error: LoomError | None = None
    chain_id: str | None = None
    try:
        weight = json_size(command.payload)
        limit = run.engine.config.inbox_max_payload_bytes
        if weight > limit:
            raise InboxMessageRefusedError(
                command.execution_id,
                command.topic,
                f"{weight} bytes exceed {limit}",
                "send a smaller one, or a reference",
            )
        check_ingest(command.execution_id, command.topic, command.payload)
        if command.execution_id in run.state.children:
            # Its start may still be on its way; whatever is sent after it arrives after it.
            chain_id = command.execution_id
        else:
            chain_id = await run.engine.patiently(lambda: run.engine.chain_of(command.execution_id), run.id)
        if chain_id is None:
            raise ExecutionNotFoundError(command.execution_id)
    except LoomError as refused:
        error = refused
    if chain_id is not None and error is None:
        run.do(partial(_sent, run, command, chain_id))
    else:
        run.do(partial(_failed, run, command, "send", error or ExecutionNotFoundError(command.execution_id)))


def _sent(run: Run, command: SendMessage, chain_id: str) -> None:
    if run.pending.pop(command.site_id, None) is None:
        return
    message_id = command.message_id or f"{run.id}/{command.site_id}"
    request = facts.message_request(
        f"send:{run.id}:{command.site_id}",
        chain_id,
        command.topic,
        command.payload,
        message_id=message_id,
        sender=run.chain_id,
    )
    run.enter(
        Kind.MESSAGE_SENT,
        {
            "siteId": command.site_id,
            "executionId": command.execution_id,
            "topic": command.topic,
            "messageId": message_id,
        },
        outgoing=(request,),
        weight=json_size(command.payload),
    )


def publish_record(run: Run, command: PublishRecord) -> None:
    """Publish a record: it leaves in the transaction of RECORD_PUBLISHED.

    The topic may still refuse it there, so this event is not write-behind: nothing else enters until its fate is known.
    """
    run.pending[command.site_id] = command
    if command.topic not in run.engine.config.publish_topics:
        refused = PublishRefusedError(
            command.topic, "it is not in the allow-list", "add it to publish_topics"
        )
        run.do(partial(_failed, run, command, "publish", refused))
        return
    run.do(partial(_publish, run, command))


def _publish(run: Run, command: PublishRecord) -> None:
    if command.site_id in run.pending:
        run.hold()
        run.journal.when_durable(lambda: run.engine.spawn(_travel(run, command), run.id))


async def _travel(run: Run, command: PublishRecord) -> None:
    data = {"siteId": command.site_id, "topic": command.topic, "at": run.engine.now()}
    if command.key is not None:
        data["key"] = command.key
    try:
        envelope = await run.journal.alone(
            Kind.RECORD_PUBLISHED, data, run.engine.stamp, (facts.publication(run.id, command),)
        )
    except PublishRefusedError as error:
        run.first(partial(_failed, run, command, "publish", error))
        run.release()
        return
    if envelope is not None:
        run.pending.pop(command.site_id, None)
        run.first(partial(run.entered, envelope))
        run.release()


def _failed(run: Run, command: Request, name: str, error: LoomError) -> None:
    if run.pending.pop(command.site_id, None) is not None:
        _fail(run, command, name, error)


def _fail(run: Run, command: Request, name: str, error: LoomError) -> None:
    run.enter(
        Kind.STEP_FAILED,
        {
            "siteId": command.site_id,
            "name": name,
            "error": describe_error(error),
            "attempt": 1,
            "final": True,
        },
    )


def _too_large(what: str, weight: int, limit: int) -> InvalidInputError:
    return InvalidInputError(what, f"{weight} bytes exceed {limit}", "pass a reference instead")
