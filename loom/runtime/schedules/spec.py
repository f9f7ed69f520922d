"""What a schedule is: which flow, when, and what to do where firings meet or come late."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from loom.errors import InvalidInputError
from loom.kernel.flow import FlowDefinition
from loom.kernel.values import dump_json
from loom.runtime.schedules.calendar import check_cron, zone_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loom.schemas.envelope import Json

Overlap = Literal["skip", "buffer_one", "allow", "cancel_other"]
"""What a firing does while an earlier one's execution still runs: not happen; wait for its end (one may wait, the first);
start beside it; cancel it, and start once it has ended."""

OVERLAPS: Final[frozenset[str]] = frozenset(get_args(Overlap))
LEAST_EVERY_MS: Final = 1_000
LEAST_CATCH_UP_MS: Final = 10_000
"""Below it the ordinary delays of a takeover would make firings that are merely late be missed."""

DAY: Final = dt.timedelta(days=1)
EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def ms_of(span: dt.timedelta) -> int:
    """A span in whole milliseconds."""
    return span // dt.timedelta(milliseconds=1)


def instant_of(ms: int) -> dt.datetime:
    """Milliseconds since the epoch as an instant in UTC."""
    return EPOCH + dt.timedelta(milliseconds=ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Start ``flow`` with ``input`` at the instants of ``cron``, or ``every`` so often.

    ``cron`` has five fields and is read in ``time_zone`` (an IANA name): a fixed time that the clocks skip fires right after
    the gap, one that they repeat fires once. ``every`` fires at the multiples of the span since 1970, moved by ``offset``,
    whoever runs it and since whenever. ``overlap`` is for a firing whose predecessor still runs. A firing that comes late
    by more than ``catch_up`` (no node was up) is missed. Nothing fires after ``until``.

    Raises:
        InvalidInputError: neither or both of ``cron`` and ``every``, or a value that cannot be.
    """

    flow: FlowDefinition[..., Any] | str
    input: Any = None
    cron: str | None = None
    time_zone: str = "UTC"
    every: dt.timedelta | None = None
    offset: dt.timedelta = dt.timedelta()
    overlap: Overlap = "skip"
    catch_up: dt.timedelta = DAY
    until: dt.datetime | None = None

    def __post_init__(self) -> None:
        if (self.cron is None) == (self.every is None):
            raise _wrong("it has both cron and every, or neither", "give one of them")
        if self.cron is not None:
            check_cron(self.cron)
            zone_of(self.time_zone)
        if self.every is not None and ms_of(self.every) < LEAST_EVERY_MS:
            raise _wrong("every is less than a second", "use a second or more")
        if self.overlap not in OVERLAPS:
            raise _wrong("overlap is none of its values", f"use one of {', '.join(sorted(OVERLAPS))}")
        if ms_of(self.catch_up) < LEAST_CATCH_UP_MS:
            raise _wrong("catch_up is less than ten seconds", "a takeover may take as long: allow for it")
        if self.until is not None and self.until.tzinfo is None:
            raise _wrong("until has no time zone", "pass an aware datetime")

    @property
    def workflow(self) -> str:
        """Name of the flow that it starts."""
        return self.flow.name if isinstance(self.flow, FlowDefinition) else self.flow

    def to_json(self) -> dict[str, Json]:
        """What is kept of it in the log.

        Raises:
            InvalidInputError: the input has no JSON form, or does not fit the flow.
        """
        given = self.input
        data = (
            self.flow.accept_input(given)
            if isinstance(self.flow, FlowDefinition)
            else dump_json(given, f"input of flow {self.flow!r}")
        )
        return {
            "flow": self.workflow,
            "input": data,
            "cron": self.cron,
            "timeZone": self.time_zone,
            "everyMs": None if self.every is None else ms_of(self.every),
            "offsetMs": ms_of(self.offset),
            "overlap": self.overlap,
            "catchUpMs": ms_of(self.catch_up),
            "until": None if self.until is None else ms_of(self.until - EPOCH),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Schedule:
        """What ``to_json`` gave.

        Raises:
            InvalidInputError: it is no schedule.
        """
        try:
            every, until = data.get("everyMs"), data.get("until")
            return cls(
                flow=str(data["flow"]),
                input=data.get("input"),
                cron=data.get("cron"),
                time_zone=data.get("timeZone", "UTC"),
                every=None if every is None else dt.timedelta(milliseconds=every),
                offset=dt.timedelta(milliseconds=data.get("offsetMs", 0)),
                overlap=data.get("overlap", "skip"),
                catch_up=dt.timedelta(milliseconds=data.get("catchUpMs", ms_of(DAY))),
                until=None if until is None else instant_of(until),
            )
        except (KeyError, TypeError, AttributeError, OverflowError):
            raise _wrong("its shape is wrong", "make it with loom.Schedule") from None


def _wrong(problem: str, remedy: str) -> InvalidInputError:
    return InvalidInputError("a schedule", problem, remedy)
