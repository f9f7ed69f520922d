"""The inbox rule: which message a wait takes next, which are passed over, and the facts that say so (system.md 0, 4).

Pure: it judges what was read against the folded state. FIFO per topic, one monotone cursor per topic, at most once by
a bounded window of keys. A driver reads the unread messages of ``topics_of(waits)``, asks ``next_delivery``, journals
what it says in one batch, and asks again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from loom.errors import SealedPayloadUnreadableError
from loom.ids import dedupe_key, inbox_stream
from loom.kernel.commands import Arm, Wait
from loom.kernel.guard import Verdict, assert_deliverable, inspect_payload
from loom.kernel.quarantine import HELD, carried_holds, first_entry, released_data, seed_holds

if TYPE_CHECKING:
    from loom.kernel.state import ExecutionState
    from loom.schemas.envelope import Envelope, Json

DEDUPE_WINDOW: Final = 1_024
"""How many keys of consumed messages a chain remembers. A constant of the fold: a fold reads no setting."""

CHILD_TOPIC_PREFIX: Final = "__loom_child__:"
"""Topic on which a child's end reaches its parent's inbox."""

CANCEL_TOPIC: Final = "__loom_cancel__"
"""Reserved inbox topic on which a cancellation reaches another chain; the owner of the chain acts on it."""

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


def held_message(chain_id: str, topic: str, inbox_seq: int, copy: Envelope) -> InboxMessage:
    """Read the copy of a held message as what it is the copy of: it stands where the original stood."""
    read = message_of(copy)
    return InboxMessage(
        inbox_stream(chain_id, topic),
        inbox_seq,
        topic,
        read.message_id,
        read.sender,
        read.key,
        read.payload,
        read.timestamp,
    )


@dataclass(frozen=True, slots=True)
class Disposal:
    """A message that is passed over: ``reason`` is ``duplicate``, ``expired`` or ``discarded``."""

    message: InboxMessage
    reason: str

    release: dict[str, Json] | None = None
    """Data of the automatic INBOX_RELEASED that precedes it in one batch, where it is held."""
    was_held: bool = False
    """Whether it comes from the quarantine: its inbox was done with it when it was held."""

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
    release: dict[str, Json] | None = None
    """Data of the automatic INBOX_RELEASED that precedes the delivery in one batch, where the message is held."""
    was_held: bool = False
    """Whether the message comes from the quarantine."""

    def consumed_data(self) -> dict[str, Json]:
        """Data of the MESSAGE_CONSUMED that answers the wait."""
        if self.message is None:
            raise ValueError("a timer consumes no message")
        return _consumed(self.message, self.message.payload) | {"siteId": self.site_id, "arm": self.arm}

    def resumed_data(self) -> dict[str, Json]:
        """Data of the EXECUTION_RESUMED that wakes a parked execution (and answers a timer)."""
        return {"siteId": self.site_id, "arm": self.arm, "kind": self.kind}


@dataclass(frozen=True, slots=True)
class Skipped:
    """A topic that is passed over, for what its queue starts with is held and not lifted here.

    ``awaits`` is ``node`` (one that can open it) or ``operator`` (this node could, and may not by itself).
    """

    topic: str
    message_id: str
    inbox_seq: int
    awaits: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What to journal next: the disposals, then the delivery, in one batch; and what is held meanwhile."""

    disposals: tuple[Disposal, ...]
    delivery: Delivery | None
    skipped: tuple[Skipped, ...] = ()


Held = Mapping[str, "InboxMessage | None"]
"""The copy of the message that each quarantined topic's queue starts with, as this node reads it; None: there is none."""


def next_delivery(
    state: ExecutionState,
    waits: Sequence[Wait],
    unread: Mapping[str, Sequence[InboxMessage]],
    *,
    now_ms: int,
    ttl_ms: int | None = None,
    erased: str | None = None,
    held: Held | None = None,
    auto_release: bool = True,
) -> Plan:
    """Find the first answer in park order: waits in the order asked, arms in the order given.

    ``unread`` holds messages by topic, in order, past the cursor or not. Duplicates and expired ones (older than
    ``ttl_ms``) on the way are disposed of. A gate is never answered here (``resume`` does).

    A quarantined topic is never read past its cursor (system.md 4.3). Its first entry comes next: one that is released is
    delivered; one that is held is released and delivered, if ``auto_release`` and its copy can be opened here, else the
    topic is passed over; one whose key was delivered meanwhile is dropped.

    Raises:
        SealedPayloadUnreadableError: the next message of a topic cannot be opened here. It holds the whole execution
            on this node (system.md 1.5), so nothing of the plan is to be journaled.
        PayloadShreddedError: it is redacted and its subject was erased.
    """
    scan = _Scan(state, unread, now_ms, ttl_ms)
    queues = _Queues(state, held or {}, erased, auto_release=auto_release) if state.quarantined else None
    for wait in waits:
        for index, arm in enumerate(wait.arms):
            if arm.kind == "timer" and arm.wake_at is not None and arm.wake_at <= now_ms:
                return scan.plan(Delivery(wait.site_id, index, "timer"), queues)
            topic = arm.topic
            if topic is None:
                continue
            if queues is not None and topic in state.quarantined:
                found = queues.first(topic)
                if isinstance(found, Disposal):
                    # What comes after it on its topic is found next time: it may come before later arms.
                    scan.disposals.setdefault(topic, []).append(found)
                    return scan.plan(None, queues)
                if found is not None:
                    message, release = found
                    answer = Delivery(wait.site_id, index, arm.kind, message, release, was_held=True)
                    return scan.plan(answer, queues)
                continue
            head = scan.head(topic)
            if head is not None:
                assert_deliverable(state.execution_id, head.message_id, topic, head.payload, erased=erased)
                return scan.plan(Delivery(wait.site_id, index, arm.kind, head), queues)
    return scan.plan(None, queues)


