"""Who drives an execution, as its log and its fence tell.

A driver names itself when it takes the fence, with the head that it saw: an event behind that head which no driver wrote
(a start, an answer) has not been taken up by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from loom.schemas.envelope import Kind
from loom.stores.rows import SIDE_KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loom.schemas.envelope import Envelope
    from loom.stores.contracts import StreamInfo

NEVER: Final = -1
BY_HAND: Final = "by-hand:"
"""Begins the owner of a fence that an operator took: nobody drives, until it is given back."""

_BY_VERBS: Final = frozenset({Kind.EXECUTION_STARTED, Kind.EXECUTION_RESUMED, Kind.EXECUTION_RECOVERED})


@dataclass(frozen=True, slots=True)
class Driver:
    """Incarnation that last took an execution, None where nobody has, and the head that it saw then."""

    node: str | None
    since: int


def fence_owner(node: str, head: int, attempt: str) -> str:
    """How a driver names itself to the fence; ``attempt`` tells its attempts apart."""
    return f"{node}/{head}/{attempt}"


def driver_of(info: StreamInfo) -> Driver:
    """Who drives, or drove, an execution."""
    if info.owner is None:
        return Driver(info.node, NEVER)
    node, _, rest = info.owner.partition("/")
    since = rest.partition("/")[0]
    return Driver(node, int(since) if since.lstrip("-").isdigit() else NEVER)


def undriven(history: Sequence[Envelope], driver: Driver) -> bool:
    """Whether the last event that moved the flow came from a verb, and nobody has taken the execution since."""
    for envelope in reversed(history):
        if envelope.type not in SIDE_KINDS:
            by_verb = envelope.type in _BY_VERBS and "node" not in envelope.metadata
            return by_verb and envelope.sequence > driver.since
    return False


def may_be_undriven(info: StreamInfo) -> bool:
    """Whether its last event is of a kind that verbs write: only its log can tell."""
    return info.status in _BY_VERBS
