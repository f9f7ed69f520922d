"""What the machine can do without an engine: the references that figures are set beside.

* The raw limit: a transactional producer on two lanes that moves records, as many a transaction as it is told.
* The bare loop: the records of one-step executions, each append awaited, one writer thread with group commit on two
  lanes, encoded with loom's codec and headers, and no engine.
* The plain reader: a consumer of a partition that looks at each record's key, value and headers, and keeps nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import threading
import time
import uuid
from dataclasses import dataclass

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from loom.schemas.codec import Codec
from loom.schemas.envelope import EVENT_SCHEMA, Envelope

LANES = 2
DEADLINE_S = 30.0
READ_S = 600.0


@dataclass(frozen=True, slots=True)
class Figure:
    """Units a second, and latencies in milliseconds where they mean something."""

    per_second: float
    p50_ms: float | None = None
    p99_ms: float | None = None


def make_topic(bootstrap: str, partitions: int = 1) -> str:
    """A fresh topic."""
    name = f"bench-{uuid.uuid4().hex[:10]}"
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(name, partitions, 1)])[name].result(DEADLINE_S)
    return name


def make_lanes(bootstrap: str, name: str) -> list[Producer]:
    """Initialised transactional producers."""
    lanes = []
    for lane in range(LANES):
        producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "transactional.id": f"{name}-{lane}",
                "linger.ms": 0,
                "socket.nagle.disable": True,
                "compression.type": "lz4",
                "queue.buffering.max.messages": 1_000_000,
                "log_level": 2,
            }
        )
        producer.init_transactions(DEADLINE_S)
        lanes.append(producer)
    return lanes


def raw_limit(
    bootstrap: str, *, records_a_transaction: int, seconds: float, value_bytes: int = 300
) -> Figure:
    """Records a second of a plain transactional producer on two lanes, and how long each transaction takes."""
    topic = make_topic(bootstrap)
    lanes = itertools.cycle(make_lanes(bootstrap, topic))
    value = b"x" * value_bytes
    headers: list[tuple[str, str | bytes | None]] = [
        ("type", "STEP_COMPLETED"),
        ("sequence", "1"),
        ("id", "x" * 26),
    ]
    latencies: list[float] = []
    began = now = time.perf_counter()
    while now - began < seconds:
        lane, begun = next(lanes), now
        lane.begin_transaction()
        for number in range(records_a_transaction):
            lane.produce(topic, value, f"{topic}/{number}", 0, headers=headers)
        lane.commit_transaction(DEADLINE_S)
        now = time.perf_counter()
        latencies.append(now - begun)
    found = summarise(latencies, now - began)
    return Figure(found.per_second * records_a_transaction, found.p50_ms, found.p99_ms)


def plain_read(bootstrap: str, topic: str) -> float:
    """Seconds for a plain consumer to read what was committed to partition 0 of a topic."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": topic,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "fetch.queue.backoff.ms": 10,
            "log_level": 2,
        }
    )
    consumer.list_topics(topic, timeout=DEADLINE_S)
    consumer.assign([TopicPartition(topic, 0, 0)])
    began, ended = time.perf_counter(), False
    try:
        while not ended:
            for message in consumer.consume(500, 0.05):
                ended = message.error() is not None
                message.key(), message.value(), message.headers()
            if time.perf_counter() - began > READ_S:
                raise TimeoutError(f"{topic} was not read in {READ_S:g} s")
        return time.perf_counter() - began
    finally:
        consumer.close()


class _GroupCommit(threading.Thread):
    """One writer thread: whatever waits goes into the next transaction."""

    def __init__(self, bootstrap: str, topic: str, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(daemon=True)
        self._topic, self._loop, self._codec = topic, loop, Codec()
        self._lanes = itertools.cycle(make_lanes(bootstrap, topic))
        self._waiting: list[tuple[list[Envelope], asyncio.Future[None]]] = []
        self._ready = threading.Condition()
        self._ended = False

    def append(self, events: list[Envelope]) -> asyncio.Future[None]:
        done: asyncio.Future[None] = self._loop.create_future()
        with self._ready:
            self._waiting.append((events, done))
            self._ready.notify()
        return done

    def end(self) -> None:
        with self._ready:
            self._ended = True
            self._ready.notify()

    def run(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._waiting or self._ended)
                if self._ended:
                    return
                batch, self._waiting = self._waiting, []
            lane = next(self._lanes)
            lane.begin_transaction()
            for events, _ in batch:
                for event in events:
                    self._produce(lane, event)
            lane.commit_transaction(DEADLINE_S)
            self._loop.call_soon_threadsafe(_resolve, [done for _, done in batch])

    def _produce(self, lane: Producer, event: Envelope) -> None:
        sequence = str(event.sequence)
        headers: list[tuple[str, str | bytes | None]] = [
            ("type", event.type),
            ("sequence", sequence),
            ("id", event.id),
            ("batch", "0/1"),
            ("timestamp", str(event.timestamp)),
        ]
        lane.produce(
            self._topic,
            self._codec.encode_envelope(event),
            f"{event.stream_id}/{sequence}",
            0,
            headers=headers,
        )


def _resolve(done: list[asyncio.Future[None]]) -> None:
    for future in done:
        if not future.done():
            future.set_result(None)


async def _call(value: object) -> object:
    return value


def _event(stream: str, sequence: int, kind: str, data: dict[str, object]) -> Envelope:
    metadata = {"node": "bench", "schema": EVENT_SCHEMA}
    return Envelope(f"{stream}:{sequence}", stream, sequence, kind, int(time.time() * 1000), data, metadata)


async def _bare(bootstrap: str, concurrency: int, seconds: float) -> Figure:
    loop = asyncio.get_running_loop()
    writer = _GroupCommit(bootstrap, make_topic(bootstrap), loop)
    writer.start()
    latencies: list[float] = []
    measured_from = time.perf_counter() + 1
    ends = measured_from + seconds

    async def one() -> None:
        while (began := time.perf_counter()) < ends:
            stream = uuid.uuid4().hex
            await writer.append(
                [_event(stream, 0, "EXECUTION_STARTED", {"workflow": "w", "input": "x" * 100})]
            )
            output = await loop.create_task(_call("x" * 100))
            await writer.append(
                [
                    _event(stream, 1, "STEP_COMPLETED", {"siteId": "0:0", "name": "s", "output": output}),
                    _event(stream, 2, "EXECUTION_COMPLETED", {"output": output}),
                ]
            )
            if began >= measured_from:
                latencies.append(time.perf_counter() - began)

    await asyncio.gather(*(one() for _ in range(concurrency)))
    writer.end()
    return summarise(latencies, seconds)


def summarise(latencies: list[float], seconds: float) -> Figure:
    """Throughput and percentiles of latencies given in seconds."""
    if len(latencies) <= 1:
        return Figure(len(latencies) / seconds)
    cuts = statistics.quantiles(latencies, n=100)
    return Figure(len(latencies) / seconds, cuts[49] * 1000, cuts[98] * 1000)


def bare_loop(bootstrap: str, *, concurrency: int, seconds: float) -> Figure:
    """One-step executions a second without an engine."""
    return asyncio.run(_bare(bootstrap, concurrency, seconds))
