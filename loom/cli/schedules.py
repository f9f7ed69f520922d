"""Schedules: make, look at, pause, trigger, delete."""

from __future__ import annotations

import asyncio
import datetime as dt
import re
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from loom.cli.common import As, AsJson, emit, load_config, parse_json, principal, table, with_client
from loom.errors import ExecutionAlreadyExistsError, ExecutionDeniedError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rich.console import Console

    from loom import Client, Schedule, ScheduleView

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the schedule.")]
Note = Annotated[str | None, typer.Option("--note", help="Why; shown by `loom schedules show`.")]

UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
AT_ONCE: Final = 16


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    group = typer.Typer(help="Start executions by the calendar or the clock.", no_args_is_help=True)
    group.command("create")(create)
    group.command("list")(list_schedules)
    group.command("show")(show)
    group.command("pause")(pause)
    group.command("unpause")(unpause)
    group.command("trigger")(trigger)
    group.command("delete")(delete)
    app.add_typer(group, name="schedules")


def create(
    name: Name,
    flow: Annotated[str, typer.Argument(metavar="FLOW", help="Flow that it starts.")],
    cron: Annotated[
        str | None, typer.Option("--cron", metavar="FIELDS", help="Minute, hour, day, month, weekday.")
    ] = None,
    zone: Annotated[str, typer.Option("--zone", help="Time zone of --cron.")] = "UTC",
    every: Annotated[
        str | None, typer.Option("--every", metavar="SPAN", help="Instead of --cron: 30s, 15m, 6h, 1d.")
    ] = None,
    input: Annotated[str | None, typer.Option("--input", metavar="JSON", help="Input of the flow.")] = None,  # noqa: A002
    overlap: Annotated[
        str, typer.Option("--overlap", help="skip, buffer_one, allow or cancel_other.")
    ] = "skip",
    catch_up: Annotated[
        str, typer.Option("--catch-up", metavar="SPAN", help="How late a firing may come.")
    ] = "1d",
    subject: Annotated[str | None, typer.Option("--subject", help="Whose key seals it; a pseudonym.")] = None,
    paused: Annotated[bool, typer.Option("--paused", help="Do not fire yet.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Where it exists, give it this definition.")
    ] = False,
    as_name: As = None,
    as_json: AsJson = False,
) -> None:
    """Make a schedule, or give one another definition.

    Example: loom schedules create nightly report --cron '30 2 * * 1-5' --zone Europe/Berlin
    """
    from loom import Schedule

    schedule = Schedule(
        flow=flow,
        input=None if input is None else parse_json(input, "--input"),
        cron=cron,
        time_zone=zone,
        every=None if every is None else span(every),
        overlap=overlap,  # type: ignore[arg-type]
        catch_up=span(catch_up),
    )

    async def work(client: Client) -> dict[str, Any]:
        who = principal(as_name)
        try:
            await client.schedules.create(name, schedule, paused=paused, subject=subject, principal=who)
        except ExecutionAlreadyExistsError:
            if not replace:
                raise
            await client.schedules.update(name, schedule, principal=who)
            return {"schedule": name, "done": "replaced"}
        return {"schedule": name, "done": "created"}

    _say(work, as_json=as_json)


def list_schedules(as_name: As = None, as_json: AsJson = False) -> None:
    """List the schedules that stand, as far as the states topic knows them.

    Example: loom schedules list
    """
    from loom.processors.summaries import read_summaries
    from loom.runtime.schedules.flow import SCHEDULE_FLOW
    from loom.runtime.schedules.verbs import name_of

    rows = read_summaries(load_config(), workflow=SCHEDULE_FLOW, limit=100_000)
    names = sorted({name_of(row["chain_id"]) for row in rows if row["status"] in {"running", "suspended"}})

    async def work(client: Client) -> list[dict[str, Any]]:
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(name: str) -> dict[str, Any]:
            async with slots:
                try:
                    return _json(await client.schedules.describe(name, principal=principal(as_name)))
                except ExecutionDeniedError:
                    return {"name": name, "status": "denied"}

        return await asyncio.gather(*(one(name) for name in names))

    found = with_client(work)
    columns = ("name", "status", "flow", "when", "next_at", "fired", "skipped", "missed")

    def human(console: Console) -> None:
        if not found:
            console.print("no schedules")
            return
        console.print(table(columns, [[row.get(column) for column in columns] for row in found]))

    emit(found, as_json=as_json, human=human)


