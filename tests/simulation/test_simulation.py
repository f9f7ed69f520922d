"""Seeds of the simulation: what must hold holds, a seed repeats itself, and planted bugs are found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from planted_bugs import BUGS

from loom.testing.simulation import FAULTS, SimulationError, simulate, simulate_many

SHORT, LONG = 2_000, 10_000
AT_ONCE = 250
"""Seeds of one test: a slow machine takes a minute for them, and what hangs is told from what is slow."""
MOST = 1_000
"""Seeds within which a planted bug is to be found."""


@pytest.mark.parametrize("first", range(0, SHORT, AT_ONCE))
def test_seeds_from_the_first_on(first):
    tally = simulate_many(range(first, first + AT_ONCE))
    assert tally.seeds == AT_ONCE
    assert set(tally.kinds) == {"plain", "keys", "paths"}
    assert min(tally.takeovers, tally.doubled, tally.denials) > AT_ONCE // 10


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_by_itself(fault):
    for seed in (7, 8):
        simulate(seed, 3_000, faults=(fault,), orders=3)


def test_a_quiet_fleet_needs_no_takeover_and_repeats_no_effect():
    for acquire in ("lazy", "eager"):
        report = simulate(3, faults=(), acquire=acquire)
        assert (report.takeovers, report.doubled) == (0, 0)


def test_seeds_side_by_side_come_to_the_same():
    alone, beside = simulate_many(range(6), 2_000, jobs=1), simulate_many(range(6), 2_000, jobs=2)
    assert alone == beside


def test_what_fails_in_another_process_says_how_to_repeat_it():
    with pytest.raises(SimulationError, match=r"double entry(?s:.*)loom sim --seed \d+ --steps 12000"):
        simulate_many(range(200), jobs=2, before=plant_no_veto)


def plant_no_veto():
    BUGS["no veto"].plant(pytest.MonkeyPatch())


def test_the_same_seed_gives_the_same_log_in_every_process():
    program = (
        "from loom.testing.simulation import simulate\n"
        "print([simulate(s, kind=kind).digest for s, kind in enumerate(('plain', 'keys', 'paths'))])"
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


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("name", [name for name, bug in BUGS.items() if bug.seed is not None])
def test_a_planted_bug_is_found_within_a_thousand_seeds(monkeypatch, name):
    """The seed that found it last is tried first; whatever changes the order of things changes which seed does."""
    bug = BUGS[name]
    bug.plant(monkeypatch)
    others = (seed for seed in range(MOST) if seed != bug.seed)
    with pytest.raises(SimulationError):
        for seed in (bug.seed, *others):
            simulate(seed)


@pytest.mark.soak
@pytest.mark.timeout(36_000)
def test_seeds_for_long():
    assert simulate_many(range(SHORT, SHORT + LONG)).seeds == LONG


@pytest.mark.soak
@pytest.mark.timeout(7_200)
@pytest.mark.parametrize("name", BUGS)
def test_the_first_seed_that_finds_a_planted_bug(monkeypatch, name, record_property):
    """Prints the rows of the table in docs/simulation.md."""
    BUGS[name].plant(monkeypatch)
    for seed in range(MOST):
        try:
            simulate(seed)
        except SimulationError as error:
            record_property("seed", seed)
            print(f"{name}: seed {seed}: {str(error).splitlines()[-2]}")  # noqa: T201 - what it is for
            return
    pytest.fail(f"{name} is not found in {MOST} seeds")
