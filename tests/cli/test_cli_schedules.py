"""Schedules through the command line, against a worker process."""

import time

import pytest

from loom.cli.schedules import span
from loom.errors import InvalidInputError

ORDER = '{"card": "tok-1", "items": [{"sku": "lamp", "price": 4200}]}'
WITHIN_S = 30.0


@pytest.fixture
def fleet(loom, worker):
    return loom


def shown(fleet, name, condition):
    """What ``loom schedules show`` says, once it is as wanted."""
    end = time.monotonic() + WITHIN_S
    while True:
        view = fleet.json("schedules", "show", name, "--as", "alice")
        if condition(view):
            return view
        assert time.monotonic() < end, view


def test_a_schedule_from_its_making_to_its_end(fleet):
    what = ["--input", ORDER, "--cron", "0 3 1 1 *", "--zone", "Europe/Berlin", "--as", "alice"]
    assert fleet.json("schedules", "create", "yearly", "order", *what)["done"] == "created"
    status, said = fleet.error("schedules", "create", "yearly", "order", *what)
    assert (status, said["error"]) == (1, "ExecutionAlreadyExistsError")
    view = shown(fleet, "yearly", lambda view: view["next_at"])
    assert view["next_at"].endswith("-01-01T02:00:00+00:00")
    assert (view["status"], view["when"], view["fired"]) == ("active", "0 3 1 1 * Europe/Berlin", 0)
    for _ in range(2):
        fired = fleet.json("schedules", "trigger", "yearly", "--request-id", "r1", "--as", "alice")
    view = shown(fleet, "yearly", lambda view: view["fired"])
    assert (view["fired"], [one["id"] for one in view["recent"]]) == (1, [fired["execution_id"]])
    fleet.json("cancel", fired["execution_id"], "--as", "alice")
    shown(fleet, "yearly", lambda view: view["recent"][0]["status"] == "cancelled")
    fleet.json("schedules", "pause", "yearly", "--note", "moving", "--as", "alice")
    assert shown(fleet, "yearly", lambda view: view["status"] == "paused")["note"] == "moving"
    fleet.json("schedules", "unpause", "yearly", "--as", "alice")
    again = ["--input", ORDER, "--every", "6h", "--replace", "--as", "alice"]
    assert fleet.json("schedules", "create", "yearly", "order", *again)["done"] == "replaced"
    shown(fleet, "yearly", lambda view: view["when"] == "every 6:00:00" and view["status"] == "active")
    assert "every 6:00:00" in fleet("schedules", "show", "yearly", "--as", "alice").out
    listed(fleet, "alice", "active")
    listed(fleet, "mallory", "denied")
    fleet.json("schedules", "delete", "yearly", "--as", "alice")
    assert shown(fleet, "yearly", lambda view: True)["status"] == "deleted"


def listed(fleet, name, status):
    end = time.monotonic() + WITHIN_S
    while True:
        rows = fleet.json("schedules", "list", "--as", name)
        if [(row["name"], row["status"]) for row in rows] == [("yearly", status)]:
            return
        assert time.monotonic() < end, rows


def test_a_schedule_of_no_known_flow_or_no_known_time_is_refused(fleet):
    status, said = fleet.error("schedules", "create", "x", "nothing", "--every", "1h")
    assert (status, said["error"]) == (1, "UnknownFlowError")
    for wrong in (["--cron", "every day"], ["--every", "1w"], [], ["--every", "1h", "--overlap", "maybe"]):
        status, said = fleet.error("schedules", "create", "x", "order", *wrong)
        assert (status, said["error"]) == (2, "InvalidInputError")


def test_spans():
    assert [span(text).total_seconds() for text in ("90s", "15m", "6h", "1d")] == [90, 900, 21_600, 86_400]
    for wrong in ("", "5", "1.5h", "-1h", "h"):
        with pytest.raises(InvalidInputError):
            span(wrong)
