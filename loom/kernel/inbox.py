"""The inbox rule: which message a wait takes next, which are passed over, and the facts that say so (system.md 0, 4).

Pure: it judges what was read against the folded state. FIFO per topic, one monotone cursor per topic, at most once by
a bounded window of keys. A driver reads the unread messages of ``topics_of(waits)``, asks ``next_delivery``, journals
what it says in one batch, and asks again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from loom.ids import dedupe_key
from loom.kernel.commands import Arm, Wait
from loom.kernel.guard import assert_deliverable
from loom.schemas.envelope import Envelope, Json, Kind, NewEvent

if TYPE_CHECKING:
    from loom.kernel.state import ExecutionState

DEDUPE_WINDOW: Final = 1_024
"""How many keys of consumed messages a chain remembers. A constant of the fold: a fold reads no setting."""

CHILD_TOPIC_PREFIX: Final = "__loom_child__:"
"""Topic on which a child's end reaches its parent's inbox."""

DUPLICATE: Final = "duplicate"
EXPIRED: Final = "expired"
DISCARDED: Final = "discarded"

_KEY_LENGTH: Final = 64
_ARM_FIELDS: Final = (("topic", "topic"), ("wake_at", "wakeAt"), ("gate", "gate"), ("child_id", "childId"))


def child_topic(child_id: str) -> str:
    """The reserved topic of a child's end."""
    return CHILD_TOPIC_PREFIX + child_id


@dataclass(frozen=True, slots=True)
class InboxMessage:
    """A message as it stands in an inbox stream; ``sequence`` is its place there, ``key`` its identity."""

    stream_id: str
    sequence: int
    topic: str
    message_id: str
    sender: str | None
    key: str
    payload: Json
    timestamp: int


def message_of(envelope: Envelope) -> InboxMessage:
    """Read an INBOX_MESSAGE."""
    data = envelope.data
    message_id, sender = str(data.get("messageId", envelope.id)), data.get("sender")
    return InboxMessage(
        envelope.stream_id,
        envelope.sequence,
        str(data.get("topic", "")),
        message_id,
        sender,
        dedupe_key(sender, message_id),
        data.get("payload"),
        envelope.timestamp,
    )


@dataclass(frozen=True, slots=True)
class Disposal:
    """A message that is passed over: ``reason`` is ``duplicate``, ``expired`` or ``discarded``."""

    message: InboxMessage
    reason: str

    def data(self) -> dict[str, Json]:
        """Data of its MESSAGE_CONSUMED; the payload is never copied."""
        return _consumed(self.message, None) | {"reason": self.reason}


@dataclass(frozen=True, slots=True)
class Delivery:
    """The answer of a wait: its arm, and the message (None for a timer that is due)."""

    site_id: str
    arm: int
    kind: str
    message: InboxMessage | None = None

    def consumed_data(self) -> dict[str, Json]:
        """Data of the MESSAGE_CONSUMED that answers the wait."""
        if self.message is None:
            raise ValueError("a timer consumes no message")
        return _consumed(self.message, self.message.payload) | {"siteId": self.site_id, "arm": self.arm}

    def resumed_data(self) -> dict[str, Json]:
        """Data of the EXECUTION_RESUMED that wakes a parked execution (and answers a timer)."""
        return {"siteId": self.site_id, "arm": self.arm, "kind": self.kind}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to journal next: the disposals, then the delivery, in one batch."""

    disposals: tuple[Disposal, ...]
    delivery: Delivery | None


def next_delivery(
    state: ExecutionState,
    waits: Sequence[Wait],
    unread: Mapping[str, Sequence[InboxMessage]],
    *,
    now_ms: int,
    ttl_ms: int | None = None,
    erased: str | None = None,
) -> Plan:
    """Find the first answer in park order: waits in the order asked, arms in the order given.

    ``unread`` holds messages by topic, in order, past the cursor or not. Duplicates and expired ones (older than
    ``ttl_ms``) on the way are disposed of. A gate is never answered here (``resume`` does). A quarantined topic is
    passed over: nothing behind a hold is read (system.md 4.3).

    Raises:
        SealedPayloadUnreadableError: the next message of a topic cannot be opened here. It holds the whole execution
            on this node (system.md 1.5), so nothing of the plan is to be journaled.
        PayloadShreddedError: it is redacted and its subject was erased.
    """
    disposals: dict[str, list[Disposal]] = {}
    heads: dict[str, InboxMessage | None] = {}
    for wait in waits:
        for index, arm in enumerate(wait.arms):
            if arm.kind == "timer" and arm.wake_at is not None and arm.wake_at <= now_ms:
                return _plan(disposals, Delivery(wait.site_id, index, "timer"))
            topic = arm.topic
            if topic is None or topic in state.quarantined:
                continue
            if topic not in heads:
                passed = disposals.setdefault(topic, [])
                heads[topic] = _head(state, unread.get(topic, ()), passed, now_ms, ttl_ms)
            message = heads[topic]
            if message is not None:
                assert_deliverable(
                    state.execution_id, message.message_id, topic, message.payload, erased=erased
                )
                return _plan(disposals, Delivery(wait.site_id, index, arm.kind, message))
    return _plan(disposals, None)


def _plan(disposals: dict[str, list[Disposal]], delivery: Delivery | None) -> Plan:
    return Plan(tuple(d for passed in disposals.values() for d in passed), delivery)


def _head(
    state: ExecutionState,
    messages: Sequence[InboxMessage],
    passed: list[Disposal],
    now_ms: int,
    ttl_ms: int | None,
) -> InboxMessage | None:
    """The first message of a topic that can be delivered; those before it are appended to ``passed``."""
    keys = {d.message.key for d in passed}
    for message in messages:
        if message.sequence <= state.cursors.get(message.topic, -1):
            continue
        if message.key in state.dedupe or message.key in keys:
            passed.append(Disposal(message, DUPLICATE))
        elif ttl_ms is not None and message.timestamp + ttl_ms <= now_ms:
            passed.append(Disposal(message, EXPIRED))
        else:
            return message
        keys.add(message.key)
    return None


def is_stale(state: ExecutionState, batch: Iterable[NewEvent]) -> bool:
    """Whether a batch built on an older state may not be appended to this one.

    It is stale if it consumes at or below a cursor or on a held topic, delivers a key that the window knows, or
    answers a wait that is not (or no longer) open.
    """
    cursors: dict[str, int] = {}
    delivered: set[str] = set()
    waiting = {w.get("siteId") for w in state.waits} if state.status == "suspended" else None
    for event in batch:
        if event.type != Kind.MESSAGE_CONSUMED:
            continue
        data = event.data
        topic, position, key = data["topic"], data["inboxSeq"], data["messageId"]
        if topic in state.quarantined or position <= cursors.get(topic, state.cursors.get(topic, -1)):
            return True
        cursors[topic] = position
        if not data.get("reason"):
            if key in state.dedupe or key in delivered:
                return True
            if waiting is not None and data.get("siteId") not in waiting:
                return True
            delivered.add(key)
    return False


def _consumed(message: InboxMessage, payload: Json) -> dict[str, Json]:
    return {
        "topic": message.topic,
        "messageId": message.key,
        "inboxSeq": message.sequence,
        "payload": payload,
    }


def remember(state: ExecutionState, key: str) -> None:
    """Put a message's key into the dedupe window; the oldest leaves when it is full."""
    window = state.dedupe
    if key not in window:
        window[key] = None
        if len(window) > DEDUPE_WINDOW:
            del window[next(iter(window))]


