"""What each happening means to a schedule: overlap, catch-up, pauses, messages."""

import datetime as dt

import pytest

from loom import Schedule
from loom.runtime.schedules.policy import (
    MAX_LATE_AT_ONCE,
    MAX_MISSED,
    MAX_RUNNING,
    RECENT,
    Firing,
    ScheduleState,
    begun,
    decided,
    firing_id,
)

MINUTE = 60_000
TIMER = {"kind": "timer"}


def every_minute(**settings):
    return Schedule(flow="job", every=dt.timedelta(minutes=1), **settings)


class Told:
    """A schedule that starts what it says at once."""

    def __init__(self, schedule, now=0, **state):
        self.schedule, self.now = schedule, now
        self.state = begun(schedule, now, paused=False, note=None)
        self.started, self.cancelled = [], []

    def happens(self, happening, now=None):
        self.now = self.now if now is None else now
        state = decided(self.schedule, "job", self.state, happening, self.now)
        assert ScheduleState.from_json(state.to_json()) == state
        self.started += [one.due for one in state.start]
        self.cancelled += state.cancel
        self.schedule = self.schedule if state.update is None else Schedule.from_json(state.update)
        for firing in state.start:
            state = state.runs(firing)
        self.state = state.done()

    def timer(self, now=None):
        self.happens(TIMER, self.state.wake_at if now is None else now)

    def ends(self, due=None, status="completed"):
        running = [one for one in self.state.running if due in {None, one.due}]
        self.happens({"kind": "ended", "id": running[0].id, "status": status})

    def told(self, now=None, **message):
        self.happens({"kind": "told", "message": message}, now)


def test_it_waits_for_its_next_instant_and_starts_each_once():
    told = Told(every_minute(), now=30_000)
    assert told.state.wake_at == MINUTE
    told.timer()
    told.ends()
    told.timer()
    assert told.started == [MINUTE, 2 * MINUTE]
    assert told.state.wake_at == 3 * MINUTE
    assert told.state.fired == 2


def test_skip_lets_go_what_meets_a_predecessor():
    told = Told(every_minute())
    for _ in range(3):
        told.timer()
    assert (told.started, told.state.skipped) == ([MINUTE], 2)
    told.ends()
    assert told.started == [MINUTE]
    told.timer()
    assert told.started == [MINUTE, 4 * MINUTE]


def test_buffer_one_keeps_the_first_and_starts_it_at_the_end():
    told = Told(every_minute(overlap="buffer_one"))
    for _ in range(4):
        told.timer()
    assert (told.started, told.state.skipped) == ([MINUTE], 2)
    told.ends()
    assert told.started == [MINUTE, 2 * MINUTE]
    assert told.state.buffered is None


def test_allow_starts_beside_up_to_a_limit():
    told = Told(every_minute(overlap="allow"))
    for _ in range(MAX_RUNNING + 2):
        told.timer()
    assert (len(told.started), told.state.skipped) == (MAX_RUNNING, 2)


def test_cancel_other_cancels_and_starts_the_newest_at_the_end():
    told = Told(every_minute(overlap="cancel_other"))
    for _ in range(3):
        told.timer()
    first = firing_id("job", MINUTE)
    assert (told.started, told.cancelled, told.state.skipped) == ([MINUTE], [first, first], 1)
    told.ends(status="cancelled")
    assert told.started == [MINUTE, 3 * MINUTE]
    assert told.state.recent[0]["status"] == "cancelled"


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [
        ("skip", [8]),
        ("buffer_one", [8]),
        ("allow", [8, 9, 10]),
        ("cancel_other", [10]),
    ],
)
def test_what_comes_late_meets_the_policy_and_what_comes_too_late_is_missed(overlap, expected):
    told = Told(every_minute(overlap=overlap, catch_up=dt.timedelta(minutes=2)))
    told.timer(10 * MINUTE)
    assert told.started == [minute * MINUTE for minute in expected]
    assert told.state.missed == 7
    assert told.state.wake_at == 11 * MINUTE


