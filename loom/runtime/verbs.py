"""The verbs that start, message, answer and cancel executions. Every one is an append with a guard (docs/adr/0001)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from loom.errors import (
    ExecutionAlreadyExistsError,
    ExecutionDeniedError,
    ExecutionFinishedError,
    ExecutionNotFoundError,
    InboxMessageRefusedError,
    InvalidInputError,
    LoomError,
    SealedStreamUnreadableError,
    StaleFenceError,
    UnknownFlowError,
    WrongHeadError,
)
from loom.ids import RESERVED_PREFIX, check_execution_id, dedupe_key, inbox_stream
from loom.kernel.flow import FlowDefinition
from loom.kernel.guard import check_ingest
from loom.kernel.readable import assert_person_readable
from loom.kernel.values import dump_json
from loom.runtime import endings, facts
from loom.runtime.answers import MAX_RACES, Answer, Answers, pause
from loom.runtime.claims import claim_start
from loom.runtime.drivers import NEVER, fence_owner
from loom.runtime.handle import Handle, status_of
from loom.runtime.holds import trim_copies
from loom.runtime.journal import JournalLatched
from loom.runtime.patience import append_patiently
from loom.runtime.sending import Sending
from loom.runtime.sizes import json_size
from loom.schemas.envelope import TERMINAL_KINDS, Envelope, Json, Kind, NewEvent
from loom.stores.contracts import NO_EVENTS, Appended, StreamAppend
from loom.stores.rows import RECENT_IDS

if TYPE_CHECKING:
    from loom.kernel.state import ExecutionState
    from loom.runtime.access import Gatekeeper, Principal
    from loom.runtime.engine import Engine
    from loom.runtime.reading import Loaded

R = TypeVar("R")

FENCE_AFTER: Final = 3
"""Lost races after which a cancel takes the fence, so that no busy flow can outrun it."""

ENDINGS: Final = TERMINAL_KINDS - {Kind.EXECUTION_CONTINUED}
JOURNALED_DENIALS: Final = frozenset({"resume", "cancel"})


class Verbs:
    """Verbs on one node; the runtime and the client give them to callers."""

    def __init__(self, engine: Engine, gate: Gatekeeper) -> None:
        self._engine = engine
        self._gate = gate
        self._sending = Sending(engine)

    # Judging --------------------------------------------------------------------------------------------------------

    async def judged(self, op: str, execution_id: str, principal: Principal | None) -> Envelope:
        """The first event of an execution on which the caller may do ``op``.

        Raises:
            ExecutionDeniedError, ExecutionNotFoundError: as the gatekeeper says.
        """
        await self._gate.before_reading(op, execution_id, principal)
        return await self._judged(op, execution_id, principal)

    async def _judged(self, op: str, execution_id: str, principal: Principal | None) -> Envelope:
        engine = self._engine
        first = await engine.patiently(lambda: engine.first_of(execution_id), execution_id)
        try:
            await self._gate.judge(op, execution_id, first, principal)
        except SealedStreamUnreadableError:
            raise  # it is a denial too, and writes nothing
        except ExecutionDeniedError as denied:
            if op in JOURNALED_DENIALS and first is not None:
                await self._journal_denial(op, execution_id, denied.reason, principal)
            raise
        if first is None:
            raise ExecutionNotFoundError(execution_id)
        return first

    async def _journal_denial(
        self, op: str, execution_id: str, reason: str, principal: Principal | None
    ) -> None:
        """Best effort: one try, and what comes of it changes nothing for the caller."""
        engine = self._engine
        actor = None if principal is None else principal.actor
        data: dict[str, Json] = {"op": op, "reason": reason}
        if actor is not None:
            data["actor"] = actor
        event = NewEvent(engine.event_id(), Kind.EXECUTION_DENIED, data, facts.stamp(actor))
        try:
            seen = await engine.events.observe(execution_id)
            await engine.events.append(StreamAppend(execution_id, (event,), observation=seen))
        except LoomError as error:
            engine.signals.repeated_storage_error(error, execution_id)

    def json_of(self, value: Any, what: str) -> Json:
        """A caller's value as JSON within the limit.

        Raises:
            InvalidInputError: it has no JSON form, or is too large.
        """
        data = dump_json(value, what)
        return self.within(data, what)

    def within(self, data: Json, what: str) -> Json:
        """A JSON value, if it is within the limit."""
        weight, limit = json_size(data), self._engine.config.max_payload_bytes
        if weight > limit:
            raise InvalidInputError(
                what, f"{weight} bytes exceed {limit}", "send a reference, or raise max_payload_bytes"
            )
        return data

    # Start ----------------------------------------------------------------------------------------------------------

    async def start(
        self,
        flow: FlowDefinition[..., R] | str,
        given: Any,
        *,
        execution_id: str | None,
        subject: str | None,
        principal: Principal | None,
    ) -> Handle[R]:
        """See :meth:`loom.runtime.client.Client.start`."""
        engine = self._engine
        definition = self._definition(flow)
        workflow = flow if isinstance(flow, str) else flow.name
        if definition is None:
            await self._assert_runs_somewhere(workflow)
        what = f"input of flow {workflow!r}"
        data = self.within(
            dump_json(given, what) if definition is None else definition.accept_input(given), what
        )
        if execution_id is None:
            execution_id, owned = engine.mint()
        else:
            owned = engine.owns(check_execution_id(execution_id))
        drives = owned and definition is not None and engine.live()
        actor = None if principal is None else principal.actor
        fact = facts.started(
            workflow,
            data,
            chain_id=execution_id,
            subject=subject,
            principal=None if principal is None else principal.to_json(),
        )
        metadata = engine.stamp if drives else facts.STAMP
        if actor is not None:
            metadata = metadata | {"actor": actor}
        event = NewEvent(engine.event_id(), Kind.EXECUTION_STARTED, fact, metadata)
        future = engine.waiters.of(execution_id)
        append = StreamAppend(execution_id, (event,), expected_head=NO_EVENTS, fence=facts.FIRST_FENCE)
        if not drives:
            await self._append_start(append)
            return Handle(engine, execution_id, definition, future)
        claim = await claim_start(engine, execution_id)
        engine.starting.add(execution_id)
        try:
            done = await self._append_start(append)
            engine.driving.begin(
                Envelope(event.id, execution_id, 0, event.type, done.timestamp, fact, metadata), claim
            )
        except ExecutionAlreadyExistsError:
            raise
        except BaseException:
            engine.driving.abandoned(execution_id)  # it may stand in the log all the same, as ours to drive
            raise
        finally:
            engine.starting.discard(execution_id)
            if claim is not None and claim.lease is not None:
                engine.leave(claim)
        return Handle(engine, execution_id, definition, future)

    async def _append_start(self, append: StreamAppend) -> Appended:
        try:
            return (await append_patiently(self._engine, (append,), append.stream_id))[0]
        except (WrongHeadError, StaleFenceError):  # what stands there may have been taken over since
            raise ExecutionAlreadyExistsError(append.stream_id) from None

    def _definition(self, flow: FlowDefinition[..., R] | str) -> FlowDefinition[..., R] | None:
        engine = self._engine
        if isinstance(flow, FlowDefinition):
            if engine.drives:
                engine.flows.add(flow)
            return flow
        if flow in engine.flows:
            return engine.flows.get(flow)
        if engine.drives:
            raise UnknownFlowError(flow, engine.flows.names)
        return None

    async def check_flow(self, flow: FlowDefinition[..., Any] | str) -> None:
        """Refuse a flow that runs nowhere; one that is given itself, this node drives from now on.

        Raises:
            UnknownFlowError: no flow of that name runs here, or on any live node.
        """
        if self._definition(flow) is None and isinstance(flow, str):
            await self._assert_runs_somewhere(flow)

    async def _assert_runs_somewhere(self, workflow: str) -> None:
        """Refuse a name that no live node announces. Where none lives, the start waits for one that does."""
        leases = self._engine.leases
        if leases is None:
            return
        live = [row.details.get("flows", ()) for row in await leases.present() if not row.expired]
        known = {str(name) for flows in live for name in flows}
        if live and workflow not in known:
            raise UnknownFlowError(workflow, tuple(known))

    # Send -----------------------------------------------------------------------------------------------------------

    async def send(
        self,
        execution_id: str,
        topic: str,
        payload: Any,
        *,
        message_id: str | None,
        sender: str | None,
        principal: Principal | None,
    ) -> str:
        """See :meth:`loom.runtime.client.Client.send`."""
        engine = self._engine
        await self._gate.before_reading("send", execution_id, principal)
        # Where both are asked of another node they are asked at once; the verdict comes first all the same.
        ending = engine.loop.create_task(self._ending_of(execution_id))
        try:
            first = await self._judged("send", execution_id, principal)
            data = self._message(execution_id, topic, payload)
            ended = await ending
        finally:
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)
        chain_id = str(first.data.get("chainId") or execution_id)
        given = message_id or engine.ids()
        event = facts.message(
            topic,
            data,
            message_id=given,
            sender=sender,
            event_id=dedupe_key(sender, given),
            metadata=facts.stamp(None if principal is None else principal.actor),
        )
        stream_id = inbox_stream(chain_id, topic)
        if ended is not None:
            if message_id is not None and await self._was_sent(stream_id, event.id):
                return given  # a sender that repeats itself is told what it was told, or would have been
            raise ExecutionFinishedError("send to", execution_id, status_of(ended))
        append = StreamAppend(stream_id, (event,), backlog_cap=engine.config.inbox_max_backlog)
        await self._sending.put(execution_id, chain_id, append)
        return given

    def _message(self, execution_id: str, topic: str, payload: Any) -> Json:
        """What is to be sent, as JSON."""
        if not topic or topic.startswith(RESERVED_PREFIX):
            raise InboxMessageRefusedError(
                execution_id, topic, "the topic is empty or reserved", "choose another topic"
            )
        data = dump_json(payload, f"message for topic {topic[:64]!r}")
        weight, limit = json_size(data), self._engine.config.inbox_max_payload_bytes
        if weight > limit:
            raise InboxMessageRefusedError(
                execution_id, topic, f"{weight} bytes exceed {limit}", "send a smaller one, or a reference"
            )
        check_ingest(execution_id, topic, data)
        return data

    async def _ending_of(self, execution_id: str) -> str | None:
        """How an execution, or what continues it, has ended; None where it goes on."""
        engine = self._engine
        if execution_id in engine.runs:
            return None
        head, info = await asyncio.gather(
            engine.driving.current(execution_id),
            engine.patiently(lambda: engine.events.info(execution_id), execution_id),
        )
        if head != execution_id:
            info = await engine.patiently(lambda: engine.events.info(head), head)
        await engine.driving.assert_readable(info)
        # One that continues meanwhile has an heir.
        return info.status if info is not None and info.status in ENDINGS else None

    async def _was_sent(self, stream_id: str, event_id: str) -> bool:
        """Whether a message stands in an inbox stream, as far back as the store tells repeats."""
        events = self._engine.events
        seen = await events.observe(stream_id)
        recent = await events.read(stream_id, max(0, seen.head + 1 - RECENT_IDS), RECENT_IDS)
        return any(event.id == event_id for event in recent)

    # Resume ---------------------------------------------------------------------------------------------------------

    async def resume(
        self,
        execution_id: str,
        gate: str,
        answer: Any,
        *,
        request_id: str | None = None,
        principal: Principal | None,
    ) -> None:
        """See :meth:`loom.runtime.client.Client.resume`."""
        await self.judged("resume", execution_id, principal)
        data = self.json_of(answer, f"answer at gate {gate[:64]!r}")
        by = None if principal is None else principal.actor
        await Answers(self._engine, self.loaded).give(execution_id, Answer(gate, data, by, request_id))

    # Cancel ---------------------------------------------------------------------------------------------------------

    async def cancel(self, execution_id: str, reason: str | None, *, principal: Principal | None) -> None:
        """See :meth:`loom.runtime.client.Client.cancel`."""
        await self.judged("cancel", execution_id, principal)
        await self._cancel(execution_id, reason, None if principal is None else principal.actor)

    async def cancel_by_request(self, chain_id: str, payload: Json) -> None:
        """A parent's cancellation reached this chain; one that has ended meanwhile is none of its business."""
        given = payload.get("reason") if isinstance(payload, Mapping) else None
        try:
            await self._cancel(chain_id, given if isinstance(given, str) else None, None)
        except (ExecutionFinishedError, ExecutionNotFoundError):
            return

    async def _cancel(self, execution_id: str, reason: str | None, by: str | None) -> None:
        engine = self._engine
        for race in range(MAX_RACES):
            current = await engine.driving.current(execution_id)
            run = engine.runs.get(current)
            if run is not None and run.active:
                try:
                    await run.perform(partial(endings.cancel, run, reason, by))
                except JournalLatched:
                    continue
                return
            loaded = await self.loaded(current)
            if loaded.state.finished:
                if loaded.state.status == "continued":
                    continue
                raise ExecutionFinishedError("cancel", execution_id, loaded.state.status)
            if await self._cancel_in_log(loaded, reason, by, fenced=race >= FENCE_AFTER):
                return
            await pause(self._engine.surroundings.draw)
        raise WrongHeadError(execution_id, NO_EVENTS, NO_EVENTS)

    async def _cancel_in_log(
        self, loaded: Loaded, reason: str | None, by: str | None, *, fenced: bool
    ) -> bool:
        engine, state, seen = self._engine, loaded.state, loaded.observation
        if fenced:
            await engine.patiently(
                lambda: engine.events.acquire_fence(
                    state.execution_id, fence_owner(engine.node, NEVER, engine.event_id())
                ),
                state.execution_id,
            )
            loaded = await self.loaded(state.execution_id)
            state, seen = loaded.state, loaded.observation
            if state.finished:
                return False
        told = facts.cancel_children(state, reason) + facts.child_end(
            facts.info_of(state), endings.cancelled_payload(reason)
        )
        event = NewEvent(
            engine.event_id(), Kind.EXECUTION_CANCELLED, endings.cancelled_data(reason, by), facts.stamp(by)
        )
        append = StreamAppend(state.execution_id, (event,), observation=seen, outgoing=told)
        try:
            await engine.patiently(lambda: engine.events.append(append), state.execution_id)
        except WrongHeadError:
            return False
        await self._clear_rows(state)
        if state.held_once:
            await trim_copies(engine, replace(state, status="cancelled"))
        return True

    async def _clear_rows(self, state: ExecutionState) -> None:
        engine = self._engine
        if engine.wakes is not None and engine.driving.timers_of(state):
            engine.spawn(engine.wakes.clear(state.execution_id), state.execution_id)

    async def readable(self, execution_id: str) -> None:
        """Read a log whole, for a verb that uses nothing of it but must not act where it cannot be opened.

        Raises:
            SealedStreamUnreadableError: it cannot. ExecutionNotFoundError: there is none.
        """
        await self.loaded(execution_id)

    async def persons_readable(self, op: str, execution_id: str, principal: Principal | None) -> None:
        """As ``readable``; and where the call is judged, nobody in the log may be named by a ciphertext."""
        loaded = await self.loaded(execution_id)
        if not self._gate.granted(op, principal):
            for envelope in loaded.history:
                assert_person_readable(envelope, op=op)

    async def loaded(self, execution_id: str) -> Loaded:
        """An execution as read now.

        Raises:
            ExecutionNotFoundError: there is none.
        """
        engine = self._engine
        loaded = await engine.patiently(lambda: engine.driving.load(execution_id), execution_id)
        if loaded is None:
            raise ExecutionNotFoundError(execution_id)
        return loaded
