"""The envelope's bytes: what a stock Avro library writes and reads, and nothing but DecodeError for anything else."""

import json
import math
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import fastavro
import pytest
from golden import legacy_bytes, legacy_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from schema_strategies import ENVELOPES, SEALS

import loom.schemas
from loom.errors import DecodeError, InvalidInputError
from loom.schemas import Envelope
from loom.schemas.binary import TYPED_METADATA, read_long, write_long
from loom.schemas.codec import SINGLE_OBJECT, Codec, decode_envelope, encode_envelope
from loom.schemas.payload import dump

FOLDER = Path(loom.schemas.__file__).parent
STOCK = fastavro.parse_schema(
    json.loads((FOLDER / "envelope.avsc").read_text(encoding="utf-8").replace("timestamp-millis", "x"))
)
PLAIN = Envelope(
    "e1", "c1", 3, "STEP_COMPLETED", 1_700_000_000_000, {"siteId": "0:1"}, {"node": "n:1", "schema": "1.25.0"}
)
FULL = replace(
    PLAIN,
    metadata={
        "node": "n:1",
        "actor": "alice",
        "schema": "1.25.0",
        "seal": {"v": 1, "cipher": "aes-256-gcm", "covers": ["INBOX_MESSAGE.payload", "X.y.*"]},
        "quarantine": {"topic": "ship", "inboxSeq": 4},
        "traceparent": "00-1",
    },
)


def as_mapping(envelope):
    rest = {k: v for k, v in envelope.metadata.items() if k not in TYPED_METADATA}
    return {
        "id": envelope.id,
        "streamId": envelope.stream_id,
        "sequence": envelope.sequence,
        "type": envelope.type,
        "timestamp": envelope.timestamp,
        "data": dump(envelope.data),
        "metadata": dump(rest) if rest else None,
        **{key: envelope.metadata.get(key) for key in TYPED_METADATA},
    }


def stock_bytes(envelope):
    stream = BytesIO()
    fastavro.schemaless_writer(stream, STOCK, as_mapping(envelope), strict=True)
    return stream.getvalue()


@given(ENVELOPES)
def test_round_trip_and_byte_for_byte_what_a_stock_library_writes(envelope):
    raw = encode_envelope(envelope)
    assert raw[10:] == stock_bytes(envelope)
    assert fastavro.schemaless_reader(BytesIO(raw[10:]), STOCK, None) == as_mapping(envelope)
    back = decode_envelope(raw)
    assert back == envelope
    assert encode_envelope(back) == raw


@given(ENVELOPES)
def test_both_framings_are_told_apart_by_the_first_byte(envelope):
    registered = Codec(registered={"loom.Envelope": 70_000})
    raw = registered.encode_envelope(envelope)
    assert raw[:5] == b"\x00\x00\x01\x11\x70"
    assert registered.decode_envelope(raw) == envelope
    assert registered.decode_envelope(encode_envelope(envelope)) == envelope
    assert encode_envelope(envelope)[:2] == SINGLE_OBJECT


def test_the_fingerprint_in_the_header_is_that_of_avro():
    """``8f5c393f1ad57572`` stands for "int" in every Avro implementation; ours was computed by the Java library too."""
    assert fastavro.schema.fingerprint('"int"', "CRC-64-AVRO") == "8f5c393f1ad57572"
    pinned = json.loads((Path(__file__).parent / "java_fingerprints.json").read_text(encoding="utf-8"))
    assert encode_envelope(PLAIN)[2:10].hex() == pinned["envelope.avsc"]


@given(st.integers(-(2**63), 2**63 - 1))
def test_numbers_are_avro_zigzag(number):
    stream = BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema({"type": "long"}), number)
    assert write_long(number) == stream.getvalue()
    assert read_long(write_long(number) + b"\xff", 0) == (number, len(stream.getvalue()))


def floats_of(value):
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from floats_of(item)


