"""What the tests of the writer share: writers that are stopped for certain, ops, and readers that know nothing of loom."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import sys
import threading
import time
import uuid

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from loom.schemas.codec import Codec
from loom.schemas.envelope import NewEvent
from loom.stores.contracts import StreamAppend
from loom.stores.index import StreamIndex
from loom.stores.kafka.client import admin_config, let_go
from loom.stores.kafka.writer import PartitionWriter, WriterSettings, WriterState
from loom.stores.ops import AppendOps
from loom.topics.catalogue import Catalogue

LOG_TOPICS = ("executions", "inbox", "quarantine", "snapshots", "marks", "appends", "commands")
PARTITION = 0
SECONDS = 20.0


def create_log(bootstrap, prefix, partitions=1, **config):
    """The topics that a writer needs, compacted where they are in the catalogue; ``config`` goes to all of them."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    settings = {k.replace("_", "."): str(v) for k, v in config.items()}
    kept = {"cleanup.policy": "compact", "message.timestamp.type": "LogAppendTime"}
    topics = [
        NewTopic(
            prefix + name,
            partitions,
            1,
            config=settings if name in {"appends", "commands"} else kept | settings,
        )
        for name in LOG_TOPICS
    ]
    for created in admin.create_topics(topics).values():
        created.result(20)


def drop_log(bootstrap, prefix):
    """Delete those topics, and return once the brokers know none of them any more."""
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    names = [prefix + name for name in LOG_TOPICS]
    for deleted in admin.delete_topics(names).values():
        deleted.result(20)
    end = time.monotonic() + SECONDS
    while set(names) & admin.list_topics(timeout=10).topics.keys():
        assert time.monotonic() < end, "the topics are still there"


class Writers:
    """Makes writers of one log, and stops them when the test has ended."""

    def __init__(self, bootstrap, prefix, folder, *, partitions=1, **settings):
        self.bootstrap, self.prefix, self.folder = bootstrap, prefix, folder
        self.partitions, self.settings = partitions, settings
        self.made = []

    def make(self, node, *, partition=PARTITION, confirm=lambda: True, start=True, folder=None, **settings):
        codec = Codec()
        name = folder or f"{node}-{uuid.uuid4().hex[:6]}"
        index = StreamIndex(self.folder / f"{name}.index", codec.encode_envelope, codec.decode_envelope)
        given = {"bootstrap": self.bootstrap, "topic_prefix": self.prefix, "partitions": self.partitions}
        writer = Watched(
            partition,
            WriterSettings(**(given | {"node": node} | self.settings | settings)),
            index=index,
            codec=codec,
            confirm_ownership=confirm,
        )
        self.made.append(writer)
        if start:
            writer.start()
        return writer

    def close(self):
        for writer in self.made:
            writer.abandon()
        for writer in self.made:
            if writer.thread_started:
                assert writer.stop(30_000), f"a writer of partition {writer.partition} does not stop"
            writer.index.close()
            let_go(writer.admin)


class Watched(PartitionWriter):
    """A writer whose states and commits are kept for the test to look at."""

    def __init__(self, partition, settings, *, index, codec, confirm_ownership):
        self.states, self.transactions = [], []
        self.changed = threading.Condition()
        self.index, self.codec, self.thread_started = index, codec, False
        self.admin = AdminClient(
            admin_config(
                settings.bootstrap,
                settings.kafka,
                client_id=f"{settings.node}-admin",
                timeout_ms=settings.transaction_timeout_ms,
            )
        )
        super().__init__(
            partition,
            settings,
            index=index,
            codec=codec,
            admin=self.admin,
            confirm_ownership=confirm_ownership,
            on_committed=self.transactions.append,
            on_state=self._note,
            clock=lambda: int(time.time() * 1000),
        )

    def _note(self, writer, state):
        with self.changed:
            self.states.append(state)
            self.changed.notify_all()

    def start(self):
        self.thread_started = True
        super().start()

    def reached(self, state, seconds=SECONDS):
        """Wait until the writer was in ``state``; True if it was."""
        with self.changed:
            return self.changed.wait_for(lambda: state in self.states, seconds)

    def serving(self, seconds=SECONDS):
        assert self.reached(WriterState.SERVING, seconds), (self.states, self.stop_reason, self.error)
        return self

    def stopped(self, seconds=SECONDS):
        assert self.reached(WriterState.STOPPED, seconds), self.states
        return self

    def write(self, op, *, origin="test", seconds=SECONDS):
        loop = asyncio.get_running_loop()
        return self.submit(op, origin=origin, deadline=time.monotonic() + seconds, loop=loop)

    def proof(self, seconds=SECONDS):
        loop = asyncio.get_running_loop()
        return self.decide(deadline=time.monotonic() + seconds, loop=loop)

    def remote(self, op, offset, source="appends"):
        """Submit a request of another node; a future of its (result, error)."""
        loop = asyncio.get_running_loop()
        answer = loop.create_future()

        def reply(result, error):
            loop.call_soon_threadsafe(lambda: answer.done() or answer.set_result((result, error)))

        self.submit_remote(op, source=source, offset=offset, reply=reply)
        return answer

    def ids(self, stream_id):
        return [self.codec.decode_envelope(value).id for value in self.read(stream_id, 0, 10_000)]


