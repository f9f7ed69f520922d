"""What operators see and callers do not (system.md 2.4).

The cause of a sealed refusal is kept outside the error object, so nothing that prints, pickles or enumerates the error
at an edge can leak it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from weakref import WeakKeyDictionary

from loom.errors import LoomError, SealedPayloadUnreadableError, SealedStreamUnreadableError


@dataclass(frozen=True, slots=True)
class SealedDetail:
    """Why a log could not be opened here, and where."""

    reason: Literal["marker-unopenable", "key-unavailable"]
    sequence: int
    covers: tuple[str, ...]


_details: WeakKeyDictionary[BaseException, SealedDetail] = WeakKeyDictionary()


def sealed_detail_of(error: BaseException) -> SealedDetail | None:
    """The cause of a sealed refusal; None for any other error."""
    return _details.get(error)


def note_sealed_detail(error: LoomError, detail: SealedDetail) -> None:
    """Keep the cause of a refusal for operators; for those who raise one."""
    _details[error] = detail


def is_sealed_unreadable(error: BaseException) -> bool:
    """Whether an error refuses sealed content, of a log or of a message. Test this before ExecutionDeniedError."""
    return isinstance(error, SealedStreamUnreadableError | SealedPayloadUnreadableError)
