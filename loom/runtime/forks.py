"""How the log of a fork is made from another's, and what of the inbox goes along (system.md 4.8; docs/adr/0026).

A fork is a chain of its own: its inbox begins empty, its cursors at the start. Messages held at the fork's point go along
as copies in its own quarantine stream; they never stood in its inbox, and the facts say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from loom.errors import InboxQuarantineRefusedError, InvalidInputError
from loom.ids import quarantine_stream
from loom.kernel.quarantine import anchor_event, first_entry, is_delivery_of, read_copy
from loom.kernel.state import ExecutionState, fold
from loom.runtime import facts
from loom.schemas.envelope import TERMINAL_KINDS, Envelope, Kind, NewEvent
from loom.stores.contracts import NO_EVENTS, StreamAppend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loom.runtime.access import Principal
    from loom.runtime.engine import Engine
    from loom.runtime.reading import Loaded
    from loom.schemas.envelope import Json


def fork_point(loaded: Loaded, at_sequence: int | None, at_step: str | None) -> int:
    """The last sequence that the fork shares; where none is given, the last one before the end.

    Raises:
        InvalidInputError: there is no such place, or children that began before it are still out.
    """
    what = f"fork of {loaded.state.execution_id!r}"
    history = loaded.history
    if history[-1].sequence + 1 != len(history):
        raise InvalidInputError(
            what, "a prefix of its log was trimmed", "fork an execution whose log is whole"
        )
    if at_step is not None:
        found = [e for e in history if e.data.get("siteId") == at_step or e.data.get("name") == at_step]
        if not found or at_sequence is not None:
            raise InvalidInputError(
                what, f"no step {at_step[:64]!r} in its log", "name a step or a site of `loom show`"
            )
        through = found[0].sequence - 1
    else:
        ended = next((e.sequence for e in history if e.type in TERMINAL_KINDS), len(history))
        through = ended - 1 if at_sequence is None else at_sequence
        if not 0 <= through < ended:
            raise InvalidInputError(
                what, f"{through} is not a sequence before its end", f"choose 0 to {ended - 1}"
            )
    if _folded(history[: through + 1]).children:
        raise InvalidInputError(
            what,
            "children that it started are still out at that place",
            "fork before they start, or after they end",
        )
    return through


async def held_copies(
    engine: Engine, loaded: Loaded, through: int, target: str
) -> tuple[dict[int, int], tuple[StreamAppend, ...]]:
    """The copies of what is held at a fork's point, for the fork's own quarantine stream, and where each will stand.

    Raises:
        InboxQuarantineRefusedError: one is missing, or is not what the hold means: no fork is made with a dangling hold.
    """
    source = loaded.state.execution_id
    state = _folded(loaded.history[: through + 1])
    if not state.quarantined:
        return {}, ()
    view, stream_id = engine.events.quarantine_view(), quarantine_stream(state.chain_id)
    places: dict[int, int] = {}
    events = [anchor_event(target)]
    for topic, queue in state.quarantined.items():
        for entry in queue:
            place = int(entry["heldAt"])
            stored = [e for e in await view.stored(stream_id, place, 1) if e.sequence == place]
            copy = read_copy(stored[0]) if stored else None
            if copy is None or not copy.is_of(topic, entry):
                raise InboxQuarantineRefusedError(
                    source, topic, "invalid", f"the copy of a message held at {place} is not there", "fork"
                )
            places[place] = len(events)
            kept = {k: v for k, v in stored[0].metadata.items() if k != "node"}
            event_id = f"quarantine:{target}:{copy.key}:{copy.inbox_seq}"
            events.append(NewEvent(event_id, stored[0].type, stored[0].data, kept))
    append = StreamAppend(quarantine_stream(target), tuple(events), expected_head=NO_EVENTS)
    return places, (append,)


def forked_log(
    prefix: Sequence[Envelope],
    target: str,
    source: str,
    through: int,
    *,
    places: dict[int, int],
    principal: Principal | None,
    reason: str | None,
) -> tuple[NewEvent, ...]:
    """The prefix as the log of another chain: its own start, and cursors of an inbox of its own."""
    first = prefix[0]
    start = {key: value for key, value in first.data.items() if key not in {"parent", "continuedFrom"}}
    start |= {
        "chainId": target,
        "forkedFrom": {"executionId": source, "sequence": through, **_carried(first, places)},
    }
    events = [NewEvent(first.id, first.type, start, _unstamped(first))]
    state = ExecutionState(answers=None)
    fold(state, first)
    for envelope in prefix[1:]:
        data = envelope.data
        if envelope.type == Kind.MESSAGE_CONSUMED and not _takes_held(state, data):
            data = {key: value for key, value in data.items() if key != "inboxSeq"}
        elif envelope.type == Kind.INBOX_QUARANTINED:
            data = data | {"forked": True, "heldAt": places.get(data.get("heldAt", 0), 1)}
        fold(state, envelope)
        events.append(NewEvent(envelope.id, envelope.type, data, _unstamped(envelope)))
    by = {"by": principal.actor} if principal is not None else {}
    recovered = {"reason": reason or "fork", "evidence": "operator", **by}
    events.append(NewEvent(f"fork:{target}", Kind.EXECUTION_RECOVERED, recovered, facts.stamp(by.get("by"))))
    return tuple(events)


def _carried(first: Envelope, places: dict[int, int]) -> dict[str, Json]:
    """What an execution was started with in its quarantine, each copy where it stands now."""
    for name in ("continuedFrom", "forkedFrom"):
        link = first.data.get(name)
        carried = link.get("carried") if isinstance(link, Mapping) else None
        queues = carried.get("quarantined") if isinstance(carried, Mapping) else None
        if queues:
            moved = {
                topic: [entry | {"heldAt": places.get(entry["heldAt"], 1)} for entry in queue]
                for topic, queue in queues.items()
            }
            return {"carried": {"quarantined": moved}}
    return {}


def _takes_held(state: ExecutionState, data: dict[str, Any]) -> bool:
    """Whether a MESSAGE_CONSUMED disposes of a held message: its place is that of the entry, and moves no cursor."""
    entry = first_entry(state, str(data.get("topic")))
    return entry is not None and is_delivery_of(entry, data.get("messageId"), data.get("inboxSeq"))


def _folded(events: Sequence[Envelope]) -> ExecutionState:
    state = ExecutionState(answers=None)
    for envelope in events:
        fold(state, envelope)
    return state


def _unstamped(envelope: Envelope) -> dict[str, Json]:
    """Metadata without its driver, whom the fork does not have yet, and without the seal, which its store puts on."""
    return {key: value for key, value in envelope.metadata.items() if key not in {"node", "seal"}}
