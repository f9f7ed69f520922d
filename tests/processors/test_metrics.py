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
