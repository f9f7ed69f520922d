"""Commands that remove what has ended: the history of an execution, or a whole chain."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from loom.cli.common import As, AsJson, DryRun, ExecutionId, emit, principal, with_client

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from loom import Client
    from loom.runtime.removal import RemovalReport

Reason = Annotated[str | None, typer.Option("--reason", help="Kept in the log, for as long as that is kept.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(purge)
    app.command()(delete)


def purge(
    execution_id: ExecutionId,
    reason: Reason = None,
    dry_run: DryRun = False,
    as_name: As = None,
    as_json: AsJson = False,
) -> None:
    """Remove the history of a finished execution; how it began and ended stays. For operators (access.operators).

    The last execution of a chain takes the chain's inbox and held messages along.

    Example: loom purge 01J8Z... --reason "closed last year" --as ops
    """
    _remove(
        lambda client: client.purge_history(
            execution_id, reason=reason, principal=principal(as_name), dry_run=dry_run
        ),
        as_json=as_json,
    )


def delete(
    execution_id: ExecutionId,
    reason: Reason = None,
    dry_run: DryRun = False,
    as_name: As = None,
    as_json: AsJson = False,
) -> None:
    """Remove all of a finished execution's chain; its ids are never used again. For operators (access.operators).

    Example: loom delete 01J8Z... --reason "a test" --dry-run --as ops
    """
    _remove(
        lambda client: client.delete_chain(
            execution_id, reason=reason, principal=principal(as_name), dry_run=dry_run
        ),
        as_json=as_json,
    )


def _remove(work: Callable[[Client], Awaitable[RemovalReport]], *, as_json: bool) -> None:
    report = with_client(work)
    did = "would remove" if report.dry_run else "removed"
    said = f"{did} {report.events} event(s) of {len(report.streams)} stream(s), chain {report.chain_id}"
    emit(asdict(report), as_json=as_json, human=lambda c: c.print(said, markup=False))
