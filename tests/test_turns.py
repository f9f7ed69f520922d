"""What a mode costs, by windows that took turns."""

from itertools import pairwise

import pytest

from loom.testing.bench.turns import Windows


def windows(*rates):
    return Windows([(round(rate), 1.0, rate * cpu / 1e6) for rate, cpu in rates])


def test_a_cost_is_judged_turn_by_turn():
    plain = windows((1_000, 500), (500, 900), (2_000, 400))
    mode = windows((900, 550), (450, 990), (1_800, 440))
    slower, dearer = mode.slower(plain), mode.dearer(plain)
    assert (slower.median, slower.low, slower.high) == pytest.approx((0.1, 0.1, 0.1))
    assert (dearer.median, dearer.low, dearer.high) == pytest.approx((0.1, 0.1, 0.1))
    assert mode.per_second == 900


def test_an_interval_holds_the_median_and_shrinks_with_the_turns():
    widths = []
    for turns in (8, 32, 128, 512):
        plain = windows(*[(1_000, 500)] * turns)
        mode = windows(*[(1_000 + 10 * (n * 37 % 21 - 10), 500) for n in range(turns)])
        share = mode.slower(plain)
        assert share.low <= share.median <= share.high
        assert abs(share.median) <= 0.02
        widths.append(share.high - share.low)
    assert all(narrow < wide for wide, narrow in pairwise(widths))


def test_a_share_is_told_with_its_interval():
    mode = windows((970, 500), (980, 500), (960, 500))
    assert str(mode.slower(windows(*[(1_000, 500)] * 3))) == "+3.0% (+2.0% to +4.0%)"
