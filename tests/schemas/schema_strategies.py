"""What hypothesis draws for this folder: JSON of every kind, envelopes, and one example of each record."""

from hypothesis import strategies as st

from loom.schemas import Envelope, Kind, NewEvent
from loom.schemas import records as r

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
NAMES = st.text(st.sampled_from("abcXYZ019._~@=+-:%é日"), min_size=1, max_size=80)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**130), 2**130)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
    | st.sampled_from(["NaN", "Infinity", "-Infinity", "\x00", '"', "\\u0000"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)
OBJECTS = st.dictionaries(TEXT, JSON, max_size=5)
LONGS = st.integers(0, 2**63 - 1) | st.integers(0, 300)

SEALS = st.fixed_dictionaries(
    {"v": st.integers(-5, 2**31 - 1), "cipher": TEXT, "covers": st.lists(TEXT, max_size=70)},
)
QUARANTINES = st.fixed_dictionaries({"topic": TEXT, "inboxSeq": st.integers(-1, 2**63 - 1)})
METADATA = st.builds(
    lambda typed, rest: {**{k: v for k, v in rest.items() if k not in typed}, **typed},
    st.fixed_dictionaries(
        {},
        optional={
            "node": TEXT,
            "actor": TEXT,
            "schema": st.sampled_from(["1.25.0", "1.24.0", "1.26.0", "1.25.7"]),
            "seal": SEALS,
            "quarantine": QUARANTINES,
        },
    ),
    st.dictionaries(
        TEXT.filter(lambda k: k not in {"node", "actor", "schema", "seal", "quarantine"}), JSON, max_size=3
    ),
)
KINDS = st.sampled_from([v for k, v in vars(Kind).items() if k.isupper()]) | NAMES
ENVELOPES = st.builds(Envelope, NAMES, NAMES, LONGS, KINDS, st.integers(-(2**62), 2**62), OBJECTS, METADATA)

_event = NewEvent("e1", "INBOX_MESSAGE", {"topic": "t", "payload": {"n": 2**70}}, {"node": "n:1"})
_append = r.AppendRecord(
    "__loom_inbox__:c:t",
    (_event, NewEvent("e2", "X", {}, {})),
    expected_head=-1,
    fence=7,
    observation=r.ObservationRecord(3, 2, "a"),
    backlog_cap=1000,
    consumed=(r.Position("__loom_inbox__:c:t", 4),),
    outgoing=(
        r.OutgoingRecord("request", "i", "k", b"\xc3\x01"),
        r.OutgoingRecord("publish", "i", "k", b"\x00\xff", "out", (r.Header("h", b""), r.Header("h", b"v"))),
    ),
)
_error = r.ErrorReport("WrongHeadError", {"stream_id": "s", "expected": 1, "head": 2})

OPS = [
    r.AppendOp((_append, r.AppendRecord("c", (_event,)))),
    r.FenceOp("c", "n:1", r.ObservationRecord(-1, 0)),
    r.FenceOp("c", "n:1"),
    r.TruncateOp("c", 9),
    r.DeleteOp("c"),
    r.CopyOp("a", "b", 12),
    r.SnapshotOp("c", 9, {"deep": [{}]}, {"k": None}),
    r.DropSnapshotOp("c"),
    r.ReadOp("events", "c", 5, 10),
    r.NotifyOp("c"),
    r.SnapshotOp("c", 0, {}),
    r.CancelOp("r0"),
    r.CancelOp("r0", 17),
]
VERBS = [
    r.StartVerb("order", {"total": 12.5}),
    r.StartVerb("order", None, "chosen", "alice"),
    r.SendVerb("c", "ship", [1, "two"], "m1", "wms"),
    r.SendVerb("c", "ship", None),
    r.ResumeVerb("c", "approve", False),
    r.CancelVerb("c"),
    r.CancelVerb("c", "no stock"),
]
RECORDS = [
    *(r.AppendRequest(f"r{n}", op) for n, op in enumerate(OPS)),
    r.AppendRequest("r", r.NotifyOp("c"), "node", 3, 60_000),
    *(r.Command(verb) for verb in VERBS),
    r.Command(VERBS[0], "orders/3/17", "alice", {"groups": ["a"]}),
    r.StreamMark("c", -1, 1, 0),
    r.StreamMark(
        "c",
        9,
        4,
        5,
        3,
        "n:1",
        "a",
        "EXECUTION_SUSPENDED",
        "n:1",
        7,
        True,
        (r.RecentId("m", 8), r.RecentId("l", 9)),
    ),
    r.PartitionMark(3, 8, 1_700_000_000_000),
    r.PartitionMark(3, 8, 1_700_000_000_000, "n:1", 2**40, 0),
    r.SnapshotRecord("c", 9, 5, {"_waits": []}),
    r.SnapshotRecord("c", 9, 5, {"__loomEnc": "x"}, {"aad": "loom-snap-v1"}),
    r.AppendReply("r", _error),
    r.AppendReply("r", None, (r.AppendedRecord("c", 0, 3, 5, repeated=True),), 7),
    r.ReadReply("r", _error),
    r.ReadReply("r", None, 0, False, (), r.StreamInfoRecord("c", 3, 1, 2)),
    r.ReadReply("r", None, 1, True, (b"", b"\x00\x01"), r.StreamInfoRecord("c", 3, 1, 2, "a", "X", "n")),
    r.ExecutionSummary("c", "c", "order", "running", 0, 1, 2),
    r.ExecutionSummary(
        "c",
        "b",
        "order",
        "failed",
        9,
        1,
        2,
        3,
        "alice",
        "p",
        "s",
        "n",
        ("inbox:ship", "timer:9"),
        4,
        True,
        "E",
    ),
    r.OperatorSignal("sealed-held", "warning", 5, "n:1"),
    r.OperatorSignal("sealed-held", "warning", 5, "n:1", "c", "text", 16, {"inboxSeq": 3}),
    r.SchemaNote("c3", "{}"),
    r.SchemaNote("c3", "{}", 12),
]
