"""A node: the verbs, and everything that drives executions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loom.runtime.client import Client
from loom.runtime.driver_leases import DriverLeases
from loom.runtime.evidence import EvidenceReader
from loom.runtime.ghosts import GhostCollector
from loom.runtime.lease_keeper import LeaseKeeper
from loom.runtime.listener import Listener
from loom.runtime.presence import PresenceKeeper
from loom.runtime.recovery import IsAbandoned, Recovery
from loom.runtime.refusals import RefusalScan
from loom.runtime.retiring import Retiring
from loom.runtime.schedules.flow import schedule_flow
from loom.runtime.sealed import refused_as
from loom.runtime.timers import TimerService
from loom.stores.sealing.doctor import covers_of

if TYPE_CHECKING:
    from loom.config import Config
    from loom.kernel.flow import FlowDefinition
    from loom.kernel.state import ExecutionState
    from loom.runtime.access import Principal
    from loom.runtime.handle import Handle
    from loom.stores.contracts import LeaseStore

DRAIN_S = 5.0


class Runtime(Client):
    """Drives executions. Use it as ``async with Runtime(config, flows=[order]) as runtime``.

    What of ``events``, ``snapshots``, ``leases``, ``wakes`` is not given is built from ``config.storage``; given an
    event store, nothing is made up beside it. ``is_abandoned`` is a host's own evidence that an execution's driver is gone.
    ``on_storage_error(error, about)`` hears of stores that fail, ``on_error(error, about)`` of executions that cannot go on
    here, ``on_execution_denied(request, reason)`` of denials, ``on_warn(message, about)`` of the rest.
    """

    _drives = True

    def __init__(
        self, config: Config | None = None, *, is_abandoned: IsAbandoned | None = None, **options: Any
    ) -> None:
        super().__init__(config, **options)
        self.flows.add(schedule_flow)
        self._is_abandoned = is_abandoned
        self._presence: PresenceKeeper | None = None
        self._timers: TimerService | None = None
        self._refusals: RefusalScan | None = None
        self._recovery: Recovery | None = None
        self._ghosts: GhostCollector | None = None
        self._retiring: Retiring | None = None

    @property
    def node(self) -> str:
        """This node's incarnation, as its events carry it in ``metadata.node``."""
        return self._engine.node

    def add_flow(self, flow: FlowDefinition[..., Any]) -> None:
        """Let this node drive a flow; ``start`` with the flow itself does it too."""
        self.flows.add(flow)

    async def open(self) -> None:
        """See :meth:`loom.runtime.client.Client.open`."""
        await super().open()
        engine = self._engine
        evidence = None
        if engine.leases is not None and self.config.leases.enabled:
            self._presence = self._keep_alive(engine.leases)
            evidence = EvidenceReader(engine.leases, self._presence, engine.node)
            self._ghosts = GhostCollector(
                engine, engine.leases, self._presence.calls, self.config.leases.ttl_ms
            )
        self._recovery = Recovery(engine, self._verbs, evidence, self._is_abandoned)
        engine.driving.abandoned = self._recovery.abandoned
        engine.driving.undecided = self._recovery.undecided
        if engine.wakes is not None:
            self._timers = TimerService(engine, engine.wakes, on_emptied=self._recovery.everything)
            self._timers.start()
            self._refusals = RefusalScan(engine, engine.wakes, self._recovery)
            self._refusals.start()
        if self._presence is not None:
            await self._presence.start()
        if engine.leasing is not None:
            engine.leasing.start()
        if self._ghosts is not None:
            self._ghosts.start()
        self._recovery.start()
        self._retiring = Retiring(engine)
        self._retiring.start()
        if engine.owning is not None:
            engine.owning.listen(
                Listener(engine, self._verbs, on_gained=self._recovery.gained, on_lost=self._recovery.lost)
            )

    async def close(self) -> None:
        """Stop driving: what was journaled becomes durable, running steps are given up, others may take over at once."""
        if self._stores is None:
            return
        if self._retiring is not None:
            await self._retiring.stop()
        if self._ghosts is not None:
            await self._ghosts.stop()
        if self._timers is not None:
            await self._timers.stop()
        if self._refusals is not None:
            await self._refusals.stop()
        if self._recovery is not None:
            await self._recovery.stop()
        await self._engine.drain(DRAIN_S)
        await self._engine.stop_runs()
        leasing, self._engine.leasing = self._engine.leasing, None
        if leasing is not None:
            await leasing.settle(DRAIN_S)
            await leasing.close()
        if self._presence is not None:
            await self._presence.stop()
        await super().close()

    # Evidence of life -----------------------------------------------------------------------------------------------

    def _keep_alive(self, store: LeaseStore) -> PresenceKeeper:
        """The node's presence and its leases: one store, one mode, one view of how the store does."""
        engine, settings = self._engine, self.config.leases
        stops = settings.on_store_error == "stop"
        keeper = LeaseKeeper(
            store,
            engine.node,
            settings.ttl_ms,
            signals=self._signals,
            still_ours=engine.still_fenced,
            surroundings=self._surroundings,
            on_store_error=settings.on_store_error,
        )
        engine.leasing = DriverLeases(
            keeper,
            drivers=engine.runs.values,
            on_lost=engine.lease_lost,
            eager=settings.acquire == "eager",
            grace_ms=settings.lazy_grace_ms,
            on_store_error=settings.on_store_error,
        )
        presence = PresenceKeeper(
            store,
            engine.node,
            self.config.presence_ms,
            signals=self._signals,
            details={"flows": list(self.flows.names)},
            on_lapsed=self._lapsed,
            on_regained=self._regained,
            on_emptied=self._emptied,
            surroundings=self._surroundings,
            stops=stops,
            covers=lambda: covers_of(engine.events),
            clock=engine.now,
        )
        engine.alive = presence.is_live
        return presence

    def _lapsed(self) -> None:
        """This node's evidence of life cannot be relied on: others may take over, so its runs stop (clauses.md, 6)."""
        self._signals.warn("presence lapsed: this node stops its runs", self._engine.node)
        self._engine.orphan_all()

    def _regained(self) -> None:
        self._engine.go_on()
        if self._recovery is not None:
            self._recovery.everything()

    def _emptied(self) -> None:
        """The lease store was emptied; the wake rows beside it may be gone too: they are written again."""
        self._signals.warn("the lease store was emptied: a quiet period begins", self._engine.node)
        self._regained()

    # Verbs that need a node -----------------------------------------------------------------------------------------

    @refused_as("resume_as")
    async def resume_as(
        self,
        execution_id: str,
        flow: FlowDefinition[..., Any] | str,
        *,
        principal: Principal | None = None,
    ) -> Handle[Any]:
        """Go on with an unfinished execution under another flow (migrated code), from its log, on this node.

        Raises:
            UnknownFlowError: no such flow here. ExecutionFinishedError: it has ended.
            WrongHeadError: the new flow does not match the log (``on_error`` is told where), or others were first.
            LeaseHeldError: another node's lease says that it drives the execution now.
        """
        await self._verbs.judged("resume_as", execution_id, principal)
        return await self._operators.redrive(execution_id, "resume_as", principal, flow)

    @refused_as("restore_from_state")
    async def restore_from_state(
        self, execution_id: str, state: ExecutionState, *, principal: Principal | None = None
    ) -> Handle[Any]:
        """Go on with an execution from a state that was kept, on this node, once the log agrees with it.

        Raises:
            InvalidInputError: the log says otherwise. LeaseHeldError: as ``resume_as``.
        """
        return await self._operators.restore_from_state(execution_id, state, principal)

    @refused_as("notify")
    async def notify_inbox(self, execution_id: str, *, principal: Principal | None = None) -> bool:
        """Look whether the chain's parked execution can go on, and take it on this node if so."""
        return await self._inbox.notify(execution_id, principal)

    @refused_as("recover")
    async def recover_abandoned(
        self, execution_id: str | None = None, *, principal: Principal | None = None
    ) -> list[str]:
        """Take over, on evidence, what nobody drives any more in the shards of this node; return the ids.

        With an ``execution_id``, that one is taken over on the caller's word, evidence or not; only a live lease of
        another node is a veto.

        Raises:
            LeaseHeldError: another node's lease says that it drives the execution now; it stops renewing once it is gone.
        """
        if execution_id is not None:
            await self._verbs.judged("recover", execution_id, principal)
            await self._operators.redrive(execution_id, "recover", principal, None)
            return [execution_id]
        assert self._recovery is not None
        return await self._recovery.sweep()

    async def rebuild_wakes(self, *, dry_run: bool = False) -> int:
        """See :meth:`loom.runtime.client.Client.rebuild_wakes`."""
        count = await super().rebuild_wakes(dry_run=dry_run)
        if self._timers is not None:
            self._timers.kick()
        return count
