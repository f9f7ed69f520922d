"""The quarantine of an inbox topic: facts, fold, and what is said of the copies of held messages (system.md 4; seed, D9).

A hold stops a topic at its head and keeps its order: ``ExecutionState.quarantined`` has, per topic, a queue of the shape
``released? held*``. Pure; facts are honoured only with the runtime's stamp, and a malformed one changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from loom.ids import dedupe_key, quarantine_stream
from loom.schemas.envelope import EVENT_SCHEMA, Envelope, Json, Kind, NewEvent

if TYPE_CHECKING:
    from loom.kernel.state import ExecutionState

QUARANTINE_FOLD_CAP: Final = 1_024
"""How many entries a state holds in all. A constant of the fold: a fold reads no setting."""

MAX_TEXT: Final = 256
"""Characters of a message id and of a reason in a fact."""

HELD: Final = "held"
RELEASED: Final = "released"
DELIVER: Final = "deliver"
DISCARD: Final = "discard"
DISPOSITIONS: Final = frozenset({DELIVER, DISCARD})

_KEY_LENGTH: Final = 64
_HEX: Final = frozenset("0123456789abcdef")

Entry = Mapping[str, "Json"]
"""``{key, inboxSeq, heldAt, state}``: one message of a queue, as it is folded and carried."""


# Facts --------------------------------------------------------------------------------------------------------------


def held_data(
    topic: str, message: Any, held_at: int, operator: Mapping[str, Json], reason: str | None
) -> dict[str, Json]:
    """Data of INBOX_QUARANTINED: ``message`` is held, its copy stands at ``held_at`` of the quarantine stream."""
    data: dict[str, Json] = {
        "topic": topic,
        "inboxSeq": message.sequence,
        "key": message.key,
        "messageId": message.message_id[:MAX_TEXT],
        "heldAt": held_at,
        "operator": dict(operator),
    }
    return data if reason is None else data | {"reason": reason[:MAX_TEXT]}


def released_data(
    topic: str,
    key: str,
    message_id: str,
    *,
    disposition: str = DELIVER,
    operator: Mapping[str, Json] | None = None,
    reason: str | None = None,
) -> dict[str, Json]:
    """Data of INBOX_RELEASED: by an operator, or by the delivery itself (``auto``) where none is given."""
    data: dict[str, Json] = {
        "topic": topic,
        "key": key,
        "messageId": message_id[:MAX_TEXT],
        "disposition": disposition,
    }
    data |= {"auto": True} if operator is None else {"operator": dict(operator)}
    return data if reason is None else data | {"reason": reason[:MAX_TEXT]}


def entry_of(data: Mapping[str, Json]) -> tuple[str, dict[str, Json]] | None:
    """Topic and entry that an INBOX_QUARANTINED holds; None where it is malformed."""
    topic, operator = data.get("topic"), data.get("operator")
    if not _is_topic(topic) or not _is_id(data.get("messageId")) or not isinstance(operator, Mapping):
        return None
    entry = _entry({**data, "state": HELD})
    return None if entry is None else (str(topic), entry)


def release_of(data: Mapping[str, Json]) -> tuple[str, str, str] | None:
    """Topic, key and disposition of an INBOX_RELEASED; None where it is malformed.

    Exactly one of ``operator`` and ``auto`` stands there, ``auto`` only as ``true`` and only with ``deliver``.
    """
    topic, key, disposition = data.get("topic"), data.get("key"), data.get("disposition")
    if not _is_topic(topic) or not _is_key(key) or not _is_id(data.get("messageId")):
        return None
    if disposition not in DISPOSITIONS or ("operator" in data) == ("auto" in data):
        return None
    if "auto" in data:
        if data["auto"] is not True or disposition != DELIVER:
            return None
    elif not isinstance(data["operator"], Mapping):
        return None
    return str(topic), str(key), str(disposition)


def is_stamped(metadata: Mapping[str, Json]) -> bool:
    """Whether the runtime wrote an event: nobody else may set ``schema``."""
    return isinstance(metadata.get("schema"), str)


def _is_topic(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_id(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT


def _is_key(value: object) -> bool:
    return isinstance(value, str) and len(value) == _KEY_LENGTH and _HEX.issuperset(value)


def _is_place(value: object, lowest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= lowest


def _entry(data: Mapping[str, Json]) -> dict[str, Json] | None:
    """An entry of its own, if ``data`` has the fields of one. Sequence 0 of a quarantine stream is no message."""
    if not _is_key(data.get("key")) or data.get("state") not in {HELD, RELEASED}:
        return None
    if not _is_place(data.get("inboxSeq"), 0) or not _is_place(data.get("heldAt"), 1):
        return None
    return {name: data[name] for name in ("key", "inboxSeq", "heldAt", "state")}


# Fold ---------------------------------------------------------------------------------------------------------------


def first_entry(state: ExecutionState, topic: str) -> Entry | None:
    """The entry that a topic's queue starts with: what is delivered next on it; None where nothing is held."""
    queue = state.quarantined.get(topic)
    return queue[0] if queue else None


