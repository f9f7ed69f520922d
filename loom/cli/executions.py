"""Commands that act on an execution: start, send, resume, cancel, list, show, tail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from loom.cli.common import As, AsJson, ExecutionId, emit, parse_json, principal, table, with_client

if TYPE_CHECKING:
    from rich.console import Console

    from loom import Client
    from loom.schemas.envelope import Envelope


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(start)
    app.command()(send)
    app.command()(resume)
    app.command()(cancel)
    app.command("list")(list_executions)
    app.command()(show)
    app.command()(tail)


def start(
    flow: Annotated[str, typer.Argument(metavar="FLOW", help="Name of the flow.")],
    input: Annotated[str | None, typer.Option("--input", metavar="JSON", help="Input of the flow.")] = None,  # noqa: A002
    execution_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="Id to use; else one is made.")
    ] = None,
    subject: Annotated[str | None, typer.Option("--subject", help="Whose key seals it; a pseudonym.")] = None,
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", help="Wait so long for the result.")
    ] = 0,
    as_name: As = None,
    as_json: AsJson = False,
) -> None:
    """Start an execution.

    Example: loom start order --input '{"card": "tok-1", "total": 4200}' --wait 30
    """
    payload = None if input is None else parse_json(input, "--input")

    async def work(client: Client) -> dict[str, Any]:
        handle = await client.start(
            flow, payload, execution_id=execution_id, subject=subject, principal=principal(as_name)
        )
        answer: dict[str, Any] = {"execution_id": handle.execution_id}
        if wait:
            answer["result"] = await handle.result(timeout=wait)
        return answer

    answer = with_client(work)

    def human(console: Console) -> None:
        console.print(f"started {flow} as {answer['execution_id']}", markup=False)
        if wait:
            console.print_json(data=answer["result"], default=str)

    emit(answer, as_json=as_json, human=human)


def send(
    execution_id: ExecutionId,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Topic of the inbox.")],
    payload: Annotated[str, typer.Argument(metavar="JSON", help="The message.")],
    message_id: Annotated[
        str | None,
        typer.Option("--message-id", help="Identity of the message: repeated, it is delivered once."),
    ] = None,
    sender: Annotated[
        str | None, typer.Option("--sender", help="Who sends; part of the message's identity.")
    ] = None,
    as_name: As = None,
    as_json: AsJson = False,
) -> None:
    """Send a message to an execution.

    Example: loom send 01J8Z... ship '{"carrier": "post"}' --message-id m1
    """
    body = parse_json(payload, "the message")

    async def work(client: Client) -> dict[str, Any]:
        await client.send(
            execution_id, topic, body, message_id=message_id, sender=sender, principal=principal(as_name)
        )
        return {"execution_id": execution_id, "topic": topic}

    emit(
        with_client(work),
        as_json=as_json,
        human=lambda c: c.print(f"sent to {execution_id} on {topic}", markup=False),
    )


def resume(
    execution_id: ExecutionId,
    gate: Annotated[str, typer.Argument(metavar="GATE", help="Gate at which it waits.")],
    answer: Annotated[str, typer.Argument(metavar="JSON", help="The answer.")],
    as_name: As = None,
    as_json: AsJson = False,
) -> None:
    """Answer a gate.

    Example: loom resume 01J8Z... approve '{"ok": true}'
    """
    body = parse_json(answer, "the answer")

    async def work(client: Client) -> dict[str, Any]:
        await client.resume(execution_id, gate, body, principal=principal(as_name))
        return {"execution_id": execution_id, "gate": gate}

    emit(
        with_client(work),
        as_json=as_json,
        human=lambda c: c.print(f"answered gate {gate} of {execution_id}", markup=False),
    )


def cancel(
    execution_id: ExecutionId,
    reason: Annotated[str | None, typer.Option("--reason", help="Kept in the log.")] = None,
    as_name: As = None,
    as_json: AsJson = False,
) -> None:
    """Cancel an execution and its children.

    Example: loom cancel 01J8Z... --reason "ordered twice"
    """

    async def work(client: Client) -> dict[str, Any]:
        await client.cancel(execution_id, reason=reason, principal=principal(as_name))
        return {"execution_id": execution_id, "status": "cancelled"}

    emit(
        with_client(work), as_json=as_json, human=lambda c: c.print(f"cancelled {execution_id}", markup=False)
    )


def list_executions(
    status: Annotated[
        str | None, typer.Option("--status", help="running, suspended, completed, failed, ...")
    ] = None,
    flow: Annotated[str | None, typer.Option("--flow", help="Only this flow.")] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=100_000, help="At most so many, newest first.")
    ] = 50,
    as_json: AsJson = False,
) -> None:
    """List executions, newest first, from the states topic.

    Example: loom list --status suspended --limit 20
    """
    from loom.cli.common import load_config
    from loom.processors.summaries import read_summaries

    rows = read_summaries(load_config(), status=status, workflow=flow, limit=limit)

    def human(console: Console) -> None:
        if not rows:
            console.print("no executions")
            return
        columns = ("execution_id", "workflow", "status", "head", "updated_at")
        console.print(table(columns, [[row[column] for column in columns] for row in rows]))

    emit(rows, as_json=as_json, human=human)


def show(
    execution_id: ExecutionId,
    payloads: Annotated[
        bool, typer.Option("--payloads", help="Also show inputs, outputs and messages.")
    ] = False,
    as_name: As = None,
    as_json: AsJson = False,
) -> None:
    """Show one execution's timeline.

    Example: loom show 01J8Z... --payloads
    """
    from loom.cli.timeline import timeline

    async def work(client: Client) -> list[Envelope]:
        return await client.history(execution_id, principal=principal(as_name))

    events = with_client(work)
    emit(
        {"execution_id": execution_id, "events": [_event_json(event) for event in events]},
        as_json=as_json,
        human=lambda console: console.print(timeline(events, payloads=payloads)),
    )


def tail(
    execution_id: Annotated[str, typer.Argument(metavar="ID", help="Execution id.")],
    as_name: As = None,
    as_json: AsJson = False,
) -> None:
    """Follow an execution's events until it ends, or Ctrl-C.

    Example: loom tail 01J8Z...
    """
    import json

    from loom.cli.timeline import describe

    async def work(client: Client) -> None:
        async for event in client.follow(execution_id, principal=principal(as_name)):
            line = (
                json.dumps(_event_json(event), ensure_ascii=False)
                if as_json
                else f"{event.sequence:>6}  {describe(event)}"
            )
            typer.echo(line)

    with_client(work)


def _event_json(event: Envelope) -> dict[str, Any]:
    return {
        "id": event.id,
        "stream_id": event.stream_id,
        "sequence": event.sequence,
        "type": event.type,
        "timestamp": event.timestamp,
        "data": event.data,
        "metadata": event.metadata,
    }
