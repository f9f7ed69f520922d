"""The filter before the index file: what was added is never denied."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loom.stores.name_filter import NameFilter


@given(st.lists(st.text(max_size=30), max_size=200), st.lists(st.text(max_size=30), max_size=50))
def test_what_was_added_is_never_denied(added, others):
    names = NameFilter()
    for name in added:
        names.add(name)
    assert all(names.may_hold(name) for name in added)
    denied = [name for name in others if not names.may_hold(name)]
    assert not set(denied) & set(added)


def test_most_of_what_was_not_added_is_denied():
    names = NameFilter()
    for number in range(50_000):
        names.add(f"here-{number}")
    wrong = sum(names.may_hold(f"elsewhere-{number}") for number in range(10_000))
    assert wrong < 50
