"""A look at the copies that a chain keeps, whoever drives it: what may go is freed, what is held is told (system.md 4.7).

Whoever lifts a hold frees its copy. This is for what was left behind: its node died between the two, or a store that has no
transactions over streams copied without journaling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from loom.errors import PayloadShreddedError, SealedStreamUnreadableError
from loom.ids import quarantine_stream
from loom.runtime.held_view import held_rows
from loom.runtime.holds import stored_copies, trim_copies
from loom.schemas.envelope import TERMINAL_KINDS, Kind

if TYPE_CHECKING:
    from loom.runtime.engine import Engine

ENDINGS: Final = TERMINAL_KINDS - {Kind.EXECUTION_CONTINUED}


@dataclass(frozen=True, slots=True)
class KeptCopies:
    """What a chain keeps once what may go was freed.

    ``copies`` stay; ``held`` are the rows of ``Client.inbox`` for what is held, ``execution_id`` the execution that holds it.
    ``closed``: its log cannot be opened here, so that nothing was freed and nothing is known of what is held.
    """

    chain_id: str
    execution_id: str
    copies: int
    held: tuple[dict[str, Any], ...] = ()
    closed: bool = False

    @property
    def awaiting(self) -> tuple[dict[str, Any], ...]:
        """What nothing on this node will deliver: it waits for a node that can open it, or for an operator."""
        return tuple(row for row in self.held if row["awaits"] in {"a capable node", "an operator"})


async def look_after_copies(engine: Engine, chain_id: str) -> KeptCopies:
    """Free the copies of a chain that nothing needs, and tell what is held. Repeating it does no harm.

    Raises:
        StoreError: the log cannot be read, or written, now.
    """
    if not await stored_copies(engine, chain_id):
        return KeptCopies(chain_id, chain_id, 0)
    try:
        current = await engine.driving.current(chain_id)
        loaded = await engine.patiently(lambda: engine.driving.load(current), current)
    except (SealedStreamUnreadableError, PayloadShreddedError):
        return await _closed(engine, chain_id)
    if loaded is None:  # the chain was deleted, and a copy came, or stayed, behind it
        stream_id = quarantine_stream(chain_id)
        await engine.patiently(lambda: engine.events.delete(stream_id), stream_id)
        return KeptCopies(chain_id, current, 0)
    kept = await trim_copies(engine, loaded.state)
    rows = () if loaded.state.finished else tuple(await held_rows(engine, loaded))
    return KeptCopies(chain_id, current, kept, rows)


async def _closed(engine: Engine, chain_id: str) -> KeptCopies:
    """As far as it goes without opening the log: a chain that has ended needs no copy, whatever is in it."""
    stream_id = quarantine_stream(chain_id)
    info = await engine.patiently(lambda: engine.events.info(chain_id), chain_id)
    seen = await engine.patiently(lambda: engine.events.observe(stream_id), stream_id)
    if info is not None and info.status in ENDINGS:
        await engine.patiently(lambda: engine.events.truncate(stream_id, seen.head + 1), stream_id)
    copies = await stored_copies(engine, chain_id)
    return KeptCopies(chain_id, chain_id, len(copies), closed=bool(copies))
