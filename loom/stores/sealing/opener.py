"""Opening on the way out, and what is said where it cannot be done (system.md 2.3 and 2.6)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from loom.errors import KeyUnavailableError, PayloadShreddedError
from loom.ids import routing_id, stream_kind
from loom.kernel.guard import SHREDDED_KEY, is_sealed_envelope
from loom.schemas.envelope import Envelope
from loom.schemas.quick import changer, quick
from loom.stores.sealing.cipher import NotOpened, is_ours, open_value
from loom.stores.sealing.marker import SEAL, SealingCapability, read_marker
from loom.stores.sealing.paths import Node, SensitiveMap, change, tree_of

if TYPE_CHECKING:
    from loom.schemas.envelope import Json
    from loom.stores.keys.contract import KeySet
    from loom.stores.sealing.keyring import KeyRing
    from loom.stores.sealing.subjects import Subjects
    from loom.stores.sealing.tombstones import Tombstones


class Status(Enum):
    """What became of an envelope."""

    READABLE = "readable"
    FOREIGN = "foreign"
    """Its marker says that this node cannot open it; it stands as stored, for the marker's judge to refuse."""
    LOCKED = "locked"
    """Its key is not here, or is another."""


@quick
@dataclass(frozen=True, slots=True)
class Opened:
    """An envelope as it may be handed on, and what became of it. A locked one stands as stored."""

    envelope: Envelope
    status: Status
    subject: str = ""

    @staticmethod
    def of(envelope: Envelope, data: dict[str, Json], subject: str = "") -> Opened:
        """A readable envelope, with the data that was sealed in it."""
        return Opened(_with_data(envelope, data), Status.READABLE, subject)


_with_data: Final = changer(Envelope, "data")
_REDACTED: Final[dict[str, Json]] = {SHREDDED_KEY: True}


class Opener:
    """Opens envelopes with the keys of their subjects."""

    def __init__(
        self,
        sensitive: SensitiveMap,
        capability: SealingCapability,
        ring: KeyRing,
        subjects: Subjects,
        tombstones: Tombstones,
    ) -> None:
        self._sensitive, self._capability = sensitive, capability
        self._ring, self._subjects, self._tombstones = ring, subjects, tombstones

    def sealed_tree(self, envelope: Envelope) -> Node | None:
        """Where sealed values may stand that are this node's to open; None where there are none.

        A marker says it. Without one it is judged as before there were markers: by the paths of this node, and the shape.
        """
        if SEAL in envelope.metadata:
            marker = read_marker(envelope.metadata[SEAL])
            if marker is None or not self._capability.opens(marker) or not marker.is_of(envelope.type):
                return None
            return tree_of(marker.covers)
        tree = self._sensitive.tree(envelope.type)
        return tree if tree is not None and _holds_ours(envelope, tree) else None

    async def open(self, envelope: Envelope) -> Opened:
        """Open one envelope, asking for subject and keys where they are not at hand.

        Raises:
            StoreError: the key store, or the chain's first event, cannot be read now.
        """
        tree = self.sealed_tree(envelope)
        if tree is None:
            return Opened(envelope, self._unsealed(envelope))
        subject = await self._subjects.of(envelope.stream_id)
        for name in dict.fromkeys(
            (subject, routing_id(envelope.stream_id))
        ):  # it may have been sealed before the start
            data = self._with(envelope, tree, await self._ring.opening(name))
            if data is not None:
                return Opened.of(envelope, data, subject)
        return Opened(envelope, Status.LOCKED, subject)

    def try_open(self, envelope: Envelope) -> Opened | None:
        """Open one envelope with what is at hand; None where something has to be asked for."""
        tree = self.sealed_tree(envelope)
        if tree is None:
            return Opened(envelope, self._unsealed(envelope))
        subject = self._subjects.peek(envelope.stream_id)
        keys = None if subject is None else self._ring.peek(subject)
        data = None if keys is None else self._with(envelope, tree, keys)
        return None if data is None or subject is None else Opened.of(envelope, data, subject)

    def redacted(self, envelope: Envelope) -> Envelope:
        """A locked envelope with what is sealed in it replaced by the redaction marker (clauses.md, point 2)."""
        tree = self.sealed_tree(envelope)
        return envelope if tree is None else _with_data(envelope, change(envelope.data, tree, _redact))

    async def loud(self, envelope: Envelope) -> Envelope:
        """Open an envelope of an execution's own log.

        Raises:
            PayloadShreddedError: it is locked, and the log holds the tombstone of its subject.
            KeyUnavailableError: it is locked, without one. StoreError: as ``open``.
        """
        opened = await self.open(envelope)
        if opened.status is not Status.LOCKED:
            return opened.envelope
        raise await self.refusal(opened)

    async def refusal(self, locked: Opened) -> PayloadShreddedError | KeyUnavailableError:
        """The error of a locked envelope: erased only with a tombstone (system.md 2.6)."""
        envelope, subject = locked.envelope, locked.subject
        if await self._tombstones.stands(envelope.stream_id, subject):
            return PayloadShreddedError(subject)
        marker = read_marker(envelope.metadata.get(SEAL))
        covers = () if marker is None else marker.covers
        return KeyUnavailableError(subject, envelope.stream_id, envelope.sequence, covers)

    def _unsealed(self, envelope: Envelope) -> Status:
        return Status.FOREIGN if SEAL in envelope.metadata else Status.READABLE

    def _with(self, envelope: Envelope, tree: Node, keys: KeySet | None) -> dict[str, Json] | None:
        marked = SEAL in envelope.metadata

        def open_it(value: Json, _pattern: str, _path: str) -> Json:
            # Beside a marker whatever is dressed as sealed has to open; without, only what is ours in shape.
            if is_sealed_envelope(value) if marked else is_ours(value):
                return open_value(keys, value)
            return value

        try:
            return change(envelope.data, tree, open_it)
        except NotOpened:
            return None


def is_log(stream_id: str) -> bool:
    """Whether a stream is an execution's own log, which is read loudly; an inbox or a quarantine is not."""
    return stream_kind(stream_id) == "executions"


def _holds_ours(envelope: Envelope, tree: Node) -> bool:
    found = False

    def look(value: Json, _pattern: str, _path: str) -> Json:
        nonlocal found
        found = found or is_ours(value)
        return value

    change(envelope.data, tree, look)
    return found


def _redact(value: Json, _pattern: str, _path: str) -> Json:
    return dict(_REDACTED) if is_sealed_envelope(value) else value
