"""Records as the runs of events that an index is built from."""

from __future__ import annotations

import pytest

from loom.stores.event_run import Beside
from loom.stores.kafka.runs import EventHead, runs_of


class Message:
    """A record as the client gives it."""

    def __init__(self, key, headers=None, value=b"v"):
        self._key, self._headers, self._value = key, headers, value

    def key(self):
        return self._key

    def value(self):
        return self._value

    def headers(self):
        return self._headers


def event(stream_id, sequence, *beside, kind="STEP_COMPLETED", batch="0/1", key="its own"):
    named = {
        "type": kind,
        "sequence": sequence,
        "id": f"e{sequence}",
        "batch": batch,
        "timestamp": 7 + sequence,
    }
    headers = [(name, str(value).encode()) for name, value in (*named.items(), *beside)]
    return Message(f"{stream_id}/{sequence}".encode() if key == "its own" else key, headers)


def read(*messages, lost=None):
    tombstones = []
    runs = list(runs_of(messages, gone=tombstones.append, lost=lambda message: lost))
    return runs, tombstones


def shape(runs):
    return [(run.stream_id, run.first, run.end) for run in runs]


def test_events_of_a_stream_that_follow_each_other_are_one_run():
    runs, _ = read(*(event("a/b", n, batch=f"{n}/3", kind=f"K{n}") for n in range(3)))
    (run,) = runs
    assert (run.stream_id, run.first, run.end) == ("a/b", 0, 3)
    assert run.ids == ["e0", "e1", "e2"]
    assert run.kinds == ["K0", "K1", "K2"]
    assert run.batches == [(0, 3), (1, 3), (2, 3)]
    assert run.values == [b"v"] * 3
    assert (run.timestamp, run.fence, run.node, run.sealed, run.consumed) == (9, None, None, False, ())


def test_a_gap_a_repeat_and_another_stream_begin_a_run():
    at = [("a", 0), ("a", 1), ("a", 3), ("a", 3), ("b", 4), ("ab", 5), ("a", 6)]
    assert shape(read(*(event(s, n) for s, n in at))[0]) == [
        ("a", 0, 2),
        ("a", 3, 4),
        ("a", 3, 4),
        ("b", 4, 5),
        ("ab", 5, 6),
        ("a", 6, 7),
    ]


def test_what_not_every_event_has_is_kept_with_the_run():
    (run,), _ = read(
        event("a", 0, ("fence", 1), ("node", "n1"), ("transaction", "t;0;x/0")),
        event("a", 1, ("fence", 2), ("node", "n2"), ("consumed", "i:a:x/3,i:a:y/0")),
        event("a", 2, ("sealed", 1), ("consumed", "i:a:x/4"), ("whole", "t")),
    )
    assert (run.fence, run.driven_at, run.node, run.sealed) == (1, 1, "n2", True)
    assert run.consumed == (("i:a:x", 3), ("i:a:y", 0), ("i:a:x", 4))


def test_a_fence_of_a_later_event_is_not_the_first_ones():
    (run,), _ = read(event("a", 0), event("a", 1, ("fence", 1), ("node", "n")))
    assert (run.fence, run.driven_at) == (None, 1)


def test_headers_may_stand_in_any_order():
    message = event("a", 1, ("fence", 4), ("node", "n"))
    message._headers.reverse()
    (run,), _ = read(event("a", 0), message)
    assert (run.ids, run.driven_at, run.node) == (["e0", "e1"], 1, "n")


@pytest.mark.parametrize("spoil", ["type", "sequence", "id", "batch", "timestamp", "fence"])
def test_an_event_whose_headers_are_lost_is_asked_for(spoil):
    message = event("a", 1, ("fence", 1), ("node", "n"))
    message._headers = [(name, b"\xff" if name == spoil else value) for name, value in message._headers]
    known = EventHead("K", 1, "e", (0, 1), 5, Beside(sealed=True))
    (run,), _ = read(event("a", 0), message, lost=known)
    assert (run.ids, run.kinds, run.batches, run.timestamp) == (
        ["e0", "e"],
        ["STEP_COMPLETED", "K"],
        [(0, 1)] * 2,
        5,
    )
    assert run.sealed
    assert shape(read(event("a", 0), message, event("a", 1))[0]) == [("a", 0, 2)]


@pytest.mark.parametrize("headers", [None, [], [("type", None)], [("x", b"y")] * 5])
def test_what_is_no_event_is_passed_over(headers):
    assert shape(read(event("a", 0), Message(b"a/1", headers), event("a", 1))[0]) == [("a", 0, 2)]


@pytest.mark.parametrize("key", [None, b"", b"x", b"a", b"/0"])
def test_a_key_without_a_sequence_belongs_to_no_stream(key):
    messages = [event("", 0, key=key), event("a", 1), event("", 2, key=key), event("a", 3)]
    assert shape(read(*messages)[0]) == [("a", 1, 2), ("a", 3, 4)]


def test_a_sequence_below_zero_is_no_event():
    assert shape(read(event("a", -1), event("a", 0), event("a", -2), event("a", -1))[0]) == [("a", 0, 1)]


def test_a_tombstone_is_told_and_a_tick_is_not():
    tombstone = Message(b"a/1", value=None)
    runs, tombstones = read(
        event("a", 0),
        tombstone,
        Message(b"__loom_tick__", value=None),
        event("a", 1),
        Message(None, value=None),
    )
    assert shape(runs) == [("a", 0, 2)]
    assert tombstones[0] is tombstone
    assert len(tombstones) == 2
