"""Membership in the consumer group on ``appends``: whose partition is whose, in the group's opinion.

The opinion decides who *should* write; who *does* is decided by the producer's epoch (kafka.md, "Conditional append").
One thread polls the group, and only while the node's event loop ticks: a node whose loop is blocked answers nobody, and
polling on its behalf would let it hold its partitions for ever.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from loom.errors import NodeFencedError
from loom.stores.kafka.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_log = logging.getLogger("loom.kafka.membership")

POLL_S: Final = 0.05
BATCH: Final = 500
"""Messages taken from the client at once; a handler that pauses a partition still gets the rest of the batch."""
_LEAVE_S: Final = 3.0
_WAKE_S: Final = 0.5
_PROBE_S: Final = 0.2
_CONFIRM_S: Final = 5.0
_REFUTED: Final = frozenset(
    {
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.FENCED_INSTANCE_ID,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
    }
)
"""Answers to a commit that say: not a member at this generation. Any other says nothing about it."""


@dataclass(frozen=True, slots=True)
class MembershipSettings:
    """Bounds of a membership, in milliseconds.

    ``session_timeout_ms`` is how long a killed node's partitions stay unowned (unless it comes back with the same id
    before); ``loop_bound_ms`` is how long the event loop may stay silent before polling stops, after which the group
    takes the partitions away within ``max_poll_interval_ms`` plus a session; ``revoke_deadline_ms`` bounds the
    transaction in flight at a rebalance.
    """

    bootstrap: str
    topic: str
    group: str
    node: str
    kafka: Mapping[str, Any] = field(default_factory=dict)
    session_timeout_ms: int = 8_000
    max_poll_interval_ms: int = 30_000
    loop_bound_ms: int = 5_000
    revoke_deadline_ms: int = 9_000


class MembershipHandler(Protocol):
    """What a membership tells. All on the membership's thread; nothing may block longer than a rebalance may take."""

    def assigned(self, committed: Mapping[int, int]) -> None:
        """These partitions are ours now, paused; values are committed offsets, -1 where none is known."""
        ...

    def revoked(self, partitions: Sequence[int], deadline: Deadline) -> Mapping[int, int]:
        """Finish with these partitions before ``deadline``; return the offsets to commit for them."""
        ...

    def lost(self, partitions: Sequence[int]) -> None:
        """These partitions may already be another's: stop at once."""
        ...

    def received(self, message: Message) -> None:
        """A record of an assigned partition that was resumed."""
        ...

    def positions(self) -> Mapping[int, int]:
        """Offsets to commit now, for every partition that is held."""
        ...

    def idle(self) -> None:
        """One round has passed."""
        ...


