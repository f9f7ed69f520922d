"""What a flow machine is given: facts of the run, and sources of the decisions that its log then keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loom.schemas.quick import quick

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from loom.schemas.envelope import Json


@quick
@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a run knows of itself before its first event, all from EXECUTION_STARTED.

    ``input`` is recorded JSON. ``started_at`` is the timestamp of sequence 0, in milliseconds, and the first logical
    time. ``erased`` names the subject if the log holds a tombstone for it.
    """

    execution_id: str
    chain_id: str
    workflow: str
    input: Json
    started_at: int
    subject: str | None = None
    principal: Mapping[str, Json] | None = None
    parent: Mapping[str, Json] | None = None
    continued_from: str | None = None
    erased: str | None = None


@dataclass(frozen=True, slots=True)
class DecisionSources:
    """Where decisions are drawn: milliseconds since the epoch, a number in [0, 1), a fresh id."""

    now_ms: Callable[[], int]
    random: Callable[[], float]
    uuid: Callable[[], str]
