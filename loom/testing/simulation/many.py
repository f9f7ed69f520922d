"""Many seeds, side by side: each is a world of its own, so that processes share nothing but the work."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import TimeoutError as NoAnswerError
from multiprocessing import get_context
from typing import TYPE_CHECKING, Final

from loom.testing.simulation.run import DEFAULT_STEPS, Report, simulate
from loom.testing.simulation.world import SimulationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

AT_ONCE: Final = 512
"""Seeds that are given out at a time."""
LONGEST_S: Final = 600.0
"""How long one seed may take before its process is held to be dead."""


@dataclass(slots=True)
class Tally:
    """What many simulations came to, together. ``last`` is the report of the last seed."""

    seeds: int = 0
    steps: int = 0
    effects: int = 0
    doubled: int = 0
    takeovers: int = 0
    denials: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    last: Report | None = None

    def add(self, report: Report) -> None:
        """Count one more."""
        self.seeds += 1
        self.steps += report.steps
        self.effects += report.effects
        self.doubled += report.doubled
        self.takeovers += report.takeovers
        self.denials += report.denials
        self.kinds[report.kind] += 1
        self.last = report


def cores() -> int:
    """How many processes this one may have run at the same time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def simulate_many(
    seeds: Sequence[int],
    steps: int = DEFAULT_STEPS,
    *,
    jobs: int | None = None,
    before: Callable[[], None] | None = None,
) -> Tally:
    """Run seeds in ``jobs`` processes, by default one a core; ``before`` is called in each, and must be importable there.

    Raises:
        SimulationError: of the first seed, in their order, that fails; it says how to repeat it.
    """
    tally = Tally()
    jobs = min(jobs or cores(), len(seeds))
    if jobs <= 1:
        if before is not None:
            before()
        for seed in seeds:
            tally.add(simulate(seed, steps))
        return tally
    for report in _side_by_side(seeds, steps, jobs, before):
        tally.add(report)
    return tally


def _side_by_side(
    seeds: Sequence[int], steps: int, jobs: int, before: Callable[[], None] | None
) -> Iterator[Report]:
    # A fresh interpreter each: whatever threads run here, a fork of them would not. The first failure ends them all.
    with get_context("spawn").Pool(jobs, initializer=before) as pool:
        for start in range(0, len(seeds), AT_ONCE):
            block = seeds[start : start + AT_ONCE]
            reports = pool.imap(partial(simulate, steps=steps), block)
            for seed in block:
                try:
                    yield reports.next(timeout=LONGEST_S)
                except NoAnswerError:
                    raise SimulationError(
                        f"no answer in {LONGEST_S} s\nrepeat it: loom sim --seed {seed} --steps {steps}"
                    ) from None
