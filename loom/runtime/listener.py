"""What a node does about what became durable in the shards it writes (docs/architecture.md, "Runtime").

A started execution that nobody drives is driven, a message wakes its parked execution, an answer by a verb is taken
up, a cancel stops its run. What a listener misses, the walk of a gained shard finds (``recovery``).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from loom.errors import StoreError
from loom.ids import INBOX_PREFIX, RESERVED_PREFIX, inbox_topic, routing_id
from loom.kernel.inbox import CANCEL_TOPIC
from loom.runtime.driving import REFUSALS
from loom.runtime.holds import held_back
from loom.runtime.phase import Phase
from loom.schemas.envelope import TERMINAL_KINDS, Kind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from loom.runtime.engine import Engine
    from loom.runtime.run import Run
    from loom.runtime.verbs import Verbs
    from loom.schemas.envelope import Json
    from loom.stores.contracts import Committed

FIRST_PAUSE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 30.0

_OF_THE_INBOX: Final = frozenset({Kind.INBOX_QUARANTINED, Kind.INBOX_RELEASED, Kind.MESSAGE_CONSUMED})
_BY_VERBS: Final = frozenset({Kind.EXECUTION_STARTED, Kind.EXECUTION_RESUMED, Kind.EXECUTION_RECOVERED})


class Listener:
    """See :class:`loom.stores.contracts.CommitListener`. ``origin`` labels this node's own appends."""

    def __init__(
        self,
        engine: Engine,
        verbs: Verbs,
        *,
        on_gained: Callable[[int], None],
        on_lost: Callable[[int], None],
    ) -> None:
        self._engine = engine
        self._verbs = verbs
        self._on_gained, self._on_lost = on_gained, on_lost

    def committed(self, batch: Sequence[Committed]) -> None:
        """See :meth:`loom.stores.contracts.CommitListener.committed`; what it does not want never comes here."""
        if self._engine.closed:
            return
        for committed in batch:
            if committed.stream_id.startswith(INBOX_PREFIX):
                self._inbox(committed)
            else:
                self._log(committed)

    def wants(self, committed: Committed) -> bool:
        """Not what a run of this process wrote, who is told by its journal; nor what is no inbox and no log."""
        stream_id = committed.stream_id
        if stream_id.startswith(RESERVED_PREFIX):
            return stream_id.startswith(INBOX_PREFIX)
        return committed.envelopes[-1].metadata.get("node") != self._engine.node

    def gained(self, shard: int) -> None:
        """See :meth:`loom.stores.contracts.CommitListener.gained`."""
        if not self._engine.closed:
            self._on_gained(shard)

    def lost(self, shard: int) -> None:
        """See :meth:`loom.stores.contracts.CommitListener.lost`."""
        if not self._engine.closed:
            self._on_lost(shard)

    def notified(self, execution_id: str) -> None:
        """Somebody asks to look at an execution's inbox again."""
        if not self._engine.closed:
            self._engine.spawn(self._notify_chain(execution_id), execution_id)

    def _inbox(self, committed: Committed) -> None:
        chain_id = routing_id(committed.stream_id)
        topic = inbox_topic(committed.stream_id)
        if topic == CANCEL_TOPIC:
            reason = committed.envelopes[-1].data.get("payload")
            self._engine.spawn(self._cancel(chain_id, reason), chain_id)
            return
        run = self._engine.chains.get(chain_id)
        if run is None:
            self._engine.spawn(self._notify_chain(chain_id), chain_id)
        elif topic is not None and run.waiting.feeds.arrived(topic, committed.envelopes):
            run.look()

    async def _cancel(self, chain_id: str, reason: Json) -> None:
        await self._persistently(chain_id, lambda: self._verbs.cancel_by_request(chain_id, reason))

    async def _notify_chain(self, chain_id: str) -> None:
        await self._persistently(chain_id, lambda: self._wake_head(chain_id))

    async def _wake_head(self, chain_id: str) -> None:
        self._engine.driving.wake(await self._engine.driving.head_of(chain_id))

    async def _persistently(self, chain_id: str, act: Callable[[], Awaitable[None]]) -> None:
        """Do what was asked for, however long a store is away: nobody asks again. A takeover finds what is left undone."""
        pause_s = FIRST_PAUSE_S
        while self._engine.owns(chain_id):
            try:
                await act()
            except REFUSALS as error:
                self._engine.refused(chain_id, error)  # a node that can open it does what is asked
                return
            except StoreError as error:
                self._engine.signals.repeated_storage_error(error, chain_id)
            else:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _unopened(self, committed: Committed) -> None:
        """This node cannot open what was written: it has no part in the execution any more, and tells why."""
        engine, stream_id = self._engine, committed.stream_id
        run = engine.runs.get(stream_id)
        driven = committed.envelopes[-1].metadata.get("node") is not None
        if run is not None:
            if not driven and run.phase is not Phase.PARKED and engine.leasing is not None:
                engine.leasing.give_up(run)  # driven, it is another's by now, under a newer fence
            engine.drop(run)
        if not driven or engine.waiters.waited_for(stream_id):  # else whoever wrote it goes on with it
            engine.spawn(engine.driving.explain(stream_id), stream_id)

    def _inbox_changed(self, execution_id: str, run: Run | None) -> None:
        """An operator held, released or discarded: what may be delivered now is another, also after a refusal."""
        engine = self._engine
        if run is not None:
            engine.drop(run)
        engine.backoff.cleared(execution_id)
        engine.backoff.cleared(held_back(execution_id))
        engine.driving.wake(execution_id)

    def _beside(self, run: Run, committed: Committed) -> None:
        """Somebody else appended to a log of which a run is here."""
        engine, last = self._engine, committed.envelopes[-1]
        if "node" in last.metadata:  # another driver has it, or will
            engine.drop(run)
        elif last.type == Kind.EXECUTION_RECOVERED:  # an operator wants it taken up anew
            engine.drop(run)
            engine.spawn(engine.driving.drive_fresh(run.id), run.id)
        else:
            run.foreign(committed.envelopes)  # what it cannot take, it finds out at its next append

    def _log(self, committed: Committed) -> None:
        last = committed.envelopes[-1]
        engine = self._engine
        run = engine.runs.get(committed.stream_id)
        if last.type == Kind.PAYLOAD_SHREDDED:
            engine.erased(committed.stream_id)
        elif committed.unopened:
            self._unopened(committed)
        elif last.type in TERMINAL_KINDS:
            if run is not None:
                engine.drop(run)
            engine.driving.tell_end(committed.stream_id, committed.envelopes)
        elif last.type in _OF_THE_INBOX and "node" not in last.metadata:
            self._inbox_changed(committed.stream_id, run)
        elif run is not None:
            self._beside(run, committed)
        elif last.type in _BY_VERBS and "node" not in last.metadata:
            engine.spawn(engine.driving.drive_fresh(committed.stream_id), committed.stream_id)