def decodes_or_refuses(codec, raw):
    try:
        envelope = codec.decode_envelope(raw)
    except DecodeError:
        return
    if any(math.isinf(number) for number in floats_of([envelope.data, envelope.metadata])):
        return  # "1e999": Python's reading of it, and nothing that can be written again
    assert codec.decode_envelope(codec.encode_envelope(envelope)) == envelope


CODEC = Codec(registered={"loom.Envelope": 1})


@given(
    st.binary(max_size=300),
    st.sampled_from([b"", SINGLE_OBJECT, encode_envelope(PLAIN)[:10], b"\x00\x00\x00\x00\x01", b"\x00"]),
)
@settings(max_examples=300)
def test_arbitrary_bytes_give_decode_error_and_nothing_else(raw, start):
    decodes_or_refuses(CODEC, start + raw)


LEGACY = [legacy_bytes(envelope) for _, envelope in legacy_cases()]


@given(ENVELOPES.map(encode_envelope) | st.sampled_from(LEGACY), st.data())
@settings(max_examples=300)
def test_damaged_records_give_decode_error_and_nothing_else(value, data):
    raw = bytearray(value)
    match data.draw(st.sampled_from(["flip", "cut", "add", "insert"])):
        case "flip":
            for _ in range(data.draw(st.integers(1, 4))):
                raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        case "cut":
            del raw[data.draw(st.integers(0, len(raw) - 1)) :]
        case "add":
            raw += data.draw(st.binary(min_size=1, max_size=9))
        case _:
            at = data.draw(st.integers(0, len(raw)))
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=9))
    decodes_or_refuses(CODEC, bytes(raw))


@pytest.mark.parametrize("envelope", [PLAIN, FULL], ids=["plain", "full"])
def test_every_cut_and_every_trailing_byte_is_refused(envelope):
    raw = encode_envelope(envelope)
    for length in range(len(raw)):
        with pytest.raises(DecodeError):
            decode_envelope(raw[:length])
    with pytest.raises(DecodeError):
        decode_envelope(raw + b"\x00")


@pytest.mark.parametrize("number", [2**62, 2**31, -1, -(2**62), 2**80])
def test_a_length_beyond_the_end_is_refused_without_allocating(number):
    head = encode_envelope(PLAIN)[:10]
    z = (number << 1) if number >= 0 else ((-number << 1) - 1)
    raw = bytearray()
    while z > 0x7F:
        raw.append(z & 0x7F | 0x80)
        z >>= 7
    raw.append(z)
    with pytest.raises(DecodeError):
        decode_envelope(head + bytes(raw) + b"abc")
    covers = encode_envelope(FULL)
    at = covers.index(b"\x04" + write_long(len("INBOX_MESSAGE.payload")) + b"INBOX")
    with pytest.raises(DecodeError):
        decode_envelope(covers[:at] + bytes(raw) + covers[at + 1 :])


def test_deep_json_is_a_decode_error():
    data = b"[" * 100_000
    for deep in (b'{"a":' + data, data):
        raw = encode_envelope(PLAIN).replace(
            write_long(16) + b'{"siteId":"0:1"}', write_long(len(deep)) + deep
        )
        with pytest.raises(DecodeError, match="deeper"):
            decode_envelope(raw)


def test_data_and_metadata_must_be_objects():
    raw = encode_envelope(PLAIN)
    with pytest.raises(DecodeError, match="no JSON object"):
        decode_envelope(raw.replace(b'{"siteId":"0:1"}', b'["siteId","0:1"]'))


def test_untyped_metadata_may_not_contradict_a_typed_field():
    raw = encode_envelope(replace(PLAIN, metadata={"noda": 1}))
    with pytest.raises(DecodeError, match="typed field"):
        decode_envelope(raw.replace(b'"noda"', b'"node"'))


