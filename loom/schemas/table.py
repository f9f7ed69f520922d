"""Known writer schemas, by fingerprint and by registry id: what lets a log be read with every registry gone.

The schemas of this release and of all before it come with the package. One that another release wrote is kept with the
log (``SchemaNote`` records in ``marks``), added here at takeover; only an id that none of these explain is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final

from fastavro.schema import SchemaParseException, fingerprint, parse_schema, to_parsing_canonical_form

from loom.errors import DecodeError, SchemaUnreadableError

MAX_SCHEMAS: Final = 1024
"""Most schemas that one table holds."""

SchemaSource = Callable[[int], str]
"""Returns the schema text of a registry id; raises ``UnreachableError`` or ``SchemaUnreadableError``."""


@dataclass(frozen=True, slots=True)
class WriterSchema:
    """A schema that some record was written with.

    ``name`` is its full name, ``fingerprint`` the 8 bytes of CRC-64-AVRO as the single-object header holds them,
    ``text`` the JSON it was given as, ``parsed`` the form that the Avro library reads with.
    """

    name: str
    fingerprint: bytes
    text: str
    parsed: Any


@lru_cache(MAX_SCHEMAS)
def read_schema(text: str) -> WriterSchema:
    """Return a schema given as JSON text.

    Raises:
        SchemaUnreadableError: it is no JSON, no Avro, or no record.
    """
    try:
        plain = _without_logical_types(json.loads(text))
        parsed = parse_schema(plain, named_schemas={})
        canonical = to_parsing_canonical_form(plain)
        print_hex = fingerprint(canonical, "CRC-64-AVRO")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, SchemaParseException) as error:
        raise SchemaUnreadableError("text", f"it is no Avro schema ({type(error).__name__})") from None
    if not isinstance(parsed, dict) or parsed.get("type") != "record":
        raise SchemaUnreadableError("text", "it is no record")
    return WriterSchema(str(parsed["name"]), bytes.fromhex(print_hex), text, parsed)


def _without_logical_types(schema: Any) -> Any:
    """Drop logical types: timestamps stay integers here, whatever a consumer of the estate makes of them."""
    if isinstance(schema, dict):
        return {key: _without_logical_types(value) for key, value in schema.items() if key != "logicalType"}
    if isinstance(schema, list):
        return [_without_logical_types(item) for item in schema]
    return schema


@lru_cache(1)
def packaged() -> dict[str, WriterSchema]:
    """Schemas of this release, by full name."""
    found = (read_schema(text) for text in _texts("."))
    return {schema.name: schema for schema in found}


@lru_cache(1)
def packaged_history() -> tuple[WriterSchema, ...]:
    """Schemas that earlier releases wrote."""
    return tuple(read_schema(text) for text in _texts("history"))


def _texts(folder: str) -> Iterator[str]:
    for entry in sorted(files("loom.schemas").joinpath(folder).iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".avsc"):
            yield entry.read_text(encoding="utf-8")


class SchemaTable:
    """Writer schemas by fingerprint and by registry id; grows by what the log and the registry tell, up to a bound.

    Safe to read from several threads: an entry is only ever added.
    """

    def __init__(self, source: SchemaSource | None = None) -> None:
        self._source = source
        self._by_id: dict[int, WriterSchema] = {}
        self._by_fingerprint = {s.fingerprint: s for s in (*packaged_history(), *packaged().values())}

    def add(self, text: str, registry_id: int | None = None) -> WriterSchema:
        """Learn a schema, and the id that a registry gave it.

        Raises:
            SchemaUnreadableError: it is no record schema, or the table is full.
        """
        schema = read_schema(text)
        known = self._by_fingerprint.get(schema.fingerprint)
        if known is None:
            if len(self._by_fingerprint) >= MAX_SCHEMAS:
                raise SchemaUnreadableError(schema.name, f"more than {MAX_SCHEMAS} schemas")
            self._by_fingerprint[schema.fingerprint] = known = schema
        if registry_id is not None:
            if registry_id not in self._by_id and len(self._by_id) >= MAX_SCHEMAS:
                raise SchemaUnreadableError(schema.name, f"more than {MAX_SCHEMAS} registry ids")
            self._by_id[registry_id] = known
        return known

    def by_fingerprint(self, print_bytes: bytes, what: str = "record") -> WriterSchema:
        """Return the schema of a single-object header.

        Raises:
            DecodeError: nobody has told it.
        """
        schema = self._by_fingerprint.get(print_bytes)
        if schema is None:
            raise DecodeError(what, f"its schema fingerprint {print_bytes.hex()} is not known here")
        return schema

    def by_id(self, registry_id: int, what: str = "record") -> WriterSchema:
        """Return the schema of a registry id; the registry is asked at most once for each.

        Raises:
            DecodeError: neither the log nor a registry tells it. UnreachableError: the registry does not answer.
            SchemaUnreadableError: it answers with no record schema.
        """
        schema = self._by_id.get(registry_id)
        if schema is None:
            if self._source is None:
                raise DecodeError(
                    what, f"its registry id {registry_id} is not known here, and registry_url is not set"
                )
            schema = self.add(self._source(registry_id), registry_id)
        return schema

    def bound_ids(self) -> dict[int, WriterSchema]:
        """Return what is known of registry ids (a copy)."""
        return dict(self._by_id)
