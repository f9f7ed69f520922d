"""What leaves outside every transaction: requests, replies, and what goes to ``dead``.

Replies do not ride in the owner's transaction: another writer's open transaction in the same partition would hide them
(kafka.md, "Replies"). One plain idempotent producer per node does for all of it.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, KafkaError, KafkaException, Message, Producer

from loom.stores.kafka.client import RECORD_OVERHEAD, let_go, name_of, store_error
from loom.stores.kafka.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from loom.errors import StoreError
    from loom.stores.contracts import Clock

_log = logging.getLogger("loom.kafka.sender")

_POLL_S: Final = 0.1
_SPAN_MS: Final = 60_000
_FLUSH_MS: Final = 2_000


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of a record: its offset, or the error that kept it from being written, or perhaps kept it."""

    offset: int = -1
    error: StoreError | None = None


class BrokerClock:
    """The brokers' time, as far as it is known: age is judged on the time the log gives (kafka.md, "Appending ...").

    A record is always seen after it was stamped, so its stamp minus our clock never exceeds the true difference; the
    largest seen lately is the estimate. It errs towards taking a record for younger than it is, which only costs work.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._since = clock()
        self._ahead: int | None = None
        self._before: int | None = None

    def saw(self, stamped_at: int) -> None:
        """A record bears this stamp of the log, in milliseconds."""
        now = self._clock()
        with self._lock:
            if now - self._since > _SPAN_MS or now < self._since:
                self._before, self._ahead, self._since = self._ahead, None, now
            ahead = stamped_at - now
            if self._ahead is None or ahead > self._ahead:
                self._ahead = ahead

    def age_ms(self, stamped_at: int) -> int:
        """Return how old a record is at least."""
        self.saw(stamped_at)
        with self._lock:
            known = [ahead for ahead in (self._ahead, self._before) if ahead is not None]
        return max(0, self._clock() + max(known) - stamped_at)


class Sender:
    """A plain producer and the thread that hears of its deliveries. Every method may be called from any thread."""

    def __init__(
        self,
        bootstrap: str,
        kafka: Mapping[str, Any],
        *,
        client_id: str,
        broker_clock: BrokerClock,
        max_record_bytes: int,
    ) -> None:
        self._bootstrap = bootstrap
        self._broker_clock = broker_clock
        self._stopping = threading.Event()
        self._producer = Producer(
            {
                "linger.ms": 0,
                "compression.type": "lz4",
                "queue.buffering.max.messages": 100_000,
                "queue.buffering.max.kbytes": 131_072,
                **kafka,
                "bootstrap.servers": bootstrap,
                "client.id": client_id,
                "enable.idempotence": True,
                "acks": "all",
                # longer than any caller waits for one copy; then the copy is given up and another one sent
                "message.timeout.ms": 30_000,
                "message.max.bytes": max_record_bytes + RECORD_OVERHEAD,
                "retry.backoff.ms": 50,
                "socket.nagle.disable": True,
                "log_level": 2,
                "error_cb": _note,
            },
            logger=_log,
        )
        self._thread = threading.Thread(target=self._run, name=f"loom-sender-{client_id}", daemon=True)
        self._thread.start()

    def send(
        self,
        topic: str,
        partition: int,
        key: str,
        value: bytes,
        *,
        headers: Sequence[tuple[str, bytes]] = (),
        then: Callable[[Sent], None] | None = None,
    ) -> None:
        """Send a record; ``then`` hears once what became of it, here or on the sender's thread."""

        def delivered(error: KafkaError | None, message: Message) -> None:
            kind, stamp = message.timestamp()
            if error is None and kind == TIMESTAMP_LOG_APPEND_TIME:
                self._broker_clock.saw(stamp)
            if then is not None:
                failed = None if error is None else self._error(KafkaException(error), topic)
                offset = message.offset()
                then(Sent(-1 if offset is None or error is not None else offset, failed))

        try:
            self._producer.produce(
                topic, value, key, partition=partition, headers=list(headers), on_delivery=delivered
            )
        except (BufferError, KafkaException, RuntimeError) as refused:  # the last: it is closed
            if then is not None:
                then(Sent(error=self._error(refused, topic)))

    def send_and_wait(
        self,
        topic: str,
        partition: int,
        key: str,
        value: bytes,
        *,
        headers: Sequence[tuple[str, bytes]] = (),
        timeout_s: float,
    ) -> bool:
        """Send a record and wait until the log has it; False if that is not known in time."""
        arrived = threading.Event()
        answer: list[Sent] = []

        def note(sent: Sent) -> None:
            answer.append(sent)
            arrived.set()

        self.send(topic, partition, key, value, headers=headers, then=note)
        return arrived.wait(timeout_s) and answer[0].error is None

    def close(self, deadline: Deadline) -> bool:
        """Send what waits, for a moment, and end; False if the thread had not ended by ``deadline``. Idempotent."""
        flush = Deadline.after(min(_FLUSH_MS, deadline.left_ms // 2))
        while len(self._producer) and not flush.passed and not self._stopping.wait(0.01):
            pass
        self._stopping.set()
        self._thread.join(deadline.left_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._producer.poll(_POLL_S)
        self._producer.purge(in_queue=True, in_flight=True, blocking=False)
        let_go(self._producer)

    def _error(self, raised: BaseException, topic: str) -> StoreError:
        return store_error(raised, f"write to {topic}", self._bootstrap)


def _note(error: KafkaError) -> None:
    _log.info("plain producer: %s", name_of(KafkaException(error)))
