"""Known schemas: by fingerprint, by registry id, from the log and from a registry, and with the registry gone."""

import json

import pytest

from loom.errors import DecodeError, SchemaUnreadableError, UnreachableError
from loom.schemas import Envelope
from loom.schemas.codec import Codec, encode_envelope
from loom.schemas.records import SchemaNote
from loom.schemas.table import MAX_SCHEMAS, SchemaTable, packaged, packaged_history, read_schema

ENVELOPE = Envelope("e", "c", 0, "X", 5, {"a": 1}, {"schema": "1.25.0"})


def gone(_):
    raise UnreachableError("the schema registry", "http://r", "registry_url")


def test_every_release_knows_the_schemas_before_it():
    table = SchemaTable()
    for schema in (*packaged().values(), *packaged_history()):
        assert table.by_fingerprint(schema.fingerprint) == schema


def test_with_the_registry_off_a_cold_start_replays_what_it_registered():
    """The log keeps the schemas that it was written with; the registry may be gone, or have lost the id."""
    writer = Codec(registered={name: n for n, name in enumerate(sorted(packaged()), 100)})
    marks = [writer.encode(note) for note in writer.notes()]
    value = writer.encode_envelope(ENVELOPE)
    assert value[0] == 0

    reader = Codec(SchemaTable(gone))
    with pytest.raises(UnreachableError):
        reader.decode_envelope(value)
    for raw in marks:
        reader.learn(reader.decode(raw, SchemaNote))
    assert reader.decode_envelope(value) == ENVELOPE


def test_a_schema_that_this_release_does_not_know_is_learned_from_the_log():
    later = json.loads(packaged()["loom.Envelope"].text)
    later["fields"].append({"name": "novel", "type": ["null", "string"], "default": None})
    schema = read_schema(json.dumps(later))
    value = b"\xc3\x01" + schema.fingerprint + encode_envelope(ENVELOPE)[10:] + b"\x00"
    reader = Codec(SchemaTable(gone))
    with pytest.raises(DecodeError, match=schema.fingerprint.hex()):
        reader.decode_envelope(value)
    reader.learn(SchemaNote(schema.fingerprint.hex(), schema.text))
    assert reader.decode_envelope(value) == ENVELOPE


def test_single_object_encoding_never_asks_a_registry():
    assert Codec(SchemaTable(gone)).decode_envelope(encode_envelope(ENVELOPE)) == ENVELOPE


def test_an_id_is_asked_for_once():
    asked = []

    def source(registry_id):
        asked.append(registry_id)
        return packaged()["loom.Envelope"].text

    codec = Codec(SchemaTable(source))
    value = Codec(registered={"loom.Envelope": 7}).encode_envelope(ENVELOPE)
    for _ in range(3):
        assert codec.decode_envelope(value) == ENVELOPE
    assert asked == [7]


def test_a_schema_of_the_registry_that_cannot_be_read_is_a_typed_error():
    codec = Codec(SchemaTable(lambda _: '{"type": "string"}'))
    with pytest.raises(SchemaUnreadableError):
        codec.decode_envelope(b"\x00\x00\x00\x00\x07abc")


def test_a_schema_with_our_name_that_ours_cannot_be_read_from_is_a_decode_error():
    text = json.dumps({"type": "record", "name": "loom.Envelope", "fields": [{"name": "id", "type": "long"}]})
    with pytest.raises(DecodeError, match="cannot be read as the one of this release"):
        Codec(SchemaTable(lambda _: text)).decode_envelope(b"\x00\x00\x00\x00\x07\x02")


def test_a_table_has_a_bound():
    table = SchemaTable()

    def text(n):
        return json.dumps({"type": "record", "name": f"x.R{n}", "fields": []})

    for n in range(MAX_SCHEMAS - len(packaged()) - len(packaged_history())):
        table.add(text(n))
    with pytest.raises(SchemaUnreadableError, match=f"more than {MAX_SCHEMAS}"):
        table.add(text("Last"))
    one = packaged()["loom.Envelope"].text
    ids = SchemaTable()
    for n in range(MAX_SCHEMAS):
        ids.add(one, n)
    with pytest.raises(SchemaUnreadableError, match="registry ids"):
        ids.add(one, MAX_SCHEMAS)