def held_total(state: ExecutionState) -> int:
    """How many entries the state has, of all topics."""
    return sum(map(len, state.quarantined.values()))


def holds_key(state: ExecutionState, key: str) -> bool:
    """Whether a message of this identity is held, on any topic."""
    return any(entry.get("key") == key for queue in state.quarantined.values() for entry in queue)


def fold_quarantined(state: ExecutionState, envelope: Envelope) -> None:
    """Take an INBOX_QUARANTINED: the cursor passes the message, its topic is held. The key stays out of the window.

    In a fork's log the message never stood in this chain's inbox (``forked``): its cursor stays where it is.
    """
    found = entry_of(envelope.data) if is_stamped(envelope.metadata) else None
    if found is None or held_total(state) >= QUARANTINE_FOLD_CAP:
        return
    topic, entry = found
    if envelope.data.get("forked") is True:
        state.copied_through = max(state.copied_through, entry["heldAt"])
    else:
        state.cursors[topic] = max(state.cursors.get(topic, -1), entry["inboxSeq"])
    state.quarantined[topic] = [*state.quarantined.get(topic, ()), entry]
    state.held_once = True


def fold_released(state: ExecutionState, envelope: Envelope) -> str | None:
    """Take an INBOX_RELEASED of the first, held entry; return the key that is disposed of, if one is."""
    found = release_of(envelope.data) if is_stamped(envelope.metadata) else None
    if found is None:
        return None
    topic, key, disposition = found
    first = first_entry(state, topic)
    if first is None or first.get("state") != HELD or first.get("key") != key:
        return None
    if disposition == DISCARD:
        _pop(state, topic)
        return key
    state.quarantined[topic] = [{**first, "state": RELEASED}, *state.quarantined[topic][1:]]
    return None


def settle_consumed(state: ExecutionState, topic: str, key: Json, position: Json) -> bool:
    """Take a MESSAGE_CONSUMED: the released entry that it disposes of leaves its queue; whether there was one.

    Its place is compared beside its key: a message of the same identity behind the hold is another.
    """
    first = first_entry(state, topic)
    if first is None or not is_delivery_of(first, key, position):
        return False
    _pop(state, topic)
    return True


def is_delivery_of(entry: Entry, key: Json, position: Json) -> bool:
    """Whether a MESSAGE_CONSUMED of this key and place disposes of the entry."""
    return entry.get("state") == RELEASED and entry.get("key") == key and entry.get("inboxSeq") == position


def _pop(state: ExecutionState, topic: str) -> None:
    rest = state.quarantined[topic][1:]
    if rest:
        state.quarantined[topic] = rest
    else:
        del state.quarantined[topic]


# What continue-as-new carries ---------------------------------------------------------------------------------------


