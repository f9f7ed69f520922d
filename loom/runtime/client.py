"""The verbs, as callers see them: a client that drives nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from loom.config import Config
from loom.errors import PayloadShreddedError, StoreError
from loom.kernel.flow import FlowDefinition, FlowRegistry
from loom.runtime.access import DeniedCallback, Gatekeeper
from loom.runtime.driving import Driving
from loom.runtime.engine import Engine
from loom.runtime.erasure import Erasure
from loom.runtime.factory import Stores, build_stores
from loom.runtime.handle import Handle
from loom.runtime.inbox_client import InboxClient
from loom.runtime.inbox_verbs import InboxVerbs
from loom.runtime.operators import Operators
from loom.runtime.quarantine import Quarantine
from loom.runtime.queries import Queries
from loom.runtime.removal import Removal
from loom.runtime.removal_client import RemovalVerbs
from loom.runtime.schedules import Schedules
from loom.runtime.sealed import refused_as, refused_while_reading_as
from loom.runtime.signals import ErrorCallback, Signals, WarnCallback
from loom.runtime.subjects import SubjectVerbs
from loom.runtime.surroundings import SYSTEM
from loom.runtime.verbs import Verbs
from loom.runtime.wake_rows import rebuild_wakes
from loom.stores.sealing.checkpoints import check_checkpoints

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from types import TracebackType

    from loom.ids import IdSource
    from loom.kernel.state import ExecutionState
    from loom.runtime.access import Authorizer, Principal
    from loom.schemas.envelope import Envelope
    from loom.stores.contracts import Clock, EventStore, LeaseStore, SnapshotStore, WakeStore

R = TypeVar("R")

FatalCallback = Callable[[Exception], None]
"""Hears once, on the runtime's loop, why this node can own nothing any more; it then goes on as a client."""


def wall_clock() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


