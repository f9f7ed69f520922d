"""Between the frozen classes of ``records.py`` and the mappings that an Avro library takes and gives.

Compiled once from each schema file: the file alone says which fields there are. Strict in both directions: a value
that is not of its field's type is refused, so no union ever takes a branch by accident. Every union of ours is "null or
one type"; a record with alternatives (a request's operation, a command's verb) has one such field for each.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

from loom.errors import DecodeError
from loom.schemas import records as r
from loom.schemas.envelope import Json, NewEvent
from loom.schemas.payload import dump, load_foreign

if TYPE_CHECKING:
    from collections.abc import Mapping

Convert = Callable[[Any], Any]

CLASSES: Final[dict[str, type]] = {
    "loom.AcquireFence": r.FenceOp,
    "loom.Append": r.AppendOp,
    "loom.AppendReply": r.AppendReply,
    "loom.AppendRequest": r.AppendRequest,
    "loom.Appended": r.AppendedRecord,
    "loom.Cancel": r.CancelVerb,
    "loom.CancelRequest": r.CancelOp,
    "loom.Command": r.Command,
    "loom.CopyPrefix": r.CopyOp,
    "loom.Delete": r.DeleteOp,
    "loom.DropSnapshot": r.DropSnapshotOp,
    "loom.ErrorReport": r.ErrorReport,
    "loom.ExecutionSummary": r.ExecutionSummary,
    "loom.Header": r.Header,
    "loom.NewEvent": NewEvent,
    "loom.Notify": r.NotifyOp,
    "loom.Observation": r.ObservationRecord,
    "loom.OperatorSignal": r.OperatorSignal,
    "loom.Outgoing": r.OutgoingRecord,
    "loom.PartitionMark": r.PartitionMark,
    "loom.Position": r.Position,
    "loom.Read": r.ReadOp,
    "loom.ReadReply": r.ReadReply,
    "loom.RecentId": r.RecentId,
    "loom.Resume": r.ResumeVerb,
    "loom.SaveSnapshot": r.SnapshotOp,
    "loom.SchemaNote": r.SchemaNote,
    "loom.Send": r.SendVerb,
    "loom.Snapshot": r.SnapshotRecord,
    "loom.Start": r.StartVerb,
    "loom.StreamAppend": r.AppendRecord,
    "loom.StreamInfo": r.StreamInfoRecord,
    "loom.StreamMark": r.StreamMark,
    "loom.Truncate": r.TruncateOp,
}
"""Class of each record, by the schema's full name."""

ALTERNATIVES: Final = {"loom.AppendRequest": "op", "loom.Command": "verb"}
"""Attribute that holds the one alternative that is set."""

_PRIMITIVES: Final[dict[str, tuple[type, int]]] = {
    "string": (str, 0),
    "bytes": (bytes, 0),
    "boolean": (bool, 0),
    "int": (int, 2**31),
    "long": (int, 2**63),
}
_CAPITAL: Final = re.compile(r"(?<=[a-z0-9])([A-Z])")


@dataclass(frozen=True, slots=True)
class Pair:
    """Both directions of one type; ``cls`` is what it takes, ``name`` the full name of a record.

    ``to_wire`` raises TypeError or InvalidInputError, ``from_wire`` DecodeError.
    """

    cls: type | None
    to_wire: Convert
    from_wire: Convert
    name: str = ""


@dataclass(frozen=True, slots=True)
class _Field:
    wire: str
    attribute: str
    pair: Pair


def compile_record(schema: Mapping[str, Any], known: dict[str, Pair] | None = None) -> Pair:
    """Return the conversions of a record schema as the Avro library parsed it (with full names).

    Raises:
        LookupError: no class mirrors it.
    """
    known = {} if known is None else known
    name = schema["name"]
    cls = CLASSES[name]
    compiled = [_Field(f["name"], _snake(f["name"]), _compile(f["type"], known)) for f in schema["fields"]]
    attributes = {f.name for f in fields(cls)} - {ALTERNATIVES.get(name)}
    plain = [f for f in compiled if f.attribute in attributes]
    choices = {f.pair.cls: f for f in compiled if f.attribute not in attributes}
    if bool(choices) != (name in ALTERNATIVES) or len(plain) != len(attributes):
        raise LookupError(f"{cls.__name__} does not mirror {name}")
    pair = _choice_record(cls, plain, choices, ALTERNATIVES[name]) if choices else _plain_record(cls, plain)
    known[name] = pair = replace(pair, name=name)
    return pair


