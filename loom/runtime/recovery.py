"""Recovery: what nobody drives any more is found and taken over (clauses.md, point 6).

When a shard is gained, and from then on now and then, its open executions are walked. A parked one gets its wake rows
and a look into its inbox. A running one is taken over on evidence that its driver is gone (``loom.kernel.evidence``): its
lease, or the presence of the incarnation that last took it, has expired. What cannot be judged is asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from loom.errors import LoomError, RedriveExhaustedError, StoreError
from loom.ids import inbox_stream
from loom.kernel.evidence import Evidence
from loom.kernel.inbox import CANCEL_TOPIC, load_waits, topics_of
from loom.runtime.background import Background
from loom.runtime.drivers import BY_HAND, Driver, driver_of, may_be_undriven, undriven
from loom.runtime.driving import REFUSALS
from loom.runtime.holds import held_topics
from loom.runtime.phase import Phase
from loom.runtime.wake_rows import timer_rows
from loom.schemas.envelope import TERMINAL_KINDS, Kind
from loom.stores.contracts import WakeRow

if TYPE_CHECKING:
    from loom.runtime.engine import Engine
    from loom.runtime.evidence import EvidenceReader
    from loom.runtime.reading import Loaded
    from loom.runtime.verbs import Verbs
    from loom.stores.contracts import StreamInfo

PAGE: Final = 500
AT_ONCE: Final = 16
IsAbandoned = Callable[[str], Awaitable[bool]]
"""A host's own evidence that an execution's driver is gone; it must agree, and is enough where there are no leases."""


class Recovery(Background):
    """Walks owned shards; what could not be judged, or was dropped by this node itself, is looked at again."""

    TASK = "loom-recovery"

    def __init__(
        self, engine: Engine, verbs: Verbs, evidence: EvidenceReader | None, is_abandoned: IsAbandoned | None
    ) -> None:
        self._engine = engine
        self._verbs = verbs
        self._evidence = evidence
        self._is_abandoned = is_abandoned
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._unsettled: dict[str, bool] = {}
        self._walking: dict[int, bool] = {}
        self._soon = asyncio.Event()

    def gained(self, shard: int) -> None:
        """This process writes the shard now: walk it, parked executions included."""
        self._walk_soon(shard, takeover=True)

    def lost(self, shard: int) -> None:
        """It writes it no longer: parked runs of it leave memory, whoever owns it wakes them."""
        engine, owning = self._engine, self._engine.owning
        if owning is None:
            return
        for run in list(engine.runs.values()):
            if owning.shard_of(run.chain_id) == shard:
                run.moved()
        engine.waiters.moved(
            lambda execution_id: owning.shard_of(execution_id) == shard and execution_id not in engine.runs
        )
        for execution_id, own in list(self._unsettled.items()):
            if not own and owning.shard_of(execution_id) == shard:
                del self._unsettled[execution_id]

    def abandoned(self, execution_id: str) -> None:
        """This node drove it, and drives it no longer: nobody else will, while this node lives."""
        self._unsettled[execution_id] = True

    def undecided(self, execution_id: str) -> None:
        """Another may drive it; whether it still does is asked again."""
        self._unsettled.setdefault(execution_id, False)

    def everything(self) -> None:
        """Walk all owned shards as if they were gained now: rows may be lost, or this node was not sure of itself."""
        if self._engine.owning is not None:
            for shard in sorted(self._engine.owning.owned()):
                self._walk_soon(shard, takeover=True)

    # Walking --------------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        engine = self._engine
        ttl_ms = engine.config.presence_ms
        often_s = min(ttl_ms / 4, engine.config.recovery_interval_ms) / 1000
        last_walk = engine.loop.time()
        while True:
            await asyncio.sleep(often_s)
            if not engine.live():
                continue
            for execution_id, own in list(self._unsettled.items()):
                await self._look(execution_id, own=own)
            if engine.loop.time() - last_walk >= engine.config.recovery_interval_ms / 1000:
                last_walk = engine.loop.time()
                for shard in sorted(engine.owning.owned() if engine.owning is not None else ()):
                    self._walk_soon(shard, takeover=False)

    def _walk_soon(self, shard: int, *, takeover: bool) -> None:
        if shard in self._walking:
            self._walking[shard] |= takeover
            return
        self._walking[shard] = takeover
        self._engine.spawn(self._walk(shard), f"shard {shard}")

    async def _walk(self, shard: int) -> None:
        engine = self._engine
        takeover = self._walking[shard]
        self._walking[shard] = False
        after = ""
        try:
            while engine.owning is not None and shard in engine.owning.owned() and not engine.closed:
                page = engine.owning.open_logs(shard, after, PAGE)
                if not page:
                    break
                await asyncio.gather(*(self._consider(info, takeover=takeover) for info in page))
                after = page[-1].stream_id
                await asyncio.sleep(0)
        finally:
            if self._walking.pop(shard):
                self._walk_soon(shard, takeover=True)

    async def _consider(self, info: StreamInfo, *, takeover: bool) -> None:
        """One open execution of the walk. A failure is told, and it is looked at again."""
        execution_id = info.stream_id
        run = self._engine.runs.get(execution_id)
        if takeover and run is not None and run.phase is Phase.PARKED and run.is_behind(info):
            # Others went on with it while they had the shard: kept, it would take every wake for its own, and sleep on.
            self._engine.drop(run)
            run = None
        resident = run is not None
        if not takeover if info.status == Kind.EXECUTION_SUSPENDED else resident:
            return
        async with self._slots:
            try:
                if resident:
                    await self._resident(info)
                elif info.status == Kind.EXECUTION_SUSPENDED:
                    await self._parked(execution_id)
                else:
                    await self._running(info)
            except (StoreError, TimeoutError) as error:
                self.undecided(execution_id)
                self._engine.signals.repeated_storage_error(error, execution_id)
            except REFUSALS as error:
                self._engine.refused(execution_id, error)
            except LoomError as error:
                self._engine.signals.repeated_error(error, execution_id)

    async def _look(self, execution_id: str, *, own: bool) -> None:
        """Look again at what was not settled."""
        try:
            info = await self._engine.events.info(execution_id)
        except StoreError as error:
            self._engine.signals.repeated_storage_error(error, execution_id)
            return
        self._unsettled.pop(execution_id, None)
        if info is not None and info.status not in TERMINAL_KINDS:
            await self._consider(info, takeover=True)
            if own and execution_id in self._unsettled:
                self._unsettled[execution_id] = True

    # Parked ---------------------------------------------------------------------------------------------------------

    async def _parked(self, execution_id: str) -> None:
        """Its alarms must stand, and nothing may wait for it unseen (kafka.md, "Parks and alarms")."""
        engine = self._engine
        loaded = await engine.driving.load(execution_id)
        if loaded is None or loaded.state.status != "suspended":
            return
        rows = [WakeRow(execution_id, at, "timer") for at in engine.driving.timers_of(loaded.state)]
        if rows and not await engine.schedule(rows):
            self.undecided(execution_id)
        heads = engine.inbox_heads(loaded.state.chain_id)
        if inbox_stream(loaded.state.chain_id, CANCEL_TOPIC) in heads:
            await self._verbs.cancel_by_request(execution_id, await self._reason(loaded.state.chain_id))
        elif held_topics(loaded.state) or any(
            heads.get(inbox_stream(loaded.state.chain_id, topic), -1) > loaded.state.cursors.get(topic, -1)
            for topic in topics_of(load_waits(loaded.state.waits))
        ):
            engine.driving.wake(execution_id)

    async def _resident(self, info: StreamInfo) -> None:
        """Parked in this process, which hears its messages; but its alarms may be lost with an emptied store."""
        rows = await timer_rows(self._engine, info)
        if rows and not await self._engine.schedule(rows):
            self.undecided(info.stream_id)
        for row in rows:
            self._engine.driving.hint(row.wake_at)

    async def _reason(self, chain_id: str) -> Any:
        last = await self._engine.events.read_last(inbox_stream(chain_id, CANCEL_TOPIC))
        return None if last is None else last.data.get("payload")

    # Running --------------------------------------------------------------------------------------------------------

    async def _running(self, info: StreamInfo) -> None:
        engine, execution_id = self._engine, info.stream_id
        blocked, refused = engine.backoff.blocked(execution_id), engine.backoff.refused(execution_id)
        if (blocked and not refused) or await self._driven(info):
            self.undecided(execution_id)
            return
        if blocked:  # nobody is known to drive it, and it is not this node's to look: it may be another's
            engine.driving.leave_inbox_row(execution_id, "refusal")
            self.undecided(execution_id)
            return
        async with engine.driving.exclusive(execution_id):
            if execution_id in engine.runs or execution_id in engine.starting:
                return
            now = await engine.events.info(execution_id)
            loaded = await engine.driving.load(execution_id)
            if now is None or loaded is None or loaded.state.status != "running":
                return
            heads = engine.inbox_heads(loaded.state.chain_id)
            cancelled = inbox_stream(loaded.state.chain_id, CANCEL_TOPIC) in heads
            unmoved = not cancelled and now.fence == loaded.observation.fence
            if unmoved and not await self._judge(loaded, driver_of(now)):
                self.undecided(execution_id)
        if cancelled:
            await self._verbs.cancel_by_request(execution_id, await self._reason(loaded.state.chain_id))

    async def carry_on(self, info: StreamInfo) -> None:
        """Take over a running execution that its shard's owner cannot open, on the evidence that anybody needs.

        Raises:
            REFUSALS: nor can this node. StoreError, TimeoutError: it could not be read.
        """
        engine, execution_id = self._engine, info.stream_id
        if await self._driven(info):
            return
        async with engine.driving.exclusive(execution_id):
            if execution_id in engine.runs or execution_id in engine.starting or not engine.live():
                return
            now = await engine.events.info(execution_id)
            loaded = await engine.driving.load(execution_id)
            if now is None or loaded is None or loaded.state.status != "running":
                return
            if now.fence == loaded.observation.fence:
                await self._judge(loaded, driver_of(now))

    async def cancel_requested(self, chain_id: str, execution_id: str) -> bool:
        """Cancel an execution whose parent asked for it, if it did; for a chain whose owner cannot."""
        stream_id = inbox_stream(chain_id, CANCEL_TOPIC)
        if await self._engine.events.info(stream_id) is None:
            return False
        await self._verbs.cancel_by_request(execution_id, await self._reason(chain_id))
        return True

    async def _driven(self, info: StreamInfo) -> bool:
        """Whether its driver is known to live, told without reading its log."""
        node = driver_of(info).node
        if node in {None, self._engine.node} or may_be_undriven(info) or self._evidence is None:
            return False
        found, _ = await self._evidence.of(info.stream_id, node)
        return found in {Evidence.LIVE, Evidence.QUIET}

    async def _judge(self, loaded: Loaded, driver: Driver) -> bool:
        """Take it over if nobody drives it; False where that is not known yet, or did not come about."""
        engine, execution_id = self._engine, loaded.state.execution_id
        if undriven(loaded.history, driver):
            return await engine.driving.take(loaded) is not None
        evidence = await self.evidence_of(loaded, driver)
        if evidence is None:
            return False
        if loaded.state.unproductive >= engine.config.max_recoveries:
            exhausted = RedriveExhaustedError(execution_id, loaded.state.unproductive)
            engine.signals.repeated_error(exhausted, execution_id)
            return True
        return await engine.driving.recover(loaded, "abandoned", evidence, previous=driver.node) is not None

    async def evidence_of(self, loaded: Loaded, driver: Driver) -> str | None:
        """Why its driver is held to be gone; None where it may live, or nothing is known.

        Raises:
            LeaseEvidenceError: the evidence could not be read.
        """
        engine, execution_id = self._engine, loaded.state.execution_id
        if driver.node == engine.node:
            # This very process took it last, and knows that it does not drive it.
            return "own"
        if driver.node is not None and driver.node.startswith(BY_HAND):
            return None  # whoever took the fence by hand gives it back by hand
        if self._evidence is None:
            return "is_abandoned" if await self._host_agrees(execution_id) else None
        found, why = await self._evidence.of(execution_id, driver.node)
        if found in {Evidence.LIVE, Evidence.QUIET}:
            return None
        if found is Evidence.EXPIRED:
            return why if self._is_abandoned is None or await self._host_agrees(execution_id) else None
        return "is_abandoned" if await self._host_agrees(execution_id) else None

    async def _host_agrees(self, execution_id: str) -> bool:
        return self._is_abandoned is not None and await self._is_abandoned(execution_id)

    # Verbs ----------------------------------------------------------------------------------------------------------

    async def sweep(self) -> list[str]:
        """Look at every running execution of the owned shards now; return those taken over by this node."""
        engine = self._engine
        taken: list[str] = []
        for shard in sorted(engine.owning.owned() if engine.owning is not None else ()):
            after = ""
            while page := engine.owning.open_logs(shard, after, PAGE):  # type: ignore[union-attr]
                await asyncio.gather(*(self._consider(info, takeover=True) for info in page))
                taken += [
                    info.stream_id
                    for info in page
                    if info.status != Kind.EXECUTION_SUSPENDED and info.stream_id in engine.runs
                ]
                after = page[-1].stream_id
        return taken
