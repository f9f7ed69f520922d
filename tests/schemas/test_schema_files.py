"""Rules that every schema file keeps, so that the faults of Avro's loose ends cannot happen."""

import json
from io import BytesIO
from pathlib import Path

import fastavro
import pytest

import loom.schemas
from loom.errors import SchemaUnreadableError
from loom.schemas.table import SchemaTable, packaged, packaged_history, read_schema

FOLDER = Path(loom.schemas.__file__).parent
FILES = sorted(FOLDER.glob("**/*.avsc"))


def walk(schema):
    yield schema
    if isinstance(schema, list):
        for branch in schema:
            yield from walk(branch)
    elif isinstance(schema, dict):
        for field in schema.get("fields", ()):
            yield from walk(field["type"])
        for key in ("items", "values", "type"):
            if key in schema and not isinstance(schema[key], str):
                yield from walk(schema[key])


def fields_of(schema):
    for part in walk(schema):
        if isinstance(part, dict):
            yield from part.get("fields", ())


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_schema_file_keeps_the_rules(path):
    schema = json.loads(path.read_text(encoding="utf-8"))
    assert schema["namespace"] == "loom"
    for part in walk(schema):
        if isinstance(part, list):
            assert len(part) == 2, "a union is null or one type: no branch is ever guessed"
            assert part[0] == "null"
        if isinstance(part, dict) and part.get("type") == "bytes":
            assert part["content"] in {"json", "json-object"}
        assert part not in ("float", "double"), "numbers that are not whole stand in JSON, exactly"
        assert not (isinstance(part, dict) and part.get("type") in {"map", "enum", "fixed"})
    for field in fields_of(schema):
        if field["type"] == "bytes" or (
            isinstance(field["type"], dict) and field["type"].get("type") == "bytes"
        ):
            assert "default" not in field, "a default of bytes comes back as text in some libraries"
        if isinstance(field["type"], list):
            assert field["default"] is None


def test_a_definition_that_several_files_share_is_the_same_in_each():
    found = {}
    for path in FOLDER.glob("*.avsc"):
        for part in walk(json.loads(path.read_text(encoding="utf-8"))):
            if isinstance(part, dict) and part.get("type") == "record":
                shape = [(f["name"], json.dumps(f["type"]), f.get("default", "-")) for f in part["fields"]]
                found.setdefault(part["name"], []).append(shape)
    assert "ErrorReport" in found
    for name, shapes in found.items():
        assert all(shape == shapes[0] for shape in shapes), name


@pytest.mark.parametrize("old", packaged_history(), ids=lambda s: s.fingerprint.hex())
def test_old_and_new_readers_read_old_and_new_records(old):
    """FULL_TRANSITIVE: between any two versions, every field that only one has must have a default."""
    new = packaged()[old.name]
    ours, theirs = ({f["name"]: f for f in s.parsed["fields"]} for s in (new, old))
    for name in ours.keys() ^ theirs.keys():
        assert "default" in (ours.get(name) or theirs[name])
    for name in ours.keys() & theirs.keys():
        assert ours[name]["type"] == theirs[name]["type"]


def test_a_schema_of_a_later_release_is_read_where_it_only_adds():
    """What a bytes default would break: a field with one is read by nobody here, and null stays null."""
    text = (FOLDER / "partition-mark.avsc").read_text(encoding="utf-8")
    later = json.loads(text)
    later["fields"] += [
        {"name": "extra", "type": ["null", "bytes"], "default": None},
        {"name": "blob", "type": "bytes", "default": "\u00ff"},
    ]
    table = SchemaTable()
    schema = table.add(json.dumps(later))
    stream = BytesIO()
    stream.write(b"\xc3\x01" + schema.fingerprint)
    values = {"partition": 1, "partitions": 8, "timestamp": 5, "extra": b"\x00", "blob": b"\xff"}
    fastavro.schemaless_writer(stream, fastavro.parse_schema(later), values)
    from loom.schemas.codec import Codec, DecodeError
    from loom.schemas.records import PartitionMark

    assert Codec(table).decode(stream.getvalue(), PartitionMark) == PartitionMark(1, 8, 5)
    with pytest.raises(DecodeError, match=schema.fingerprint.hex()):
        Codec().decode(stream.getvalue(), PartitionMark)


@pytest.mark.parametrize(
    "text",
    ["", "{", "5", '"string"', '{"type":"record"}', '{"type":"record","name":"X","fields":[{"name":"a","type":"Y"}]}',
     '{"type":"enum","name":"E","symbols":["A"]}', "[" * 10_000, '["null","string"]', '{"type":"record","name":"X","fields":5}'],
    ids=lambda t: t[:20],
)  # fmt: skip
def test_a_schema_that_cannot_be_read_is_a_typed_error(text):
    with pytest.raises(SchemaUnreadableError) as refused:
        read_schema(text)
    assert refused.value.exit_status == 2
