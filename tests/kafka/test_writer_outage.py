"""A broker that goes away, or forgets: appends wait or fail within their deadlines, and everything resumes."""

from __future__ import annotations

import asyncio
import socket
import struct
import time

import pytest
from writers import Writers, append, create_log, streams, until

from loom.errors import DeadlineExceededError, OutcomeUnknownError, StorageWriteError
from loom.stores.kafka.writer import WriterState

LATE_S = 2.0


@pytest.fixture
def private_log(start_kafka, tmp_path):
    """Makes writers on a broker of this test's own, given its properties."""
    made = []

    def make(properties=None, **settings):
        broker = start_kafka(properties=properties)
        create_log(broker.bootstrap, "t.")
        made.append(Writers(broker.bootstrap, "t.", tmp_path, **settings))
        return broker, made[-1]

    yield make
    for writers in made:
        writers.close()


async def outage(broker, writers, seconds):
    """Callers append throughout, with a deadline shorter than the outage."""
    writer = writers.make("n1").serving()
    acknowledged = {f"s{n}": 0 for n in range(16)}
    slowest, failed, stopping = [0.0], [], asyncio.Event()

    async def call(stream_id):
        while not stopping.is_set():
            began = time.monotonic()
            try:
                await writer.write(append(stream_id, acknowledged[stream_id], 3), seconds=3)
            except (OutcomeUnknownError, StorageWriteError) as error:
                failed.append(type(error))
            else:
                acknowledged[stream_id] += 3
            slowest[0] = max(slowest[0], time.monotonic() - began)

    callers = [asyncio.create_task(call(s)) for s in acknowledged]
    await until(lambda: min(acknowledged.values()) >= 9)
    broker.kill()
    with pytest.raises(DeadlineExceededError):
        await writer.proof(seconds=1)
    await asyncio.sleep(seconds)
    await asyncio.to_thread(broker.restart)
    before = dict(acknowledged)
    await until(lambda: all(acknowledged[s] >= before[s] + 9 for s in acknowledged), 90)
    stopping.set()
    await asyncio.gather(*callers)

    assert writer.state is WriterState.SERVING
    assert failed, "some deadlines passed meanwhile"
    assert slowest[0] < 3 + LATE_S
    assert streams(broker.bootstrap, "t.") == {
        s: [f"e:{n}" for n in range(c)] for s, c in acknowledged.items()
    }


@pytest.mark.timeout(240)
async def test_a_short_outage_costs_time_only(private_log):
    await outage(*private_log(transaction_timeout_ms=4_000, commit_deadline_ms=2_500), 4)


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_an_outage_of_thirty_seconds_costs_time_only(private_log):
    await outage(*private_log(), 30)


@pytest.mark.timeout(120)
async def test_a_transactional_id_that_expired_costs_one_retry(private_log):
    broker, writers = private_log(
        {
            "transactional.id.expiration.ms": "1000",
            "transaction.remove.expired.transaction.cleanup.interval.ms": "200",
            "producer.id.expiration.ms": "1000",
            "producer.id.expiration.check.interval.ms": "200",
        }
    )
    writer = writers.make("n1").serving()
    await writer.write(append("s", 0))
    assert writer.tenure == 1
    await asyncio.sleep(3)  # nothing but time makes it expire, and nothing tells of it
    await writer.write(append("s", 1))
    assert writer.tenure == 2, "it had expired"
    assert streams(broker.bootstrap, "t.") == {"s": ["e:0", "e:1"]}


INIT_PRODUCER_ID = 22
LAST_EPOCH = 32_767


def initialise(connection, transactional_id):
    """InitProducerId (version 0) by hand, until it is granted; the producer id and epoch that it gives."""
    name = transactional_id.encode()
    body = struct.pack(">hhih", INIT_PRODUCER_ID, 0, 1, -1) + struct.pack(">h", len(name)) + name
    body += struct.pack(">i", 10_000)
    while True:  # the end of a transaction may still be under way; a broker ends those by itself
        connection.sendall(struct.pack(">i", len(body)) + body)
        answer = connection.makefile("rb")
        (size,) = struct.unpack(">i", answer.read(4))
        _, _, error, producer_id, epoch = struct.unpack(">iihqh", answer.read(size))
        if error == 0:
            return producer_id, epoch


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_epochs_may_run_out(private_log):
    broker, writers = private_log(max_retakes=100)
    writer = writers.make("n1", lanes=1).serving()
    await writer.write(append("s", 0))
    host, port = broker.bootstrap.split(":")
    transactional_id = writer.settings.catalogue.log_transactional_id(0)

    def use_up(until_epoch):
        """Initialise, as restarts for ages would; the producer id at the end."""
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            while True:
                producer_id, epoch = initialise(connection, transactional_id)
                if epoch >= until_epoch:
                    return producer_id

    first = await asyncio.to_thread(use_up, LAST_EPOCH - 4)
    for number in range(
        1, 6
    ):  # fenced each time, and taken again: with the next epoch, or another producer id
        await writer.write(append("s", number), seconds=60)
        last = await asyncio.to_thread(use_up, 0)
    await writer.write(append("s", 6), seconds=60)
    assert last != first, "the epochs of the first did run out"
    assert writer.tenure == 7
    assert streams(broker.bootstrap, "t.") == {"s": [f"e:{n}" for n in range(7)]}
