"""A row that takes a run of events is the row that takes them one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loom.ids import inbox_stream
from loom.schemas.envelope import Kind
from loom.stores.event_run import Beside, EventRun
from loom.stores.rows import RECENT_IDS, deleted_row, new_row

KINDS = st.sampled_from(
    [
        Kind.STEP_COMPLETED,
        Kind.EXECUTION_SUSPENDED,
        Kind.EXECUTION_COMPLETED,
        Kind.OUTCOME_RECORDED,
        Kind.MESSAGE_CONSUMED,
    ]
)
EVENTS = st.lists(st.tuples(KINDS, st.sampled_from([None, 1, 2]), st.booleans()), min_size=1, max_size=6)


def run_of(stream_id, first, events):
    run = EventRun(stream_id, first)
    for sequence, (kind, fence, sealed) in enumerate(events, first):
        run.ids.append(f"e{sequence}")
        run.kinds.append(kind)
        run.timestamp = sequence
        run.note(Beside(fence, None if fence is None else f"n{sequence}", sealed=sealed))
    return run


def put_each(row, first, events):
    for sequence, (kind, fence, sealed) in enumerate(events, first):
        if sequence > row.head and not row.deleted:
            node = None if fence is None else f"n{sequence}"
            row.put(sequence, f"e{sequence}", kind, sequence, fence=fence, node=node, sealed=sealed)
        row.sealed = row.sealed or sealed


@pytest.mark.parametrize("stream_id", ["x", inbox_stream("x", "t")])
@given(events=st.lists(st.tuples(st.integers(0, 9), EVENTS), min_size=1, max_size=4), deleted=st.booleans())
def test_a_run_is_taken_as_its_events_are(stream_id, events, deleted):
    whole, each = new_row(stream_id), new_row(stream_id)
    if deleted:
        whole, each = deleted_row(whole), deleted_row(each)
    for first, some in events:
        whole.put_run(run_of(stream_id, first, some))
        put_each(each, first, some)
        assert whole == each
        assert list((whole.recent or {}).items()) == list((each.recent or {}).items())


def test_a_run_leaves_the_last_ids_of_an_inbox():
    row = new_row(inbox_stream("x", "t"))
    row.put_run(run_of(inbox_stream("x", "t"), 0, [(Kind.INBOX_MESSAGE, None, False)] * (RECENT_IDS + 3)))
    assert (len(row.recent), next(iter(row.recent))) == (RECENT_IDS, "e3")
