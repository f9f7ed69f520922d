"""Names of streams: none stands for two things."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loom.errors import InvalidIdError
from loom.ids import check_execution_id, inbox_stream, inbox_topic, quarantine_stream, routing_id, stream_kind

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
