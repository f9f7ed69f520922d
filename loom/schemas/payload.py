"""User data as it rests in a record: UTF-8 JSON in a ``bytes`` field (kafka.md "Topics").

Numbers come back as they went in: integers of any size up to 4,300 digits, floats bit for bit. Whatever
:func:`dump` returns, :func:`load` reads; what could not be read again is refused when it is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pydantic_core import from_json, to_json

from loom.errors import DecodeError, InvalidInputError

if TYPE_CHECKING:
    from loom.schemas.envelope import Json

MAX_JSON_DEPTH: Final = 200
"""Nesting that any record can hold; deeper is refused, in both directions, never a ``RecursionError``."""

_NESTED_LENGTH: Final = 2 * MAX_JSON_DEPTH
_LONG_LENGTH: Final = 4096
_REMEDY: Final = f"use numbers, text, lists and mappings only (no NaN, no infinity, no lone surrogate, at most {MAX_JSON_DEPTH} deep)"


def dump(value: Json, what: str = "payload") -> bytes:
    """Return ``value`` as compact JSON.

    Mappings, lists, tuples, strings, numbers, booleans and None; the runtime has turned everything else into these.

    Raises:
        InvalidInputError: JSON cannot hold it: NaN, an infinity, a lone surrogate, a cycle, an object, or more than
            :data:`MAX_JSON_DEPTH` levels. ``what`` names it there.
    """
    try:
        raw = to_json(value)
        if (len(raw) > _NESTED_LENGTH and _may_be_deep(raw)) or b"NaN" in raw or b"Infinity" in raw:
            # A trial, where depth, length or a constant makes a refusal possible.
            from_json(raw, allow_inf_nan=False)
    except (ValueError, RecursionError):  # whose text may quote the value
        raise InvalidInputError(what, "it is no JSON that every reader can take", _REMEDY) from None
    return raw


def load(raw: bytes, what: str = "payload") -> Json:
    """Return the value of compact or any other JSON text.

    A number too large for a float reads as an infinity here, as it does in Python's own parser. No record of ours holds
    one; where others write, :func:`load_foreign` refuses it.

    Raises:
        DecodeError: it is no JSON in UTF-8, or nests deeper than :data:`MAX_JSON_DEPTH`.
    """
    try:
        return from_json(raw, allow_inf_nan=False)
    except (ValueError, RecursionError) as error:
        raise DecodeError(what, _problem(error)) from None


def load_foreign(raw: bytes, what: str = "payload") -> Json:
    """Return the value of JSON text that anybody may have written: one that :func:`dump` takes again.

    Raises:
        DecodeError: as :func:`load`, or a number is too large.
    """
    value = load(raw, what)
    try:
        dump(value)
    except InvalidInputError:
        raise DecodeError(what, "a number in it is too large") from None
    return value


def load_object(raw: bytes, what: str = "payload") -> dict[str, Json]:
    """Return the mapping of a JSON object.

    Raises:
        DecodeError: as :func:`load`, or it is another value.
    """
    value = load(raw, what)
    if not isinstance(value, dict):
        raise DecodeError(what, "no JSON object")
    return value


def _may_be_deep(raw: bytes) -> bool:
    """Whether a reader might refuse it for its nesting, or for a number of more digits than it takes."""
    return len(raw) > _LONG_LENGTH or raw.count(b"[") + raw.count(b"{") > MAX_JSON_DEPTH >> 1


def _problem(error: BaseException) -> str:
    """Say where the text stops being JSON; the parser's own words may quote what it read."""
    if "recursion" in str(error):
        return f"JSON nested deeper than {MAX_JSON_DEPTH} levels"
    return "no JSON in UTF-8"