def show(name: Name, as_name: As = None, as_json: AsJson = False) -> None:
    """Show where a schedule stands, and its last firings.

    Example: loom schedules show nightly
    """

    async def work(client: Client) -> dict[str, Any]:
        return _json(await client.schedules.describe(name, principal=principal(as_name)))

    view = with_client(work)

    def human(console: Console) -> None:
        for key, value in view.items():
            if key not in {"recent", "running"} and value is not None:
                console.print(f"{key:<12} {value}", markup=False)
        if view["recent"]:
            console.print(
                table(("due", "status", "id"), [(r["due"], r["status"], r["id"]) for r in view["recent"]])
            )

    emit(view, as_json=as_json, human=human)


def pause(name: Name, note: Note = None, as_name: As = None, as_json: AsJson = False) -> None:
    """Let a schedule fire no more; what runs goes on.

    Example: loom schedules pause nightly --note "the ledger is being moved"
    """

    async def work(client: Client) -> dict[str, Any]:
        await client.schedules.pause(name, note=note, principal=principal(as_name))
        return {"schedule": name, "done": "paused"}

    _say(work, as_json=as_json)


def unpause(name: Name, note: Note = None, as_name: As = None, as_json: AsJson = False) -> None:
    """Let a schedule fire again, from now on.

    Example: loom schedules unpause nightly
    """

    async def work(client: Client) -> dict[str, Any]:
        await client.schedules.unpause(name, note=note, principal=principal(as_name))
        return {"schedule": name, "done": "unpaused"}

    _say(work, as_json=as_json)


def trigger(
    name: Name,
    overlap: Annotated[
        str | None, typer.Option("--overlap", help="Instead of its own policy, this once.")
    ] = None,
    request_id: Annotated[
        str | None, typer.Option("--request-id", metavar="ID", help="Repeated, it fires once.")
    ] = None,
    as_name: As = None,
    as_json: AsJson = False,
) -> None:
    """Fire a schedule once, now.

    Example: loom schedules trigger nightly --overlap allow
    """

    async def work(client: Client) -> dict[str, Any]:
        execution_id = await client.schedules.trigger(
            name,
            overlap=overlap,  # type: ignore[arg-type]
            request_id=request_id,
            principal=principal(as_name),
        )
        return {"schedule": name, "done": "triggered", "execution_id": execution_id}

    _say(work, as_json=as_json)


def delete(
    name: Name,
    reason: Annotated[str | None, typer.Option("--reason", help="Kept in the log.")] = None,
    as_name: As = None,
    as_json: AsJson = False,
) -> None:
    """End a schedule; what it started goes on, and its log stays.

    Example: loom schedules delete nightly
    """

    async def work(client: Client) -> dict[str, Any]:
        await client.schedules.delete(name, reason=reason, principal=principal(as_name))
        return {"schedule": name, "done": "deleted"}

    _say(work, as_json=as_json)


def span(text: str) -> dt.timedelta:
    """Read a span, as ``90s``, ``15m``, ``6h`` or ``1d``.

    Raises:
        InvalidInputError: it is none.
    """
    found = re.fullmatch(r"(\d{1,9})([smhd])", text)
    if found is None:
        raise InvalidInputError("a span", "it is not a number and a unit", "write 30s, 15m, 6h or 1d")
    return dt.timedelta(**{UNITS[found[2]]: int(found[1])})


def _say(work: Callable[[Client], Awaitable[dict[str, Any]]], *, as_json: bool) -> None:
    answer = with_client(work)
    tail = f" as {answer['execution_id']}" if "execution_id" in answer else ""
    emit(
        answer,
        as_json=as_json,
        human=lambda c: c.print(f"{answer['done']} {answer['schedule']}{tail}", markup=False),
    )


def _json(view: ScheduleView) -> dict[str, Any]:
    return {
        "name": view.name,
        "status": view.status,
        "flow": view.schedule.workflow,
        "when": _when(view.schedule),
        "overlap": view.schedule.overlap,
        "next_at": None if view.next_at is None else view.next_at.isoformat(),
        "note": view.note,
        "execution_id": view.execution_id,
        "running": list(view.running),
        "waiting": view.waiting,
        "fired": view.fired,
        "skipped": view.skipped,
        "missed": view.missed,
        "recent": [dict(one) for one in view.recent],
    }


def _when(schedule: Schedule) -> str:
    return f"{schedule.cron} {schedule.time_zone}" if schedule.cron else f"every {schedule.every}"
