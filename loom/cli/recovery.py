"""The recovery surface: who drives what, which alarms are set, and taking over what nobody drives."""

from __future__ import annotations

import asyncio
import datetime as dt
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from loom.cli.common import As, AsJson, DryRun, ExecutionId, emit, principal, table, with_client
from loom.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from loom import Client
    from loom.stores.contracts import Lease, Presence

NO_REDIS: Final = "set LOOM_REDIS_URL, or redis_url in loom.toml"


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(recover)
    app.command()(leases)
    wakes = typer.Typer(help="Alarms: list them, or write them again from the log.", no_args_is_help=True)
    wakes.command("list")(list_wakes)
    wakes.command("rebuild")(rebuild_wakes)
    app.add_typer(wakes, name="wakes")


def recover(
    execution_id: ExecutionId,
    reason: Annotated[str, typer.Option("--reason", help="Kept in the log.")] = "asked for by an operator",
    as_name: As = None,
    as_json: AsJson = False,
) -> None:
    """Have the owner take over an execution that nobody drives, on your word instead of evidence.

    Workers recover by themselves once the node that drove is seen to be gone; this is for when you know better.

    Example: loom recover 01J8Z... --reason "host was switched off"
    """

    async def work(client: Client) -> dict[str, Any]:
        changed = await client.recover(execution_id, reason=reason, principal=principal(as_name))
        return {"execution_id": execution_id, "changed": changed}

    answer = with_client(work)
    said = "recovered" if answer["changed"] else "nothing to recover:"
    emit(answer, as_json=as_json, human=lambda c: c.print(f"{said} {execution_id}", markup=False))


def leases(
    limit: Annotated[
        int, typer.Option("--limit", min=0, max=1000, help="Leases to show, lapsed ones first.")
    ] = 100,
    as_json: AsJson = False,
) -> None:
    """Show the nodes that are, or were, alive, with what they run, and the leases they hold on executions.

    Example: loom leases --limit 20
    """

    async def work(client: Client) -> tuple[list[dict[str, Any]], int]:
        store = client.stores.leases
        if store is None:
            raise ConfigError("redis_url", "it is not set", NO_REDIS)
        present, held, count = await asyncio.gather(store.present(), store.held(limit), store.count())
        return rows_of(present, held), count

    rows, count = with_client(work)

    def human(console: Console) -> None:
        if not rows:
            console.print("no node has announced itself")
            return
        columns = ("node", "state", "flows", "opens")
        console.print(
            table(
                columns, [(r["node"], r["state"], ", ".join(r["flows"]), ", ".join(r["opens"])) for r in rows]
            )
        )
        held = [(lease["expires_at"], lease, row["node"]) for row in rows for lease in row["leases"]]
        held.sort(key=lambda one: one[0])
        if not held:
            console.print("no execution is leased")
            return
        shown = f"{len(held)} of {count} leases" if len(held) < count else None
        console.print(
            table(
                ("execution", "owner", "state", "lapses"),
                [(lease["execution_id"], node, lease["state"], _time(at)) for at, lease, node in held],
                title=shown,
            )
        )

    emit(rows, as_json=as_json, human=human)


def rows_of(present: Sequence[Presence], held: Sequence[Lease]) -> list[dict[str, Any]]:
    """Nodes with their leases; an owner that has not announced itself is a node of unknown state."""
    nodes: dict[str, dict[str, Any]] = {
        row.node: {
            "node": row.node,
            "state": _state(row),
            "expires_at": row.expires_at,
            "flows": row.details.get("flows", []),
            "opens": list(row.covers),
            "leases": [],
        }
        for row in present
    }
    for lease in held:
        unknown: dict[str, Any] = {
            "node": lease.owner,
            "state": "unknown",
            "expires_at": None,
            "flows": [],
            "opens": [],
            "leases": [],
        }
        nodes.setdefault(lease.owner, unknown)["leases"].append(
            {
                "execution_id": lease.execution_id,
                "state": _state(lease),
                "acquired_at": lease.acquired_at,
                "expires_at": lease.expires_at,
            }
        )
    return list(nodes.values())


def _state(row: Presence | Lease) -> str:
    return "expired" if row.expired else "live"


def _time(ms: int) -> str:
    return dt.datetime.fromtimestamp(ms / 1000, dt.UTC).isoformat(timespec="seconds")


def list_wakes(
    execution_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="Only this execution.")] = None,
    as_json: AsJson = False,
) -> None:
    """Count the alarms, or list those of one execution.

    Example: loom wakes list 01J8Z...
    """

    async def work(client: Client) -> dict[str, Any]:
        store = client.stores.wakes
        if store is None:
            raise ConfigError("redis_url", "it is not set", NO_REDIS)
        if execution_id is None:
            return {"count": await store.count()}
        rows = await store.rows_of(execution_id)
        return {"rows": [{"wake_at": row.wake_at, "kind": row.kind, "holds": row.holds} for row in rows]}

    answer = with_client(work)

    def human(console: Console) -> None:
        if "count" in answer:
            console.print(f"{answer['count']} alarms")
        else:
            console.print(
                table(
                    ("wake_at", "kind", "holds"),
                    [(r["wake_at"], r["kind"], r["holds"]) for r in answer["rows"]],
                )
            )

    emit(answer, as_json=as_json, human=human)


def rebuild_wakes(dry_run: DryRun = False, as_json: AsJson = False) -> None:
    """Write the alarm of every open timer again, from the log. Harmless while workers run: rows are keyed by what they are for.

    Example: loom wakes rebuild --dry-run
    """

    async def work(client: Client) -> dict[str, Any]:
        if client.stores.wakes is None:
            raise ConfigError("redis_url", "it is not set", NO_REDIS)
        return {"rows": await client.rebuild_wakes(dry_run=dry_run), "dry_run": dry_run}

    answer = with_client(work)
    said = "would be written" if dry_run else "written"
    emit(answer, as_json=as_json, human=lambda c: c.print(f"{answer['rows']} alarms {said}"))
