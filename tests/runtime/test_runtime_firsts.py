"""First events as verbs need them: remembered, and what was sealed for a moment only."""

from __future__ import annotations

import pytest

from loom.runtime import firsts
from loom.runtime.firsts import FRESH_S, Firsts
from loom.schemas.envelope import Envelope, Kind


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def first(execution_id, metadata=None):
    data = {"workflow": "w", "chainId": execution_id, "input": "clear"}
    return Envelope("e", execution_id, 0, Kind.EXECUTION_STARTED, 1, data, metadata or {})


def test_a_first_event_is_remembered_without_its_input():
    known = Firsts(Clock())
    known.put(first("a"))
    assert known.get("a").data == {"workflow": "w", "chainId": "a"}
    assert known.get("b") is None
    known.drop("a")
    assert known.get("a") is None


@pytest.mark.parametrize(("sealed", "metadata"), [(True, {}), (False, {"seal": {}})])
def test_what_was_sealed_is_remembered_for_a_moment_only(sealed, metadata):
    clock = Clock()
    known = Firsts(clock)
    known.put(first("open"))
    known.put(first("a", metadata), sealed=sealed)
    clock.now = FRESH_S * 0.9
    assert known.get("a").data["workflow"] == "w"
    known.put(first("b", metadata), sealed=sealed)
    clock.now = FRESH_S
    assert known.get("a") is None
    known.put(first("c", metadata), sealed=sealed)
    assert list(known._sealed) == ["b", "c"], "nothing stale is kept"
    clock.now = FRESH_S * 9
    assert known.get("open") is not None


def test_they_are_bounded(monkeypatch):
    monkeypatch.setattr(firsts, "MAX_FIRSTS", 3)
    known = Firsts(Clock())
    for number in range(9):
        known.put(first(f"open {number}"))
        known.put(first(f"sealed {number}"), sealed=True)
    assert list(known._open) == [f"open {n}" for n in (6, 7, 8)]
    assert list(known._sealed) == [f"sealed {n}" for n in (6, 7, 8)]
