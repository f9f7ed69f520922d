"""The command that measures: ``loom bench``."""

from __future__ import annotations

from typing import Annotated

import typer

from loom.cli.common import AsJson


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(bench)


def bench(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Measurements; default all.")
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.5, help="Length of each throughput figure.")
    ] = 8.0,
    scale: Annotated[float, typer.Option("--scale", min=0.001, max=10, help="Size of the long ones.")] = 1.0,
    flush_each: Annotated[
        bool,
        typer.Option(
            "--flush-each", help="The broker flushes each append: as durable on one node as a database."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure loom on a broker and a Redis started for it, beside what the machine does without an engine.

    Example: loom bench throughput wake --seconds 5
    """
    from loom.testing.bench.report import run

    run(names or [], seconds=seconds, scale=scale, flush_each=flush_each, as_json=as_json)
