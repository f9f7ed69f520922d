"""Commands on an inbox: what waits in it and what is held, and the verbs of operators on both."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from loom.cli.common import As, AsJson, DryRun, ExecutionId, emit, principal, table, with_client

if TYPE_CHECKING:
    from rich.console import Console

    from loom import Client

MessageId = Annotated[
    str | None,
    typer.Option("--message-id", help="Only if this is the next message: makes a repeat harmless."),
]
Reason = Annotated[str | None, typer.Option("--reason", help="Kept in the log.")]
COLUMNS: Final = (
    "topic",
    "inbox_seq",
    "message_id",
    "sender",
    "age_ms",
    "state",
    "held_by",
    "awaits",
    "reason",
)


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("inbox")(show_inbox)
    app.command()(discard)
    app.command()(expire)
    app.command()(quarantine)
    app.command()(release)
    app.command()(held)


def show_inbox(execution_id: ExecutionId, as_name: As = None, as_json: AsJson = False) -> None:
    """Show what is held, and what waits, in the inbox of an execution's chain.

    Of a held message: since when (its age), by whom, why, and what it awaits.

    Example: loom inbox 01J8Z...
    """

    async def work(client: Client) -> list[dict[str, Any]]:
        return await client.inbox(execution_id, principal=principal(as_name))

    _show_rows(with_client(work), COLUMNS, "nothing waits", as_json=as_json)


def held(as_json: AsJson = False) -> None:
    """Show the held topics of the fleet, found by their copies in the quarantine topic.

    Example: loom held
    """
    from loom.cli.common import load_config
    from loom.processors.summaries import read_quarantined

    chains = read_quarantined(load_config())

    async def work(client: Client) -> list[dict[str, Any]]:
        return [row async for row in client.held(chains)]

    _show_rows(with_client(work), ("execution_id", *COLUMNS), "nothing is held", as_json=as_json)


def _show_rows(rows: list[dict[str, Any]], columns: tuple[str, ...], nothing: str, *, as_json: bool) -> None:
    def human(console: Console) -> None:
        if not rows:
            console.print(nothing)
            return
        told = [column for column in columns if any(row.get(column) is not None for row in rows)]
        console.print(table(told, [[row.get(column) for column in told] for row in rows]))

    emit(rows, as_json=as_json, human=human)


def discard(
    execution_id: ExecutionId,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Topic whose next message is dropped.")],
    message_id: MessageId = None,
    reason: Reason = None,
    dry_run: DryRun = False,
    as_name: As = None,
    as_json: AsJson = False,
) -> None:
    """Drop the next message of a topic, unread. For operators (access.operators).

    What is held is dropped by `loom release --discard`; this acts behind it.

    Example: loom discard 01J8Z... ship --message-id m1 --reason "sent twice" --as ops
    """

    async def work(client: Client) -> dict[str, Any]:
        caller = principal(as_name)
        if dry_run:
            rows = await client.inbox(execution_id, principal=caller)
            waiting = [row for row in rows if row["topic"] == topic and "awaits" not in row]
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


def expire(
    execution_id: ExecutionId,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Topic whose old messages are passed over.")],
    older_than_s: Annotated[
        float, typer.Option("--older-than", min=0, help="Seconds that a message has waited.")
    ],
    reason: Reason = None,
    dry_run: DryRun = False,
    as_name: As = None,
    as_json: AsJson = False,
) -> None:
    """Pass over the messages at the head of a topic that have waited too long. Never what is held.

    Example: loom expire 01J8Z... ship --older-than 86400 --reason "yesterday's"
    """
    limit_ms = round(older_than_s * 1000)

    async def work(client: Client) -> dict[str, Any]:
        caller = principal(as_name)
        if dry_run:
            old = 0
            for row in await client.inbox(execution_id, principal=caller):
                if row["topic"] != topic or "awaits" in row:
                    continue
                if row["age_ms"] < limit_ms:
                    break
                old += 1
            return {"expired": 0, "would_expire": old}
        count = await client.expire_inbox(
            execution_id, topic, older_than_ms=limit_ms, reason=reason, principal=caller
        )
        return {"expired": count}

    answer = with_client(work)
    said = f"would expire {answer['would_expire']}" if dry_run else f"expired {answer['expired']}"
    emit(answer, as_json=as_json, human=lambda c: c.print(f"{said} message(s) on {topic}", markup=False))


def quarantine(
    execution_id: ExecutionId,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Topic that is held at its next message.")],
    message_id: MessageId = None,
    reason: Reason = None,
    dry_run: DryRun = False,
    as_name: As = None,
    as_json: AsJson = False,
) -> None:
    """Hold a topic at its next message, which is sealed and cannot be opened here. For operators (access.operators).

    Other topics flow. A node that can open the message delivers it by itself, before what came after it.

    Example: loom quarantine 01J8Z... ship --message-id m1 --reason "no node has the key" --as ops
    """

    async def work(client: Client) -> dict[str, Any]:
        done = await client.quarantine_inbox(
            execution_id,
            topic,
            message_id=message_id,
            reason=reason,
            principal=principal(as_name),
            dry_run=dry_run,
        )
        return asdict(done) | {"dry_run": dry_run}

    answer = with_client(work)
    said = "would hold" if dry_run else "holds" if answer["changed"] else "held already:"
    emit(
        answer,
        as_json=as_json,
        human=lambda c: c.print(f"{said} {topic} at message {answer['message_id']}", markup=False),
    )


def release(
    execution_id: ExecutionId,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Topic that is held.")],
    message_id: Annotated[
        str, typer.Argument(metavar="MESSAGE", help="Id, or key, of its oldest held message.")
    ],
    drop: Annotated[
        bool, typer.Option("--discard", help="Drop it. Without, this node must be able to open it.")
    ] = False,
    sender: Annotated[
        str | None, typer.Option("--sender", help="Whose message, where several used one id.")
    ] = None,
    reason: Reason = None,
    dry_run: DryRun = False,
    as_name: As = None,
    as_json: AsJson = False,
) -> None:
    """Let the oldest held message of a topic go: to be delivered, or dropped. For operators (access.operators).

    Example: loom release 01J8Z... ship m1 --discard --reason "nobody has the key any more" --as ops
    """

    async def work(client: Client) -> dict[str, Any]:
        changed = await client.release_inbox(
            execution_id,
            topic,
            message_id,
            disposition="discard" if drop else "deliver",
            sender=sender,
            reason=reason,
            principal=principal(as_name),
            dry_run=dry_run,
        )
        return {"changed": changed, "dry_run": dry_run}

    answer = with_client(work)
    did = "dropped" if drop else "released"
    said = f"would be {did}" if dry_run else did if answer["changed"] else f"was {did} before"
    emit(answer, as_json=as_json, human=lambda c: c.print(f"{message_id} on {topic}: {said}", markup=False))
