"""Commands on an inbox: what waits in it, and discarding what should not be delivered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from loom.cli.common import As, AsJson, DryRun, ExecutionId, emit, principal, table, with_client

if TYPE_CHECKING:
    from rich.console import Console

    from loom import Client


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("inbox")(show_inbox)
    app.command()(discard)


def show_inbox(execution_id: ExecutionId, as_name: As = None, as_json: AsJson = False) -> None:
    """Show the messages that wait in the inbox of an execution's chain.

    Example: loom inbox 01J8Z...
    """

    async def work(client: Client) -> list[dict[str, Any]]:
        return await client.inbox(execution_id, principal=principal(as_name))

    rows = with_client(work)

    def human(console: Console) -> None:
        if not rows:
            console.print("nothing waits")
            return
        columns = ("topic", "inbox_seq", "message_id", "sender", "age_ms")
        console.print(table(columns, [[row[column] for column in columns] for row in rows]))

    emit(rows, as_json=as_json, human=human)


def discard(
    execution_id: ExecutionId,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Topic whose next message is dropped.")],
    message_id: Annotated[
        str | None,
        typer.Option("--message-id", help="Only if this is the next message: makes a repeat harmless."),
    ] = None,
    reason: Annotated[str | None, typer.Option("--reason", help="Kept in the log.")] = None,
    dry_run: DryRun = False,
    as_name: As = None,
    as_json: AsJson = False,
) -> None:
    """Drop the next message of a topic, unread. For operators (access.operators).

    Example: loom discard 01J8Z... ship --message-id m1 --reason "sent twice" --as ops
    """

    async def work(client: Client) -> dict[str, Any]:
        caller = principal(as_name)
        if dry_run:
            waiting = [
                row for row in await client.inbox(execution_id, principal=caller) if row["topic"] == topic
            ]
            return {"discarded": 0, "would_discard": waiting[:1]}
        count = await client.discard_inbox(
            execution_id, topic, message_id=message_id, reason=reason, principal=caller
        )
        return {"discarded": count}

    answer = with_client(work)

    def human(console: Console) -> None:
        if dry_run:
            console.print(f"would discard {len(answer['would_discard'])} message(s) on {topic}", markup=False)
        else:
            console.print(f"discarded {answer['discarded']} message(s) on {topic}", markup=False)

    emit(answer, as_json=as_json, human=human)
