"""From an event's shape as it was written to the shape that folds read, one version at a time.

The wire schema (Avro) is resolved before: a field that its writer did not know is absent. What remains is the shape of
``data``, told by ``metadata.schema``; an envelope without it is of 1.24.0, which did not insist on the stamp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from loom.errors import DecodeError
from loom.schemas.envelope import EVENT_SCHEMA, LEGACY_EVENT_SCHEMA, Envelope

Step = Callable[[Envelope], Envelope]


def _unchanged(envelope: Envelope) -> Envelope:
    return envelope


STEPS: Final[dict[str, tuple[str, Step]]] = {
    # The seal marker and the quarantine stamp came with 1.25.0; without them an envelope makes no claim, so an old
    # one means what it always meant. A step that changes data must also move the stamp; this one leaves both.
    LEGACY_EVENT_SCHEMA: (EVENT_SCHEMA, _unchanged),
}
"""Version to (next version, step)."""


def upcast(envelope: Envelope, what: str = "event") -> Envelope:
    """Return the envelope in the shape of :data:`EVENT_SCHEMA`.

    A later minor version is taken as it is: it only adds, and folds ignore what they do not know.

    Raises:
        DecodeError: its version is older than any known one, of a later major one, or no version.
    """
    version = envelope.metadata.get("schema", LEGACY_EVENT_SCHEMA)
    while version != EVENT_SCHEMA:
        if version in STEPS:
            version, step = STEPS[version]
            envelope = step(envelope)
        elif _is_later_minor(version):
            return envelope
        else:
            raise DecodeError(what, "its event schema is not one that this release reads")
    return envelope


def _is_later_minor(version: str) -> bool:
    try:
        major, minor, patch = (int(part) for part in version.split("."))
    except ValueError:
        return False
    ours = tuple(int(part) for part in EVENT_SCHEMA.split("."))
    return major == ours[0] and (minor, patch) > ours[1:]
