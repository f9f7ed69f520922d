"""Holding a topic at its head, and letting it go: the verbs of operators (system.md 4; seed, D9).

Copy and fact are one transaction under what was observed of the owner's log. Who is second reads again and is told what
stands; nothing is held, released or delivered twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from loom.errors import (
    InboxQuarantineRefusedError,
    InvalidInputError,
    SealedPayloadUnreadableError,
    StoreError,
    WrongHeadError,
)
from loom.ids import dedupe_key, inbox_stream, quarantine_stream
from loom.kernel.guard import Verdict, assert_deliverable, inspect_payload
from loom.kernel.inbox import DUPLICATE, Disposal, InboxMessage, message_of
from loom.kernel.quarantine import (
    DELIVER,
    DISCARD,
    DISPOSITIONS,
    HELD,
    MAX_TEXT,
    QUARANTINE_FOLD_CAP,
    Entry,
    anchor_event,
    copy_event,
    first_entry,
    held_data,
    held_total,
    holds_key,
    oldest_pinned,
    released_data,
)
from loom.kernel.stale import is_stale
from loom.kernel.state import ExecutionState, fold
from loom.runtime import facts
from loom.runtime.driving import INBOX_ROW_AT
from loom.runtime.holds import read_entry, stored_copies, trim_copies
from loom.runtime.owner_reads import Owner, OwnerReads
from loom.schemas.envelope import Envelope, Kind, NewEvent
from loom.stores.contracts import NO_EVENTS, StreamAppend, WakeRow

if TYPE_CHECKING:
    from loom.kernel.quarantine import Copy
    from loom.runtime.access import Principal
    from loom.runtime.engine import Engine
    from loom.runtime.verbs import Verbs
    from loom.schemas.envelope import Json

PAGE: Final = 500
MAX_RACES: Final = 16
SEARCH_CHUNK: Final = 64
SEARCH_BUDGET: Final = 4_096
"""Events looked at for the fact of a release that is asked for again (system.md 4.5)."""


Refuse = partial[InboxQuarantineRefusedError]


@dataclass(frozen=True, slots=True)
class HeldMessage:
    """A message that is held: its raw id, where it stood in its topic's stream, where its copy stands.

    ``changed`` tells whether this very call held it, or found it held.
    """

    message_id: str
    inbox_seq: int
    held_at: int
    changed: bool = True


class Quarantine:
    """See :class:`loom.runtime.inbox_client.InboxClient` for what each verb means to a caller."""

    def __init__(self, engine: Engine, verbs: Verbs) -> None:
        self._engine = engine
        self._verbs = verbs
        self._owner_reads = OwnerReads(engine)

    # Holding --------------------------------------------------------------------------------------------------------

    async def hold(
        self,
        execution_id: str,
        topic: str,
        *,
        message_id: str | None,
        reason: str | None,
        principal: Principal | None,
        dry_run: bool = False,
    ) -> HeldMessage:
        """Hold the head of a topic."""
        await self._verbs.judged("quarantine", execution_id, principal)
        facts.check_reason(reason)
        refuse = partial(_refusal, execution_id, topic, "quarantine")
        for _ in range(MAX_RACES):
            owner = await self._owner(execution_id)
            if message_id is not None:
                found = await self._held_already(owner.state, topic, message_id)
                if found is not None:
                    return found
            if owner.state.status != "suspended":
                raise refuse("not-parked", "it does not wait now")
            passed, head = await self._head(owner.state, topic)
            if head is None:
                raise refuse("invalid", "no message waits on the topic")
            if message_id is not None and message_id not in {head.message_id, head.key}:
                raise refuse("invalid", "another message is at the head of the topic")
            if holds_key(owner.state, head.key):
                raise refuse("invalid", "a message of this id is held already; this repeat waits behind it")
            if held_total(owner.state) >= QUARANTINE_FOLD_CAP:
                raise refuse("invalid", f"{QUARANTINE_FOLD_CAP} messages are held, the cap of an execution")
            self._assert_sealed(execution_id, topic, head, refuse)
            by = _operator(principal)
            held = await self._hold(
                owner, topic, passed, head, operator=by, reason=reason, refuse=refuse, dry_run=dry_run
            )
            if held is not None:
                return held
        raise refuse("contended")

    async def _hold(
        self,
        owner: Owner,
        topic: str,
        passed: list[InboxMessage],
        head: InboxMessage,
        *,
        operator: dict[str, Json],
        reason: str | None,
        refuse: Refuse,
        dry_run: bool,
    ) -> HeldMessage | None:
        """One try: copy, duplicates passed and fact in one transaction; None where another append came first."""
        engine, state = self._engine, owner.state
        copies = await stored_copies(engine, state.chain_id)
        target = quarantine_stream(state.chain_id)
        seen = await engine.patiently(lambda: engine.events.observe(target), target)
        held_at, beside = await self._copy(state, topic, head, copies=copies, last=seen.head, refuse=refuse)
        by = str(operator["actor"])
        duplicates = [Disposal(message, DUPLICATE).data() for message in passed]
        events = [self._event(Kind.MESSAGE_CONSUMED, data, by) for data in duplicates]
        events.append(
            self._event(Kind.INBOX_QUARANTINED, held_data(topic, head, held_at, operator, reason), by)
        )
        if is_stale(state, events):
            return None
        if dry_run:
            return HeldMessage(head.message_id, head.sequence, held_at)
        consumed = tuple((m.stream_id, m.sequence) for m in (*passed, head))
        if not await self._append(owner, events, beside, consumed=consumed):
            return None
        return HeldMessage(head.message_id, head.sequence, held_at)

    async def _copy(
        self,
        state: ExecutionState,
        topic: str,
        head: InboxMessage,
        *,
        copies: list[tuple[Copy, Envelope]],
        last: int,
        refuse: Refuse,
    ) -> tuple[int, tuple[StreamAppend, ...]]:
        """Where the copy stands, or will: one that a try before this left is used again (clauses.md, point 9)."""
        entry: Entry = {"key": head.key, "inboxSeq": head.sequence}
        found = next((copy for copy, _ in copies if copy.is_of(topic, entry)), None)
        if found is not None:
            return found.held_at, ()
        oldest = oldest_pinned(state, [copy for copy, _ in copies])
        held_at = max(last + 1, 1)
        limit = self._engine.config.quarantine_max
        if (held_at if oldest is None else oldest) + limit <= held_at:
            raise refuse("invalid", f"{limit} copies are kept, the cap of a chain (quarantine_max)")
        stored = await self._stored(head)
        if stored is None:
            raise refuse("contended", "the message left its stream meanwhile")
        event = copy_event(state.chain_id, head.key, topic, stored)
        events = (event,) if last > NO_EVENTS else (anchor_event(state.chain_id), event)
        return held_at, (StreamAppend(quarantine_stream(state.chain_id), events, expected_head=last),)

    async def _stored(self, head: InboxMessage) -> Envelope | None:
        """The message exactly as its stream keeps it: no key is asked for, nothing is opened."""
        view = self._engine.events.quarantine_view()
        for envelope in await view.stored(head.stream_id, head.sequence, 1):
            if envelope.sequence == head.sequence and message_of(envelope).key == head.key:
                return envelope
        return None

    async def _head(
        self, state: ExecutionState, topic: str
    ) -> tuple[list[InboxMessage], InboxMessage | None]:
        """The head of a topic, and the repeats before it."""
        engine, stream_id = self._engine, inbox_stream(state.chain_id, topic)
        start = state.cursors.get(topic, -1) + 1
        passed: list[InboxMessage] = []
        while page := await engine.patiently(
            lambda start=start: engine.events.read(stream_id, start, PAGE),  # type: ignore[misc]
            stream_id,
        ):
            for message in (message_of(e) for e in page if e.sequence >= start):
                if message.key not in state.dedupe:
                    return passed, message
                passed.append(message)
            if page[-1].sequence < start:
                break
            start = page[-1].sequence + 1
        return passed, None

    def _assert_sealed(self, execution_id: str, topic: str, head: InboxMessage, refuse: Refuse) -> None:
        """Only what is sealed, and cannot be opened here, is held. A redacted read proves neither (seed, line 207)."""
        verdict = inspect_payload(head.payload)
        if verdict is Verdict.SHREDDED:
            raise SealedPayloadUnreadableError(execution_id, head.message_id, topic)
        if verdict is not Verdict.SEALED:
            raise refuse("not-sealed")

    async def _held_already(self, state: ExecutionState, topic: str, message_id: str) -> HeldMessage | None:
        for entry in state.quarantined.get(topic, ()):
            copy = await read_entry(self._engine, state.chain_id, topic, entry, at_rest=True)
            if message_id == entry["key"] or (copy is not None and copy.message_id == message_id):
                raw = message_id if copy is None else copy.message_id
                return HeldMessage(raw, int(entry["inboxSeq"]), int(entry["heldAt"]), changed=False)
        return None

    # Releasing ------------------------------------------------------------------------------------------------------

    async def release(
        self,
        execution_id: str,
        topic: str,
        message_id: str,
        *,
        disposition: str,
        sender: str | None,
        reason: str | None,
        principal: Principal | None,
        dry_run: bool = False,
    ) -> bool:
        """Release, or drop, the oldest held message of a topic; False where that was done before."""
        if disposition not in DISPOSITIONS:
            raise InvalidInputError(
                "disposition", f"{disposition!r} is none", f"use {DELIVER!r} or {DISCARD!r}"
            )
        await self._verbs.judged("discard" if disposition == DISCARD else "release", execution_id, principal)
        facts.check_reason(reason)
        refuse = partial(_refusal, execution_id, topic, "release")
        for _ in range(MAX_RACES):
            owner = await self._owner(execution_id)
            state, entry = owner.state, first_entry(owner.state, topic)
            copy = None
            if entry is not None:
                dropped = disposition == DISCARD
                copy = await read_entry(self._engine, state.chain_id, topic, entry, at_rest=dropped)
            if entry is None or entry["state"] != HELD or not _names(entry, copy, message_id, sender):
                await self._assert_repeated(
                    owner, topic, message_id, sender=sender, disposition=disposition, refuse=refuse
                )
                return False
            if state.status != "suspended":
                raise refuse("not-parked", "it does not wait now")
            if disposition == DELIVER:
                _assert_opens(state, topic, entry, copy)
            by = _operator(principal)
            raw = message_id if copy is None else copy.message_id
            data = released_data(
                topic, str(entry["key"]), raw, disposition=disposition, operator=by, reason=reason
            )
            event = self._event(Kind.INBOX_RELEASED, data, str(by["actor"]))
            if not is_stale(state, [event]) and (dry_run or await self._append(owner, [event])):
                return True
        raise refuse("contended")

    async def _assert_repeated(
        self,
        owner: Owner,
        topic: str,
        message_id: str,
        *,
        sender: str | None,
        disposition: str,
        refuse: Refuse,
    ) -> None:
        """Return if this release was made before; else say why it cannot be made."""
        if any(_could_be(e, message_id, sender) for e in owner.state.quarantined.get(topic, ())[1:]):
            raise refuse("invalid", "an older message of the topic is held; release that first")
        found = await self._find_releases(owner.state, topic, message_id, sender)
        if not found:
            raise refuse("invalid", "no such message is the oldest held one of the topic")
        if len({data["key"] for data in found}) > 1:
            raise refuse("invalid", "several senders used this message id; name the sender")
        if found[-1]["disposition"] != disposition:
            raise refuse("invalid", f"it was released before, to {found[-1]['disposition']}")

    async def _find_releases(
        self, state: ExecutionState, topic: str, message_id: str, sender: str | None
    ) -> list[dict[str, Json]]:
        """The newest releases of a message, all of one chunk, in log order; the search goes backwards and has a bound."""
        budget, current, head = SEARCH_BUDGET, state.execution_id, state.head
        before = state.continued_from
        while True:
            while head >= 0 and budget > 0:
                first = max(0, head - SEARCH_CHUNK + 1)
                chunk = await self._owner_reads.read(current, first, head - first + 1)
                found = [e.data for e in chunk if _releases(e, topic, message_id, sender)]
                if found:
                    return found
                budget -= head - first + 1
                head = first - 1
            if before is None or budget <= 0:
                return []
            current = before
            older = (await self._owner_reads.load(current)).state
            head, before = older.head, older.continued_from

    # Both -----------------------------------------------------------------------------------------------------------

    async def _owner(self, execution_id: str) -> Owner:
        """The chain's execution as its log has it; a run of it that rests here leaves memory, for the log moves on."""
        engine = self._engine
        current = await self._owner_reads.current(execution_id)
        run = engine.runs.get(current)
        if run is not None and run.evictable():
            engine.drop(run)
        return await self._owner_reads.load(current)

    def _event(self, kind: str, data: dict[str, Json], by: str) -> NewEvent:
        return NewEvent(self._engine.event_id(), kind, data, facts.stamp(by))

    async def _append(
        self,
        owner: Owner,
        events: list[NewEvent],
        beside: tuple[StreamAppend, ...] = (),
        *,
        consumed: tuple[tuple[str, int], ...] = (),
    ) -> bool:
        """Append under what was observed, with what goes beside it; False where another was first."""
        engine, current = self._engine, owner.state.execution_id
        own = StreamAppend(current, tuple(events), observation=owner.observation, consumed=consumed)
        try:
            await engine.patiently(lambda: engine.events.append_many([own, *beside]), current)
        except WrongHeadError:
            return False
        # A node that can go on, and did not hear of it, finds the row; this process may end right after the verb.
        await engine.schedule([WakeRow(current, INBOX_ROW_AT, "inbox")])
        try:
            await self._tidy(owner.state, events)
            for stream_id, position in consumed[-1:]:
                await engine.events.truncate(stream_id, position + 1)
        except StoreError as error:  # it is done all the same; the next verb, or park, frees what is left
            engine.signals.repeated_storage_error(error, current)
        return True

    async def _tidy(self, before: ExecutionState, events: list[NewEvent]) -> None:
        """Free the copies that are needed no more, by the state that stands now."""
        after = ExecutionState(
            execution_id=before.execution_id,
            head=before.head,
            status=before.status,
            chain_id=before.chain_id,
            cursors=dict(before.cursors),
            dedupe=dict(before.dedupe),
            quarantined={topic: list(queue) for topic, queue in before.quarantined.items()},
            copied_through=before.copied_through,
        )
        for event in events:
            place = after.head + 1
            fold(
                after,
                Envelope(event.id, after.execution_id, place, event.type, 0, event.data, event.metadata),
            )
        await trim_copies(self._engine, after)