# What continue-as-new carries ---------------------------------------------------------------------------------------


def carried_inbox(state: ExecutionState) -> dict[str, Json]:
    """``continuedFrom.carried``: the inbox as the successor takes it over.

    Topics of children that have ended are left behind: nothing comes on them any more.
    """
    cursors = {
        topic: position
        for topic, position in state.cursors.items()
        if not topic.startswith(CHILD_TOPIC_PREFIX) or topic[len(CHILD_TOPIC_PREFIX) :] in state.children
    }
    carried: dict[str, Json] = {"inbox": {"cursors": cursors, "keys": list(state.dedupe)}}
    if state.quarantined:
        carried["quarantined"] = {
            topic: [dict(e) for e in queue] for topic, queue in state.quarantined.items()
        }
    return carried


def seed_inbox(state: ExecutionState, carried: Mapping[str, Json]) -> None:
    """Take a carried inbox over; parts that are not well-formed are ignored."""
    inbox = carried.get("inbox")
    if not isinstance(inbox, Mapping):
        return
    cursors = inbox.get("cursors")
    if isinstance(cursors, Mapping):
        for topic, position in cursors.items():
            if isinstance(position, int) and not isinstance(position, bool) and position >= 0:
                state.cursors[str(topic)] = position
    keys = inbox.get("keys")
    if isinstance(keys, Sequence) and not isinstance(keys, str):
        for key in keys[-DEDUPE_WINDOW:]:
            if isinstance(key, str) and len(key) == _KEY_LENGTH:
                remember(state, key)


# Waits on the wire --------------------------------------------------------------------------------------------------


def topics_of(waits: Iterable[Wait]) -> tuple[str, ...]:
    """The inbox topics that waits look at, each once, in park order."""
    return tuple(dict.fromkeys(arm.topic for wait in waits for arm in wait.arms if arm.topic is not None))


def wakes_of(waits: Iterable[Wait]) -> tuple[int, ...]:
    """The instants of timers, each once, earliest first."""
    return tuple(sorted({arm.wake_at for wait in waits for arm in wait.arms if arm.wake_at is not None}))


def dump_waits(waits: Iterable[Wait]) -> list[Json]:
    """``EXECUTION_SUSPENDED.waits``, in park order."""
    return [{"siteId": wait.site_id, "arms": [_dump_arm(arm) for arm in wait.arms]} for wait in waits]


def load_waits(recorded: Iterable[Mapping[str, Json]]) -> tuple[Wait, ...]:
    """Waits of a recorded park (without models, which no log holds)."""
    return tuple(Wait(w["siteId"], tuple(_load_arm(a) for a in w.get("arms", ()))) for w in recorded)


def find_gate(waits: Iterable[Wait], name: str) -> tuple[str, int] | None:
    """Site and arm of the first wait at a gate, None where nobody waits there."""
    for wait in waits:
        for index, arm in enumerate(wait.arms):
            if arm.kind == "gate" and arm.gate == name:
                return wait.site_id, index
    return None


def _dump_arm(arm: Arm) -> dict[str, Json]:
    data: dict[str, Json] = {"kind": arm.kind}
    for attribute, wire in _ARM_FIELDS:
        value = getattr(arm, attribute)
        if value is not None:
            data[wire] = value
    return data


def _load_arm(data: Mapping[str, Json]) -> Arm:
    return Arm(data.get("kind", ""), **{attribute: data.get(wire) for attribute, wire in _ARM_FIELDS})
