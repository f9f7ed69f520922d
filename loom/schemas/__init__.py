"""What is written: envelope and event kinds, the Avro schemas, the codec and its golden files."""

from loom.schemas.codec import Codec, decode, decode_envelope, encode, encode_envelope
from loom.schemas.envelope import EVENT_SCHEMA, TERMINAL_KINDS, Envelope, Json, Kind, NewEvent
from loom.schemas.table import SchemaTable

__all__ = [
    "EVENT_SCHEMA",
    "TERMINAL_KINDS",
    "Codec",
    "Envelope",
    "Json",
    "Kind",
    "NewEvent",
    "SchemaTable",
    "decode",
    "decode_envelope",
    "encode",
    "encode_envelope",
]
