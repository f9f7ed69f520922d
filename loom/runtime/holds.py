"""What a node does about held topics: it reads the copies, says what they wait for, and frees those that may go.

The rule of delivery is the kernel's (``next_delivery``); here is what it needs to know (system.md 4.3 and 4.7).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from loom.errors import LoomError, QuarantineHeldError
from loom.ids import quarantine_stream
from loom.kernel.inbox import InboxMessage, Skipped, held_message, load_waits, topics_of
from loom.kernel.quarantine import Copy, Entry, first_entry, oldest_pinned, read_copy
from loom.kernel.state import ExecutionState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from loom.kernel.inbox import Held
    from loom.runtime.engine import Engine
    from loom.runtime.run import Run
    from loom.schemas.envelope import Envelope

PAGE: Final = 500
MAX_COPIES: Final = 4_096
"""Copies looked at in one pass; ``quarantine_max`` keeps them far fewer."""


async def read_held(engine: Engine, state: ExecutionState, topic: str) -> InboxMessage | None:
    """The copy of the message that a topic's queue starts with, as this node reads it; None where it is not there."""
    entry = first_entry(state, topic)
    return None if entry is None else await read_entry(engine, state.chain_id, topic, entry)


async def read_entry(
    engine: Engine, chain_id: str, topic: str, entry: Entry, *, at_rest: bool = False
) -> InboxMessage | None:
    """The copy that an entry means, if it stands where the entry says and is that message's (clauses.md, point 11).

    ``at_rest`` reads it as it is stored, for its id alone: no key is asked for.
    """
    place, stream_id = int(entry["heldAt"]), quarantine_stream(chain_id)
    if at_rest:
        found = await engine.events.quarantine_view().stored(stream_id, place, 1)
    else:
        found = await engine.events.read(stream_id, place, 1)
    for envelope in found:
        copy = read_copy(envelope)
        if copy is not None and copy.held_at == place and copy.is_of(topic, entry):
            return held_message(chain_id, topic, copy.inbox_seq, envelope)
    return None


async def read_waited(engine: Engine, state: ExecutionState) -> dict[str, InboxMessage | None]:
    """The copies that a parked execution's held topics start with."""
    return {topic: await read_held(engine, state, topic) for topic in held_topics(state)}


def held_topics(state: ExecutionState) -> list[str]:
    """The held topics that a parked execution waits for."""
    if not state.quarantined:
        return []
    return [topic for topic in topics_of(load_waits(state.waits)) if topic in state.quarantined]


def held_back(execution_id: str) -> str:
    """Name under which the back-off of a held execution is kept: its other topics are not slowed by it."""
    return f"held:{execution_id}"


def held_error(execution_id: str, skipped: Sequence[Skipped]) -> QuarantineHeldError:
    """What is told of a pass that found nothing but held topics."""
    first = skipped[0]
    return QuarantineHeldError(execution_id, first.message_id, first.topic, first.inbox_seq, first.awaits)


class Holds:
    """The held topics of one run."""

    __slots__ = ("_known", "_reading", "_run", "skipped")

    def __init__(self, run: Run) -> None:
        self._run = run
        self._known: dict[str, tuple[int, InboxMessage | None]] = {}
        self._reading = False
        self.skipped: tuple[Skipped, ...] = ()
        """What the last look passed over."""

    @property
    def reading(self) -> bool:
        """Whether copies are being read just now."""
        return self._reading

    def ready(self, topics: Iterable[str]) -> Held | None:
        """The copies that these topics' queues start with; None while they are being read."""
        state = self._run.state
        wanted = {t: int(state.quarantined[t][0]["heldAt"]) for t in topics if t in state.quarantined}
        missing = [t for t, place in wanted.items() if self._known.get(t, (0, None))[0] != place]
        if not missing:
            return {topic: self._known[topic][1] for topic in wanted}
        if not self._reading:
            self._reading = True
            self._run.engine.spawn(self._read(self._run, missing), self._run.id)
        return None

    def passed(self, skipped: tuple[Skipped, ...], *, parked: bool) -> None:
        """Nothing else could be delivered: tell it once the flow is parked, and read anew next time."""
        self.skipped = skipped
        for topic in skipped:
            self._known.pop(topic.topic, None)  # the key may come
        if skipped and parked:
            self._run.engine.held(self._run.id, held_error(self._run.id, skipped))

    def forget(self) -> None:
        """Read every copy anew."""
        self._known.clear()

    def freed(self) -> None:
        """Free the copies that nothing needs any more, by what is durable: a state that runs ahead would free too much."""
        run = self._run
        run.journal.when_durable(lambda: self._free(run))

    def _free(self, run: Run) -> None:
        if run.journal.behind:
            run.journal.when_durable(lambda: self._free(run))
            return
        state = run.state
        durable = ExecutionState(
            chain_id=state.chain_id,
            status=state.status,
            cursors=dict(state.cursors),
            quarantined=dict(state.quarantined),
            copied_through=state.copied_through,
        )
        run.engine.spawn(trim_copies(run.engine, durable), run.id)

    def detach(self) -> None:
        """Forget the run: it is gone."""
        del self._run

    async def _read(self, run: Run, topics: list[str]) -> None:
        engine = run.engine
        try:
            for topic in topics:
                entry = first_entry(run.state, topic)
                if entry is not None:
                    copy = await read_entry(engine, run.chain_id, topic, entry)
                    self._known[topic] = (int(entry["heldAt"]), copy)
        except LoomError as error:
            self._reading = False
            engine.signals.repeated_storage_error(error, run.id)
            engine.later(engine.retry_ms, run.look)
            return
        self._reading = False
        run.look()


async def stored_copies(engine: Engine, chain_id: str) -> list[tuple[Copy, Envelope]]:
    """The copies that a chain keeps, oldest first, as they are stored: no key is asked for."""
    view, stream_id = engine.events.quarantine_view(), quarantine_stream(chain_id)
    found: list[tuple[Copy, Envelope]] = []
    start = 1
    while len(found) < MAX_COPIES and (page := await view.stored(stream_id, start, PAGE)):
        found += [(copy, e) for e in page if (copy := read_copy(e)) is not None]
        start = page[-1].sequence + 1
    return found


async def trim_copies(engine: Engine, state: ExecutionState) -> int:
    """Delete the copies before the first that must be kept; all of them once the chain has ended. Return how many stay.

    ``state`` may be older than the log: then only more is kept (system.md 4.7).
    """
    copies = [copy for copy, _ in await stored_copies(engine, state.chain_id)]
    if not copies:
        return 0
    ended = state.finished and state.status != "continued"
    pinned = None if ended else oldest_pinned(state, copies)
    before = copies[-1].held_at + 1 if pinned is None else pinned
    if before > copies[0].held_at:
        stream_id = quarantine_stream(state.chain_id)
        await engine.patiently(lambda: engine.events.truncate(stream_id, before), stream_id)
    return sum(copy.held_at >= before for copy in copies)