class _Scan:
    """The topics past their cursors: each one's head, and what is disposed of before it."""

    __slots__ = ("_heads", "_now_ms", "_state", "_ttl_ms", "_unread", "disposals")

    def __init__(
        self,
        state: ExecutionState,
        unread: Mapping[str, Sequence[InboxMessage]],
        now_ms: int,
        ttl_ms: int | None,
    ) -> None:
        self._state, self._unread, self._now_ms, self._ttl_ms = state, unread, now_ms, ttl_ms
        self._heads: dict[str, InboxMessage | None] = {}
        self.disposals: dict[str, list[Disposal]] = {}

    def head(self, topic: str) -> InboxMessage | None:
        """The first message of a topic that can be delivered; those before it are disposed of."""
        if topic not in self._heads:
            self._heads[topic] = self._find(topic)
        return self._heads[topic]

    def plan(self, delivery: Delivery | None, queues: _Queues | None) -> Plan:
        skipped = () if queues is None else queues.skipped
        return Plan(tuple(d for passed in self.disposals.values() for d in passed), delivery, skipped)

    def _find(self, topic: str) -> InboxMessage | None:
        state = self._state
        passed = self.disposals.setdefault(topic, [])
        keys = {d.message.key for d in passed}
        for message in self._unread.get(topic, ()):
            if message.sequence <= state.cursors.get(message.topic, -1):
                continue
            if message.key in state.dedupe or message.key in keys:
                passed.append(Disposal(message, DUPLICATE))
            elif self._ttl_ms is not None and message.timestamp + self._ttl_ms <= self._now_ms:
                passed.append(Disposal(message, EXPIRED))
            else:
                return message
            keys.add(message.key)
        return None


class _Queues:
    """The quarantined topics: what each queue starts with."""

    __slots__ = ("_auto_release", "_erased", "_held", "_skipped", "_state")

    def __init__(self, state: ExecutionState, held: Held, erased: str | None, *, auto_release: bool) -> None:
        self._state, self._held, self._erased, self._auto_release = state, held, erased, auto_release
        self._skipped: dict[str, Skipped] = {}

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        return tuple(self._skipped.values())

    def first(self, topic: str) -> Disposal | tuple[InboxMessage, dict[str, Json] | None] | None:
        """What comes next on a quarantined topic: a drop, a delivery with its release, or nothing here."""
        state, copy = self._state, self._held.get(topic)
        entry = first_entry(state, topic)
        assert entry is not None, "an empty queue disappears"
        key = str(entry["key"])
        message = copy or InboxMessage(
            inbox_stream(state.chain_id, topic), entry["inboxSeq"], topic, key, None, key, None, 0
        )
        release = None
        if entry["state"] == HELD:
            release = released_data(topic, key, message.message_id)
        if key in state.dedupe:
            return Disposal(message, DUPLICATE, release, was_held=True)
        if release is None:
            if copy is None:
                raise SealedPayloadUnreadableError(state.execution_id, key, topic, unverifiable=True)
            assert_deliverable(state.execution_id, copy.message_id, topic, copy.payload, erased=self._erased)
            return copy, None
        opened = copy is not None and inspect_payload(copy.payload) is Verdict.CLEAN
        if copy is not None and opened and self._auto_release:
            return copy, release
        awaits = "operator" if opened else "node"
        self._skipped[topic] = Skipped(topic, message.message_id, entry["inboxSeq"], awaits)
        return None


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


def is_drained(state: ExecutionState, topic: str, head: int) -> bool:
    """Whether all that stands in a topic's stream, up to ``head``, is disposed of. Never while the topic is held."""
    return topic not in state.quarantined and state.cursors.get(topic, -1) >= head


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
        carried["quarantined"] = carried_holds(state)
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
    seed_holds(state, carried.get("quarantined"))


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
