"""A test of a fleet that fails shows what its workers said last."""

from types import SimpleNamespace

import pytest
from fleet_support import show_workers


@pytest.mark.parametrize(("failed", "workers"), [(True, 1), (True, 0), (False, 1)])
def test_the_last_lines_of_the_workers_are_in_the_report(failed, workers):
    fleet = SimpleNamespace(workers=["north"] * workers, tails=lambda: "--- north\nand then it stopped")
    report = show_workers(SimpleNamespace(failed=failed, sections=[]), fleet)
    shown = [("the last lines of the workers", fleet.tails())]
    assert report.sections == (shown if failed and workers else [])


def test_without_a_fleet_a_report_stays_as_it_is():
    assert show_workers(SimpleNamespace(failed=True, sections=[]), None).sections == []