def _refusal(
    execution_id: str, topic: str, verb: str, reason: str, detail: str = ""
) -> InboxQuarantineRefusedError:
    return InboxQuarantineRefusedError(execution_id, topic, reason, detail, verb)


def _operator(principal: Principal | None) -> dict[str, Json]:
    """Who acted, as a fact keeps it: the actor alone, for facts are never sealed and an identity may have to be."""
    assert principal is not None, "the gatekeeper lets nobody else pass"
    return {"actor": principal.actor}


def _names(entry: Entry, copy: InboxMessage | None, message_id: str, sender: str | None) -> bool:
    """Whether a caller names this entry: by the raw id of its copy or by its key, and by its sender where one is given."""
    if message_id == entry["key"]:
        return True
    if sender is not None:
        return str(entry["key"]) == dedupe_key(sender, message_id)
    return copy is not None and copy.message_id == message_id


def _could_be(entry: Entry, message_id: str, sender: str | None) -> bool:
    return str(entry["key"]) in {message_id, dedupe_key(sender, message_id)}


def _assert_opens(state: ExecutionState, topic: str, entry: Entry, copy: InboxMessage | None) -> None:
    """Refuse to release, to be delivered, what this node cannot open: it would hold up all of the execution."""
    if copy is None:
        raise SealedPayloadUnreadableError(state.execution_id, str(entry["key"]), topic, unverifiable=True)
    erased = state.subject if state.subject in state.shredded else None
    assert_deliverable(state.execution_id, copy.message_id, topic, copy.payload, erased=erased)


def _releases(envelope: Envelope, topic: str, message_id: str, sender: str | None) -> bool:
    data = envelope.data
    if envelope.type != Kind.INBOX_RELEASED or data.get("topic") != topic:
        return False
    if message_id == data.get("key"):
        return True
    if sender is not None:
        return data.get("key") == dedupe_key(sender, message_id)
    return data.get("messageId") == message_id[:MAX_TEXT]