class Membership:
    """One static member (its instance id is the node id) of the group that shares out the partitions."""

    def __init__(
        self, settings: MembershipSettings, handler: MembershipHandler, on_fatal: Callable[[Exception], None]
    ) -> None:
        """Prepare a member; nothing happens before ``start``. ``on_fatal`` runs on the membership's thread, once."""
        self._settings = settings
        self._handler = handler
        self._on_fatal = on_fatal
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._proof = threading.Condition()
        self._consumer: Consumer | None = None
        self._thread = threading.Thread(target=self._run, name=f"loom-group-{settings.node}", daemon=True)
        self._assigned: dict[int, int] = {}
        self._given_up: frozenset[int] = frozenset()
        self._resume_at: dict[int, int] = {}
        self._rejoin_at: float | None = None
        self._ticked = self._confirmed = time.monotonic()
        self._refuted = self._wanted = 0.0
        self._asked: float | None = None
        self._next_probe = 0.0
        self._fatal: KafkaError | None = None

    # -- any thread ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the group."""
        self._ticked = self._confirmed = time.monotonic()
        self._consumer = Consumer(self._properties(), logger=_log)
        self._thread.start()

    def tick(self) -> None:
        """Say that the event loop runs; it has to say so within ``loop_bound_ms``, again and again."""
        self._ticked = time.monotonic()

    def call(self, fn: Callable[[], None]) -> None:
        """Run ``fn`` on the membership's thread, soon."""
        self._calls.put(fn)

    def confirm(self, partition: int) -> bool:
        """Whether the group still counts this node as the owner: a commit at the current generation, asked for now.

        Another thread's call; bounded by five seconds. The commit itself is the membership thread's (the client's lock
        starves every other thread while one polls). A member that does not poll confirms nothing: to the coordinator it
        may be gone, and a commit under its old name would be fatal.
        """
        asked = time.monotonic()
        with self._proof:
            self._wanted = asked
            self._proof.wait_for(
                lambda: (
                    max(self._confirmed, self._refuted) > asked
                    or self._stopping.is_set()
                    or self._silent_for(self._settings.loop_bound_ms)
                ),
                _CONFIRM_S,
            )
            return self._confirmed > asked and partition in self._assigned and partition not in self._given_up

    def stop(self, deadline: Deadline) -> bool:
        """Leave the group, so that others take over at once; False if the thread had not ended at the deadline."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(deadline.left_s)
        return not self._thread.is_alive()

    # -- the membership's thread ---------------------------------------------------------------------------------

    def resume(self, partition: int, offset: int | None = None) -> None:
        """Read on, from ``offset`` where one is given."""
        if partition in self._assigned:
            self._resume_at[partition] = -1 if offset is None else offset
            self._try_resume()

    def pause(self, partition: int) -> None:
        """Read no further for now."""
        self._resume_at.pop(partition, None)
        if partition in self._assigned:
            self._client.pause([self._at(partition)])

    def rejoin(self, delay_s: float) -> None:
        """Leave the group, and join it again after ``delay_s``."""
        if self._rejoin_at is None and not self._stopping.is_set():
            self._rejoin_at = time.monotonic() + delay_s
            self._client.unsubscribe()

    @property
    def _client(self) -> Consumer:
        if self._consumer is None:
            raise RuntimeError("the membership has ended")
        return self._consumer

    def _properties(self) -> dict[str, Any]:
        s = self._settings
        return {
            **s.kafka,
            "bootstrap.servers": s.bootstrap,
            "group.id": s.group,
            # an empty one makes a dynamic member, for a broker that never misses a static one
            "group.instance.id": s.kafka.get("group.instance.id", s.node),
            "client.id": f"{s.node}-owner",
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": s.session_timeout_ms,
            "heartbeat.interval.ms": max(500, s.session_timeout_ms // 6),
            "max.poll.interval.ms": max(s.max_poll_interval_ms, s.session_timeout_ms),
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            # a partition that is resumed waits for the fetch that is under way without it
            "fetch.wait.max.ms": 100,
            "socket.nagle.disable": True,
            # an answer that is lost must not keep a member from leaving: closing waits for it
            "socket.timeout.ms": s.session_timeout_ms,
            "log_level": 2,  # what matters is told by errors; a lost connection would be told again and again
            "queued.max.messages.kbytes": 16_384,
            "on_commit": self._on_commit,
            "error_cb": self._on_error,
        }

    def _run(self) -> None:
        try:
            self._subscribe()
            while not self._stopping.is_set():
                self._round()
        except Exception as failed:  # noqa: BLE001 - whatever it is, it is told, and nothing is held any more
            self._handler.lost(tuple(self._assigned))
            self._on_fatal(failed)
        finally:
            self._end()

    def _subscribe(self) -> None:
        self._client.subscribe(
            [self._settings.topic],
            on_assign=self._on_assign,
            on_revoke=self._on_revoke,
            on_lost=self._on_lost,
        )

    def _round(self) -> None:
        while not self._calls.empty():
            self._calls.get_nowait()()
        if self._silent_for(self._settings.loop_bound_ms):
            if self._silent_for(self._settings.max_poll_interval_ms):
                self._give_up("the event loop is blocked")
            self._stopping.wait(POLL_S)
            return
        if self._rejoin_at is not None and time.monotonic() >= self._rejoin_at:
            self._rejoin_at = None
            self._subscribe()
        self._try_resume()
        self._poll()
        self._probe()
        self._handler.idle()

    def _poll(self) -> None:
        first = self._client.poll(POLL_S)
        batch = () if first is None else (first, *self._client.consume(BATCH, timeout=0))
        for message in batch:
            error = message.error()
            if error is None:
                self._handler.received(message)
            else:
                self._on_error(error)
        if self._fatal is not None:
            raise self._reason(self._fatal)

    def _on_error(self, error: KafkaError) -> None:
        if error.fatal() or error.code() in (KafkaError._FATAL, KafkaError.FENCED_INSTANCE_ID):  # noqa: SLF001 - the client's own name
            self._fatal = error
        else:
            _log.info("group %s: %s", self._settings.group, error.name())

    def _reason(self, error: KafkaError) -> Exception:
        if "fenced" in error.str().lower() or error.code() == KafkaError.FENCED_INSTANCE_ID:
            return NodeFencedError(self._settings.node)
        return KafkaException(error)

    # -- membership is proved, not assumed -----------------------------------------------------------------------

    def _silent_for(self, bound_ms: int) -> bool:
        return time.monotonic() - self._ticked > bound_ms / 1000

    def _probe(self) -> None:
        """Commit what is done with, also when nothing is new: the answer proves that the group still knows us.

        The client's own notice of lost partitions is not relied on (it may never come): without proof for a whole
        session everything is given up, and taken again once there is proof.
        """
        now = time.monotonic()
        session_s = self._settings.session_timeout_ms / 1000
        if self._assigned and now - self._confirmed > session_s:
            self._give_up("the coordinator confirms nothing")
        if self._asked is not None and now - self._asked < session_s:
            return
        wanted = max(self._confirmed, self._refuted, now - _CONFIRM_S) < self._wanted
        if now < self._next_probe - (session_s / 4 - _PROBE_S if wanted else 0):
            return
        positions = {**self._assigned, **self._handler.positions()}
        if positions:
            self._next_probe, self._asked = now + session_s / 4, now
            try:
                self._commit(positions, asynchronous=True)
            except KafkaException as failed:
                self._on_error(failed.args[0])

    def _commit(self, positions: Mapping[int, int], *, asynchronous: bool) -> None:
        offsets = [self._at(partition, max(0, offset)) for partition, offset in positions.items()]
        if asynchronous:
            self._client.commit(offsets=offsets, asynchronous=True)
            return
        for answer in self._client.commit(offsets=offsets, asynchronous=False):
            if answer.error is not None:
                raise KafkaException(answer.error)

    def _on_commit(self, error: KafkaError | None, partitions: Sequence[TopicPartition]) -> None:
        asked, self._asked = self._asked, None
        failed = error or next((p.error for p in partitions if p.error), None)
        with self._proof:
            if failed is None and asked is not None:
                self._confirmed = max(self._confirmed, asked)
            elif failed is not None and failed.code() in _REFUTED:
                self._refuted = time.monotonic()
            self._proof.notify_all()
        if failed is not None:
            self._on_error(failed)
        elif self._given_up:
            self._take_again()

    def _give_up(self, why: str) -> None:
        given_up = [p for p in self._assigned if p not in self._given_up]
        if given_up:
            _log.warning("partitions %s are given up: %s", sorted(given_up), why)
            self._given_up |= frozenset(given_up)
            self._handler.lost(given_up)

    def _take_again(self) -> None:
        again = {p: self._assigned[p] for p in self._given_up if p in self._assigned}
        self._given_up = frozenset()
        if again:
            self._client.pause([self._at(p) for p in again])
            self._handler.assigned(again)

    # -- rebalances ----------------------------------------------------------------------------------------------

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        consumer.incremental_assign(partitions)
        self._confirmed = max(self._confirmed, time.monotonic())
        if not partitions:
            return
        consumer.pause(partitions)
        committed = {p.partition: -1 for p in partitions}
        try:
            for found in consumer.committed(partitions, timeout=5):
                committed[found.partition] = max(-1, found.offset)
        except KafkaException as failed:
            _log.info("committed offsets are not known: %s", failed.args[0].name())
        self._assigned |= committed
        self._given_up -= committed.keys()
        self._handler.assigned(committed)

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        revoked = [p.partition for p in partitions]
        positions = self._handler.revoked(revoked, Deadline.after(self._settings.revoke_deadline_ms))
        try:
            if positions:
                self._commit(positions, asynchronous=False)
        except KafkaException as failed:
            # The next owner reads some requests again and finds them applied.
            _log.info("offsets of %s are not committed: %s", sorted(revoked), failed.args[0].name())
        self._drop(revoked)
        consumer.incremental_unassign(partitions)

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        lost = [p.partition for p in partitions]
        self._handler.lost(lost)
        self._drop(lost)
        consumer.incremental_unassign(partitions)

    def _drop(self, partitions: Sequence[int]) -> None:
        self._given_up -= frozenset(partitions)
        for partition in partitions:
            self._assigned.pop(partition, None)
            self._resume_at.pop(partition, None)

    def _try_resume(self) -> None:
        for partition, offset in list(self._resume_at.items()):
            try:
                if offset >= 0:
                    self._client.seek(self._at(partition, offset))
            except KafkaException:
                continue  # the client has not begun with the partition yet: next round
            self._client.resume([self._at(partition)])
            del self._resume_at[partition]
            # The client's fetcher sleeps for up to a second while everything is paused; any request to it wakes it.
            with contextlib.suppress(KafkaException):
                self._client.get_watermark_offsets(self._at(partition), timeout=_WAKE_S)

    def _at(self, partition: int, offset: int | None = None) -> TopicPartition:
        if offset is None:
            return TopicPartition(self._settings.topic, partition)
        return TopicPartition(self._settings.topic, partition, offset)

    def _end(self) -> None:
        """Leave (a static member that merely closes would keep its partitions unowned for a session), then close."""
        consumer = self._client
        try:
            consumer.unsubscribe()
            end = time.monotonic() + _LEAVE_S + self._settings.revoke_deadline_ms / 1000
            while self._assigned and time.monotonic() < end:
                consumer.poll(POLL_S)
            consumer.poll(POLL_S)
        except (KafkaException, RuntimeError) as failed:
            _log.info("leaving the group: %s", type(failed).__name__)
        self._consumer = None
        consumer.close()
