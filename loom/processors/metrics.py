"""The fold's figures as a page that Prometheus reads (text format 0.0.4); no client library is needed for so few."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from loom.processors.fold import FoldStats

_COUNTERS: Final = (
    ("events", "Events folded."),
    ("summaries", "Summaries written to states."),
    ("transactions", "Transactions committed."),
    ("faults", "Times that a partition was taken again after a fault."),
)


def exposition(stats: FoldStats) -> str:
    """Return the page; ``loom_fold_lag`` is offsets not yet folded, by partition."""
    lines: list[str] = []
    for name, meaning in _COUNTERS:
        metric = f"loom_fold_{name}_total"
        lines += [
            f"# HELP {metric} {meaning}",
            f"# TYPE {metric} counter",
            f"{metric} {getattr(stats, name)}",
        ]
    lines += ["# HELP loom_fold_lag Offsets not yet folded.", "# TYPE loom_fold_lag gauge"]
    lines += [f'loom_fold_lag{{partition="{number}"}} {lag}' for number, lag in sorted(stats.lag.items())]
    return "\n".join(lines) + "\n"
