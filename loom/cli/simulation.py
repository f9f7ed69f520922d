"""The command that runs the simulation: ``loom sim``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loom.cli.common import AsJson, emit

if TYPE_CHECKING:
    from rich.console import Console


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(sim)


def sim(
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="The seed that decides all; the first of --count.")
    ] = 0,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Steps of chaos before everything is healed.")
    ] = None,
    count: Annotated[int, typer.Option("--count", min=1, help="How many seeds.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Run a fleet of nodes in one process, on one clock, with faults, and check what must hold after every step.

    The same seed and steps give the same log, byte for byte. One that fails shows its log and the command that repeats it.

    Example: loom sim --seed 133 --steps 8000
    """
    from loom.testing.simulation import DEFAULT_STEPS, simulate

    reports = [simulate(one, steps or DEFAULT_STEPS) for one in range(seed, seed + count)]
    answer: dict[str, Any] = {
        "seeds": count,
        "effects": sum(report.effects for report in reports),
        "takeovers": sum(report.takeovers for report in reports),
        "repeated_effects": sum(report.doubled for report in reports),
        "last": asdict(reports[-1]),
    }

    def human(console: Console) -> None:
        console.print(
            f"{count} seeds from {seed} held: {answer['effects']} effects, {answer['repeated_effects']} of them repeated "
            f"after {answer['takeovers']} takeovers; log of the last: {reports[-1].digest[:16]}"
        )

    emit(answer, as_json=as_json, human=human)
