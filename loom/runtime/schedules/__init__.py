"""Schedules: executions that start other executions, by the calendar or by the clock (docs/adr/0033).

``spec`` says what a schedule is, ``calendar`` when it fires, ``policy`` what each happening leads to, ``flow`` does it
durably, ``verbs`` is its face.
"""

from loom.runtime.schedules.flow import SCHEDULE_FLOW
from loom.runtime.schedules.spec import Overlap, Schedule
from loom.runtime.schedules.verbs import Schedules, ScheduleView

__all__ = ["SCHEDULE_FLOW", "Overlap", "Schedule", "ScheduleView", "Schedules"]