def test_a_long_outage_is_caught_up_in_bounded_turns():
    told = Told(every_minute(overlap="skip"))
    told.timer(3 * MAX_LATE_AT_ONCE * MINUTE)
    assert told.state.wake_at == (MAX_LATE_AT_ONCE + 1) * MINUTE  # due already: the next turn is at once
    while told.state.wake_at <= told.now:
        told.timer(told.now)
    assert (len(told.started), told.state.skipped) == (1, 3 * MAX_LATE_AT_ONCE - 1)
    told = Told(every_minute(catch_up=dt.timedelta(minutes=1)))
    told.timer(10 * MAX_MISSED * MINUTE)
    assert told.state.missed == MAX_MISSED
    assert told.started == [(10 * MAX_MISSED - 1) * MINUTE]


def test_a_pause_lets_instants_pass_and_a_trigger_through():
    told = Told(every_minute())
    told.told(verb="pause", note="moving")
    assert (told.state.wake_at, told.state.note) == (None, "moving")
    told.told(verb="trigger", request="r1", now=90_000)
    assert told.state.running == (Firing("job+r1", 90_000),)
    told.told(verb="unpause", now=10 * MINUTE)
    assert told.state.wake_at == 11 * MINUTE
    assert told.state.missed == 0


def test_an_update_takes_over_from_now_and_knows_what_runs():
    told = Told(every_minute())
    told.timer()
    hourly = Schedule(flow="job", every=dt.timedelta(hours=1))
    told.told(verb="update", schedule=hourly.to_json())
    assert told.schedule == hourly
    assert told.state.wake_at == 60 * MINUTE
    assert len(told.state.running) == 1


@pytest.mark.parametrize(
    "message",
    [
        None,
        7,
        "pause",
        {},
        {"verb": "burn"},
        {"verb": "trigger"} | {"request": "a b"},
        {"verb": "trigger", "request": "x" * 300},
        {"verb": "update", "schedule": {"flow": "job", "cron": "every day"}},
        {"verb": "update", "schedule": None},
    ],
)
def test_a_message_that_means_nothing_changes_nothing(message):
    told = Told(every_minute())
    before = told.state
    told.happens({"kind": "told", "message": message})
    assert told.state == before


def test_a_start_that_is_refused_counts_as_skipped():
    told = Told(every_minute())
    told.timer()
    told.happens({"kind": "refused", "id": told.state.running[0].id, "status": "refused"})
    assert (told.state.fired, told.state.skipped, told.state.running) == (0, 1, ())


def test_nothing_fires_past_its_end():
    until = dt.datetime.fromtimestamp(150, dt.UTC)
    told = Told(every_minute(until=until, overlap="allow"))
    told.timer()
    told.timer()
    assert told.state.wake_at is None
    assert told.started == [MINUTE, 2 * MINUTE]


def test_a_clock_that_is_behind_fires_no_instant_twice():
    told = Told(every_minute(overlap="allow"))
    told.timer()
    told.timer(now=0)  # another node's clock; its timer fired all the same
    told.timer()
    assert told.started == [MINUTE, 2 * MINUTE, 3 * MINUTE]


def test_a_pause_that_a_clock_behind_ends_brings_no_instant_back():
    told = Told(every_minute())
    told.timer()
    told.ends()
    told.told(verb="pause")
    told.told(verb="unpause", now=0)
    told.timer()
    assert told.started == [MINUTE, 2 * MINUTE]


def test_what_is_remembered_is_bounded():
    told = Told(every_minute())
    for _ in range(3 * RECENT):
        told.timer()
        told.ends()
    assert len(told.state.recent) == RECENT


def test_ids_tell_instants_apart():
    assert firing_id("job", 1_700_000_000_000) == "job@20231114T221320Z"
    assert firing_id("job", 1_700_000_000_250) == "job@20231114T221320.250Z"
