"""JSON values at the border between a flow and its log.

What a flow hands over is copied into plain JSON, what it is given is a copy of what the log holds: a flow may change
its values freely, the log's own are never touched.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import functools
import inspect
import json
import math
import types
import typing
import uuid
from collections import abc
from collections.abc import Callable, Mapping
from typing import Any, Final

import pydantic
from pydantic_core import PydanticSerializationError, to_jsonable_python

from loom.errors import ConfigError, InvalidInputError

if typing.TYPE_CHECKING:
    from loom.schemas.envelope import Json

JSON_MAX_DEPTH: Final = 200
"""How deep a user's value may nest: below what any JSON reader of the estate takes."""

_SCALARS: Final = frozenset({str, int, bool, type(None)})
_RICH: Final = (
    pydantic.BaseModel,
    enum.Enum,
    dt.date,
    dt.time,
    dt.timedelta,
    decimal.Decimal,
    uuid.UUID,
)


def dump_json(value: Any, what: str) -> Json:
    """Return ``value`` as plain JSON, in fresh containers; ``what`` names it in errors.

    Takes JSON types, tuples, pydantic models, dataclasses, enums, dates, decimals and UUIDs.

    Raises:
        InvalidInputError: something in it has no JSON form (also NaN, sets, bytes, keys that are no strings, lone
            surrogates), or it nests deeper than 200.
    """
    return _dump(value, what, 0)


def _dump(value: Any, what: str, depth: int) -> Json:
    kind = type(value)
    if kind is str:
        return value if value.isascii() else _utf8(value, what)
    if kind in _SCALARS:
        return value
    if depth > JSON_MAX_DEPTH:
        raise InvalidInputError(what, f"it nests deeper than {JSON_MAX_DEPTH}", "pass a flatter value")
    if kind is dict or isinstance(value, Mapping):
        return {_key(k, what): _dump(v, what, depth + 1) for k, v in value.items()}
    if kind is list or isinstance(value, list | tuple):
        return [_dump(v, what, depth + 1) for v in value]
    if kind is float:
        if math.isfinite(value):
            return value
        raise InvalidInputError(what, "NaN and infinity have no JSON form", "pass None or a string")
    return _dump_rich(value, what, depth)


