"""A TCP proxy that knows Kafka's frames and hurts them by rule: hold, delay, drop, cut (pitfalls.md, "Transactions").

It stands between clients and a broker whose advertised listener is the proxy's own port, so that every connection of a
client stays on it (``loom.testing.services.kafka(proxy_ports=...)``)::

    with KafkaProxy(port, ("127.0.0.1", broker_port)) as proxy:
        held = proxy.hold(Api.END_TXN, client="*log.0*")
        ...
        held.caught.wait(5)
        held.release()          # goes on to the broker, also when the client has hung up meanwhile

A rule applies to the next ``times`` frames that match, then it is spent. Rules of one kind apply in the order made.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import socket
import struct
import threading
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from types import TracebackType

MAX_FRAME: Final = 128 * 1024 * 1024
_START_TIMEOUT_S: Final = 10.0
_ANSWER_TIMEOUT_S: Final = 5.0
_SIZE: Final = struct.Struct(">i")
_REQUEST: Final = struct.Struct(">hhih")


class Api(IntEnum):
    """Keys of the requests that tests name."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    OFFSET_COMMIT = 8
    FIND_COORDINATOR = 10
    INIT_PRODUCER_ID = 22
    ADD_PARTITIONS_TO_TXN = 24
    END_TXN = 26


class Side(Enum):
    """Which frame of a request a rule is about."""

    REQUEST = "request"
    REPLY = "reply"


class Action(Enum):
    """What is done to a frame."""

    HOLD = "hold"
    """Kept until ``Rule.release``; what comes after it on its connection waits behind it."""
    HOLD_AND_HANG_UP = "hold_and_hang_up"
    """Kept until ``Rule.release``; the client's connection is closed at once. Requests only."""
    DELAY = "delay"
    """Passed on ``delay_ms`` later; what comes after it on its connection waits behind it."""
    DROP = "drop"
    """Swallowed; the connection stays open, and the client waits for its own timeout."""
    CUT = "cut"
    """Swallowed, and both connections are closed."""


@dataclass(eq=False, slots=True)
class Rule:
    """One thing to do to frames, made by the methods of :class:`KafkaProxy`."""

    action: Action
    api: Api
    side: Side
    client: str
    times: int = 1
    delay_ms: int = 0
    skip: int = 0
    """Matching frames that pass before the first that is caught."""
    caught: threading.Event = field(default_factory=threading.Event)
    """Set once a frame was caught."""
    passed: threading.Event = field(default_factory=threading.Event)
    """Set once a held frame went on its way after ``release``."""
    _loop: asyncio.AbstractEventLoop | None = None
    _released: asyncio.Event = field(default_factory=asyncio.Event)

    def release(self) -> None:
        """Let a held frame go; frames caught later by the same rule pass at once. Idempotent, from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._released.set)

    def matches(self, api: int, side: Side, client: str) -> bool:
        """Whether the rule is about this frame and not spent."""
        return (
            self.times > 0
            and self.api == api
            and self.side is side
            and fnmatch.fnmatchcase(client, self.client)
        )


class KafkaProxy:
    """The proxy: a thread with an event loop of its own, from ``start`` to ``stop``.

    Attributes:
        port: where it listens, on the loopback interface.
        seen: how many requests passed, by (api key, client id).
    """

    def __init__(self, port: int, upstream: tuple[str, int]) -> None:
        self.port, self.seen = port, Counter[tuple[int, str]]()
        self._upstream = upstream
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._links: set[_Link] = set()
        self._ready = threading.Event()
        self._closing: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name=f"kafka-proxy-{port}", daemon=True)

    # -- rules -----------------------------------------------------------------------------------------------

    def hold(
        self,
        api: Api,
        client: str = "*",
        side: Side = Side.REQUEST,
        *,
        hang_up: bool = False,
        skip: int = 0,
    ) -> Rule:
        """Hold the next such frame until released; with ``hang_up`` the client sees its connection cut meanwhile."""
        action = Action.HOLD_AND_HANG_UP if hang_up else Action.HOLD
        return self._add(Rule(action, api, side, client, skip=skip))

    def drop(self, api: Api, client: str = "*", side: Side = Side.REPLY, *, times: int = 1) -> Rule:
        """Swallow the next such frames in silence."""
        return self._add(Rule(Action.DROP, api, side, client, times))

    def cut(self, api: Api, client: str = "*", side: Side = Side.REPLY, *, times: int = 1) -> Rule:
        """Swallow the next such frames and close their connections: a reply is lost after the broker applied it."""
        return self._add(Rule(Action.CUT, api, side, client, times))

    def delay(
        self, api: Api, delay_ms: int, client: str = "*", side: Side = Side.REQUEST, *, times: int = 1
    ) -> Rule:
        """Pass the next such frames on later."""
        return self._add(Rule(Action.DELAY, api, side, client, times, delay_ms))

    def clear(self) -> None:
        """Forget every rule and let go of everything held."""
        with self._lock:
            rules, self._rules = self._rules, []
        for rule in rules:
            rule.times = 0
            rule.release()

    def disconnect(self) -> None:
        """Close every connection that stands now."""
        self._loop.call_soon_threadsafe(self._close_links)

    def _add(self, rule: Rule) -> Rule:
        rule._loop = self._loop  # noqa: SLF001 - a rule is part of its proxy
        with self._lock:
            self._rules.append(rule)
        return rule

    def match(self, api: int, side: Side, client: str) -> Rule | None:
        """Take one use of the first rule about this frame."""
        with self._lock:
            for rule in self._rules:
                if rule.matches(api, side, client):
                    if rule.skip == 0:
                        rule.times -= 1
                        return rule
                    rule.skip -= 1
        return None

    # -- the thread ------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Listen; return once connections are accepted."""
        self._thread.start()
        if not self._ready.wait(_START_TIMEOUT_S):
            raise TimeoutError(f"the proxy does not listen on port {self.port}")
        return self

    def stop(self) -> None:
        """Close every connection and end; idempotent."""
        self.clear()
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._close)
            self._thread.join(_START_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _close_links(self) -> None:
        for link in self._links:
            link.close()

    def now(self) -> float:
        """Seconds on the proxy's own clock."""
        return self._loop.time()

    def _close(self) -> None:
        if self._closing is not None:
            self._closing.set()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.run_until_complete(_end_others())
            self._loop.close()

    async def _serve(self) -> None:
        self._closing = asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, limit=2**20)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._closing.wait()
        server.close()
        links = list(self._links)
        for link in links:
            link.close()
        await asyncio.gather(*(link.ended.wait() for link in links))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection(*self._upstream, limit=2**20)
        except OSError:
            writer.close()
            return
        for end in (writer, up_writer):
            end.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = _Link(self, reader, writer, up_reader, up_writer)
        self._links.add(link)
        try:
            await link.run()
        finally:
            self._links.discard(link)


