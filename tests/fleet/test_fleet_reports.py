"""A test of a fleet that fails shows what its workers said last."""

from types import SimpleNamespace

import pytest
from fleet_support import show_workers


@pytest.mark.parametrize(("failed", "workers"), [(True, 1), (True, 0), (False, 1)])
def test_the_last_lines_of_the_workers_are_in_the_report(failed, workers):
    fleet = SimpleNamespace(workers=["north"] * workers, tails=lambda: "--- north\nand then it stopped")
    report = SimpleNamespace(failed=failed, sections=[])
    show_workers(report, fleet)
    shown = [("the last lines of the workers", fleet.tails())]
    assert report.sections == (shown if failed and workers else [])


def test_a_fleet_is_known_to_the_report_of_its_test(fleet, request):
    (plugin,) = (p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "FLEETS"))
    assert request.node.stash[plugin.FLEETS] == [fleet]
