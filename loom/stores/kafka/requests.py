"""Asking the owner of a partition, where this node is not it (kafka.md, "Appending where you are not the writer").

A request waits in ``appends`` until there is an owner. It is sent again, with the same id, until it is answered: that
repairs a lost reply, and the owner applies it once. Its absence in the log proves nothing while a copy waits, so a write
that is not answered in time is settled by a cancel record behind it in the same partition, or its outcome is unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from loom.errors import (
    BrokerError,
    DeadlineExceededError,
    LoomError,
    OutcomeUnknownError,
    PayloadTooLargeError,
    StorageWriteError,
    StoreClosedError,
    StoreError,
    TopicsError,
    UnreachableError,
)
from loom.schemas.records import AppendReply, AppendRequest, CancelOp, ReadOp, ReadReply, RequestOp
from loom.stores.kafka import wire
from loom.stores.kafka.replies import Reply, ReplyReader
from loom.topics.partitioner import partition_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loom.ids import IdSource
    from loom.schemas.codec import Codec
    from loom.stores.kafka.deadline import Deadline
    from loom.stores.kafka.sender import Sender, Sent
    from loom.topics.catalogue import Catalogue

MAX_PENDING: Final = 10_000
"""Requests of one node that may wait for an answer."""
RESEND_S: Final = 1.5
MAX_RESEND_S: Final = 6.0
SETTLE_S: Final = 2.0
"""Most of a write's budget that is kept for settling it: at most a fifth."""
_AGAIN_S: Final = 0.1


@dataclass(slots=True)
class _Ask:
    """One question, over all its copies."""

    stream_id: str
    key: str
    shard: int
    op: RequestOp
    deadline: Deadline
    answer: asyncio.Future[Any]
    request_id: str
    ids: list[str] = field(default_factory=list)
    copies: int = 0
    offsets: list[int] = field(default_factory=list)
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    error: StoreError | None = None
    cancel_id: str | None = None

    @property
    def reads(self) -> bool:
        return isinstance(self.op, ReadOp)

    @property
    def since(self) -> int | None:
        """Offset of the first copy, None where that of any is not known."""
        return min(self.offsets) if len(self.offsets) == self.copies else None