def carried_holds(state: ExecutionState) -> dict[str, list[dict[str, Json]]]:
    """``continuedFrom.carried.quarantined``: the queues as the successor takes them over."""
    return {topic: [dict(entry) for entry in queue] for topic, queue in state.quarantined.items()}


def seed_holds(state: ExecutionState, carried: Json, *, forked: bool = False) -> None:
    """Take carried queues over, behind the cursors. A topic with a malformed or misplaced entry is ignored whole.

    Released entries come first and are at most one; each entry lies at or below its topic's cursor, but in a fork, in whose
    inbox it never stood; all topics together stay within the cap.
    """
    if not isinstance(carried, Mapping):
        return
    for topic, queue in carried.items():
        if not _is_topic(topic) or not isinstance(queue, list | tuple) or not queue:
            continue
        entries = [_entry(e) if isinstance(e, Mapping) else None for e in queue]
        seeds = [e for e in entries if e is not None]
        well_formed = len(seeds) == len(entries) and all(e["state"] == HELD for e in seeds[1:])
        in_place = forked or all(e["inboxSeq"] <= state.cursors.get(topic, -1) for e in seeds)
        if well_formed and in_place and held_total(state) + len(seeds) <= QUARANTINE_FOLD_CAP:
            state.quarantined[topic] = seeds
            state.held_once = True
            if forked:
                state.copied_through = max(state.copied_through, *(e["heldAt"] for e in seeds))


# Copies -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Copy:
    """A held message in the quarantine stream: where it stands, its identity, and where the original stood."""

    held_at: int
    key: str
    topic: str
    inbox_seq: int

    def is_of(self, topic: str, entry: Entry) -> bool:
        """Whether it is the copy that an entry means: never judged by its id alone (clauses.md, point 11)."""
        return (self.topic, self.key, self.inbox_seq) == (topic, entry.get("key"), entry.get("inboxSeq"))


def read_copy(envelope: Envelope) -> Copy | None:
    """What a stored envelope is the copy of; None for the anchor, and for what carries no stamp."""
    stamp = envelope.metadata.get("quarantine")
    if not isinstance(stamp, Mapping) or envelope.sequence < 1:
        return None
    data = envelope.data
    key = dedupe_key(data.get("sender"), str(data.get("messageId", envelope.id)))
    return Copy(envelope.sequence, key, str(stamp.get("topic", "")), int(stamp.get("inboxSeq", -1)))


def copy_event(chain_id: str, key: str, topic: str, stored: Envelope) -> NewEvent:
    """The copy of a message as it is stored: data and seal untouched, its place in the stamp, its id deterministic."""
    kept: dict[str, Json] = {
        name: stored.metadata[name] for name in ("schema", "seal") if name in stored.metadata
    }
    stamp = {"topic": topic, "inboxSeq": stored.sequence}
    return NewEvent(
        f"quarantine:{chain_id}:{key}:{stored.sequence}",
        stored.type,
        stored.data,
        {**kept, "quarantine": stamp},
    )


def anchor_event(chain_id: str) -> NewEvent:
    """Sequence 0 of a quarantine stream: it carries nothing, since a store keeps that place for ever."""
    return NewEvent(
        f"{quarantine_stream(chain_id)}:anchor",
        Kind.INBOX_MESSAGE,
        {"anchor": True},
        {"schema": EVENT_SCHEMA},
    )


def oldest_pinned(state: ExecutionState, copies: Iterable[Copy]) -> int | None:
    """Place of the first copy that must be kept; None where every one may go.

    A copy is kept while an entry means it, and while its original lies above the cursor: the fact that will name it may
    be on its way (system.md 4.7). Those that a fork brought along are on no way.
    """
    for copy in copies:
        live = any(e.get("heldAt") == copy.held_at for q in state.quarantined.values() for e in q)
        on_its_way = copy.held_at > state.copied_through and copy.inbox_seq > state.cursors.get(
            copy.topic, -1
        )
        if live or on_its_way:
            return copy.held_at
    return None