class _Link:
    """One client connection and the one to the broker that belongs to it."""

    def __init__(
        self,
        proxy: KafkaProxy,
        client_in: asyncio.StreamReader,
        client_out: asyncio.StreamWriter,
        broker_in: asyncio.StreamReader,
        broker_out: asyncio.StreamWriter,
    ) -> None:
        self._proxy = proxy
        self._client_in, self._client_out = client_in, client_out
        self._broker_in, self._broker_out = broker_in, broker_out
        self._asked: dict[int, tuple[int, str]] = {}
        self._reply = asyncio.Event()
        self._keep_upstream = False
        self.ended = asyncio.Event()

    async def run(self) -> None:
        """Pass frames both ways until either side hangs up."""
        requests = asyncio.create_task(self._requests())
        replies = asyncio.create_task(self._replies())
        try:
            await asyncio.wait({requests, replies}, return_when=asyncio.FIRST_COMPLETED)
            if self._keep_upstream:
                await requests  # a held request still goes to the broker after its client has gone
        finally:
            self.close()
            await asyncio.gather(requests, replies, return_exceptions=True)
            self.ended.set()

    def close(self) -> None:
        """Close both connections."""
        self._client_out.close()
        self._broker_out.close()

    async def _requests(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                frame = await _frame(self._client_in)
                api, _version, correlation, length = _REQUEST.unpack_from(frame, _SIZE.size)
                start = _SIZE.size + _REQUEST.size
                client = frame[start : start + max(length, 0)].decode("utf-8", "replace")
                self._proxy.seen[api, client] += 1
                self._asked[correlation] = (api, client)
                rule = self._proxy.match(api, Side.REQUEST, client)
                if rule is not None and not await self._suffer(rule):
                    continue
                self._broker_out.write(frame)
                await self._broker_out.drain()
                if rule is not None:
                    rule.passed.set()
                    await self._answered(correlation)

    async def _answered(self, correlation: int) -> None:
        """Wait until the broker has answered: a connection that closes too soon may take its last request with it."""
        end = self._proxy.now() + _ANSWER_TIMEOUT_S
        while correlation in self._asked and self._proxy.now() < end:
            self._reply.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    await self._reply.wait()

    async def _replies(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                frame = await _frame(self._broker_in)
                (correlation,) = _SIZE.unpack_from(frame, _SIZE.size)
                api, client = self._asked.pop(correlation, (-1, ""))
                self._reply.set()
                rule = self._proxy.match(api, Side.REPLY, client)
                if rule is not None and not await self._suffer(rule):
                    continue
                if not self._client_out.is_closing():
                    self._client_out.write(frame)
                    await self._client_out.drain()
                if rule is not None:
                    rule.passed.set()

    async def _suffer(self, rule: Rule) -> bool:
        """Do what the rule says to the frame in hand; True if it goes on its way."""
        if rule.action is Action.HOLD_AND_HANG_UP:
            self._keep_upstream = True
            self._client_out.close()
        rule.caught.set()
        if rule.action in {Action.HOLD, Action.HOLD_AND_HANG_UP}:
            self._keep_upstream = True
            await rule._released.wait()  # noqa: SLF001 - a rule is part of its proxy
            return True
        if rule.action is Action.DELAY:
            await asyncio.sleep(rule.delay_ms / 1000)
            return True
        if rule.action is Action.CUT:
            self.close()
        return False


async def _end_others() -> None:
    """End every other task of the loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _frame(reader: asyncio.StreamReader) -> bytes:
    """Read one frame, its size included."""
    head = await reader.readexactly(_SIZE.size)
    (size,) = _SIZE.unpack(head)
    if not 0 < size <= MAX_FRAME:
        raise EOFError
    return head + await reader.readexactly(size)
