"""How a message of this process reaches an inbox: by an append of its own, or together with its delivery.

A run that rests here for a message gets it as it is sent, and what the flow makes of it becomes durable in one append
with the message itself (docs/adr/0038). Nothing is seen of either before both stand, no step starts, and where they are
refused both are as if they had never been: the run is dropped, and the message is sent by itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Final

from loom.runtime.backoff import Backoff
from loom.runtime.journal import JournalLatched

if TYPE_CHECKING:
    from loom.runtime.engine import Engine
    from loom.stores.contracts import StreamAppend

APART_MS: Final = 1_000
"""After a hand-over that came to nothing, a chain's messages go by themselves for so long; doubled each time."""


class Sending:
    """Puts messages into inboxes. Called on the runtime's loop."""

    __slots__ = ("_apart", "_engine", "_handing", "_under_way")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._under_way: Counter[str] = Counter()
        self._handing: dict[str, asyncio.Event] = {}
        self._apart = Backoff(engine.clock, first_ms=APART_MS)

    async def put(self, execution_id: str, chain_id: str, append: StreamAppend) -> None:
        """Make one message durable; a repeat, by its id, is one message.

        Raises:
            StoreError: the store's last trouble, once patience has ended. InboxFullError: what waits is at the cap.
        """
        engine, stream_id = self._engine, append.stream_id
        alone = stream_id not in self._under_way and stream_id not in self._handing
        if alone and await self._handed_over(chain_id, append):
            return
        self._under_way[stream_id] += 1
        try:
            handing = self._handing.get(stream_id)
            if handing is not None:  # it has its place already: to overtake it would be to refuse it
                await handing.wait()
            await engine.patiently(lambda: engine.events.append(append), execution_id)
        finally:
            self._under_way[stream_id] -= 1
            if not self._under_way[stream_id]:
                del self._under_way[stream_id]

    async def _handed_over(self, chain_id: str, append: StreamAppend) -> bool:
        """Whether it became durable together with its delivery."""
        run = self._engine.chains.get(chain_id)
        if run is None or self._apart.blocked(chain_id) or not run.waiting.hand_over(append):
            return False
        handing = self._handing[append.stream_id] = asyncio.Event()
        try:
            await run.journal.durable()
        except JournalLatched:
            self._apart.failed(chain_id)
            return False  # nobody knows whether it stands; said again by its id, it stands once
        finally:
            del self._handing[append.stream_id]
            handing.set()
        self._apart.cleared(chain_id)
        return True
