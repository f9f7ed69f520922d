"""How a writer that a rival fences again and again backs off, and gives way."""

from __future__ import annotations

from loom.stores.kafka.tenure import LONGEST_PAUSE_S, Backoff, Rivalry


def longest(_low, high):
    return high


def test_pauses_grow_with_each_fence_and_end():
    rivalry = Rivalry(4, settled_s=30.0, draw=longest)
    pauses = []
    for now in range(4):
        rivalry.serving(now)
        pauses.append(rivalry.fenced(now + 0.5))
    assert pauses == sorted(set(pauses)), "each is longer than the one before it"
    assert pauses[-1] <= LONGEST_PAUSE_S
    rivalry.serving(5)
    assert rivalry.fenced(5.5) is None, "it gives way"


def test_a_tenure_that_settled_begins_anew():
    rivalry = Rivalry(1, settled_s=30.0, draw=longest)
    first = rivalry.fenced(0)
    rivalry.serving(1)
    assert rivalry.fenced(31.0) == first
    rivalry.serving(32)
    assert rivalry.fenced(33) is None


def test_attempts_without_number_are_paced_and_jittered():
    asked = []
    backoff = Backoff(lambda low, high: asked.append((low, high)) or high)
    pauses = [backoff.next_s() for _ in range(10_000)]
    assert max(pauses) == pauses[-1] == LONGEST_PAUSE_S
    assert all(low == high / 2 for low, high in asked)
    backoff.reset()
    assert backoff.next_s() == pauses[0]
