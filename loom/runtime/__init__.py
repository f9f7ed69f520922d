"""Who drives it: verbs, drive and replay, timers, recovery, evidence of life."""

from loom.runtime.access import (
    AccessRequest,
    Authorizer,
    ExecutionAccessPolicy,
    Principal,
    execution_access_policy,
)
from loom.runtime.client import Client, wall_clock
from loom.runtime.handle import Handle
from loom.runtime.runtime import Runtime
from loom.runtime.schedules import Overlap, Schedule, Schedules, ScheduleView

__all__ = [
    "AccessRequest",
    "Authorizer",
    "Client",
    "ExecutionAccessPolicy",
    "Handle",
    "Overlap",
    "Principal",
    "Runtime",
    "Schedule",
    "ScheduleView",
    "Schedules",
    "execution_access_policy",
    "wall_clock",
]
