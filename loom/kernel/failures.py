"""How a flow's error is written down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from loom.kernel.commands import Fail

if TYPE_CHECKING:
    from loom.schemas.envelope import Json

MAX_ERROR_CHARS: Final = 2_000
"""How much of an error's text a log keeps."""

MAX_GROUPED_ERRORS: Final = 8
"""How many errors of an exception group a log names."""


def failure_of(error: BaseException) -> Fail:
    """The end of a flow that raised ``error``; a group's own errors are named in ``details.errors``."""
    details: dict[str, Json] = {}
    if isinstance(error, BaseExceptionGroup):
        details["errors"] = [error_record(leaf) for leaf in _leaves(error)]
    return Fail(type(error).__name__, error_text(error), details)


def error_record(error: BaseException) -> dict[str, Json]:
    """``{type, message}`` as the log holds it, of a step's error too."""
    return {"type": type(error).__name__, "message": error_text(error)}


def error_text(error: BaseException) -> str:
    """An error's text, capped, in valid Unicode; empty where its own ``__str__`` fails."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - user code may do anything, and the failure to record is the first one
        return ""
    return text[:MAX_ERROR_CHARS].encode("utf-8", "replace").decode()


def _leaves(group: BaseExceptionGroup[Any]) -> list[BaseException]:
    found: list[BaseException] = []
    stack: list[BaseException] = [group]
    while stack and len(found) < MAX_GROUPED_ERRORS:
        error = stack.pop()
        if isinstance(error, BaseExceptionGroup):
            stack.extend(reversed(error.exceptions))
        else:
            found.append(error)
    return found
