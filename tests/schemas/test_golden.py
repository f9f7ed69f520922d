"""Every golden record is read as it always was, and what is written today is what was written then, byte for byte."""

import json

import pytest
from golden import GOLDEN, LEGACY, REGISTRY_ID, current_cases, legacy_bytes, legacy_cases, record_cases

from loom.schemas import EVENT_SCHEMA, Envelope
from loom.schemas.codec import Codec, decode, decode_envelope, encode, encode_envelope

ENVELOPES = sorted((GOLDEN / LEGACY).glob("*.bin")) + sorted((GOLDEN / EVENT_SCHEMA).glob("*.bin"))


def read_back(path):
    reading = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    return reading.pop("release"), Envelope(**reading)


def test_no_golden_record_is_missing():
    for release, cases in ((LEGACY, legacy_cases()), (EVENT_SCHEMA, current_cases())):
        assert {p.stem for p in (GOLDEN / release).glob("*.bin")} >= {name for name, _ in cases}
    assert {p.stem for p in (GOLDEN / f"{EVENT_SCHEMA}-records").glob("*.bin")} >= {
        name for name, _ in record_cases()
    }


@pytest.mark.parametrize("path", ENVELOPES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_golden_envelope_reads_as_it_did(path):
    release, expected = read_back(path)
    envelope = decode_envelope(path.read_bytes())
    assert envelope == expected
    assert envelope.metadata.get("schema") == release
    if path.parent.name == LEGACY:
        assert "seal" not in envelope.metadata
        assert "quarantine" not in envelope.metadata


@pytest.mark.parametrize("path", ENVELOPES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_golden_envelope_is_written_as_it_was(path):
    _, envelope = read_back(path)
    write = legacy_bytes if path.parent.name == LEGACY else encode_envelope
    assert write(envelope) == path.read_bytes()


def test_an_old_envelope_written_again_differs_in_its_schema_alone():
    for path in sorted((GOLDEN / LEGACY).glob("*.bin")):
        old = path.read_bytes()
        again = encode_envelope(decode_envelope(old))
        assert again[10:] == old[10:] + b"\x00\x00", "the two markers are null, all else is as it was"


def test_the_wire_format_of_a_registry_is_stable_too():
    for path in (GOLDEN / f"{EVENT_SCHEMA}-registry").glob("*.bin"):
        _, expected = read_back(path)
        codec = Codec(registered={"loom.Envelope": REGISTRY_ID})
        assert codec.decode_envelope(path.read_bytes()) == expected
        assert codec.encode_envelope(expected) == path.read_bytes()


@pytest.mark.parametrize(
    ("name", "record"), list(record_cases()), ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_golden_record_reads_and_is_written_as_it_was(name, record):
    raw = (GOLDEN / f"{EVENT_SCHEMA}-records" / f"{name}.bin").read_bytes()
    assert decode(raw, type(record)) == record
    assert encode(record) == raw
