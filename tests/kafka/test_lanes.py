"""The rule of lanes, as it was model-checked: what initialises in which order, and which lane is next."""

from __future__ import annotations

import pytest

from loom.stores.kafka.client import Fault
from loom.stores.kafka.deadline import Deadline
from loom.stores.kafka.lanes import LaneFault, Lanes


class Recorded:
    """Stands where a producer would; says what was done to it."""

    def __init__(self, number, done, *, fails=False):
        self.number, self.done, self.fails = number, done, fails

    def initialise(self, deadline, wait):
        self.done.append(("initialise", self.number))
        if self.fails:
            raise LaneFault("initialise", Fault.FENCED, "_FENCED")

    def disturbance(self):
        return "FAIL" if self.fails else None

    def close(self):
        self.done.append(("close", self.number))


def opened(count, *, failing=()):
    done = []
    lanes = Lanes(lambda number: Recorded(number, done, fails=number in failing), count)
    return lanes, done


def open_lanes(lanes):
    lanes.open(Deadline.after(1_000), lambda: None)


def test_every_lane_is_initialised_and_lane_0_first():
    lanes, done = opened(2)
    open_lanes(lanes)
    assert done == [("initialise", 0), ("initialise", 1)]


def test_lane_1_waits_until_lane_0_has_committed_in_this_tenure():
    lanes, _ = opened(2)
    open_lanes(lanes)
    assert [lanes.next().number for _ in range(3)] == [0, 0, 0], "aborts may never reach the broker"
    lanes.committed()
    assert [lanes.next().number for _ in range(4)] == [1, 0, 1, 0]


def test_a_lane_that_cannot_be_initialised_ends_all_of_them():
    lanes, done = opened(2, failing={1})
    with pytest.raises(LaneFault):
        open_lanes(lanes)
    lanes.close()
    lanes.close()
    assert done[2:] == [("close", 0), ("close", 1)]


def test_a_disturbance_of_any_lane_is_one_of_all():
    lanes, _ = opened(2, failing={1})
    with pytest.raises(LaneFault):
        open_lanes(lanes)
    assert lanes.disturbance() == "FAIL"


@pytest.mark.parametrize("count", [0, 3])
def test_only_what_was_checked_is_allowed(count):
    with pytest.raises(ValueError, match="lanes"):
        opened(count)


def test_one_lane_is_always_next():
    lanes, _ = opened(1)
    open_lanes(lanes)
    lanes.committed()
    assert [lanes.next().number for _ in range(3)] == [0, 0, 0]
