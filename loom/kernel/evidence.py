"""What lease and presence rows say about the life of an execution's driver (system.md 6; clauses.md, point 6)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

CONTINUE: Final = "~continue"
"""Ends the incarnation of a node that outlives an outage of the lease store: its rows are no proof (seed, D11, 10)."""

UNLEASED: Final = "~unleased"
"""Ends the incarnation of a node that keeps no rows at all: that it has none says nothing."""


class Evidence(Enum):
    """Ranked; the first that applies counts."""

    LIVE = "live"
    """It lives, or may: a veto on everything, a host's own evidence included."""
    EXPIRED = "expired"
    """It is gone: a node that could not renew has stopped itself before this could be seen."""
    QUIET = "quiet"
    """Rows may be missing, or unrenewed, because of an outage: nothing is concluded yet."""
    EXPIRED_HEURISTIC = "expired-heuristic"
    """Its rows lapsed, but it is of a kind that goes on without them: a host's word is needed."""
    ABSENT = "absent"
    """Nothing is known: a host's word is needed."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A row: whose, and whether it has expired on the store's clock."""

    owner: str
    expired: bool


def judge(
    driver: str | None, lease: Seen | None, presence: Seen | None, *, quiet: bool, emptied: bool, proof: bool
) -> tuple[Evidence, str]:
    """What is known of the incarnation that last took an execution, and how that is told in a log.

    ``presence`` is its row. An expired lease speaks of its owner alone: one that another left behind says nothing of
    whoever took the execution since. A missing presence row counts as expired, unless the store was ``emptied`` a moment
    ago; while it is ``quiet`` after an outage nothing counts, for drivers renew first. ``proof`` says whether rows of this store may be proof at all: all nodes share it, and this node does not outlive outages itself.
    """
    if lease is not None and not lease.expired:
        return Evidence.LIVE, "lease live"
    if driver is not None and driver.endswith(UNLEASED):
        return Evidence.ABSENT, "unleased"
    if lease is not None and lease.owner == driver:
        why = "lease expired"
    elif driver is None:
        why = "no driver"
    elif presence is not None and not presence.expired:
        return Evidence.LIVE, "presence live"
    else:
        why = "presence absent" if presence is None else "presence expired"
    if quiet or (emptied and presence is None and why != "lease expired"):
        return Evidence.QUIET, why
    if not proof or (driver is not None and driver.endswith(CONTINUE)):
        return (Evidence.EXPIRED_HEURISTIC, why)
    return Evidence.EXPIRED, why
