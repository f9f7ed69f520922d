import re
from typing import get_type_hints

from loom.processors.fold import FoldStats
from loom.processors.metrics import exposition


def test_the_page_names_every_figure():
    page = exposition(FoldStats(events=3, summaries=2, transactions=1, faults=0, lag={1: 5, 0: 0}))
    lines = page.splitlines()
    assert "loom_fold_events_total 3" in lines
    assert "loom_fold_faults_total 0" in lines
    assert lines[-2:] == ['loom_fold_lag{partition="0"} 0', 'loom_fold_lag{partition="1"} 5']
    assert page.endswith("\n")
    described = {line.split()[2] for line in lines if line.startswith("# HELP")}
    typed = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    named = {line.split("{")[0].split()[0] for line in lines if not line.startswith("#")}
    assert described == typed == named


def test_the_page_holds_numbers_alone():
    """No id, no subject, no payload: there is no place for one."""
    assert set(map(str, get_type_hints(FoldStats).values())) == {str(int), str(dict[int, int])}
    page = exposition(FoldStats(events=3, lag={1: 5, 0: 0}))
    figures = [line for line in page.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r'loom_fold_\w+(\{partition="\d+"\})? \d+', line) for line in figures)
