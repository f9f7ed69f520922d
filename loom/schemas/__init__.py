"""What is written: envelope and event kinds, the Avro schemas, the codec and its golden files."""

from loom.schemas.envelope import EVENT_SCHEMA, TERMINAL_KINDS, Envelope, Json, Kind, NewEvent

__all__ = ["EVENT_SCHEMA", "TERMINAL_KINDS", "Envelope", "Json", "Kind", "NewEvent"]
