"""When a schedule fires: cron in a zone whose clocks move, intervals, and what is refused."""

import datetime as dt
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loom import InvalidInputError, Schedule
from loom.runtime.schedules.calendar import cron_instants, interval_instants

HOUR = dt.timedelta(hours=1)


def ms(text):
    return round(dt.datetime.fromisoformat(text).timestamp() * 1000)


def fires(expression, zone, after, count):
    found = islice(cron_instants(expression, zone, ms(after)), count)
    return [dt.datetime.fromtimestamp(at / 1000, dt.UTC).strftime("%d %H:%M") for at in found]


def test_a_time_that_the_clocks_skip_fires_once_right_after_the_gap():
    # 2026-03-29: 02:00 becomes 03:00 in Berlin, at 01:00 UTC.
    assert fires("30 2 * * *", "Europe/Berlin", "2026-03-28T00:00+00:00", 3) == [
        "28 01:30",
        "29 01:00",
        "30 00:30",
    ]


def test_a_time_that_the_clocks_repeat_fires_once_wherever_one_looks_from():
    # 2026-10-25: 03:00 becomes 02:00 in Berlin, at 01:00 UTC.
    assert fires("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00+00:00", 2) == ["25 00:30", "26 01:30"]
    for after in ("00:30", "00:45", "01:00", "01:15", "01:30", "01:45"):
        assert fires("30 2 * * *", "Europe/Berlin", f"2026-10-25T{after}+00:00", 1) == ["26 01:30"]


def test_what_fires_every_hour_does_so_through_both():
    assert fires("0 * * * *", "Europe/Berlin", "2026-03-29T00:30+00:00", 2) == ["29 01:00", "29 02:00"]
    assert fires("0 * * * *", "Europe/Berlin", "2026-10-24T23:30+00:00", 3) == [
        "25 00:00",
        "25 01:00",
        "25 02:00",
    ]


@given(
    st.sampled_from(
        ["*/7 * * * *", "30 2 * * *", "15 1,2,3 * * 0", "0 0 29 2 *", "0 */5 * * *", "59 23 L * *"]
    ),
    st.sampled_from(["UTC", "Europe/Berlin", "America/St_Johns", "Australia/Lord_Howe", "Asia/Kolkata"]),
    st.integers(ms("2024-01-01T00:00+00:00"), ms("2030-01-01T00:00+00:00")),
)
def test_instants_rise_and_do_not_depend_on_where_one_looks_from(expression, zone, after):
    found = list(islice(cron_instants(expression, zone, after), 4))
    assert all(a < b for a, b in pairwise([after, *found]))
    assert list(islice(cron_instants(expression, zone, found[0]), 3)) == found[1:]
    between = (found[1] + found[2]) // 2
    assert next(cron_instants(expression, zone, between)) == found[2]


@given(st.integers(1_000, 10**9), st.integers(-(10**9), 10**9), st.integers(0, 10**13))
def test_intervals_are_multiples_since_the_epoch(every, offset, after):
    first, second = islice(interval_instants(every, offset, after), 2)
    assert after < first <= after + every
    assert (first - offset) % every == 0
    assert second == first + every


@pytest.mark.parametrize(
    "given_",
    [
        {},
        {"cron": "0 2 * * *", "every": HOUR},
        {"cron": "0 2 * *"},
        {"cron": "0 0 2 * * *"},
        {"cron": "61 2 * * *"},
        {"cron": "0 0 30 2 *"},
        {"cron": "0 2 * * *", "time_zone": "Europe/Atlantis"},
        {"cron": "0 2 * * *", "time_zone": "../secrets"},
        {"every": dt.timedelta(milliseconds=999)},
        {"every": HOUR, "overlap": "sometimes"},
        {"every": HOUR, "catch_up": dt.timedelta(seconds=9)},
        {"every": HOUR, "until": dt.datetime(2030, 1, 1)},  # noqa: DTZ001 - that is the point
    ],
)
def test_what_cannot_be_is_refused(given_):
    with pytest.raises(InvalidInputError):
        Schedule(flow="job", **given_)


def test_a_schedule_survives_its_log():
    for schedule in (
        Schedule(flow="job", input={"a": [1]}, cron="0 2 * * *", time_zone="Europe/Berlin", overlap="allow"),
        Schedule(flow="job", every=HOUR, offset=HOUR / 4, until=dt.datetime(2030, 1, 1, tzinfo=dt.UTC)),
    ):
        assert Schedule.from_json(schedule.to_json()) == schedule
