"""The contracts that every store keeps, and the values that pass through them.

One conformance suite per contract (``loom.testing.conformance``) runs on every twin and every wrapper. All methods
are coroutines unless they say otherwise; every one that waits has a deadline of its store and raises
``DeadlineExceededError`` or ``UnreachableError`` past it. No backend word stands here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

if TYPE_CHECKING:
    from loom.schemas.envelope import Envelope, Json, NewEvent
from loom.schemas.quick import quick

NO_EVENTS: Final = -1
"""Head of a stream that was never appended to."""


@quick
@dataclass(frozen=True, slots=True)
class Observation:
    """What a stream looked like: the condition of ``append_if_unchanged`` and ``acquire_fence_if``.

    ``head`` is the last sequence (-1: none), ``fence`` the current token (0: never fenced), ``anchor`` the id of the
    event at sequence 0 (None: no events): it tells a stream from another that took its name.
    """

    head: int
    fence: int
    anchor: str | None


@quick
@dataclass(frozen=True, slots=True)
class Outgoing:
    """Work on another chain, or for the estate, that leaves in the transaction of the event deciding it.

    ``target`` is ``"request"`` (``body`` is the ``StreamAppend`` that the shard of ``key``, a chain id, shall make) or ``"publish"`` (a record for
    a topic of the allow-list). ``id`` is deterministic: the receiver applies it once (clauses.md, point 10).
    """

    target: str
    id: str
    key: str
    body: Any
    topic: str | None = None
    headers: tuple[tuple[str, bytes], ...] = ()


@quick
@dataclass(frozen=True, slots=True)
class StreamAppend:
    """An append to one stream, judged as a whole.

    Exactly one guard applies:

    * ``expected_head``: the stream must end there (-1: must not exist, and must not have been deleted before), and the
      message of an inbox must not stand in it already;
    * ``observation``: head, fence and anchor must be those observed;
    * neither: the store assigns the place (messages entering an inbox); the first event's id is the dedupe key, kept in
      a bounded window of recent ids.

    ``fence`` is the driver's token; an older one than the current is ``StaleFenceError``. None means that the append
    is no driver's (control records, inbox messages) and leaves the fence alone.

    An append whose events already stand where it would put them is success (a repeat), told by their ids.
    ``backlog_cap`` bounds messages waiting in an inbox stream: more is ``InboxFullError``. ``consumed`` names the
    inbox positions ``(stream, sequence)`` that these events dispose of: what is at or below them waits no longer.
    """

    stream_id: str
    events: tuple[NewEvent, ...]
    expected_head: int | None = None
    fence: int | None = None
    observation: Observation | None = None
    backlog_cap: int | None = None
    consumed: tuple[tuple[str, int], ...] = ()
    outgoing: tuple[Outgoing, ...] = ()


@quick
@dataclass(frozen=True, slots=True)
class Appended:
    """Where events came to stand: ``first`` and ``head`` are sequences; ``repeated`` tells a retry found in place."""

    stream_id: str
    first: int
    head: int
    timestamp: int
    repeated: bool = False


@quick
@dataclass(frozen=True, slots=True)
class Committed:
    """Events that became durable, as handed to listeners in the same process, in log order per stream.

    ``origin`` is the ``origin`` label of the appending store handle (None for one from another node): a driver
    recognises its own appends by it and skips them. ``unopened`` are the sequences, of a log, that a sealing store could
    not open here: those envelopes stand as they are stored, and refuse the execution (system.md 2.3).
    """

    stream_id: str
    envelopes: tuple[Envelope, ...]
    origin: str | None
    unopened: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """What a store knows of a stream without reading events.

    ``first`` is the lowest sequence still there above 0 (1 where nothing was trimmed). ``status`` is the last event's
    type for logs. ``node`` is ``metadata.node`` of the last event that carried a fence (the driver's incarnation).
    ``owner`` is who took the current fence (None: the append of sequence 0, or not told by another node's reply).
    ``sealed``: whether any event bears the marker, so that reading it is for who can open it.
    """

    stream_id: str
    head: int
    first: int
    fence: int
    anchor: str | None
    status: str | None
    node: str | None
    owner: str | None = None
    sealed: bool = False


class CommitListener(Protocol):
    """What a runtime gives to the store that owns streams. Called on the runtime's loop, never blocking.

    One that has ``wants(committed) -> bool`` is not told of what it does not want, and nothing is opened or judged for it.
    """

    def committed(self, batch: Sequence[Committed]) -> None:
        """Events became durable, by whoever appended them."""
        ...

    def gained(self, shard: int) -> None:
        """This process now writes the shard: everything committed before is readable."""
        ...

    def lost(self, shard: int) -> None:
        """This process no longer writes the shard."""
        ...


def wanted(listener: CommitListener, batch: Sequence[Committed]) -> Sequence[Committed]:
    """What of a batch a listener wants to be told."""
    wants = getattr(listener, "wants", None)
    return batch if wants is None else list(filter(wants, batch))


@runtime_checkable
class EventStore(Protocol):
    """Streams of events with conditional append.

    Three outcomes of a write, never confused: it returns (durable), it raises a ``StoreError`` that is not
    ``OutcomeUnknownError`` (not written), or ``OutcomeUnknownError`` (repeat it unchanged, or read).
    """

    async def append(self, append: StreamAppend, *, deadline_ms: int | None = None) -> Appended:
        """Append to one stream.

        Raises:
            WrongHeadError: the head, or the observation, is not the expected one.
            StaleFenceError: the fence token is older than the stream's.
            ExecutionAlreadyExistsError: ``expected_head=-1`` on a stream whose id was deleted.
            InboxFullError: over ``backlog_cap``.
            PayloadTooLargeError: no transaction of the log can take it.
            StorageWriteError: not written. OutcomeUnknownError: unknown.
        """
        ...

    async def append_many(
        self, appends: Sequence[StreamAppend], *, deadline_ms: int | None = None
    ) -> list[Appended]:
        """Append to several streams of one shard, all or nothing (clauses.md, point 9)."""
        ...

    async def read(self, stream_id: str, from_sequence: int = 0, limit: int = 1000) -> list[Envelope]:
        """Events from ``from_sequence`` on, in order, at most ``limit``; empty where there are none.

        A fresh read: it holds whatever was acknowledged before it was asked.
        """
        ...

    async def read_last(self, stream_id: str) -> Envelope | None:
        """The last event, None for an empty stream."""
        ...

    async def observe(self, stream_id: str) -> Observation:
        """Head, fence and anchor, as a deciding read: no superseded owner answers it from memory."""
        ...

    async def info(self, stream_id: str) -> StreamInfo | None:
        """What is known of a stream; None where it was never appended to."""
        ...

    async def acquire_fence(self, stream_id: str, owner: str) -> int:
        """Take the execution: return a token above every earlier one. The append of sequence 0 with ``fence=1`` holds 1."""
        ...

    async def acquire_fence_if(self, stream_id: str, observation: Observation, owner: str) -> int:
        """Take the execution only if it is as observed, else ``WrongHeadError``."""
        ...

    async def truncate(self, stream_id: str, before: int) -> None:
        """Delete events with 0 < sequence < ``before``; sequence 0 and the numbering stay."""
        ...

    async def delete(self, stream_id: str) -> None:
        """Delete a stream for good; its id refuses reuse."""
        ...

    async def copy_prefix(self, source: str, target: str, through: int) -> int:
        """Copy stored events 0..``through`` verbatim into a new stream of the same shard; return its head."""
        ...

    def subscribe(self, stream_id: str, from_sequence: int = 0) -> AsyncIterator[Envelope]:
        """Events from ``from_sequence`` on, then live, until the iterator is closed."""
        ...

    async def close(self) -> None:
        """Release everything; idempotent."""
        ...


@runtime_checkable
class OwningEventStore(EventStore, Protocol):
    """A store that serves shards from this process and tells a runtime what became durable in them."""

    def shard_of(self, stream_id: str) -> int:
        """Shard that a stream's name places it in."""
        ...

    def owned(self) -> frozenset[int]:
        """Shards that this process writes now."""
        ...

    def mint_shard(self) -> int | None:
        """Shard for a fresh id: an owned one, the same until its writer is saturated; None where nothing is owned."""
        ...

    def listen(self, listener: CommitListener) -> None:
        """Register the one listener of this process."""
        ...

    def open_logs(self, shard: int, after: str = "", limit: int = 1000) -> list[StreamInfo]:
        """Execution logs of the shard that have no terminal event, ordered by id, a page after ``after``. Not a coroutine."""
        ...

    def inbox_streams(self, chain_id: str) -> list[StreamInfo]:
        """Inbox streams of a chain that this process serves. Not a coroutine."""
        ...


OPTIONAL_EVENT_STORE_METHODS: Final = (
    "sealing_capability",
    "read_at_rest",
    "read_redacted",
    "survey",
    "subscribe_loud",
    "find_subject",
    "notify",
    "mint_id",
    "health",
    "scan_open_logs",
    "list_inboxes",
)
"""What an event store may have beyond its contract, asked for with ``getattr``; absent means that it cannot.

``sealing_capability() -> SealingCapability | None``: what this node opens (absent, None: nothing); ``read_at_rest``: as
``read``, stored envelopes, never asking for a key; ``read_redacted``: as ``read``, what cannot be opened redacted;
``survey``: as ``read_redacted``, saying of each envelope whether it opens here;
``subscribe_loud``: as ``subscribe``, raising where ``read`` would; ``find_subject(subject) -> list[str]``: names of every
stream of the chains whose first event names the subject, complete as of the call; ``list_inboxes(chain_id) -> list[str]``:
names of the chain's inbox streams, from whatever process, as a deciding read.
Every wrapper forwards, overrides or refuses each of them by name (a test lists them all).
"""


class Outcome(Enum):
    """Result of a lease call that raced."""

    TAKEN = "taken"
    HELD = "held"


@dataclass(frozen=True, slots=True)
class Lease:
    """A row that says who drives an execution. Times are milliseconds on the store's clock."""

    execution_id: str
    owner: str
    acquired_at: int
    expires_at: int
    expired: bool


@dataclass(frozen=True, slots=True)
class Presence:
    """A node that lives: ``node`` is its incarnation ``<node_id>:<incarnation>``; ``covers`` is what it can open."""

    node: str
    expires_at: int
    expired: bool
    covers: tuple[str, ...] = ()
    details: dict[str, Json] = field(default_factory=dict)


@runtime_checkable
class LeaseStore(Protocol):
    """Evidence of life, judged on the store's own clock. Rows never vanish by themselves (system.md 6).

    ``scope`` is ``"cluster"`` when all nodes share it, else ``"process"``.
    """

    scope: str

    async def acquire(self, execution_id: str, owner: str, ttl_ms: int) -> Lease | None:
        """Take a free or expired lease, or one already ours; None while another holds it unexpired."""
        ...

    async def acquire_many(self, execution_ids: Sequence[str], owner: str, ttl_ms: int) -> set[str]:
        """Acquire each; return the ids now held by ``owner``."""
        ...

    async def renew_many(self, execution_ids: Sequence[str], owner: str, ttl_ms: int) -> set[str]:
        """Extend each row still of ``owner`` (also an expired, untaken one); return the held set. Never takes one back."""
        ...

    async def release_many(self, execution_ids: Sequence[str], owner: str) -> set[str]:
        """Delete each row of ``owner``; return the released ids."""
        ...

    async def steal(self, execution_id: str, owner: str, ttl_ms: int) -> Lease:
        """Take the lease whoever holds it; only with a conditional-fence proof in hand."""
        ...

    async def get(self, execution_id: str) -> Lease | None:
        """The row, expired or not; None where there is none."""
        ...

    async def expired(self, limit: int, after: str = "") -> list[Lease]:
        """Expired rows ordered by id, at most ``limit`` after ``after`` (the scan rotates)."""
        ...

    async def held(self, limit: int) -> list[Lease]:
        """Rows for who looks at them: lapsed ones first, then those that lapse soonest; at most ``limit``."""
        ...

    async def count(self) -> int:
        """How many lease rows there are, lapsed ones among them."""
        ...

    async def now(self) -> int:
        """The store's own clock, by which rows lapse: milliseconds since the epoch."""
        ...

    async def beat(
        self, node: str, ttl_ms: int, covers: Sequence[str] = (), details: dict[str, Json] | None = None
    ) -> Presence:
        """Write or renew a node's presence row."""
        ...

    async def presence(self, nodes: Sequence[str]) -> dict[str, Presence]:
        """Presence rows of these nodes; a node without a row is absent from the answer."""
        ...

    async def present(self) -> list[Presence]:
        """All presence rows, expired ones among them until ``forget_node``."""
        ...

    async def leave(self, node: str) -> None:
        """Mark a node's presence as ended now (a clean stop): the row stays, expired."""
        ...

    async def forget_node(self, node: str) -> None:
        """Delete a presence row that nothing refers to any more."""
        ...

    async def epoch(self) -> str:
        """Identity of the store's contents: another value means that it was emptied (a quiet period follows)."""
        ...

    async def close(self) -> None:
        """Release everything; idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class WakeRow:
    """An alarm. Its key is ``(execution_id, wake_at)``; ``wake_at`` is milliseconds since the epoch.

    ``kind`` is ``timer``, ``inbox`` or ``refusal``; ``head`` and ``holds`` belong to refusal rows (system.md 5): an
    upsert keeps the maximum of both.
    """

    execution_id: str
    wake_at: int
    kind: str
    head: int = -1
    holds: int = 0


@runtime_checkable
class WakeStore(Protocol):
    """Alarms, sharded like the log, so that a node polls only what it may act on."""

    async def schedule(self, rows: Sequence[WakeRow]) -> None:
        """Upsert by key; ``head`` and ``holds`` keep their maximum, the kind the strongest of inbox, refusal, timer.

        So a timer is never replaced by another kind, and rows that meet on a key merge to the same in any order.
        """
        ...

    async def due(
        self, now: int, limit: int, *, shards: frozenset[int], refused: bool = True
    ) -> list[WakeRow]:
        """Rows with ``wake_at <= now`` in these shards, earliest first; refusal rows only if ``refused``.

        A row is left out while a claim stands on it (judged on the store's clock): its claimant is at work.
        """
        ...

    async def refusals(self, now: int, limit: int, *, shard: int, offset: int = 0) -> list[WakeRow]:
        """Refusal rows of a shard that are due, claimed ones among them, in order, at most ``limit`` from ``offset`` on.

        For any node, whoever owns the shard: what its owner cannot open, another may (docs/adr/0021).
        """
        ...

    async def claim(self, row: WakeRow, owner: str, ttl_ms: int) -> bool:
        """Claim a due row for ``owner`` for ``ttl_ms``; False while another's claim stands, or where the row is gone.

        Claimed anew for 0 ms it is given back.
        """
        ...

    async def complete(self, execution_id: str, wake_at: int) -> bool:
        """Delete a row; False where there was none.

        An inbox or refusal row that was scheduled again while its claim stood stays, unclaimed: whoever scheduled it may
        have done so after the claimant read the inbox.
        """
        ...

    async def move(self, execution_id: str, wake_at: int, row: WakeRow) -> bool:
        """Replace a row by another in one step (a hold), with the upsert rule; False where the first is gone.

        False also where the first has become a timer's and ``row`` is none: a hold never completes a timer's key.
        """
        ...

    async def rows_of(self, execution_id: str) -> list[WakeRow]:
        """All rows of an execution, earliest first."""
        ...

    async def clear(self, execution_id: str) -> int:
        """Delete all rows of an execution; return how many."""
        ...

    async def count(self) -> int:
        """How many rows there are."""
        ...

    async def epoch(self) -> str:
        """As ``LeaseStore.epoch``: another value means that the rows are to be rebuilt from the log."""
        ...

    async def close(self) -> None:
        """Release everything; idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A folded state at a sequence."""

    execution_id: str
    sequence: int
    state: dict[str, Json]
    metadata: dict[str, Json] = field(default_factory=dict)


@runtime_checkable
class SnapshotStore(Protocol):
    """Latest folded state per execution; a cache that the log can always replace."""

    async def save(self, snapshot: Snapshot) -> None:
        """Keep the snapshot unless a later one stands."""
        ...

    async def load_latest(self, execution_id: str) -> Snapshot | None:
        """The latest snapshot, None where there is none."""
        ...

    async def delete(self, execution_id: str) -> None:
        """Delete the snapshot; idempotent."""
        ...

    async def close(self) -> None:
        """Release everything; idempotent."""
        ...


Clock = Callable[[], int]
"""Milliseconds since the epoch; injected everywhere."""
