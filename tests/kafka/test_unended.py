"""A transaction that Kafka left without an end: its writer commits what is whole, aborts what is not, guesses nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from types import SimpleNamespace

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from writers import PARTITION, Writers, append, create_log, streams, visible

from loom.errors import IncompleteReadError
from loom.schemas.codec import Codec
from loom.stores.kafka.client import producer_config
from loom.stores.kafka.deadline import Deadline
from loom.stores.kafka.lanes import Lane
from loom.stores.kafka.pending import Pending
from loom.stores.kafka.reader import Ends
from loom.stores.kafka.records import (
    ANY_PARTITION,
    FIRST,
    LAST,
    TICK_KEY,
    Place,
    Record,
    Records,
    first_header,
)
from loom.stores.kafka.transaction import Limits, Transaction
from loom.stores.kafka.unended import OpenTransaction, open_transactions
from loom.stores.kafka.writer import StopReason
from loom.topics.catalogue import Catalogue

EXECUTIONS, MARKS, ELSEWHERE = Place("t.executions", 3), Place("t.marks", 3), Place("t.appends", 1)


# -- what the records say --------------------------------------------------------------------------------------


def record(key, *headers, value=b"{}"):
    return SimpleNamespace(
        key=key.encode,
        value=lambda: value,
        headers=lambda: [(name, text.encode()) for name, text in headers] or None,
    )


def begins(name, lane=0, places=(EXECUTIONS,), *, outside=False):
    return (FIRST, first_header(name, lane, places, outside=outside))


def test_records_are_told_apart_by_the_transaction_that_they_open_with():
    places = (EXECUTIONS, MARKS)
    found = open_transactions(
        {
            EXECUTIONS: [
                record("s/0", begins("a", 1, places)),
                record("s/1", (LAST, "a")),
                record("s/2", begins("b"), (LAST, "b")),
                record(TICK_KEY, value=None),
                record("s/3", begins("c")),
            ],
            MARKS: [record("s", begins("a", 1, places), (LAST, "a"))],
        }
    )
    assert list(found) == ["a", "b", "c"]
    assert (found["a"].lane, found["a"].places, found["a"].whole) == (1, places, {EXECUTIONS, MARKS})
    assert found["a"].events == [("s", 0), ("s", 1)]
    assert found["b"].whole == {EXECUTIONS}
    assert found["c"].whole == set()


def test_records_of_nobody_are_nobodys_to_end():
    assert open_transactions({EXECUTIONS: [record("s/0")]}) is None
    for header in ("", "a", "a;b;c", "a;0;t.executions/x", "\ufffd;0"):
        assert open_transactions({EXECUTIONS: [record("s/0", (FIRST, header), (LAST, "a"))]}) is None
    assert open_transactions({EXECUTIONS: [record("s/0", begins("a"), (LAST, "a")), record("s/1")]}) is None


def transaction(places=(EXECUTIONS, MARKS), *, outside=False, whole=(), ended=(), events=()):
    return OpenTransaction("a", 0, places, outside, set(whole), set(ended), list(events))


def heads(**known):
    return lambda stream_id: SimpleNamespace(head=known[stream_id]) if stream_id in known else None


@pytest.mark.parametrize(
    ("found", "outcome"),
    [
        (transaction(whole=(EXECUTIONS, MARKS), events=[("s", 3), ("s", 4), ("new", 0)]), True),
        (transaction(whole=(EXECUTIONS,)), False),
        (transaction(whole=(EXECUTIONS,), ended=(MARKS,)), None),
        (transaction(ended=(MARKS,)), False),
        (transaction(outside=True, whole=(EXECUTIONS, MARKS)), None),
        (transaction(outside=True, whole=(MARKS,)), False),
        (transaction(whole=(EXECUTIONS, MARKS), events=[("s", 2)]), False),
        (transaction((EXECUTIONS, ELSEWHERE), whole=(EXECUTIONS,)), False),
        (transaction((EXECUTIONS, ELSEWHERE), whole=(EXECUTIONS, ELSEWHERE)), True),
    ],
    ids=[
        "whole",
        "torn",
        "it has an end somewhere, so it was decided",
        "torn, whatever has an end",
        "what stands outside loom cannot be seen",
        "torn, whatever stands outside loom",
        "its place was taken",
        "torn elsewhere",
        "whole elsewhere, too",
    ],
)
def test_the_outcome_is_what_could_have_been_acknowledged(found, outcome):
    assert found.outcome(heads(s=2)) is outcome


# -- a real broker that drops markers ----------------------------------------------------------------------------

ATTEMPTS = 8


class Left:
    """A log in which a transaction of the writer's own was left without an end, by a broker that was killed."""

    def __init__(self, broker, tmp_path):
        self.broker = broker
        create_log(broker.bootstrap, "t.", partitions=2)
        self.writers = Writers(broker.bootstrap, "t.", tmp_path, partitions=2)
        self.catalogue = Catalogue("t.", 2)
        self.ends = Ends(AdminClient({"bootstrap.servers": broker.bootstrap}), PARTITION, broker.bootstrap)

    async def make(self, op, *, dropped=(), extra=()):
        """Leave ``op`` without an end; the records at the places ``dropped`` never reach the broker."""
        for _ in range(ATTEMPTS):
            writer = self.writers.make("n1").serving()
            await asyncio.to_thread(writer.stop, 20_000)
            self._open(writer, op, dropped, extra)
            await asyncio.to_thread(self.broker.kill)
            await asyncio.sleep(1.5)  # its transaction timeout passes while the broker is away
            await asyncio.to_thread(self.broker.start)
            topics = [self.catalogue.executions, self.catalogue.marks]
            await asyncio.sleep(3)
            if self.ends.stable(topics) != self.ends.written(topics):
                return
        pytest.skip("this broker ended every transaction")

    def _open(self, writer, op, dropped, extra):
        records = Records(Codec(), self.catalogue, PARTITION, "n1", lambda: int(time.time() * 1000))
        made = Transaction(writer.index, records, None, Limits(100, 10**6, 10**6, 10**6))
        made.judge(Pending(op, time.monotonic() + 60), int(time.time() * 1000))
        for added in extra:
            made.add(added(records))
        config = producer_config(
            self.broker.bootstrap,
            {},
            transactional_id=self.catalogue.log_transactional_id(PARTITION, 0),
            client_id="left",
            timeout_ms=1_000,
            max_record_bytes=10**6,
        )
        lane = Lane(config, self.catalogue.marks)
        lane.initialise(Deadline.after(20_000), lambda: None)
        lane.begin()
        produce = lane.produce
        lane.produce = lambda topic, *args, **more: topic in dropped or produce(topic, *args, **more)
        made.produce(lane)
        lane.flush(Deadline.after(5_000))
        lane.close()


