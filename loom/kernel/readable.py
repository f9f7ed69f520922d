"""Whether this node can open an execution's log: the check before any fold, replay or authorization (system.md 2.3).

O(1) for each envelope: a look at its marker. What no marker claims is treated as before there were markers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from loom.errors import UNKNOWN_OWNER_REASON, SealedStreamUnreadableError
from loom.kernel.guard import is_sealed_envelope, is_shredded_marker
from loom.operator import SealedDetail, note_sealed_detail, sealed_detail_of
from loom.schemas.envelope import Envelope, Json, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

SEAL: Final = "seal"
READ: Final = "read"
"""Op of a refusal before it is known which verb it refuses; what a caller sees names the verb."""


class Opens(Protocol):
    """What a node can open (``loom.stores.sealing.marker.SealingCapability``)."""

    def opens(self, marker: Json) -> bool:
        """Whether an envelope with this marker can be opened here."""
        ...


def sealed_refusal(
    op: str, execution_id: str, detail: SealedDetail, reason: str = UNKNOWN_OWNER_REASON
) -> SealedStreamUnreadableError:
    """The refusal of a log that this node cannot open: to its caller the denial of an unknown owner, word for word.

    The cause goes to operators alone (``loom.operator.sealed_detail_of``).
    """
    error = SealedStreamUnreadableError(op, execution_id, reason)
    note_sealed_detail(error, detail)
    return error


def reworded(
    refusal: SealedStreamUnreadableError,
    op: str,
    reason: str = UNKNOWN_OWNER_REASON,
    *,
    execution_id: str = "",
) -> SealedStreamUnreadableError:
    """A fresh refusal for the verb that a caller used, with the cause for operators. Raise it outside any handler.

    ``execution_id`` is what the caller named, where that is another than the log that was read.
    """
    fresh = SealedStreamUnreadableError(op, execution_id or refusal.execution_id, reason)
    detail = sealed_detail_of(refusal)
    if detail is not None:
        note_sealed_detail(fresh, detail)
    return fresh


def assert_stream_readable(
    execution_id: str, envelopes: Iterable[Envelope], capability: Opens | None, *, op: str = READ
) -> None:
    """Refuse envelopes of an execution's own log of which one is marked as sealed and cannot be opened here.

    ``capability`` None: this node opens nothing. What bears no marker makes no claim, and passes.

    Raises:
        SealedStreamUnreadableError: one cannot be opened; nothing of the stream may be used.
    """
    for envelope in envelopes:
        detail = unreadable(envelope, capability)
        if detail is not None:
            raise sealed_refusal(op, execution_id, detail)


def unreadable(envelope: Envelope, capability: Opens | None) -> SealedDetail | None:
    """Why an envelope of an execution's own log cannot be used here; None where it can."""
    marker = envelope.metadata.get(SEAL)
    if marker is None:
        return None
    if capability is None or not capability.opens(marker) or not _speaks_of(marker, envelope.type):
        return detail_of(envelope, "marker-unopenable")
    return None


def detail_of(envelope: Envelope, reason: Literal["marker-unopenable", "key-unavailable"]) -> SealedDetail:
    """What operators are told of an envelope."""
    marker: Any = envelope.metadata.get(SEAL)
    covers: Sequence[Json] = marker.get("covers", ()) if isinstance(marker, Mapping) else ()
    listed = tuple(c for c in covers if isinstance(c, str)) if isinstance(covers, list | tuple) else ()
    return SealedDetail(reason, envelope.sequence, listed)


_PERSONS: Final = {Kind.EXECUTION_STARTED: "principal", Kind.OUTCOME_RECORDED: "recordedBy"}


def assert_person_readable(envelope: Envelope, *, op: str = READ) -> None:
    """Refuse an unmarked event that names a person by a ciphertext, before an authorizer is asked about that person.

    It would reach the authorizer as an unknown owner, or as a stranger. Only calls that are judged are refused: what the
    process does by itself consults no person, and goes on as before there were markers (system.md 2.5; clauses.md, D7).

    Raises:
        SealedStreamUnreadableError: as ``assert_stream_readable``.
    """
    name = _PERSONS.get(envelope.type)
    if name is not None and any(map(is_sealed_envelope, _parts(envelope.data.get(name)))):
        raise sealed_refusal(op, envelope.stream_id, detail_of(envelope, "marker-unopenable"))


def is_dressed(person: Json) -> bool:
    """Whether a recorded person, or a part of it, is a ciphertext or what is left of one: it names nobody."""
    return any(is_sealed_envelope(part) or is_shredded_marker(part) for part in _parts(person))


def _parts(person: Json) -> Iterable[Json]:
    """One small object, never walked further."""
    if not isinstance(person, Mapping):
        return ()
    identity = person.get("identity")
    return (
        person,
        person.get("actor"),
        identity,
        *(identity.values() if isinstance(identity, Mapping) else ()),
    )


def _speaks_of(marker: Mapping[str, Json], kind: str) -> bool:
    """Whether a marker that can be opened speaks of this type of event: another's was put there by no store."""
    for entry in marker["covers"]:  # noqa: SIM110 - for every event that is read
        if entry.partition(".")[0] != kind:
            return False
    return True
