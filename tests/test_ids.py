"""Names of streams: none stands for two things."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loom.errors import InvalidIdError
from loom.ids import (
    CROCKFORD,
    check_execution_id,
    inbox_stream,
    inbox_topic,
    quarantine_stream,
    routing_id,
    stream_kind,
    ulid,
)

chains = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._~@=+-]{0,8}\Z")
topics = st.none() | st.text(min_size=1, max_size=6) | st.sampled_from([":", "a:b", "a/b", "a,b", "%3A", " "])
named = st.tuples(chains, topics)


@given(named, named)
def test_streams_of_different_chains_and_topics_have_different_names(one, other):
    assert (inbox_stream(*one) == inbox_stream(*other)) == (one == other)
    for chain, topic in (one, other):
        name = inbox_stream(chain, topic)
        assert (stream_kind(name), routing_id(name), inbox_topic(name)) == ("inbox", chain, topic)
        assert not set("/,") & set(name), "headers separate streams by these"
        assert routing_id(quarantine_stream(chain)) == chain


@pytest.mark.parametrize("wrong", ["", "a:b", "a/b", "a b", "a,b", "-a", "ä", "x" * 201, "__loom_inbox__:a"])
def test_an_id_that_could_name_another_stream_is_refused(wrong):
    with pytest.raises(InvalidIdError):
        check_execution_id(wrong)


def test_a_ulid_says_when_and_differs_by_eighty_random_bits(monkeypatch):
    moment = 1_796_045_992_695
    monkeypatch.setattr("loom.ids.time.time_ns", lambda: moment * 1_000_000 + 999_999)
    made = [ulid() for _ in range(5_000)]
    assert {len(one) for one in made} == {26}
    assert {int("".join(format(CROCKFORD.index(c), "05b") for c in one[:10]), 2) for one in made} == {moment}
    assert len(set(made)) == len(made)
    for place in range(10, 26):
        assert {one[place] for one in made} == set(CROCKFORD)


def test_ulids_sort_by_their_milliseconds(monkeypatch):
    moments = [0, 1, 31, 32, 1_023, 1_024, 1_796_045_992_695, 1_796_045_992_696, 2**48 - 1]
    made = []
    for moment in moments:
        monkeypatch.setattr("loom.ids.time.time_ns", lambda moment=moment: moment * 1_000_000)
        made.append(ulid())
    assert made == sorted(made)
