"""Records to bytes and back, in either framing.

* Avro single-object encoding: ``C3 01``, the schema's CRC-64-AVRO fingerprint, the record.
* Confluent wire format, once the schemas are registered: ``00``, four bytes of registry id, the record.

Readers tell the two apart by the first byte, so a log may hold both. Arbitrary bytes give ``DecodeError`` and nothing
else, without allocating more than they are long.
"""

from __future__ import annotations

from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, TypeVar

from fastavro import schemaless_reader, schemaless_writer
from fastavro.read import SchemaResolutionError

from loom.errors import DecodeError, InvalidInputError
from loom.schemas.binary import MAX_INT, TYPED_METADATA, read_envelope, untyped_object, write_envelope
from loom.schemas.envelope import EVENT_SCHEMA, Envelope
from loom.schemas.mapping import CLASSES, Pair, compile_record
from loom.schemas.payload import load_object
from loom.schemas.records import SchemaNote
from loom.schemas.table import SchemaTable, WriterSchema, packaged
from loom.schemas.upcast import upcast

if TYPE_CHECKING:
    from collections.abc import Mapping

Record = TypeVar("Record")

SINGLE_OBJECT: Final = b"\xc3\x01"
CONFLUENT: Final = b"\x00"
ENVELOPE: Final = "loom.Envelope"
SELF_EXPLAINED: Final = frozenset({"loom.SchemaNote", "loom.StreamMark", "loom.PartitionMark"})
"""Records of ``marks``: always in single-object encoding, since what explains registry ids is found among them."""

_SINGLE_LENGTH: Final = 10
_CONFLUENT_LENGTH: Final = 5


class Codec:
    """Encodes in one framing, decodes both.

    ``registered`` maps full record names to registry ids: those records are written in the Confluent wire format (but
    never those of ``SELF_EXPLAINED``), all others in single-object encoding.
    """

    def __init__(self, table: SchemaTable | None = None, registered: Mapping[str, int] | None = None) -> None:
        self.table = table if table is not None else SchemaTable()
        self._prefixes = {name: SINGLE_OBJECT + schema.fingerprint for name, schema in packaged().items()}
        for name, registry_id in (registered or {}).items():
            if name not in SELF_EXPLAINED:
                self._prefixes[name] = CONFLUENT + registry_id.to_bytes(4, "big")
            self.table.add(packaged()[name].text, registry_id)
        self._envelope_prefix = self._prefixes[ENVELOPE]
        self._envelope_start = len(self._envelope_prefix)

    def encode_envelope(self, envelope: Envelope) -> bytes:
        """Return the record value of an event.

        Raises:
            InvalidInputError: a field is not of its type, or data or metadata are no JSON.
        """
        return write_envelope(self._envelope_prefix, envelope)

    def decode_envelope(self, raw: bytes, what: str = "event") -> Envelope:
        """Return the event of a record value, upcast to the shape that folds read.

        Raises:
            DecodeError: no record of an Envelope in a schema that this node knows. (With a registry also
            UnreachableError or SchemaUnreadableError, for an id that only the registry can explain.)
        """
        if raw.startswith(self._envelope_prefix):
            envelope = read_envelope(raw, self._envelope_start, what)
        else:
            envelope = self._decode_foreign_envelope(raw, what)
        return envelope if envelope.metadata.get("schema") == EVENT_SCHEMA else upcast(envelope, what)

    def _decode_foreign_envelope(self, raw: bytes, what: str) -> Envelope:
        schema, start = self.writer_of(raw, what)
        if schema.name != ENVELOPE:
            raise DecodeError(what, f"it is a {schema.name}, not a {ENVELOPE}")
        if schema.fingerprint == packaged()[ENVELOPE].fingerprint:
            return read_envelope(raw, start, what)
        return _envelope_of(read_record(schema, raw, start, what), what)

    def encode(self, record: object) -> bytes:
        """Return the value of a record of ``loom.schemas.records``.

        Raises:
            InvalidInputError: an attribute is not of its type, or no JSON.
        """
        name, pair = _pair_of(type(record))
        stream = BytesIO()
        stream.write(self._prefixes[name])
        try:
            schemaless_writer(stream, packaged()[name].parsed, pair.to_wire(record), strict=True)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidInputError(
                name, f"a field is not of its type ({error})", "see loom/schemas"
            ) from error
        return stream.getvalue()

    def decode(self, raw: bytes, cls: type[Record], what: str = "record") -> Record:
        """Return the record of a value.

        Raises:
            DecodeError: no record of that class in a schema that this node knows. (As ``decode_envelope`` with a
            registry.)
        """
        name, pair = _pair_of(cls)
        schema, start = self.writer_of(raw, what)
        if schema.name != name:
            raise DecodeError(what, f"it is a {schema.name}, not a {name}")
        try:
            record: Record = pair.from_wire(read_record(schema, raw, start, what))
        except DecodeError as error:
            raise DecodeError(what, error.problem) from None
        return record

    def notes(self) -> tuple[SchemaNote, ...]:
        """Return the schemas that this codec writes with.

        A writer keeps them with the log, in ``marks``, before it writes with them: then whoever reads the log needs no
        registry.
        """
        ids = {schema.fingerprint: registry_id for registry_id, schema in self.table.bound_ids().items()}
        return tuple(
            SchemaNote(schema.fingerprint.hex(), schema.text, ids.get(schema.fingerprint))
            for schema in packaged().values()
        )

    def learn(self, note: SchemaNote) -> None:
        """Take in a schema that the log keeps.

        Raises:
            SchemaUnreadableError: it is no record schema, or the table is full.
        """
        self.table.add(note.schema, note.registry_id)

    def writer_of(self, raw: bytes, what: str = "record") -> tuple[WriterSchema, int]:
        """Return the schema that a value was written with, and where its record starts.

        Raises:
            DecodeError: neither framing, or a schema that nobody knows.
        """
        if len(raw) >= _SINGLE_LENGTH and raw.startswith(SINGLE_OBJECT):
            return self.table.by_fingerprint(raw[2:_SINGLE_LENGTH], what), _SINGLE_LENGTH
        if len(raw) >= _CONFLUENT_LENGTH and raw.startswith(CONFLUENT):
            return self.table.by_id(int.from_bytes(raw[1:_CONFLUENT_LENGTH], "big"), what), _CONFLUENT_LENGTH
        raise DecodeError(what, "it starts with neither framing")


