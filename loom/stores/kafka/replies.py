"""Replies to this node's requests: a reader of one partition of ``replies``, begun before the first request is sent."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import Consumer, KafkaException, TopicPartition

from loom.errors import DecodeError, UnreachableError
from loom.schemas.records import AppendReply, ReadReply
from loom.stores.kafka.client import name_of, reader_config, store_error

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping, Sequence

    from confluent_kafka import Message

    from loom.schemas.codec import Codec
    from loom.stores.kafka.deadline import Deadline

_log = logging.getLogger("loom.kafka.replies")

Reply = AppendReply | ReadReply
_POLL_S: Final = 0.1
_AGAIN_S: Final = 0.1
_BATCH: Final = 500
_READ_REPLY: Final = "loom.ReadReply"


class ReplyReader:
    """Reads what is addressed to ``requester``, and hands it over on the event loop, in batches.

    The position is fixed in ``start``, so no reply to a later request is missed. Replies are written outside of
    transactions, and read so: nobody's open transaction can hide one.
    """

    def __init__(
        self,
        bootstrap: str,
        kafka: Mapping[str, Any],
        *,
        topic: str,
        partition: int,
        requester: str,
        codec: Codec,
        deliver: Callable[[Sequence[Reply]], None],
    ) -> None:
        self._bootstrap = bootstrap
        self._topic, self._partition = topic, partition
        self._requester = requester.encode()
        self._codec = codec
        self._deliver = deliver
        self._stopping = threading.Event()
        config = reader_config(bootstrap, kafka, client_id=f"{requester}-replies", committed=False)
        config |= {
            "enable.partition.eof": False,
            "auto.offset.reset": "latest",
            "log_level": 2,
            "fetch.wait.max.ms": 500,
        }
        self._consumer = Consumer(config, logger=_log)
        self._thread: threading.Thread | None = None

    def start(self, loop: asyncio.AbstractEventLoop, deadline: Deadline) -> None:
        """Fix the position, and begin to read. Blocks; call it on a thread that may wait.

        Raises:
            UnreachableError, TopicsError: the end of the partition cannot be asked for.
        """
        place = TopicPartition(self._topic, self._partition)
        while True:
            try:
                _, place.offset = self._consumer.get_watermark_offsets(
                    place, timeout=max(0.1, deadline.left_s)
                )
                break
            except KafkaException as failed:
                # A partition that has just been made, or has moved, has no leader for a moment.
                error = store_error(failed, f"read {self._topic}", self._bootstrap)
                if (
                    not isinstance(error, UnreachableError)
                    or self._stopping.wait(_AGAIN_S)
                    or deadline.passed
                ):
                    raise error from failed
        self._consumer.assign([place])
        self._thread = threading.Thread(
            target=self._run, args=(loop,), name=f"loom-replies-{self._partition}", daemon=True
        )
        self._thread.start()

    def close(self, deadline: Deadline) -> bool:
        """End; False if the thread had not ended by ``deadline``. Idempotent."""
        self._stopping.set()
        if self._thread is None:
            self._consumer.close()
            return True
        self._thread.join(deadline.left_s)
        return not self._thread.is_alive()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while not self._stopping.is_set():
                first = self._consumer.poll(_POLL_S)
                if first is None:
                    continue
                batch = (first, *self._consumer.consume(_BATCH, timeout=0))
                replies = [reply for message in batch if (reply := self._read(message)) is not None]
                if replies:
                    loop.call_soon_threadsafe(self._deliver, replies)
        except RuntimeError as failed:  # the loop is closed: nobody waits any more
            _log.info("replies end: %s", type(failed).__name__)
        finally:
            self._consumer.close()

    def _read(self, message: Message) -> Reply | None:
        error = message.error()
        if error is not None:
            _log.info("replies: %s", name_of(KafkaException(error)))
            return None
        if message.key() != self._requester:
            return None
        raw = message.value() or b""
        try:
            schema, _ = self._codec.writer_of(raw, "reply")
            cls: type[Any] = ReadReply if schema.name == _READ_REPLY else AppendReply
            reply: Reply = self._codec.decode(raw, cls, "reply")
        except DecodeError as failed:
            # Whoever waits asks again, and is told at its deadline.
            _log.warning("%s partition %d: %s", self._topic, self._partition, failed.problem)
            return None
        return reply
