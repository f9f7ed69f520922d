"""Serving the requests of other nodes for the partitions written here.

Each is applied once: its events' ids tell a repeat, its id is remembered while this tenure lasts, and the writer records
the offset in the transaction that applied it. What reads is answered only after a transaction of this tenure that was
begun after the request came. What cannot be used goes to ``dead`` with why, and the reading moves on.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from loom.errors import DecodeError, LoomError, NotOwnerError
from loom.ids import routing_id
from loom.schemas.records import (
    AppendReply,
    AppendRequest,
    CancelOp,
    NotifyOp,
    ReadOp,
    ReadReply,
    RequestOp,
)
from loom.stores.judge import Tick, WriteOp
from loom.stores.kafka import wire
from loom.stores.kafka.offsets import OffsetTracker
from loom.stores.kafka.ownership import APPENDS
from loom.stores.kafka.records import TICK_KEY, text_of
from loom.topics.partitioner import partition_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from confluent_kafka import Message

    from loom.schemas.codec import Codec
    from loom.stores.kafka.sender import BrokerClock, Sender
    from loom.stores.kafka.shard import Shard
    from loom.stores.kafka.writer import PartitionWriter
    from loom.topics.catalogue import Catalogue

_log = logging.getLogger("loom.kafka.intake")

REMEMBERED: Final = 4_096
"""Requests of a partition whose answer is remembered, to repeat it to a copy."""
PART_BYTES: Final = 600_000
"""Encoded events in one part of a reply."""
_DEAD_S: Final = 10.0
_CLOSE_S: Final = 5.0


class Answers:
    """What became of the requests of one tenure, the last ones. Thread-safe.

    ``since`` is the offset from which on everything is known: a request whose first copy came later and that is not
    here was never applied.
    """

    def __init__(self, since: int) -> None:
        self._lock = threading.Lock()
        self._since = since
        self._known: OrderedDict[str, tuple[int, AppendReply | None]] = OrderedDict()

    def begin(self, request_id: str, offset: int) -> bool:
        """Remember a request that is being applied; False if it is known already."""
        with self._lock:
            if request_id in self._known:
                return False
            self._known[request_id] = (offset, None)
            while len(self._known) > REMEMBERED:
                _, (dropped, _) = self._known.popitem(last=False)
                self._since = max(self._since, dropped + 1)
            return True

    def done(self, request_id: str, reply: AppendReply | None) -> None:
        """Remember its answer; None: it was not applied, and a copy may be."""
        with self._lock:
            if reply is None:
                self._known.pop(request_id, None)
            elif request_id in self._known:
                self._known[request_id] = (self._known[request_id][0], reply)

    def of(self, request_id: str) -> AppendReply | None:
        """The answer given, None where there is none yet."""
        with self._lock:
            return self._known.get(request_id, (0, None))[1]

    def settles(self, request_id: str, since: int | None) -> bool:
        """Whether its absence here proves that it was not applied."""
        with self._lock:
            return since is not None and since >= self._since and request_id not in self._known


class RequestIntake:
    """Serves requests for every partition of this node."""

    def __init__(
        self,
        *,
        catalogue: Catalogue,
        codec: Codec,
        sender: Sender,
        broker_clock: BrokerClock,
        shard_of: Callable[[PartitionWriter], Shard],
        on_notify: Callable[[str], None],
    ) -> None:
        self.catalogue, self.codec, self.sender, self.broker_clock = catalogue, codec, sender, broker_clock
        self.on_notify = on_notify
        self._shard_of = shard_of
        self.reads: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        """Reads may touch the disk, and a writer's thread must not wait for it."""
        self._reader = threading.Thread(target=self._serve_reads, name="loom-reads", daemon=True)
        self._reader.start()

    def open(self, writer: PartitionWriter, start: int) -> PartitionIntake:
        """Serve a partition from offset ``start`` of ``appends`` on."""
        return PartitionIntake(self, writer, self._shard_of(writer), start)

    def close(self) -> None:
        """Answer no reads any more; idempotent."""
        self.reads.put(None)
        self._reader.join(_CLOSE_S)

    def _serve_reads(self) -> None:
        while (read := self.reads.get()) is not None:
            try:
                read()
            except Exception:  # noqa: BLE001 - one bad read must not end all others
                # The asker asks again, or is told at its deadline; other reads go on.
                _log.exception("a read failed")