async def until(condition, seconds=30.0):
    """Wait until ``condition()`` holds; it is a fact of another thread, or of the log."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - nobody could set an event
            await asyncio.sleep(0.05)


class Process:
    """A process with one writer (``writer_process.py``); killed when the test has ended."""

    def __init__(self, running):
        self.running, self.said = running, []

    @classmethod
    async def start(cls, **asked):
        script = pathlib.Path(__file__).with_name("writer_process.py")
        pipe = asyncio.subprocess.PIPE
        running = await asyncio.create_subprocess_exec(
            sys.executable, str(script), json.dumps(asked), stdin=pipe, stdout=pipe
        )
        return cls(running)

    def ask(self, stream_id, first, count=1, *, name, seconds=SECONDS):
        asked = {"append": [stream_id, first, count, name], "seconds": seconds}
        self.running.stdin.write(json.dumps(asked).encode() + b"\n")

    async def hear(self, condition, seconds=30.0):
        """Wait for a line that fulfils ``condition``; earlier ones are kept in ``said``."""
        for line in self.said:
            if condition(line):
                return line
        async with asyncio.timeout(seconds):
            while line := await self.running.stdout.readline():
                self.said.append(json.loads(line))
                if condition(self.said[-1]):
                    return self.said[-1]
        raise EOFError(self.said)

    async def serving(self):
        await self.hear(lambda line: line.get("state") == "serving")
        return self

    async def answer(self, name):
        return await self.hear(lambda line: line.get("name") == name)

    def signal(self, number):
        self.running.send_signal(number)

    async def close(self):
        if self.running.returncode is None:
            self.running.kill()
        await self.running.wait()


def event(event_id, kind="STEP_COMPLETED", size=20, **data):
    output = os.urandom(size // 2).hex()  # compresses by half at best
    return NewEvent(event_id, kind, {"output": output, **data}, {"node": "n:1", "schema": "1.25.0"})


def append(stream_id, first, count=1, *, name="e", size=20, **options):
    """Append ``count`` events that shall begin at ``first``; ids say place and name."""
    events = tuple(event(f"{name}:{first + i}", size=size) for i in range(count))
    options.setdefault("expected_head", first - 1)
    return AppendOps((StreamAppend(stream_id, events, **options),))


def visible(bootstrap, topic, partition=PARTITION, *, committed=True):
    """Records that a stock consumer sees, as (offset, key, value, headers), read to the end by position."""
    level = "read_committed" if committed else "read_uncommitted"
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": uuid.uuid4().hex,
            "isolation.level": level,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    place = TopicPartition(topic, partition, 0)
    consumer.assign([place])
    found, end = [], time.monotonic() + SECONDS
    try:
        while time.monotonic() < end:
            message = consumer.poll(0.5)
            if message is None:
                continue
            if message.error() is not None:
                assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
                return found
            found.append(
                (message.offset(), message.key().decode(), message.value(), dict(message.headers() or ()))
            )
    finally:
        consumer.close()
    raise TimeoutError(f"{topic} could not be read to its end")


def streams(bootstrap, prefix, topic="executions", partition=PARTITION):
    """Per stream, the ids of its committed events in log order; fails unless sequences are gapless from 0."""
    found = {}
    for _, key, value, headers in visible(bootstrap, prefix + topic, partition):
        stream_id, _, sequence = key.rpartition("/")
        if stream_id and value is not None:
            ids = found.setdefault(stream_id, [])
            assert int(sequence) == len(ids) == int(headers["sequence"]), f"{key} follows {len(ids) - 1}"
            ids.append(headers["id"].decode())
    for stream_id, ids in found.items():
        assert len(ids) == len(set(ids)), f"{stream_id} holds an event twice"
    return found


def foreign_producer(bootstrap, transactional_id=None):
    """A producer that is no writer of loom's."""
    config = {"bootstrap.servers": bootstrap, "linger.ms": 0, "log_level": 2}
    if transactional_id is not None:
        config |= {"transactional.id": transactional_id, "transaction.timeout.ms": 30_000}
    producer = Producer(config)
    if transactional_id is not None:
        producer.init_transactions(20)
    return producer


def catalogue(prefix, partitions=1):
    return Catalogue(prefix, partitions)
