"""What a look at a server found, for ``loom doctor``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. ``severity`` is ``info``, ``warning`` or ``error``; ``code`` is stable, for machines."""

    code: str
    severity: str
    problem: str
    remedy: str
