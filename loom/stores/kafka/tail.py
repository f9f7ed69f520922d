"""Live events of partitions that another process writes: one consumer at the end of their topics.

It starts at the last stable offset, not at the end: what an open transaction has written already lies below the end, and
would be missed once it commits.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import Consumer, KafkaException, TopicPartition

from loom.errors import DecodeError, StoreError
from loom.stores.kafka.client import name_of, reader_config
from loom.stores.kafka.reader import END_OF_PARTITION, Ends
from loom.stores.kafka.records import text_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping, Sequence

    from confluent_kafka import Message
    from confluent_kafka.admin import AdminClient

    from loom.schemas.codec import Codec
    from loom.schemas.envelope import Envelope
    from loom.stores.kafka.deadline import Deadline

_log = logging.getLogger("loom.kafka.tail")

_POLL_S: Final = 0.1
_BATCH: Final = 1_000

Place = tuple[str, int]


class TailReader:
    """Follows the streams that are asked for, on a thread of its own, and hands their events over on the event loop."""

    def __init__(
        self,
        bootstrap: str,
        kafka: Mapping[str, Any],
        *,
        client_id: str,
        admin: AdminClient,
        codec: Codec,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[str, Sequence[Envelope]], None],
    ) -> None:
        self._bootstrap, self._admin, self._codec = bootstrap, admin, codec
        self._loop, self._deliver = loop, deliver
        self._lock = threading.Lock()
        self._streams: dict[str, int] = {}
        self._places: dict[Place, int] = {}
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        config = reader_config(bootstrap, kafka, client_id=client_id) | {
            "auto.offset.reset": "latest",
            "log_level": 2,
            "fetch.wait.max.ms": 100,
            "enable.partition.eof": False,
        }
        self._consumer = Consumer(config, logger=_log)
        self._thread = threading.Thread(target=self._run, name=f"loom-tail-{client_id}", daemon=True)
        self._thread.start()

    async def follow(self, stream_id: str, topic: str, partition: int) -> None:
        """Hand over events of the stream from now on; returns once none can be missed any more.

        Raises:
            UnreachableError, TopicsError, BrokerError: the end of the partition is not known; nothing is followed.
        """
        with self._lock:
            self._streams[stream_id] = self._streams.get(stream_id, 0) + 1
            place = (topic, partition)
            self._places[place] = self._places.get(place, 0) + 1
        begun = self._loop.create_future()
        self._calls.put(lambda: self._begin(place, begun))
        try:
            await begun
        except BaseException:
            self.unfollow(stream_id, topic, partition)
            raise

    def unfollow(self, stream_id: str, topic: str, partition: int) -> None:
        """Undo one ``follow``."""
        with self._lock:
            self._streams[stream_id] -= 1
            if not self._streams[stream_id]:
                del self._streams[stream_id]
            place = (topic, partition)
            self._places[place] -= 1
            if not self._places[place]:
                del self._places[place]
        self._calls.put(lambda: self._end(place))

    def close(self, deadline: Deadline) -> bool:
        """End; False if the thread had not ended by ``deadline``. Idempotent."""
        self._stopping.set()
        self._thread.join(deadline.left_s)
        return not self._thread.is_alive()

    # -- the tail's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                while not self._calls.empty():
                    self._calls.get_nowait()()
                if not self._consumer.assignment():
                    with contextlib.suppress(queue.Empty):
                        self._calls.get(timeout=_POLL_S)()
                    continue
                first = self._consumer.poll(_POLL_S / 4)
                if first is not None:
                    self._take((first, *self._consumer.consume(_BATCH, timeout=0)))
        except RuntimeError as failed:  # the loop is closed: nobody listens any more
            _log.info("tail ends: %s", type(failed).__name__)
        finally:
            self._consumer.close()

    def _begin(self, place: Place, begun: asyncio.Future[None]) -> None:
        topic, partition = place
        error: Exception | None = None
        try:
            if not any((p.topic, p.partition) == place for p in self._consumer.assignment()):
                start = Ends(self._admin, partition, self._bootstrap).stable([topic])[topic]
                self._consumer.incremental_assign([TopicPartition(topic, partition, start)])
        except (StoreError, KafkaException) as failed:
            error = failed
        self._loop.call_soon_threadsafe(_settle, begun, error)

    def _end(self, place: Place) -> None:
        with self._lock:
            wanted = place in self._places
        if not wanted and any((p.topic, p.partition) == place for p in self._consumer.assignment()):
            self._consumer.incremental_unassign([TopicPartition(*place)])

    def _take(self, messages: Sequence[Message]) -> None:
        found: dict[str, list[Envelope]] = {}
        for message in messages:
            error = message.error()
            if error is not None:
                if error.code() != END_OF_PARTITION:
                    _log.info("tail: %s", name_of(KafkaException(error)))
                continue
            stream_id = text_of(message.key()).rpartition("/")[0]
            value = message.value()
            with self._lock:
                wanted = stream_id in self._streams
            if not wanted or value is None:
                continue
            try:
                found.setdefault(stream_id, []).append(self._codec.decode_envelope(value))
            except DecodeError as failed:
                # The subscriber meets the gap, and reads the log again, where the owner judges it.
                _log.warning("event of %s: %s", stream_id, failed.problem)
        for stream_id, envelopes in found.items():
            self._loop.call_soon_threadsafe(self._deliver, stream_id, envelopes)


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
