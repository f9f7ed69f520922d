"""Reading executions whole: what verbs, takeovers and queries decide on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from loom.ids import inbox_stream
from loom.kernel.inbox import InboxMessage, load_waits, message_of, next_delivery, topics_of
from loom.kernel.state import ExecutionState, fold
from loom.runtime.feeds import MAX_UNREAD
from loom.runtime.holds import held_error, read_waited
from loom.schemas.envelope import TERMINAL_KINDS, Envelope, Kind
from loom.stores.rows import SIDE_KINDS

if TYPE_CHECKING:
    from loom.runtime.engine import Engine
    from loom.stores.contracts import Observation, StreamInfo

PAGE: Final = 1_000


@dataclass(frozen=True, slots=True)
class Loaded:
    """An execution as read: what it was observed to be, all its events, the state they fold to."""

    observation: Observation
    history: list[Envelope]
    state: ExecutionState


class Reading:
    """Reads on behalf of one node."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def load(self, execution_id: str) -> Loaded | None:
        """Read an execution whole; None where there is none."""
        events = self._engine.events
        # Side by side, for each may cost a round trip; what the page has beyond the observation is left out.
        observation, page = await asyncio.gather(
            events.observe(execution_id), events.read(execution_id, 0, PAGE)
        )
        if observation.head < 0:
            return None
        history = await self._read_on(execution_id, page, observation.head)
        state = ExecutionState(answers=None)
        for envelope in history:
            fold(state, envelope)
        return Loaded(observation, history, state)

    async def read_all(self, stream_id: str, head: int) -> list[Envelope]:
        """Every event of a log up to ``head``, page by page."""
        return await self._read_on(stream_id, [], head)

    async def assert_readable(self, info: StreamInfo | None) -> None:
        """Refuse a log that this node cannot open; one that bears the marker is read whole, any other not at all.

        Raises:
            SealedStreamUnreadableError, PayloadShreddedError: as the store's guarded read.
        """
        if info is not None and info.sealed:
            await self._engine.patiently(lambda: self.read_all(info.stream_id, info.head), info.stream_id)

    async def assert_opens(self, execution_id: str) -> StreamInfo | None:
        """As ``assert_readable``, of a log by its id; return what is known of it, None where there is none."""
        engine = self._engine
        info = await engine.patiently(lambda: engine.events.info(execution_id), execution_id)
        await self.assert_readable(info)
        return info

    async def _read_on(self, stream_id: str, page: list[Envelope], head: int) -> list[Envelope]:
        history = [e for e in page if e.sequence <= head]
        while not history or history[-1].sequence < head:
            start = history[-1].sequence + 1 if history else 0
            page = await self._engine.events.read(stream_id, start, PAGE)
            if not page:
                break
            history.extend(e for e in page if e.sequence <= head)
        return history

    async def head_of(self, execution_id: str) -> str:
        """The execution that a chain is at now: follow successors."""
        return (await self._path(execution_id))[-1]

    async def current(self, execution_id: str) -> str:
        """As ``head_of``, for a verb: patient with a store that does not answer at once, and every log passed is judged.

        Raises:
            SealedStreamUnreadableError, PayloadShreddedError: one that was passed cannot be opened here. Of the head no more
                than its last event is judged.
        """
        path = await self._engine.patiently(lambda: self._path(execution_id), execution_id)
        for passed in path[:-1]:
            await self.assert_opens(passed)
        return path[-1]

    async def _path(self, execution_id: str) -> list[str]:
        """The executions from one to its chain's head, by the end of each log."""
        path = [execution_id]
        while path[-1] not in self._engine.runs:
            current = path[-1]
            last = await self._engine.events.read_last(current)
            if last is None or last.type not in TERMINAL_KINDS | SIDE_KINDS:
                break
            if last.type == Kind.EXECUTION_CONTINUED:
                path.append(str(last.data["successorId"]))
                continue
            successor = await self._successor(current) if last.type in SIDE_KINDS else None
            if successor is None:
                break
            path.append(successor)
        return path

    async def _successor(self, execution_id: str) -> str | None:
        """Successor of an execution whose log ends with control records."""
        info = await self._engine.events.info(execution_id)
        if info is None or info.status != Kind.EXECUTION_CONTINUED:
            return None
        for envelope in reversed(
            await self._engine.events.read(execution_id, max(0, info.head - PAGE), PAGE + 1)
        ):
            if envelope.type == Kind.EXECUTION_CONTINUED:
                return str(envelope.data["successorId"])
        return None

    async def unread(self, state: ExecutionState) -> dict[str, list[InboxMessage]]:
        """The messages next to be read on the topics that a parked execution waits for."""
        engine = self._engine
        heads = engine.inbox_heads(state.chain_id) if engine.owns(state.chain_id) else None
        starts = {topic: state.cursors.get(topic, -1) + 1 for topic in topics_of(load_waits(state.waits))}
        if heads is not None:
            starts = {
                topic: start
                for topic, start in starts.items()
                if heads.get(inbox_stream(state.chain_id, topic), -1) >= start
            }
        found = await asyncio.gather(
            *(
                engine.events.read(inbox_stream(state.chain_id, topic), start, MAX_UNREAD)
                for topic, start in starts.items()
            )
        )
        return {
            topic: [message_of(e) for e in page if e.sequence >= starts[topic]]
            for topic, page in zip(starts, found, strict=True)
        }

    async def answerable(self, state: ExecutionState) -> dict[str, list[InboxMessage]] | None:
        """The unread messages of a parked execution, where a wait could be answered now; None where none could.

        Judged before a fence is taken (clauses.md, "Guard and refusal").

        Raises:
            SealedPayloadUnreadableError, PayloadShreddedError: what comes next cannot be opened here.
            QuarantineHeldError: nothing can be delivered but what is held.
        """
        engine = self._engine
        unread = await self.unread(state)
        plan = next_delivery(
            state,
            load_waits(state.waits),
            unread,
            now_ms=engine.now(),
            ttl_ms=engine.config.inbox_message_ttl_ms,
            erased=state.subject if state.subject in state.shredded else None,
            held=await read_waited(engine, state),
            auto_release=engine.config.inbox_auto_release,
        )
        if plan.delivery is not None or plan.disposals:
            return unread
        if plan.skipped:
            raise held_error(state.execution_id, plan.skipped)
        return None

    async def moved(self, loaded: Loaded | None) -> bool:
        """Whether a log went on since it was read."""
        if loaded is None:
            return False
        return await self._engine.events.observe(loaded.state.execution_id) != loaded.observation