class Requester:
    """Sends requests and waits for their replies; one per store, on one event loop."""

    def __init__(
        self,
        bootstrap: str,
        kafka: Mapping[str, Any],
        *,
        catalogue: Catalogue,
        node: str,
        codec: Codec,
        sender: Sender,
        ids: IdSource,
        max_request_bytes: int,
    ) -> None:
        self.name: Final = f"{node}:{ids()}"
        """Who asks: replies are addressed to it. Another process never has the same."""
        self._bootstrap = bootstrap
        self._catalogue = catalogue
        self._codec = codec
        self._sender = sender
        self._ids = ids
        self._max_request_bytes = max_request_bytes
        self._reply_partition = partition_of(self.name, catalogue.partitions)
        self._waiting: dict[str, tuple[_Ask, dict[int, ReadReply]]] = {}
        self._reader = ReplyReader(
            bootstrap,
            kafka,
            topic=catalogue.replies,
            partition=self._reply_partition,
            requester=self.name,
            codec=codec,
            deliver=self._take,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def start(self, deadline: Deadline) -> None:
        """Fix the position in ``replies``, and write a first record there: it tells the brokers' time.

        Raises:
            UnreachableError, TopicsError, BrokerError: it cannot be.
        """
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._reader.start, self._loop, deadline)
        written = self._loop.create_future()
        hello = self._codec.encode(AppendReply(self.name))
        then = self._on_loop(lambda sent: None if written.done() else written.set_result(sent))
        self._sender.send(self._catalogue.replies, self._reply_partition, self.name, hello, then=then)
        try:
            async with asyncio.timeout(deadline.left_s):
                sent: Sent = await written
        except TimeoutError:
            raise UnreachableError("Kafka", self._bootstrap, "bootstrap") from None
        if sent.error is not None:
            raise sent.error

    async def close(self, deadline: Deadline) -> bool:
        """End; who still waits is told. False if a thread had not ended at ``deadline``."""
        self._closed = True
        for ask, _ in list(self._waiting.values()):
            ask.failed.set()
        return await asyncio.to_thread(self._reader.close, deadline)

    async def write(self, shard: int, stream_id: str, key: str, op: RequestOp, deadline: Deadline) -> Any:
        """Ask for a write; return its result, or raise its refusal.

        Raises:
            DeadlineExceededError: not written, and it never will be.
            OutcomeUnknownError: no answer, and nothing could be settled. PayloadTooLargeError: not sent.
        """
        answered = await self._ask(shard, stream_id, key, op, deadline)
        return wire.append_result(answered)

    async def read(
        self, shard: int, stream_id: str, key: str, op: ReadOp, deadline: Deadline
    ) -> list[ReadReply]:
        """Ask for a read; return its reply in order of its parts.

        Raises:
            DeadlineExceededError: no answer in time. UnreachableError: the brokers did not take the request.
        """
        parts: list[ReadReply] = await self._ask(shard, stream_id, key, op, deadline)
        return parts

    def post(self, shard: int, key: str, op: RequestOp) -> None:
        """Ask without waiting for an answer, and without a promise that it arrives."""
        request = AppendRequest(self._ids(), op)
        self._sender.send(self._catalogue.appends, shard, key, self._codec.encode(request))

    async def _ask(self, shard: int, stream_id: str, key: str, op: RequestOp, deadline: Deadline) -> Any:
        if self._loop is None or self._closed:
            raise StoreClosedError(stream_id)
        if len(self._waiting) >= MAX_PENDING:
            raise StorageWriteError(stream_id, f"{MAX_PENDING} requests wait for their owners already")
        ask = _Ask(stream_id, key, shard, op, deadline, self._loop.create_future(), self._ids())
        try:
            return await self._until_answered(ask)
        finally:
            for request_id in ask.ids:
                self._waiting.pop(request_id, None)

    async def _until_answered(self, ask: _Ask) -> Any:
        kept_s = 0.0 if ask.reads else min(SETTLE_S, ask.deadline.budget_ms / 5000)
        refusal: LoomError | None = None
        pause_s = RESEND_S
        while (left_s := ask.deadline.left_s - kept_s) > 0:
            self._send(ask, int(left_s * 1000))
            answered = await self._wait(ask, min(pause_s, left_s))
            pause_s = min(2 * pause_s, MAX_RESEND_S)
            if not answered:
                continue
            try:
                return self._settled(ask)
            except wire.AGAIN:
                await asyncio.sleep(min(_AGAIN_S, ask.deadline.left_s))
            except LoomError as error:
                if ask.reads or ask.copies == 1:
                    raise
                # Another copy may still wait in the log: a refusal is only true once that cannot be applied.
                refusal = error
                break
            ask.answer = asyncio.get_running_loop().create_future()
        if ask.reads:
            raise self._late(ask)
        return await self._settle(ask, refusal)

    async def _wait(self, ask: _Ask, timeout_s: float) -> bool:
        """Wait for the answer; come back early where a copy could not be sent, after a moment."""
        failed = asyncio.ensure_future(ask.failed.wait())
        try:
            await asyncio.wait({ask.answer, failed}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._closed and not ask.answer.done():
                raise OutcomeUnknownError(ask.stream_id, "the store was closed")
            if ask.failed.is_set() and not ask.answer.done():
                if isinstance(ask.error, TopicsError | BrokerError):
                    raise ask.error
                await asyncio.wait({ask.answer}, timeout=min(1.0, timeout_s))
        finally:
            failed.cancel()
            ask.failed.clear()
        return ask.answer.done()

    def _settled(self, ask: _Ask) -> Any:
        reply = ask.answer.result()
        first = reply[0] if isinstance(reply, list) else reply
        if first.error is not None:
            raise wire.raised(first.error)
        return reply

    async def _settle(self, ask: _Ask, refusal: LoomError | None) -> Any:
        """Put a cancel record behind every copy: its answer says what became of them all."""
        last, ask.answer = ask.answer, asyncio.get_running_loop().create_future()
        if refusal is None and last.done():
            ask.answer = last
        late = self._late(ask)
        if ask.copies and ask.deadline.left_s > 0:
            ask.cancel_id = f"{ask.request_id}:cancel"
            self._send_as(ask, ask.cancel_id, CancelOp(ask.request_id, ask.since), ask.deadline.left_ms)
            await self._wait(ask, ask.deadline.left_s)
        if ask.answer.done():
            try:
                return self._settled(ask)
            except wire.RequestExpiredError:
                raise refusal or late from None
            except (wire.RequestUnsettledError, *wire.AGAIN):
                pass
        raise OutcomeUnknownError(ask.stream_id, f"no answer within {ask.deadline.budget_ms} ms")

    def _late(self, ask: _Ask) -> LoomError:
        if not ask.offsets and isinstance(ask.error, UnreachableError):
            return ask.error
        return DeadlineExceededError(f"{type(ask.op).__name__} on {ask.stream_id!r}", ask.deadline.budget_ms)

    def _send(self, ask: _Ask, timeout_ms: int) -> None:
        """Send a copy; it is not applied any more once a write is being settled."""
        # Copies of a write are one request; each copy of a read is answered by itself, in parts of its own.
        request_id = self._ids() if ask.reads and ask.copies else ask.request_id
        ask.copies += 1
        self._send_as(ask, request_id, ask.op, timeout_ms, self._on_loop(partial(self._sent, ask)))

    def _send_as(self, ask: _Ask, request_id: str, op: RequestOp, timeout_ms: int, then: Any = None) -> None:
        request = AppendRequest(request_id, op, self.name, self._reply_partition, max(1, timeout_ms))
        value = self._codec.encode(request)
        if len(value) > self._max_request_bytes:
            raise PayloadTooLargeError(ask.stream_id, len(value), self._max_request_bytes)
        if request_id not in self._waiting:
            self._waiting[request_id] = (ask, {})
            ask.ids.append(request_id)
        self._sender.send(self._catalogue.appends, ask.shard, ask.key, value, then=then)

    def _on_loop(self, call: Any) -> Any:
        def then(sent: Sent) -> None:
            assert self._loop is not None
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(call, sent)

        return then

    def _sent(self, ask: _Ask, sent: Sent) -> None:
        if sent.error is None:
            ask.offsets.append(sent.offset)
        else:
            ask.error = sent.error
            ask.failed.set()

    def _take(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            ask, parts = self._waiting.get(reply.request_id, (None, {}))
            if ask is None or ask.answer.done():
                continue
            if ask.cancel_id not in {None, reply.request_id} and reply.error is not None:
                continue  # it speaks of one copy; what became of them all is what is asked now
            if isinstance(reply, AppendReply) or reply.error is not None:
                ask.answer.set_result(reply if isinstance(reply, AppendReply) else [reply])
                continue
            parts[reply.part] = reply
            last = max(parts)
            if not parts[last].more and len(parts) == last + 1:
                ask.answer.set_result([parts[part] for part in range(last + 1)])
