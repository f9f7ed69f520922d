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
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Processes side by side; by default one a core.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a fleet of nodes in one process, on one clock, with faults, and check what must hold after every step.

    The same seed and steps give the same log, byte for byte. One that fails shows its log and the command that repeats it.

    Example: loom sim --seed 133 --steps 8000
    """
    from loom.testing.simulation import DEFAULT_STEPS, simulate_many

    tally = simulate_many(range(seed, seed + count), steps or DEFAULT_STEPS, jobs=jobs)
    assert tally.last is not None
    digest = tally.last.digest
    answer: dict[str, Any] = {
        "seeds": tally.seeds,
        "effects": tally.effects,
        "takeovers": tally.takeovers,
        "repeated_effects": tally.doubled,
        "denials": tally.denials,
        "fleets": dict(tally.kinds),
        "last": asdict(tally.last),
    }

    def human(console: Console) -> None:
        console.print(
            f"{count} seeds from {seed} held: {tally.effects} effects, {tally.doubled} of them repeated "
            f"after {tally.takeovers} takeovers, {tally.denials} denials; log of the last: {digest[:16]}"
        )

    emit(answer, as_json=as_json, human=human)