def read_record(schema: WriterSchema, raw: bytes, start: int, what: str) -> dict[str, Any]:
    """Return the record at ``start``, resolved from its writer's schema to this release's.

    Raises:
        DecodeError: it is none, it does not end with ``raw``, or its schema cannot become ours.
    """
    stream = BytesIO(raw)
    stream.seek(start)
    try:
        ours = packaged()[schema.name]
        reader = None if schema.fingerprint == ours.fingerprint else ours.parsed
        record = schemaless_reader(stream, schema.parsed, reader)
    except (
        EOFError,
        IndexError,
        KeyError,
        ValueError,
        TypeError,
        OverflowError,
        MemoryError,
        RecursionError,
    ) as error:
        raise DecodeError(what, f"no record of its schema ({type(error).__name__})") from None
    except SchemaResolutionError:
        raise DecodeError(what, "its schema cannot be read as the one of this release") from None
    if stream.tell() != len(raw) or not isinstance(record, dict):
        raise DecodeError(what, "bytes follow the record")
    return record


def _envelope_of(record: dict[str, Any], what: str) -> Envelope:
    rest = record["metadata"]
    metadata = {} if rest is None else untyped_object(rest, what)
    metadata |= {key: record[key] for key in TYPED_METADATA if record[key] is not None}
    seal = record["seal"]
    if record["sequence"] < 0 or (seal is not None and abs(seal["v"]) > MAX_INT):
        raise DecodeError(what, "a number out of range")
    return Envelope(
        record["id"],
        record["streamId"],
        record["sequence"],
        record["type"],
        record["timestamp"],
        load_object(record["data"], what),
        metadata,
    )


@lru_cache(1)
def _pairs() -> dict[type, tuple[str, Pair]]:
    """Full name and conversions of each class that is a record of its own."""
    return {CLASSES[n]: (n, compile_record(s.parsed)) for n, s in packaged().items() if n in CLASSES}


def _pair_of(cls: type) -> tuple[str, Pair]:
    try:
        return _pairs()[cls]
    except KeyError:
        raise TypeError(f"{cls.__name__} is no record of its own") from None


_default: Final = Codec()
encode_envelope: Final = _default.encode_envelope
"""Encode with the packaged schemas, in single-object encoding."""
decode_envelope: Final = _default.decode_envelope
"""Decode either framing, as far as the packaged schemas explain it."""
encode: Final = _default.encode
"""As ``Codec.encode``, likewise."""
decode: Final = _default.decode
"""As ``Codec.decode``, likewise."""