class Client(SubjectVerbs, InboxClient, RemovalVerbs):
    """Starts, messages, answers, cancels and reads executions that workers drive.

    Use it as ``async with Client(config) as client``. ``principal`` of every verb is who asks. With an ``authorizer``
    each call is judged by it. Without one, calls that name a principal are judged by ``execution_access_policy()``, and
    a call without a principal is the process's own. ``keys`` (or ``sealing.keys``) is where subjects' keys are.

    Raises:
        PlaintextCheckpointError: ``snapshots`` would rest in plaintext beside ``events``, which seals.
    """

    _drives = False
    _surroundings = SYSTEM

    def __init__(
        self,
        config: Config | None = None,
        *,
        flows: Iterable[FlowDefinition[..., Any]] = (),
        events: EventStore | None = None,
        snapshots: SnapshotStore | None = None,
        leases: LeaseStore | None = None,
        wakes: WakeStore | None = None,
        keys: Any = None,
        authorizer: Authorizer | None = None,
        clock: Clock = wall_clock,
        ids: IdSource | None = None,
        on_storage_error: ErrorCallback | None = None,
        on_error: ErrorCallback | None = None,
        on_execution_denied: DeniedCallback | None = None,
        on_warn: WarnCallback | None = None,
        on_fatal: FatalCallback | None = None,
    ) -> None:
        self.config = config if config is not None else Config()
        self.flows = FlowRegistry(flows)
        self._given = {"events": events, "snapshots": snapshots, "leases": leases, "wakes": wakes}
        self._keys = keys
        self._clock = clock
        self._ids = ids
        self._on_fatal = on_fatal
        self._signals = Signals(on_storage_error=on_storage_error, on_error=on_error, on_warn=on_warn)
        self._gate = Gatekeeper(authorizer, self.config.access.operators, on_execution_denied)
        allowed = self.config.sealing.allow_plaintext_checkpoints
        check_checkpoints(events, snapshots, allow_plaintext=allowed)
        self._stores: Stores | None = None

    # Opening and closing --------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect; ``async with`` does it.

        Raises:
            ConfigError: a setting is missing or wrong. UnreachableError: a server does not answer.
            TopicsError: the topics are missing or of another shape.
        """
        self._stores = await build_stores(
            self.config,
            self._given,
            clock=self._clock,
            drives=self._drives,
            on_fatal=self._on_fatal,
            keys=self._keys,
        )
        extra: dict[str, Any] = {} if self._ids is None else {"ids": self._ids}
        self._engine = Engine(
            self.config,
            self._stores,
            self.flows,
            self._signals,
            clock=self._clock,
            drives=self._drives,
            surroundings=self._surroundings,
            **extra,
        )
        self._driving = Driving(self._engine)
        self._verbs = Verbs(self._engine, self._gate)
        self._queries = Queries(self._engine, self._verbs)
        self._operators = Operators(self._engine, self._verbs)
        assert self._stores.subjects is not None
        self._erasure = Erasure(self._engine, self._gate, self._stores.subjects)
        self._removal = Removal(self._engine, self._gate, self._verbs, self._stores.subjects)
        self._inbox = InboxVerbs(self._engine, self._verbs)
        self._quarantine = Quarantine(self._engine, self._verbs)

    async def close(self) -> None:
        """Disconnect; idempotent."""
        stores, self._stores = self._stores, None
        if stores is None:
            return
        await self._engine.close()
        for store in stores.owned:
            await store.close()

    @property
    def stores(self) -> Stores:
        """The stores under the verbs.

        Raises:
            StoreError: it is not open.
        """
        if self._stores is None:
            raise StoreError("it is not open; use it as `async with`")
        return self._stores

    @property
    def schedules(self) -> Schedules:
        """The verbs on schedules."""
        return Schedules(self)

    # Starting and messaging -----------------------------------------------------------------------------------------

    @overload
    async def start(
        self,
        flow: FlowDefinition[..., R],
        input: Any = ...,
        *,
        execution_id: str | None = ...,
        subject: str | None = ...,
        principal: Principal | None = ...,
    ) -> Handle[R]: ...

    @overload
    async def start(
        self,
        flow: str,
        input: Any = ...,
        *,
        execution_id: str | None = ...,
        subject: str | None = ...,
        principal: Principal | None = ...,
    ) -> Handle[Any]: ...

    async def start(
        self,
        flow: FlowDefinition[..., Any] | str,
        input: Any = None,  # noqa: A002
        *,
        execution_id: str | None = None,
        subject: str | None = None,
        principal: Principal | None = None,
    ) -> Handle[Any]:
        """Start an execution; when this returns, its first event is durable.

        ``input`` is validated against the flow where the flow is known here. ``execution_id`` is made where none is
        chosen. ``subject`` names whose key seals the chain: a pseudonym, kept in the clear. ``principal`` becomes the owner.

        Raises:
            ExecutionAlreadyExistsError: the chosen id is taken. InvalidIdError: it cannot be an id.
            InvalidInputError: the input has no JSON form, is too large, or does not fit.
            UnknownFlowError: no flow of that name runs here.
        """
        return await self._verbs.start(
            flow, input, execution_id=execution_id, subject=subject, principal=principal
        )

    def handle(self, execution_id: str, flow: FlowDefinition[..., R] | None = None) -> Handle[R]:
        """A handle on an execution that was started elsewhere; ``flow`` types its result. Reads nothing yet."""
        return Handle(self._engine, execution_id, flow)

    @refused_as("send")
    async def send(
        self,
        execution_id: str,
        topic: str,
        payload: Any,
        *,
        message_id: str | None = None,
        sender: str | None = None,
        principal: Principal | None = None,
    ) -> str:
        """Put a message into the inbox of an execution's chain; when this returns it is durable. Returns its message id.

        The same ``message_id`` from the same ``sender`` is delivered once, however often it is sent.

        Raises:
            ExecutionDeniedError, ExecutionNotFoundError, ExecutionFinishedError: who may, and whether there is one.
            InboxMessageRefusedError: too large, or dressed as a sealed or erased payload.
            InboxFullError: the topic's backlog is at its cap.
        """
        return await self._verbs.send(
            execution_id, topic, payload, message_id=message_id, sender=sender, principal=principal
        )

    @refused_as("resume")
    async def resume(
        self,
        execution_id: str,
        gate: str,
        answer: Any = None,
        *,
        request_id: str | None = None,
        principal: Principal | None = None,
    ) -> None:
        """Answer a gate at which the execution waits; when this returns the answer is durable.

        With ``request_id`` a call that repeats one that succeeded succeeds, and answers nothing.

        Raises:
            GateNotOpenError: it does not wait there now. ExecutionFinishedError: it has ended.
        """
        await self._verbs.resume(execution_id, gate, answer, request_id=request_id, principal=principal)

    @refused_as("cancel")
    async def cancel(
        self, execution_id: str, reason: str | None = None, *, principal: Principal | None = None
    ) -> None:
        """Cancel an execution: terminal when this returns, whatever its steps are doing. Reaches its children.

        Raises:
            ExecutionFinishedError: it has ended already.
        """
        try:
            await self._verbs.cancel(execution_id, reason, principal=principal)
        except PayloadShreddedError:  # its log opens nowhere any more, and it can be ended all the same
            if not await self._erasure.cancel(execution_id, reason, principal):
                raise

    # Reading --------------------------------------------------------------------------------------------------------

    @refused_as("load_state")
    async def load_state(self, execution_id: str, *, principal: Principal | None = None) -> ExecutionState:
        """The state folded from the execution's log.

        Raises:
            ExecutionNotFoundError: there is none. ExecutionDeniedError: the caller may not.
        """
        return await self._queries.load_state(execution_id, principal)

    @refused_as("query")
    async def query(self, execution_id: str, *, principal: Principal | None = None) -> dict[str, Any]:
        """Where an execution stands, without payloads: workflow, status, head, waits, children."""
        return await self._queries.query(execution_id, principal)

    @refused_as("query")
    async def status(self, execution_id: str, *, principal: Principal | None = None) -> str:
        """``running``, ``suspended``, ``completed``, ``failed``, ``cancelled`` or ``continued``."""
        return await self._queries.status(execution_id, principal)

    @refused_as("load_state")
    async def history(self, execution_id: str, *, principal: Principal | None = None) -> list[Envelope]:
        """Every event of an execution's log, in order."""
        return await self._queries.history(execution_id, principal)

    @refused_while_reading_as("load_state")
    def follow(self, execution_id: str, *, principal: Principal | None = None) -> AsyncIterator[Envelope]:
        """Its events from the first on, live, through continue-as-new, until the end."""
        return self._queries.follow(execution_id, principal)

    @refused_as("load_state")
    async def parked_at_sequence(
        self, execution_id: str, *, principal: Principal | None = None
    ) -> int | None:
        """Sequence of the park at which it rests; None where it is not parked."""
        return await self._queries.parked_at_sequence(execution_id, principal)

    @refused_as("load_state")
    async def follow_to_head(self, execution_id: str, *, principal: Principal | None = None) -> str:
        """Id of the execution that its chain is at now."""
        return await self._queries.follow_to_head(execution_id, principal)

    # Operators ------------------------------------------------------------------------------------------------------

    @refused_as("record_outcome")
    async def record_outcome(
        self, execution_id: str, outcome: Any, *, principal: Principal | None = None
    ) -> None:
        """Note in a finished execution's log what became of it in the world."""
        await self._operators.record_outcome(execution_id, outcome, principal)

    @refused_as("acquire_fence")
    async def acquire_fence(self, execution_id: str, *, principal: Principal | None = None) -> int:
        """Take the execution from its driver, which stops at its next append; return the token."""
        return await self._operators.acquire_fence(execution_id, principal)

    @refused_as("fork")
    async def fork(
        self,
        execution_id: str,
        *,
        at_sequence: int | None = None,
        at_step: str | None = None,
        new_id: str | None = None,
        reason: str | None = None,
        principal: Principal | None = None,
    ) -> Handle[Any]:
        """Start an execution, in a chain of its own, whose log begins as this one's did.

        It shares the events through ``at_sequence``, or those before the step (or site) ``at_step``; by default all but
        the end. Its inbox begins empty, but for what is held there. ``reason`` is kept in its log.

        Raises:
            InboxQuarantineRefusedError: the copy of a held message is missing; nothing was written.
            InvalidInputError: there is no such place, or children are out at it.
        """
        return await self._operators.fork(
            execution_id,
            at_sequence=at_sequence,
            at_step=at_step,
            new_id=new_id,
            reason=reason,
            principal=principal,
        )

    @refused_as("recover")
    async def recover(
        self, execution_id: str, *, reason: str | None = None, principal: Principal | None = None
    ) -> bool:
        """Have the owner take over an execution on the caller's word, evidence or not.

        Returns False where it is parked: nobody drives a parked execution, so there is nothing to take over.

        Raises:
            ExecutionFinishedError: it has ended. WrongHeadError: its driver lives and keeps writing.
        """
        return await self._operators.recover(execution_id, reason, principal)

    async def rebuild_wakes(self, *, dry_run: bool = False) -> int:
        """Write the wake row of every open timer again, from the log; return how many there are.

        Of the shards that this process serves or, where it serves none, of all that its store can read.

        Raises:
            ConfigError: there is no wake store, or the store cannot list open executions from here.
        """
        return await rebuild_wakes(self._engine, dry_run=dry_run)