@pytest.fixture
def left(start_kafka, tmp_path):
    hasty = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "50"}
    made = Left(start_kafka(properties=hasty), tmp_path)
    yield made
    made.writers.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "torn"])
async def test_what_a_broker_left_open_is_ended_and_the_log_goes_on(left, caplog, whole):
    caplog.set_level(logging.WARNING, "loom.kafka.writer")
    marked = [lambda records: records.partition_mark({"appends": 7})]
    await left.make(append("s", 0, 3), dropped=() if whole else {left.catalogue.marks}, extra=marked)

    writer = left.writers.make("n2").serving(60)
    assert "without an end" in caplog.text
    assert writer.ids("s") == (["e:0", "e:1", "e:2"] if whole else [])
    assert writer.applied("appends") == (7 if whole else -1)
    await writer.write(append("s", 3 if whole else 0, 2))
    assert streams(left.broker.bootstrap, "t.")["s"] == writer.ids("s")


def request(topic, partition):
    def made(_records):
        return Record(topic, b"x", "k", partition, None, 40)

    return made


@pytest.mark.timeout(300)
async def test_what_it_asked_of_another_partition_is_ended_with_it(left):
    appends = left.catalogue.appends
    await left.make(append("s", 0, 1), extra=[request(appends, 1)])
    writer = left.writers.make("n2").serving(60)
    assert writer.ids("s") == ["e:0"]
    assert [value for _, _, value, _ in visible(left.broker.bootstrap, appends, 1) if value] == [b"x"]


@pytest.mark.timeout(300)
async def test_what_it_published_outside_loom_is_an_operators_to_decide(left):
    admin = AdminClient({"bootstrap.servers": left.broker.bootstrap})
    admin.create_topics([NewTopic("orders", 1, 1)])["orders"].result(20)
    await left.make(append("s", 0, 1), extra=[request("orders", ANY_PARTITION)])
    writer = left.writers.make("n2", takeover_deadline_ms=5_000).stopped(60)
    assert writer.stop_reason is StopReason.INCOMPLETE
    assert isinstance(writer.error, IncompleteReadError)
    assert "kafka-transactions.sh" in str(writer.error)
