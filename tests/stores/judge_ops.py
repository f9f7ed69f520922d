"""Random writes for the judge and the indexes: few streams and few ids, so that they meet."""

from hypothesis import strategies as st

from loom.ids import inbox_stream, quarantine_stream
from loom.schemas.codec import encode_envelope
from loom.schemas.envelope import EVENT_SCHEMA, Kind, NewEvent
from loom.stores.contracts import Observation, Snapshot, StreamAppend
from loom.stores.event_run import Beside, EventRun
from loom.stores.judge import (
    AcquireFence,
    AppendOps,
    CopyPrefix,
    Delete,
    DeleteSnapshot,
    SaveSnapshot,
    Tick,
    Truncate,
)

LOGS = ("a", "b", "c")
INBOXES = (inbox_stream("a", "t"), inbox_stream("b"))
STREAMS = (*LOGS, *INBOXES, quarantine_stream("a"))
KINDS = (
    Kind.STEP_COMPLETED,
    Kind.EXECUTION_SUSPENDED,
    Kind.EXECUTION_DENIED,
    Kind.EXECUTION_COMPLETED,
    Kind.PAYLOAD_SHREDDED,
)

_NOTHING = Beside()

small = st.integers(-1, 12)


@st.composite
def events(draw, stream_id, head):
    """Events whose ids follow from their place, mostly, so that an append may be met again."""
    count = draw(st.integers(1, 3))
    salt = draw(st.sampled_from(("", "", "", "x")))
    kind = draw(st.sampled_from(KINDS))
    node = draw(st.sampled_from((None, "n:1", "n:2")))
    metadata = {"schema": EVENT_SCHEMA} | ({} if node is None else {"node": node})
    return tuple(
        NewEvent(f"{stream_id}{head + n}{salt}", kind, {"n": n}, metadata) for n in range(1, count + 1)
    )


@st.composite
def appends(draw):
    guard = draw(st.sampled_from(("head", "head", "head", "observation", "none")))
    stream_id = draw(st.sampled_from(INBOXES if guard == "none" and draw(st.booleans()) else STREAMS))
    head = draw(small)
    fence = draw(st.sampled_from((None, None, None, 1, 1, 2, 3)))
    consumed = draw(st.lists(st.tuples(st.sampled_from(INBOXES), st.integers(0, 6)), max_size=1))
    options = {"fence": fence, "consumed": tuple(consumed)}
    if guard == "head":
        options["expected_head"] = head
    elif guard == "observation":
        anchor = None if head < 0 else f"{stream_id}0"
        options["observation"] = Observation(head, draw(st.integers(0, 3)), anchor)
    else:
        options["backlog_cap"] = draw(st.sampled_from((None, 2, 4)))
    return StreamAppend(stream_id, draw(events(stream_id, head)), **options)


stream_ids = st.sampled_from(STREAMS)
log_ids = st.sampled_from(LOGS)
snapshots = st.builds(lambda s, n: Snapshot(s, n, {"n": n}), log_ids, st.integers(0, 12))
fences = st.builds(
    AcquireFence,
    log_ids,
    st.sampled_from(("n:1", "n:2")),
    st.one_of(st.none(), st.builds(lambda h, f: Observation(h, f, "a0"), small, st.integers(0, 3))),
)
ops = st.one_of(
    st.builds(lambda a: AppendOps((a,)), appends()),
    st.builds(lambda a: AppendOps((a,)), appends()),
    st.builds(lambda a: AppendOps((a,)), appends()),
    st.builds(lambda a: AppendOps(tuple(a)), st.lists(appends(), min_size=2, max_size=3)),
    fences,
    st.builds(Truncate, stream_ids, small),
    st.builds(Delete, st.sampled_from(("c", *INBOXES))),
    st.builds(CopyPrefix, log_ids, log_ids, st.integers(0, 6)),
    st.builds(SaveSnapshot, snapshots),
    st.builds(DeleteSnapshot, log_ids),
    st.just(Tick()),
)


@st.composite
def growing_ops(draw, steps):
    """Ops of which most append where the stream ends, so that histories become long."""
    heads = dict.fromkeys(STREAMS, -1)
    found = []
    for _ in range(steps):
        if draw(st.integers(0, 3)) == 0:
            found.append(draw(ops))
            continue
        stream_id = draw(stream_ids)
        new = draw(events(stream_id, heads[stream_id]))
        fence = 1 if heads[stream_id] < 0 and draw(st.booleans()) else None
        consumed = (
            ((INBOXES[0], draw(st.integers(0, 6))),) if stream_id == "a" and draw(st.booleans()) else ()
        )
        found.append(
            AppendOps(
                (
                    StreamAppend(
                        stream_id, new, expected_head=heads[stream_id], fence=fence, consumed=consumed
                    ),
                )
            )
        )
        heads[stream_id] += len(new)
    return found


histories = st.integers(0, 40).flatmap(growing_ops)
"""Lists of ops."""

transactions = histories.flatmap(
    lambda found: st.tuples(
        st.just(found),
        st.lists(st.sampled_from(("", "", "", "commit", "abort")), min_size=len(found), max_size=len(found)),
    )
)
"""Ops, and after each what becomes of the transaction that it is in (nothing yet, commit, abort)."""


def state(index):
    """All that an index says, for comparing."""
    found = {}
    for stream_id in STREAMS:
        row = index.row(stream_id)
        if row is None or not (row.exists or row.deleted):
            found[stream_id] = None
            continue
        events = index.events(stream_id, 0, 10_000)
        assert [e.id for e in events] == index.event_ids(stream_id, 0, row.head)
        recent = None if row.recent is None else list(row.recent.items())
        fields = {name: getattr(row, name) for name in row.__slots__ if name != "recent"}
        found[stream_id] = (fields, recent, events)
    return found, {s: index.snapshot_sequence(s) for s in LOGS}


def keep(run, e, beside=_NOTHING):
    """Add an event to a run."""
    run.ids.append(e.id)
    run.kinds.append(e.type)
    run.batches.append((0, 1))
    run.values.append(encode_envelope(e))
    run.timestamp = e.timestamp
    run.note(beside)


def run_of(stream_id, *events):
    """Events that follow each other, as a reading finds them."""
    run = EventRun(stream_id, events[0].sequence)
    for e in events:
        keep(run, e)
    return run