def _dump_rich(value: Any, what: str, depth: int) -> Json:
    if isinstance(value, _RICH):
        return _dump(_jsonable(value, what), what, depth + 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return _dump(fields, what, depth)
    for base in (str, bool, int, float):
        if isinstance(value, base):
            return _dump(base(value), what, depth)
    raise InvalidInputError(
        what, f"{type(value).__name__} has no JSON form", "pass JSON types, a pydantic model or a dataclass"
    )


def _jsonable(value: Any, what: str) -> Json:
    try:
        return to_jsonable_python(value, inf_nan_mode="constants")
    except (PydanticSerializationError, ValueError, RecursionError):
        raise InvalidInputError(
            what, f"{type(value).__name__} cannot be written as JSON", "pass fields that have a JSON form"
        ) from None


def _key(key: Any, what: str) -> str:
    if type(key) is str:
        return key if key.isascii() else _utf8(key, what)
    if isinstance(key, str):
        return _utf8(str.__str__(key), what)
    raise InvalidInputError(what, f"a key is {type(key).__name__}", "use strings as keys")


def _utf8(text: str, what: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInputError(what, "a string holds half a surrogate pair", "pass valid Unicode") from None
    return text


def copy_json(value: Json) -> Json:
    """Return a deep copy of a JSON value (scalars as they are)."""
    kind = type(value)
    if kind is dict:
        return {k: copy_json(v) for k, v in value.items()}
    if kind is list:
        return [copy_json(v) for v in value]
    return value


def load_json(value: Json, model: Any, what: str) -> Any:
    """Return a copy of a JSON value, validated into ``model`` where there is one (None: as it is).

    Raises:
        InvalidInputError: the value does not fit; the message names places and rules, never the value.
    """
    if model is None or model is Any:
        return copy_json(value)
    return validate(adapter_of(model), value, what)


def validate(adapter: pydantic.TypeAdapter[Any], value: Json, what: str) -> Any:
    """Validate a copy of a JSON value, or raise ``InvalidInputError`` without a byte of it."""
    try:
        return adapter.validate_python(copy_json(value))
    except pydantic.ValidationError:
        pass  # a strict model takes dates, tuples and enums from JSON text only: that judgement stands
    try:
        return adapter.validate_json(json.dumps(value))
    except pydantic.ValidationError as error:
        raise InvalidInputError(what, fit_problem(error), "send what the model asks for") from None


def fit_problem(error: pydantic.ValidationError) -> str:
    """What a validation found wrong, in places and rule names only: keys of the value are payload too."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    places = []
    for problem in found[:4]:
        where = ".".join(str(p)[:32] for p in problem["loc"] if isinstance(p, int) or str(p).isidentifier())
        places.append(f"{where or 'value'} ({problem['type']})")
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""  # noqa: PLR2004 - the first four are shown
    return f"it does not fit the model {error.title[:64]}: " + ", ".join(places) + more


@functools.lru_cache(maxsize=1024)
def _cached_adapter(model: Any) -> pydantic.TypeAdapter[Any]:
    try:
        return pydantic.TypeAdapter(model)
    except (pydantic.PydanticSchemaGenerationError, pydantic.PydanticUndefinedAnnotation):
        raise ConfigError(
            f"type {getattr(model, '__name__', model)}",
            "it has no JSON form",
            "use JSON types or a pydantic model",
        ) from None


def adapter_of(model: Any) -> pydantic.TypeAdapter[Any]:
    """The validator of a type, cached (at most 1,024).

    Raises:
        ConfigError: the type cannot be read from JSON.
    """
    try:
        return _cached_adapter(model)
    except TypeError:  # an unhashable annotation
        return _cached_adapter.__wrapped__(model)


@functools.lru_cache(maxsize=1024)
def _cached_output_model(fn: Callable[..., Any]) -> Any:
    annotation = annotation_of(fn, "return")
    while typing.get_origin(annotation) in _AWAITABLES:
        annotation = typing.get_args(annotation)[-1]
    return None if annotation in _PLAIN_RESULTS else annotation


def output_model(fn: Callable[..., Any]) -> Any:
    """The type that a step's or flow's result is validated into: its return annotation; None passes JSON on.

    Raises:
        ConfigError: the annotation cannot be resolved.
    """
    try:
        return _cached_output_model(fn)
    except TypeError:  # an unhashable callable
        return _cached_output_model.__wrapped__(fn)


def annotation_of(fn: Callable[..., Any], name: str) -> Any:
    """One annotation of a callable, resolved; ``Any`` where there is none.

    Raises:
        ConfigError: it names a type that is not there at run time.
    """
    target: Any = fn
    while isinstance(target, functools.partial):
        target = target.func
    if not hasattr(target, "__annotations__") and callable(target):
        target = type(target).__call__
    target = inspect.unwrap(target)
    annotation = getattr(target, "__annotations__", {}).get(name, Any)
    if not isinstance(annotation, str):
        return type(None) if annotation is None else annotation
    holder = types.SimpleNamespace(__annotations__={name: annotation})
    try:
        return typing.get_type_hints(
            holder, globalns=getattr(target, "__globals__", {}), include_extras=True
        )[name]
    except (NameError, AttributeError, SyntaxError):
        raise ConfigError(
            f"{getattr(target, '__qualname__', 'a step')}, annotation of {name!r}",
            f"{annotation[:64]} is not known at run time",
            "import the type outside of TYPE_CHECKING, at module level",
        ) from None


_AWAITABLES: Final = (abc.Awaitable, abc.Coroutine)
_PLAIN_RESULTS: Final = (
    Any,
    object,
    str,
    int,
    float,
    bool,
    dict,
    list,
    type(None),
    typing.NoReturn,
    typing.Never,
)