def _plain_record(cls: type, plain: list[_Field]) -> Pair:
    def to_wire(value: Any) -> dict[str, Any]:
        if type(value) is not cls:
            raise TypeError(f"{cls.__name__} expected")
        return {f.wire: f.pair.to_wire(getattr(value, f.attribute)) for f in plain}

    def from_wire(record: dict[str, Any]) -> Any:
        return cls(**{f.attribute: f.pair.from_wire(record[f.wire]) for f in plain})

    return Pair(cls, to_wire, from_wire)


def _choice_record(
    cls: type, plain: list[_Field], choices: dict[type | None, _Field], alternative: str
) -> Pair:
    def to_wire(value: Any) -> dict[str, Any]:
        chosen = getattr(value, alternative, None)
        if type(value) is not cls or type(chosen) not in choices:
            raise TypeError(f"{cls.__name__} with one of its alternatives expected")
        record = {f.wire: f.pair.to_wire(getattr(value, f.attribute)) for f in plain}
        for of_class, choice in choices.items():
            record[choice.wire] = choice.pair.to_wire(chosen) if type(chosen) is of_class else None
        return record

    def from_wire(record: dict[str, Any]) -> Any:
        found = [choice for choice in choices.values() if record[choice.wire] is not None]
        if len(found) != 1:
            raise DecodeError(cls.__name__, f"{len(found)} of its alternatives are set, exactly one must be")
        chosen = found[0].pair.from_wire(record[found[0].wire])
        return cls(**{f.attribute: f.pair.from_wire(record[f.wire]) for f in plain}, **{alternative: chosen})

    return Pair(cls, to_wire, from_wire)


def _compile(schema: Any, known: dict[str, Pair]) -> Pair:
    if isinstance(schema, list):
        null, other = schema
        if null != "null":
            raise LookupError("a union of ours is null or one type")
        return _optional(_compile(other, known))
    if isinstance(schema, str):
        return known[schema] if schema in known else _primitive(schema)
    if "content" in schema:
        return _json(is_object=schema["content"] == "json-object")
    if schema["type"] == "record":
        return compile_record(schema, known)
    if schema["type"] == "array":
        return _array(_compile(schema["items"], known))
    return _compile(schema["type"], known)


def _optional(pair: Pair) -> Pair:
    """Null, or the type; a record goes with its name, so that the library need not find out which branch fits."""
    name, to_wire, from_wire = pair.name, pair.to_wire, pair.from_wire

    def named_to_wire(value: Any) -> Any:
        return None if value is None else (name, to_wire(value))

    def plain_to_wire(value: Any) -> Any:
        return None if value is None else to_wire(value)

    return Pair(
        pair.cls,
        named_to_wire if name else plain_to_wire,
        lambda value: None if value is None else from_wire(value),
    )


def _array(pair: Pair) -> Pair:
    def to_wire(value: Any) -> list[Any]:
        if not isinstance(value, tuple):
            raise TypeError("tuple expected")
        return [pair.to_wire(item) for item in value]

    return Pair(tuple, to_wire, lambda items: tuple(pair.from_wire(item) for item in items))


def _json(*, is_object: bool) -> Pair:
    def to_wire(value: Json) -> bytes:
        if is_object and not isinstance(value, dict):
            raise TypeError("mapping expected")
        return dump(value)

    def from_wire(raw: bytes) -> Json:
        value = load_foreign(raw)
        if is_object and not isinstance(value, dict):
            raise DecodeError("payload", "no JSON object")
        return value

    return Pair(None, to_wire, from_wire)


def _primitive(name: str) -> Pair:
    cls, limit = _PRIMITIVES[name]

    def to_wire(value: Any) -> Any:
        if type(value) is cls:
            return value
        raise TypeError(f"{name} expected")

    def number_to_wire(value: Any) -> int:
        if type(value) is int and -limit <= value < limit:
            return value
        raise TypeError(f"{name} expected")

    def number_from_wire(value: int) -> int:
        if -limit <= value < limit:  # the library reads more bits than the type has
            return value
        raise DecodeError(name, "a number out of range")

    if limit:
        return Pair(cls, number_to_wire, number_from_wire)
    return Pair(cls, to_wire, lambda value: value)


def _snake(wire: str) -> str:
    return _CAPITAL.sub(lambda match: "_" + match.group(1).lower(), wire)