@pytest.mark.parametrize(
    "metadata",
    [
        {"node": 5},
        {"schema": ["1"]},
        {"seal": {"v": 1, "cipher": "c"}},
        {"seal": {"v": 1, "cipher": "c", "covers": ["x"], "more": 1}},
        {"seal": {"v": "1", "cipher": "c", "covers": ["x"]}},
        {"seal": {"v": True, "cipher": "c", "covers": ["x"]}},
        {"seal": {"v": 2**31, "cipher": "c", "covers": ["x"]}},
        {"seal": {"v": 1, "cipher": "c", "covers": "x"}},
        {"seal": {"v": 1, "cipher": "c", "covers": [1]}},
        {"seal": "sealed"},
        {"quarantine": {"topic": "t"}},
        {"quarantine": {"topic": "t", "inboxSeq": 1.5}},
        {"quarantine": {"topic": "t", "inboxSeq": 1, "x": 1}},
        {"other": float("nan")},
        {"other": {"a": object()}},
    ],
    ids=lambda m: json.dumps(m, default=lambda o: type(o).__name__)[:40],
)
def test_metadata_of_another_shape_is_refused_not_coerced(metadata):
    with pytest.raises(InvalidInputError):
        encode_envelope(replace(PLAIN, metadata=metadata))


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": None},
        {"id": b"e"},
        {"id": "\ud800"},
        {"stream_id": 5},
        {"sequence": -1},
        {"sequence": 2**63},
        {"sequence": 1.0},
        {"sequence": True},
        {"sequence": "1"},
        {"type": None},
        {"timestamp": 2**63},
        {"timestamp": 1.5},
        {"timestamp": None},
        {"data": [1]},
        {"data": None},
        {"data": {"a": float("inf")}},
        {"metadata": None},
    ],
    ids=str,
)
def test_a_field_of_another_type_is_refused(wrong):
    with pytest.raises(InvalidInputError):
        encode_envelope(replace(PLAIN, **wrong))


@given(SEALS)
def test_a_seal_marker_round_trips_whatever_it_claims(seal):
    envelope = replace(PLAIN, metadata={"seal": seal})
    assert decode_envelope(encode_envelope(envelope)) == envelope


def test_a_typed_key_that_is_none_counts_as_absent():
    assert decode_envelope(encode_envelope(replace(PLAIN, metadata={"actor": None}))).metadata == {}


def test_an_old_record_cannot_carry_a_marker_in_its_untyped_metadata():
    (_, envelope), *_ = legacy_cases()
    forged = legacy_bytes(replace(envelope, metadata={**envelope.metadata, "seal": {"v": 1}}))
    with pytest.raises(DecodeError, match="typed field"):
        decode_envelope(forged)


def test_covers_in_several_blocks_are_read():
    """Avro allows blocks, also with their size in bytes; another writer may use them."""
    raw = encode_envelope(FULL)
    pattern = write_long(len("X.y.*")) + b"X.y.*"
    at = raw.index(pattern)
    first = raw.index(b"\x04" + write_long(len("INBOX_MESSAGE.payload")) + b"INBOX")
    blocks = b"\x02" + raw[first + 1 : at] + write_long(-1) + write_long(len(pattern)) + pattern
    assert decode_envelope(raw[:first] + blocks + raw[at + len(pattern) :]) == FULL


def test_another_record_is_refused_by_name():
    from loom.schemas.codec import encode
    from loom.schemas.records import PartitionMark

    with pytest.raises(DecodeError, match=r"loom\.PartitionMark, not a loom\.Envelope"):
        decode_envelope(encode(PartitionMark(0, 8, 5)))


def test_an_unknown_schema_is_named_by_its_fingerprint():
    with pytest.raises(DecodeError, match="0102030405060708 is not known"):
        decode_envelope(b"\xc3\x01\x01\x02\x03\x04\x05\x06\x07\x08abc")
    with pytest.raises(DecodeError, match="registry id 9 is not known"):
        decode_envelope(b"\x00\x00\x00\x00\x09abc")
