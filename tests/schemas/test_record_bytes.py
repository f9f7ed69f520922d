"""Records beside envelopes: every alternative and every optional field, strictly, and nothing but DecodeError."""

import contextlib
import tracemalloc
from dataclasses import fields, replace
from io import BytesIO

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schema_strategies import OPS, RECORDS, VERBS

from loom.errors import DecodeError, InvalidInputError
from loom.schemas import records as r
from loom.schemas.codec import Codec, decode, encode
from loom.schemas.mapping import CLASSES, compile_record
from loom.schemas.table import packaged

BY_TYPE = {type(record): record for record in RECORDS}
ALWAYS_SINGLE = (r.SchemaNote, r.StreamMark, r.PartitionMark)
CODEC = Codec(
    registered=dict.fromkeys(packaged(), 1) | {name: n for n, name in enumerate(sorted(packaged()), 1)}
)


@pytest.mark.parametrize("record", RECORDS, ids=lambda x: type(x).__name__)
def test_every_branch_round_trips_to_the_same_bytes(record):
    raw = encode(record)
    back = decode(raw, type(record))
    assert back == record
    assert encode(back) == raw
    framed = CODEC.encode(record)
    assert framed[0] == (0xC3 if type(record) in ALWAYS_SINGLE else 0)
    assert CODEC.decode(framed, type(record)) == record
    assert CODEC.decode(raw, type(record)) == record


def test_the_examples_cover_every_record_alternative_and_optional_field():
    assert set(BY_TYPE) == {CLASSES[name] for name in packaged() if name in CLASSES}
    assert {type(x) for x in OPS} | {type(x) for x in VERBS} == set(r.RequestOp.__args__) | set(
        r.CommandVerb.__args__
    )
    seen = {}

    def note(value):
        if type(value) in CLASSES.values():
            for f in fields(value):
                inner = getattr(value, f.name)
                seen.setdefault((type(value).__name__, f.name), set()).add(inner is None)
                note(inner)
        elif isinstance(value, tuple):
            for item in value:
                note(item)

    for record in RECORDS:
        note(record)
    nullable = set()
    for schema in packaged().values():
        collect_nullable(schema.parsed, nullable)
    missing = {(c, f) for c, f in nullable if (c, f) in seen and seen[c, f] != {True, False}}
    assert not missing


def collect_nullable(schema, out):
    if isinstance(schema, list):
        for item in schema:
            collect_nullable(item, out)
    elif isinstance(schema, dict):
        if schema.get("type") == "record":
            cls = CLASSES.get(schema["name"])
            for f in schema["fields"]:
                if cls is not None and isinstance(f["type"], list):
                    snake = "".join("_" + c.lower() if c.isupper() else c for c in f["name"])
                    out.add((cls.__name__, snake))
                collect_nullable(f["type"], out)
        elif schema.get("type") == "array":
            collect_nullable(schema["items"], out)


@pytest.mark.parametrize("record", RECORDS, ids=lambda x: type(x).__name__)
def test_a_stock_library_reads_them_with_the_schema_file(record):
    name = next(n for n, cls in CLASSES.items() if cls is type(record))
    mapping = fastavro.schemaless_reader(BytesIO(encode(record)[10:]), packaged()[name].parsed, None)
    stream = BytesIO()
    fastavro.schemaless_writer(stream, packaged()[name].parsed, mapping, strict=True)
    assert stream.getvalue() == encode(record)[10:]


