"""Commands on all that belongs to a subject: erasing it, and giving out what is recorded of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path  # noqa: TC003 - the command line library looks at annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loom.cli.common import As, AsJson, DryRun, emit, principal, with_client

if TYPE_CHECKING:
    from rich.console import Console

    from loom import Client
    from loom.runtime.erasure import ErasureReport
    from loom.stores.sealing.shred import Force

Subject = Annotated[
    str, typer.Argument(metavar="SUBJECT", help="Whose data: by default a chain's first execution id.")
]
Elsewhere = Annotated[
    bool,
    typer.Option(
        "--key-destroyed-elsewhere",
        help="Assert that its key died in the key store that has the say. Counts only beside a begun erasure.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(erase)
    app.command("export")(export_subject)


def erase(
    subject: Subject,
    reason: Annotated[str | None, typer.Option("--reason", help="Kept in every log.")] = None,
    elsewhere: Elsewhere = False,
    dry_run: DryRun = False,
    as_name: As = None,
    as_json: AsJson = False,
) -> None:
    """Erase a subject: destroy its key, say so in every log of it, and end what of it still runs.

    For operators (access.operators), and for who owns every execution of it. Safe to repeat after any failure.

    Example: loom erase customer-4711 --dry-run --as ops
    """

    async def work(client: Client) -> ErasureReport:
        return await client.erase_subject(
            subject, force=_force(elsewhere), reason=reason, dry_run=dry_run, principal=principal(as_name)
        )

    report = with_client(work)

    def human(console: Console) -> None:
        would = "would be " if report.dry_run else ""
        for execution_id in report.executions:
            done = [
                *(["erased"] if execution_id in report.tombstoned else []),
                *(["cancelled"] if execution_id in report.cancelled else []),
            ]
            said = (
                f"{would}{' and '.join(done)}"
                if done
                else "nothing to do: it was erased, or nothing was sealed"
            )
            console.print(f"{execution_id}: {said}", markup=False)
        if not report.dry_run:
            console.print(f"the key of {subject}: {report.key}", markup=False)

    emit(asdict(report), as_json=as_json, human=human)


def export_subject(
    subject: Subject,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="Write there instead of printing.")
    ] = None,
    elsewhere: Elsewhere = False,
    as_name: As = None,
    as_json: AsJson = False,  # noqa: ARG001 - it is always JSON, a line an event
) -> None:
    """Give out everything that is recorded of a subject, opened: JSON, a line an event.

    Example: loom export customer-4711 --to customer-4711.jsonl --as ops
    """

    async def work(client: Client) -> list[dict[str, Any]]:
        found = await client.export_subject(subject, force=_force(elsewhere), principal=principal(as_name))
        return [
            {"subject": subject, "erased": stream.erased, **_event(event)}
            for stream in found.streams
            for event in stream.events
        ]

    lines = [json.dumps(row, ensure_ascii=False, default=str) for row in with_client(work)]
    if to is None:
        for line in lines:
            typer.echo(line)
    else:
        to.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        typer.echo(f"{len(lines)} events of {subject} in {to}", err=True)


def _force(elsewhere: bool) -> Force | None:
    return "key-destroyed-elsewhere" if elsewhere else None


def _event(event: Any) -> dict[str, Any]:
    return {
        "stream_id": event.stream_id,
        "sequence": event.sequence,
        "type": event.type,
        "timestamp": event.timestamp,
        "data": event.data,
    }
