"""How large a JSON value is once written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pydantic_core import to_json

if TYPE_CHECKING:
    from loom.schemas.envelope import Json

_SMALL: Final = frozenset({int, float, bool, type(None)})
_ROUGHLY: Final = 24


def json_size(value: Json) -> int:
    """Bytes of a value in compact JSON (a bound for scalars); values come from ``dump_json`` and have a JSON form."""
    kind = type(value)
    if kind in _SMALL:
        return _ROUGHLY
    if kind is str and value.isascii() and len(value) < 1024:  # noqa: PLR2004 - escapes at most sextuple it
        return 6 * len(value) + 2 if not value.isprintable() else len(value) + 2
    return len(to_json(value))