@pytest.mark.parametrize(
    "wrong",
    [
        replace(BY_TYPE[r.StreamMark], head="1"),
        replace(BY_TYPE[r.StreamMark], head=1.0),
        replace(BY_TYPE[r.StreamMark], head=True),
        replace(BY_TYPE[r.StreamMark], head=2**63),
        replace(BY_TYPE[r.StreamMark], stream_id=None),
        replace(BY_TYPE[r.StreamMark], deleted=1),
        replace(BY_TYPE[r.StreamMark], anchor=b"a"),
        replace(BY_TYPE[r.StreamMark], recent=[r.RecentId("a", 1)]),
        replace(BY_TYPE[r.StreamMark], recent=("a",)),
        replace(BY_TYPE[r.StreamMark], stream_id="\ud800"),
        replace(BY_TYPE[r.PartitionMark], partition=2**31),
        replace(BY_TYPE[r.SnapshotRecord], state=[1]),
        replace(BY_TYPE[r.SnapshotRecord], state={"a": float("nan")}),
        replace(BY_TYPE[r.SnapshotRecord], metadata=[1]),
        r.Command(None),
        r.Command(r.NotifyOp("c")),
        r.Command(r.StartVerb("f", object())),
        r.AppendRequest("r", r.StartVerb("f", 1)),
        r.AppendRequest("r", r.AppendOp((r.Position("s", 1),))),
        replace(BY_TYPE[r.ReadReply], values=("text",)),
        replace(BY_TYPE[r.ReadReply], info=r.Position("s", 1)),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_field_of_another_type_is_refused_not_coerced(wrong):
    with pytest.raises(InvalidInputError):
        encode(wrong)


def test_what_is_no_record_of_its_own_is_refused():
    with pytest.raises(TypeError, match="Position is no record of its own"):
        encode(r.Position("s", 1))


@given(st.sampled_from(RECORDS), st.data())
@settings(max_examples=400)
def test_damaged_records_give_decode_error_and_nothing_else(record, data):
    raw = bytearray(encode(record))
    match data.draw(st.sampled_from(["flip", "cut", "insert", "noise"])):
        case "flip":
            for _ in range(data.draw(st.integers(1, 4))):
                raw[data.draw(st.integers(10, len(raw) - 1))] = data.draw(st.integers(0, 255))
        case "cut":
            del raw[data.draw(st.integers(0, len(raw) - 1)) :]
        case "insert":
            at = data.draw(st.integers(10, len(raw)))
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=12))
        case _:
            raw[10:] = data.draw(st.binary(max_size=200))
    try:
        back = CODEC.decode(bytes(raw), type(record))
    except DecodeError:
        return
    assert CODEC.decode(CODEC.encode(back), type(record)) == back


HUGE = [b"\xfe\xff\xff\xff\x0f", b"\xfe" + b"\xff" * 8 + b"\x01", b"\xff" * 9 + b"\x01", b"\x01", b"\x03"]


@pytest.mark.parametrize("length", HUGE, ids=bytes.hex)
@pytest.mark.parametrize("record", RECORDS, ids=lambda x: type(x).__name__)
def test_a_huge_or_negative_length_anywhere_is_refused_without_allocating(record, length):
    raw = encode(record)
    for at in range(10, len(raw)):
        for damaged in (raw[:at] + length + raw[at + 1 :], raw[:at] + length):
            try:
                decode(damaged, type(record))
            except DecodeError:
                continue


def test_two_alternatives_at_once_are_refused():
    name = "loom.Command"
    pair = compile_record(packaged()[name].parsed)
    both = pair.to_wire(r.Command(VERBS[0])) | {"cancel": {"executionId": "c", "reason": None}}
    none = both | {"start": None, "cancel": None}
    for mapping in (both, none):
        stream = BytesIO()
        fastavro.schemaless_writer(stream, packaged()[name].parsed, mapping)
        with pytest.raises(DecodeError, match="exactly one"):
            decode(encode(r.Command(VERBS[0]))[:10] + stream.getvalue(), r.Command)


def test_a_value_of_another_record_is_refused_by_name():
    with pytest.raises(DecodeError, match=r"loom\.PartitionMark, not a loom\.StreamMark"):
        decode(encode(BY_TYPE[r.PartitionMark]), r.StreamMark)


def test_nothing_claimed_is_allocated():
    """A record that claims gigabytes costs no more than its own length."""
    damaged = [encode(record)[:10] + length * 3 + b"\x02" * 50 for record in RECORDS for length in HUGE]
    tracemalloc.start()
    try:
        for raw in damaged:
            for cls in BY_TYPE:
                with contextlib.suppress(DecodeError):
                    decode(raw, cls)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