class PartitionIntake:
    """The requests of one partition, in one tenure of it by this node."""

    def __init__(self, intake: RequestIntake, writer: PartitionWriter, shard: Shard, start: int) -> None:
        self.offsets = OffsetTracker(start)
        self._all = intake
        self._writer = writer
        self._shard = shard
        self._answers = Answers(start)

    def serve(self, message: Message) -> bool:
        """Serve one request; False: it cannot be dealt with now, so read it again later.

        Its offset is open until nothing is owed for it. Runs on the membership's thread.
        """
        offset = message.offset()
        assert offset is not None
        self.offsets.begin(offset)
        if message.value() is None and message.key() == TICK_KEY.encode():
            self._skip(offset)
            return True
        try:
            request = self._all.codec.decode(message.value() or b"", AppendRequest, "request")
            write = wire.write_op(request.op, self._all.codec)
            partition = self._partition_of(request.op)
        except LoomError as unusable:
            return self._bury(message, unusable)
        if partition not in {None, self._writer.partition}:
            return self._forward(message, partition)
        _, stamp = message.timestamp()
        age_ms = self._all.broker_clock.age_ms(stamp)
        if (
            request.timeout_ms is not None
            and age_ms > request.timeout_ms
            and not isinstance(request.op, CancelOp)
        ):
            self._skip(offset)
            self._reply(request, wire.append_reply(request.id, None, wire.RequestExpiredError(request.id)))
        elif write is not None:
            self._write(request, write, offset, message)
        else:
            self._other(request, offset)
        return True

    # -- the three kinds of request ------------------------------------------------------------------------------

    def _write(self, request: AppendRequest, op: WriteOp, offset: int, message: Message) -> None:
        if not self._answers.begin(request.id, offset):
            given = self._answers.of(request.id)
            if given is not None:
                self._reply(request, given)
            self.offsets.done(offset)
            return
        # Nobody waits for a writer's own request: what is refused of those must not be lost in silence.
        kept = message if request.requester is None else None
        self._writer.submit_remote(
            op, source=APPENDS, offset=offset, reply=partial(self._applied, request, offset, kept)
        )

    def _applied(
        self, request: AppendRequest, offset: int, kept: Message | None, result: Any, error: Exception | None
    ) -> None:
        reply = wire.append_reply(request.id, result, error)
        again = isinstance(error, wire.AGAIN)
        self._answers.done(request.id, None if again else reply)
        if error is not None and kept is not None and not again:
            self._send_dead(kept, error, wait=False)
        self._reply(request, reply)
        self.offsets.done(offset)

    def _other(self, request: AppendRequest, offset: int) -> None:
        """What reads: after a transaction of this tenure that has this request behind it."""
        if isinstance(request.op, NotifyOp):
            self._all.on_notify(request.op.execution_id)
            self._skip(offset)
            return
        self._writer.submit_remote(
            Tick(), source=APPENDS, offset=offset, reply=partial(self._proved, request, offset)
        )

    def _proved(self, request: AppendRequest, offset: int, _result: Any, error: Exception | None) -> None:
        self.offsets.done(offset)
        if error is not None:
            return  # the asker asks again
        if isinstance(request.op, CancelOp):
            self._reply(request, self._settlement(request, request.op))
        elif isinstance(request.op, ReadOp):
            self._all.reads.put(partial(self._read, request, request.op))

    def _settlement(self, request: AppendRequest, op: CancelOp) -> AppendReply:
        known = self._answers.of(op.request_id)
        if known is not None:
            return AppendReply(request.id, known.error, known.appended, known.number)
        if self._answers.settles(op.request_id, op.since):
            return wire.append_reply(request.id, None, wire.RequestExpiredError(op.request_id))
        return wire.append_reply(request.id, None, wire.RequestUnsettledError(op.request_id))

    # -- reads (the reader's thread) -----------------------------------------------------------------------------

    def _read(self, request: AppendRequest, op: ReadOp) -> None:
        try:
            for part in self._parts(request.id, op):
                self._reply(request, part)
        except NotOwnerError:
            pass  # the next owner answers
        except LoomError as error:
            self._reply(request, ReadReply(request.id, wire.report(error)))

    def _parts(self, request_id: str, op: ReadOp) -> list[ReadReply]:
        if op.query == "observe":
            seen = wire.observed(op.stream_id, self._shard.observe(op.stream_id))
            return [ReadReply(request_id, info=seen)]
        if op.query == "info":
            info = self._shard.info(op.stream_id)
            return [ReadReply(request_id, info=None if info is None else wire.stream_info(info))]
        if op.query == "snapshot":
            found = self._shard.snapshot(op.stream_id)
            return [ReadReply(request_id, values=() if found is None else (found,))]
        if op.query == "last":
            return [ReadReply(request_id, values=tuple(self._shard.last(op.stream_id)))]
        if op.query == "inboxes":
            return [ReadReply(request_id, values=tuple(self._shard.inboxes(op.stream_id)))]
        if op.query != "events":
            raise DecodeError("request", "its query is not known")
        return self._event_parts(request_id, op)

    def _event_parts(self, request_id: str, op: ReadOp) -> list[ReadReply]:
        parts: list[list[bytes]] = [[]]
        size = 0
        for value in self._shard.read(op.stream_id, op.from_sequence, min(op.limit, wire.MAX_READ)):
            if size and size + len(value) > PART_BYTES:
                parts.append([])
                size = 0
            parts[-1].append(value)
            size += len(value)
        last = len(parts) - 1
        return [
            ReadReply(request_id, part=number, more=number < last, values=tuple(values))
            for number, values in enumerate(parts)
        ]

    # -- what leaves ---------------------------------------------------------------------------------------------

    def _reply(self, request: AppendRequest, reply: AppendReply | ReadReply) -> None:
        """Answer whoever waits, outside any transaction; a lost answer is asked for again."""
        if request.requester is None or request.reply_partition is None:
            return
        if isinstance(request.op, ReadOp) and isinstance(reply, AppendReply):
            reply = ReadReply(request.id, reply.error)
        if isinstance(reply, AppendReply) and reply.request_id != request.id:
            reply = AppendReply(request.id, reply.error, reply.appended, reply.number)
        catalogue = self._all.catalogue
        if 0 <= request.reply_partition < catalogue.partitions:
            value = self._all.codec.encode(reply)
            self._all.sender.send(catalogue.replies, request.reply_partition, request.requester, value)

    def _skip(self, offset: int) -> None:
        self._writer.skip_remote(source=APPENDS, offset=offset)
        self.offsets.done(offset)

    def _partition_of(self, op: RequestOp) -> int | None:
        """Partition that all streams of a request are in; None where it names none.

        Raises:
            DecodeError: they are in several.
        """
        partitions = {
            partition_of(routing_id(stream), self._all.catalogue.partitions) for stream in wire.streams_of(op)
        }
        if len(partitions) > 1:
            raise DecodeError("request", "its streams are in several partitions")
        return next(iter(partitions), None)

    def _forward(self, message: Message, partition: int | None) -> bool:
        """A request in the wrong partition is forwarded, not trusted (kafka.md, "Topics")."""
        key = text_of(message.key())
        _log.warning("request in partition %s forwarded to %s", message.partition(), partition)
        assert partition is not None
        sent = self._all.sender.send_and_wait(
            self._all.catalogue.appends, partition, key, message.value() or b"", timeout_s=_DEAD_S
        )
        if sent:
            self._skip(message.offset() or 0)
        return sent

    def _bury(self, message: Message, why: LoomError) -> bool:
        """Send an unusable request to ``dead``, and move on only once it is there."""
        offset = message.offset() or 0
        buried = self._send_dead(message, why, wait=True)
        if buried:
            self._skip(offset)
        return buried

    def _send_dead(self, message: Message, why: Exception, *, wait: bool) -> bool:
        catalogue, value = self._all.catalogue, message.value() or b""
        source = f"{catalogue.appends}/{message.partition()}/{message.offset()}"
        _log.warning("request %s goes to %s: %s", source, catalogue.dead, type(why).__name__)
        headers = [
            ("source", source.encode()),
            ("key", message.key() or b""),
            ("error", type(why).__name__.encode()),
            ("why", str(why).encode()),
        ]
        place = partition_of(source, catalogue.partitions)
        if wait:
            return self._all.sender.send_and_wait(
                catalogue.dead, place, source, value, headers=headers, timeout_s=_DEAD_S
            )
        self._all.sender.send(catalogue.dead, place, source, value, headers=headers)
        return True
