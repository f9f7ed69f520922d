"""Seeds of the simulation: what must hold holds, a seed repeats itself, and planted bugs are found."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from planted_bugs import BUGS

from loom.testing.simulation import FAULTS, SimulationError, simulate

SHORT_S = 25.0
ENOUGH = 12
FIRST_OF_THE_SHORT_RUN = 1_000


def test_seeds_for_a_while():
    """As many as there is time for, and always some."""
    until, seed = time.monotonic() + SHORT_S, FIRST_OF_THE_SHORT_RUN
    while seed < FIRST_OF_THE_SHORT_RUN + ENOUGH or time.monotonic() < until:
        simulate(seed)
        seed += 1


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_by_itself(fault):
    simulate(7, 5_000, faults=(fault,), orders=3)


def test_a_quiet_fleet_needs_no_takeover_and_repeats_no_effect():
    for acquire in ("lazy", "eager"):
        report = simulate(3, faults=(), acquire=acquire)
        assert (report.takeovers, report.doubled) == (0, 0)


def test_the_same_seed_gives_the_same_log_in_every_process():
    program = (
        "from loom.testing.simulation import simulate; print([simulate(s, 4_000).digest for s in range(3)])"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(Path.cwd())},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in (1, 2)
    }
    assert len(told) == 1
    assert len(set(eval(told.pop()))) == 3  # noqa: S307 - our own output


def test_a_failing_seed_says_how_to_repeat_it(monkeypatch):
    BUGS["no veto"].plant(monkeypatch)
    with pytest.raises(SimulationError, match=r"double entry(?s:.*)loom sim --seed \d+ --steps 12000"):
        for seed in range(100):
            simulate(seed)


@pytest.mark.soak
@pytest.mark.timeout(36_000)
def test_seeds_for_long():
    for seed in range(10_000):
        simulate(seed)


@pytest.mark.soak
@pytest.mark.timeout(7_200)
@pytest.mark.parametrize("name", [name for name, bug in BUGS.items() if bug.found])
def test_planted_bugs_are_found_within_a_thousand_seeds(monkeypatch, name):
    BUGS[name].plant(monkeypatch)
    with pytest.raises(SimulationError):
        for seed in range(1_000):
            simulate(seed)
