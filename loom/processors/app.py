"""The Faust app of a worker: agents on ``inbox``, ``commands`` and ``quarantine`` (kafka.md "Processors").

It delivers at least once and writes nothing to the log: every transactional write goes through the event store. Its web
server is off, it declares no topics, and Faust's own exactly-once mode is never used (pitfalls.md, "Groups and Faust").
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from loom.errors import ConfigError, DeadlineExceededError
from loom.processors.credentials import broker_credentials
from loom.processors.delivery import Delivery, DeliveryBridge, Source
from loom.processors.quarantine import HeldTopics, QuarantineBridge
from loom.processors.summaries import read_quarantined
from loom.processors.transport import CommittedApp, check_faust
from loom.runtime.client import wall_clock
from loom.schemas.codec import Codec
from loom.topics.catalogue import Catalogue
from loom.topics.partitioner import partition_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from loom.config import Config
    from loom.runtime.kept_copies import KeptCopies
    from loom.schemas.records import Command, OperatorSignal

T = TypeVar("T")

ROLE: Final = "delivery"
SESSION_S: Final = 10.0
HEARTBEAT_S: Final = 3.0
COMMIT_EVERY_S: Final = 1.0
BUFFER: Final = 1024
"""Records that wait in front of an agent."""

BRIDGE_TIMEOUT_S: Final = 30.0
WRITE_TIMEOUT_S: Final = 30.0
CHAINS_TIMEOUT_MS: Final = 10_000
"""For reading which chains keep copies: within the time that a stop of the app may take, and tried again."""


class Bridge(DeliveryBridge, QuarantineBridge, Protocol):
    """What the app asks of the runtime."""


class LoopBridge:
    """Carries calls to a bridge that lives on another event loop, and its answers back, within a bound."""

    def __init__(
        self, bridge: Bridge, loop: asyncio.AbstractEventLoop, timeout_s: float = BRIDGE_TIMEOUT_S
    ) -> None:
        """``loop`` is the one the runtime runs on."""
        self._bridge, self._loop, self._timeout_s = bridge, loop, timeout_s

    async def notify(self, chain_id: str, stream: str, sequence: int) -> None:
        """See :meth:`DeliveryBridge.notify`. Raises DeadlineExceededError: no answer in time."""
        await self._call("a notification", lambda: self._bridge.notify(chain_id, stream, sequence))

    async def command(self, command: Command, source: Source) -> None:
        """See :meth:`DeliveryBridge.command`. Raises DeadlineExceededError: no answer in time."""
        await self._call("a command", lambda: self._bridge.command(command, source))

    async def look_after(self, chain_id: str) -> KeptCopies:
        """See :meth:`QuarantineBridge.look_after`. Raises DeadlineExceededError: no answer in time."""
        return await self._call("a look at copies", lambda: self._bridge.look_after(chain_id))

    async def _call(self, what: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self._loop.is_closed():
            raise DeadlineExceededError(what, 0)
        answer = asyncio.run_coroutine_threadsafe(call(), self._loop)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            raise DeadlineExceededError(what, round(self._timeout_s * 1000)) from None


class WorkerApp(CommittedApp):
    """The app, with what its agents do."""

    delivery: Delivery
    quarantine: HeldTopics

    async def settle(self) -> None:
        """Stop what the agents have at work; unsettled records are delivered again, here or elsewhere. Idempotent."""
        await self.delivery.close()
        await self.quarantine.close()


def build_app(
    config: Config,
    runtime_bridge: Bridge,
    *,
    codec: Codec | None = None,
    report: Callable[[Source, Exception], None] | None = None,
) -> WorkerApp:
    """Return the app of this node. Call it on the event loop that will run it (``loom.processors.host``).

    Raises:
        ConfigError: no bootstrap, credentials that Faust cannot use, or a Faust that loom's transport does not fit.
    """
    check_faust()
    if not config.bootstrap:
        raise ConfigError("bootstrap", "it is not set", "name the brokers, host:port")
    catalogue = Catalogue(config.topic_prefix, config.partitions)
    app = WorkerApp(
        catalogue.group(ROLE),
        broker=[f"kafka://{broker.strip()}" for broker in config.bootstrap.split(",")],
        broker_credentials=broker_credentials(config.kafka),
        broker_client_id=f"{config.node_id}-{ROLE}",
        broker_session_timeout=SESSION_S,
        broker_heartbeat_interval=HEARTBEAT_S,
        broker_commit_interval=COMMIT_EVERY_S,
        processing_guarantee="at_least_once",
        stream_buffer_maxsize=BUFFER,
        stream_wait_empty=False,  # bounded stop: what is not settled is delivered again
        store="memory://",
        web_enabled=False,
        topic_allow_declare=False,
        topic_disable_leader=True,
        autodiscover=False,
        origin="loom.processors",
    )
    codec = codec or Codec()
    writer = _Writer(app, catalogue, codec)
    app.delivery = Delivery(runtime_bridge, codec, writer.bury, report=report)
    app.quarantine = HeldTopics(
        runtime_bridge,
        writer.signal,
        partial(_chains_of, config),
        node=config.node_id,
        now=wall_clock,
        report=report,
    )
    _agent(app, catalogue.inbox, "inbox", app.delivery.inbox)
    _agent(app, catalogue.commands, "commands", app.delivery.commands)
    _agent(app, catalogue.quarantine, "quarantine", app.quarantine.take)

    async def assigned(_app: Any, *told: Any, signal: Any, **_: Any) -> None:
        del signal
        app.quarantine.assigned({tp.partition for tp in told[0] if tp.topic == catalogue.quarantine})

    app.on_partitions_assigned.connect(assigned, weak=False)  # type: ignore[arg-type, unused-ignore]
    app.finalize()
    return app


async def _chains_of(config: Config, partition: int) -> list[str]:
    return await asyncio.to_thread(
        read_quarantined, config, partitions=(partition,), timeout_ms=CHAINS_TIMEOUT_MS
    )


def _agent(app: WorkerApp, topic: str, name: str, take: Callable[[Any, Callable[[], object]], Any]) -> None:
    """Register an agent that hands raw records on and acknowledges nothing by itself."""
    channel = app.topic(topic, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw")

    @app.agent(channel, name=name)  # type: ignore[untyped-decorator, unused-ignore]
    async def agent(stream: Any) -> None:
        async for event in stream.noack().events():
            await take(event.message, event.ack)


class _Writer:
    """Writes through the app's producer."""

    def __init__(self, app: WorkerApp, catalogue: Catalogue, codec: Codec) -> None:
        self._app, self._catalogue, self._codec = app, catalogue, codec

    async def signal(self, signal: OperatorSignal) -> None:
        """Write to ``signals``, and return once the brokers have it."""
        key = signal.execution_id or signal.node
        await self._write(self._catalogue.signals, key, self._codec.encode(signal), {})

    async def bury(self, source: str, value: bytes, headers: Sequence[tuple[str, bytes]]) -> None:
        """Write to ``dead``, and return once the brokers have it."""
        await self._write(self._catalogue.dead, source, value, dict(headers))

    async def _write(self, topic: str, key: str, value: bytes, headers: dict[str, bytes]) -> None:
        partition = partition_of(key, self._catalogue.partitions)
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await self._app.producer.send_and_wait(topic, key.encode(), value, partition, None, headers)
