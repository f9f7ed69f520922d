"""The inbox from outside: what waits in it, and passing over what shall not be delivered. Each fact says who and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from loom.errors import InboxDiscardRefusedError, WrongHeadError
from loom.ids import RESERVED_PREFIX, inbox_stream, inbox_topic
from loom.kernel.inbox import (
    DISCARDED,
    EXPIRED,
    Disposal,
    InboxMessage,
    load_waits,
    message_of,
    topics_of,
)
from loom.kernel.quarantine import MAX_TEXT, holds_key
from loom.runtime import facts
from loom.runtime.held_view import held_rows
from loom.schemas.envelope import Kind, NewEvent
from loom.stores.contracts import StreamAppend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loom.kernel.state import ExecutionState
    from loom.runtime.access import Principal
    from loom.runtime.engine import Engine
    from loom.runtime.verbs import Verbs
    from loom.schemas.envelope import Json

    Pick = Callable[[ExecutionState, Sequence[InboxMessage]], list[Disposal]]

PAGE: Final = 500
MAX_RACES: Final = 8


class InboxVerbs:
    """See :class:`loom.runtime.inbox_client.InboxClient` for what each means to a caller."""

    def __init__(self, engine: Engine, verbs: Verbs) -> None:
        self._engine = engine
        self._verbs = verbs

    async def notify(self, execution_id: str, principal: Principal | None) -> bool:
        """Look whether the chain's parked execution can go on, here and now."""
        await self._verbs.judged("notify", execution_id, principal)
        driving = self._engine.driving
        return await driving.notify(await driving.current(execution_id))

    async def rows(self, execution_id: str, principal: Principal | None) -> list[dict[str, Json]]:
        """Messages that are held, and those that wait, in the inbox of an execution's chain, without their payloads."""
        await self._verbs.judged("query", execution_id, principal)
        engine = self._engine
        loaded = await self._verbs.loaded(await engine.driving.current(execution_id))
        state = loaded.state
        waited = topics_of(load_waits(state.waits))
        known = (inbox_topic(stream_id) for stream_id in engine.inbox_heads(state.chain_id))
        topics = dict.fromkeys([*waited, *state.cursors, *(topic for topic in known if topic is not None)])
        rows: list[dict[str, Json]] = await held_rows(engine, loaded)
        for topic in (t for t in topics if not t.startswith(RESERVED_PREFIX)):
            start = state.cursors.get(topic, -1) + 1
            for envelope in await engine.events.read(inbox_stream(state.chain_id, topic), start, PAGE):
                if envelope.sequence < start:
                    continue
                message = message_of(envelope)
                row: dict[str, Json] = {
                    "topic": topic,
                    "inbox_seq": message.sequence,
                    "message_id": message.message_id,
                    "sender": message.sender,
                    "age_ms": max(0, engine.now() - message.timestamp),
                    "state": "behind a hold" if topic in state.quarantined else "waiting",
                }
                rows.append(row)
        return rows

    async def discard(
        self,
        execution_id: str,
        topic: str,
        *,
        message_id: str | None,
        reason: str | None,
        principal: Principal | None,
    ) -> int:
        """Discard the next message of a topic (or the one named), unread; return how many were."""
        await self._verbs.judged("discard", execution_id, principal)

        def pick(state: ExecutionState, messages: Sequence[InboxMessage]) -> list[Disposal]:
            if not messages:
                return []
            if message_id is not None and message_id not in {messages[0].message_id, messages[0].key}:
                raise InboxDiscardRefusedError(execution_id, topic, "invalid")
            if holds_key(state, messages[0].key):
                # With its key in the window the held message would be dropped as delivered.
                raise InboxDiscardRefusedError(execution_id, topic, "invalid")
            return [Disposal(messages[0], DISCARDED)]

        return await self._dispose(execution_id, topic, pick, reason, principal)

    async def expire(
        self,
        execution_id: str,
        topic: str,
        *,
        older_than_ms: int,
        reason: str | None,
        principal: Principal | None,
    ) -> int:
        """Pass over the messages at the head of a topic that have waited too long; return how many."""
        await self._verbs.judged("expire", execution_id, principal)
        limit = self._engine.now() - older_than_ms

        def pick(state: ExecutionState, messages: Sequence[InboxMessage]) -> list[Disposal]:
            old: list[Disposal] = []
            for message in messages:
                if message.timestamp > limit or holds_key(state, message.key):
                    break
                old.append(Disposal(message, EXPIRED))
            return old

        return await self._dispose(execution_id, topic, pick, reason, principal)

    async def _dispose(
        self, execution_id: str, topic: str, pick: Pick, why: str | None, principal: Principal | None
    ) -> int:
        engine = self._engine
        by = None if principal is None else principal.actor
        for _ in range(MAX_RACES):
            current = await engine.driving.current(execution_id)
            run = engine.runs.get(current)
            if run is not None:
                if not run.evictable():
                    raise InboxDiscardRefusedError(execution_id, topic, "not-parked")
                engine.drop(run)  # the facts go into the log under an observation, as from any other node
            loaded = await self._verbs.loaded(current)
            if loaded.state.status != "suspended":
                raise InboxDiscardRefusedError(execution_id, topic, "not-parked")
            stream_id = inbox_stream(loaded.state.chain_id, topic)
            start = loaded.state.cursors.get(topic, -1) + 1
            read = await engine.patiently(
                lambda stream_id=stream_id, start=start: engine.events.read(stream_id, start, PAGE),  # type: ignore[misc]
                stream_id,
            )
            disposals = pick(loaded.state, [message_of(e) for e in read if e.sequence >= start])
            if not disposals:
                return 0
            append = StreamAppend(
                current,
                tuple(self._consumed(d, why, by) for d in disposals),
                observation=loaded.observation,
                consumed=tuple((stream_id, d.message.sequence) for d in disposals),
            )
            try:
                await engine.patiently(lambda append=append: engine.events.append(append), current)  # type: ignore[misc]
            except WrongHeadError:
                continue
            return len(disposals)
        raise InboxDiscardRefusedError(execution_id, topic, "contended")

    def _consumed(self, disposal: Disposal, why: str | None, by: str | None) -> NewEvent:
        data = disposal.data()
        if why is not None:
            data["note"] = why[:MAX_TEXT]
        return NewEvent(self._engine.event_id(), Kind.MESSAGE_CONSUMED, data, facts.stamp(by))
