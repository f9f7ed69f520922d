"""What the quarantine verbs may read of a log that this node cannot open (system.md 4.9; seed, S5b).

A delivered payload rests sealed in its MESSAGE_CONSUMED. To hold or release a message nothing of it is needed: cursors,
window and queues come from routing fields, which are plain. So such an event, and only such a one, is stepped over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from loom.errors import KeyUnavailableError
from loom.kernel.guard import is_sealed_envelope
from loom.kernel.readable import READ, Opens, detail_of, sealed_refusal, unreadable
from loom.operator import SealedDetail
from loom.schemas.envelope import Kind
from loom.stores.sealing.cipher import CIPHER
from loom.stores.sealing.marker import SEAL, read_marker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loom.schemas.envelope import Envelope
    from loom.stores.contracts import EventStore, SnapshotStore

KNOWN_CIPHERS: Final = frozenset({CIPHER})
"""Ciphers whose values are known to be plain objects with a string ``__loomEnc``; a marker may name any other."""

ROUTING: Final = ("topic", "messageId", "inboxSeq", "siteId", "arm", "reason")
"""Fields of a MESSAGE_CONSUMED that the fold reads."""

_PAYLOAD: Final = f"{Kind.MESSAGE_CONSUMED}.payload"


def is_opaque(envelope: Envelope) -> bool:
    """Whether a marked envelope is stepped over: a delivery in which nothing but the payload was sealed."""
    marker = read_marker(envelope.metadata.get(SEAL))
    if marker is None or envelope.type != Kind.MESSAGE_CONSUMED or marker.cipher not in KNOWN_CIPHERS:
        return False
    if not all(entry == _PAYLOAD or entry.startswith(f"{_PAYLOAD}.") for entry in marker.covers):
        return False
    return not any(is_sealed_envelope(envelope.data.get(name)) for name in ROUTING)


class AtRestView:
    """Reads for holding and releasing: no write, no fence, no subscription.

    Envelopes of a log come as they are stored where every marked one is stepped over, so that no key is asked for; else
    they are opened as ever, and what cannot be is stepped over or refuses.
    """

    __slots__ = ("_capability", "_store")

    def __init__(self, store: EventStore, capability: Callable[[], Opens | None]) -> None:
        self._store, self._capability = store, capability

    async def read(self, stream_id: str, from_sequence: int = 0, limit: int = 1000) -> list[Envelope]:
        """Events of an execution's log.

        Raises:
            SealedStreamUnreadableError: one is sealed otherwise than is stepped over, and cannot be opened here.
            PayloadShreddedError: its subject was erased.
        """
        at_rest = await self.stored(stream_id, from_sequence, limit)
        if all(_needs_no_key(envelope) for envelope in at_rest):
            return at_rest
        detail = None
        try:
            opened = await self._store.read(stream_id, from_sequence, limit)
        except KeyUnavailableError as closed:
            detail = SealedDetail("key-unavailable", closed.sequence, closed.covers)
        if detail is not None:
            raise sealed_refusal(READ, stream_id, detail)
        self._judge(stream_id, opened)
        return opened

    async def read_last(self, stream_id: str) -> Envelope | None:
        """The last event of a log; raises as ``read``."""
        last = await self._store.observe(stream_id)
        found = await self.read(stream_id, last.head, 1) if last.head >= 0 else []
        return found[0] if found else None

    async def stored(self, stream_id: str, from_sequence: int = 0, limit: int = 1000) -> list[Envelope]:
        """Events exactly as they are stored, never opened; as read where the store cannot do that."""
        read: Any = getattr(self._store, "read_at_rest", self._store.read)
        found: list[Envelope] = await read(stream_id, from_sequence, limit)
        return found

    def _judge(self, stream_id: str, envelopes: Sequence[Envelope]) -> None:
        capability = self._capability()
        for envelope in envelopes:
            if unreadable(envelope, capability) is not None and not is_opaque(envelope):
                raise sealed_refusal(READ, stream_id, detail_of(envelope, "marker-unopenable"))


def _needs_no_key(envelope: Envelope) -> bool:
    if SEAL in envelope.metadata:
        return is_opaque(envelope)
    return not any(map(is_sealed_envelope, envelope.data.values()))


async def checkpoint_sequence(snapshots: SnapshotStore | None, execution_id: str) -> int | None:
    """Sequence of an execution's checkpoint at rest, -1 where there is none; None where that cannot be told."""
    if snapshots is None:
        return -1
    load: Any = getattr(snapshots, "load_at_rest", snapshots.load_latest)
    try:
        found = await load(execution_id)
    except KeyUnavailableError:
        return None
    return -1 if found is None else int(found.sequence)
