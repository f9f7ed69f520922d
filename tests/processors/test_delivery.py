"""The delivery rules on their own: order per chain, windows, merging, patience, dead letters."""

import asyncio
from dataclasses import dataclass, field

import pytest
from kafka_bench import until

from loom.errors import (
    DecodeError,
    ExecutionNotFoundError,
    GateNotOpenError,
    InboxFullError,
    NotOwnerError,
    UnreachableError,
)
from loom.ids import inbox_stream
from loom.processors.delivery import Delivery, Source
from loom.schemas.codec import Codec
from loom.schemas.records import CancelVerb, Command, SendVerb

CODEC = Codec()


@dataclass
class Message:
    offset: int
    key: bytes | None
    value: bytes | None = b"v"
    topic: str = "p.inbox"
    partition: int = 0
    headers: tuple = (("type", b"INBOX_MESSAGE"),)


def message(chain, sequence, topic="t"):
    return Message(sequence, f"{inbox_stream(chain, topic)}/{sequence}".encode())


def command(offset, verb, key=b"c", **more):
    return Message(offset, key, CODEC.encode(Command(verb, **more)), "p.commands", 0, ())


@dataclass
class Runtime:
    """A bridge that answers as it is told, and knows what it was asked."""

    asked: list = field(default_factory=list)
    answers: dict = field(default_factory=dict)
    gate: asyncio.Event | None = None
    at_once: int = 0
    most: int = 0

    async def notify(self, chain_id, stream, sequence):
        self.asked.append((chain_id, sequence))
        await self._answer(chain_id)

    async def command(self, given, source):
        self.asked.append((given, source))
        await self._answer(given.id)

    async def _answer(self, name):
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            if self.gate is not None:
                await self.gate.wait()
            await asyncio.sleep(0)
            if self.answers.get(name):
                raise self.answers[name].pop(0)
        finally:
            self.at_once -= 1


@dataclass
class Dead:
    records: list = field(default_factory=list)
    failures: int = 0

    async def __call__(self, source, value, headers):
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no broker")
        self.records.append((source, value, dict(headers)))


@pytest.fixture
def runtime():
    return Runtime()


@pytest.fixture
def dead():
    return Dead()


@pytest.fixture
async def delivery(runtime, dead):
    made = Delivery(runtime, CODEC, dead, window=4, patience_s=0.2)
    made.acked = []
    yield made
    await made.close()


async def settled(delivery, count):
    await until(lambda: len(delivery.acked) >= count, f"{count} acknowledgements")


def ack(delivery, record):
    return lambda: delivery.acked.append(record.offset)


async def take(delivery, *records):
    for record in records:
        entry = delivery.inbox if record.topic == "p.inbox" else delivery.commands
        await entry(record, ack(delivery, record))


async def test_a_message_is_acknowledged_after_the_bridge_answered(delivery, runtime):
    runtime.gate = asyncio.Event()
    await take(delivery, message("c", 3))
    await asyncio.sleep(0)
    assert delivery.acked == []
    runtime.gate.set()
    await settled(delivery, 1)
    assert runtime.asked == [("c", 3)]


async def test_what_is_no_message_is_passed_over(delivery, runtime):
    other = message("c", 4)
    other.headers = (("type", b"SOMETHING_ELSE"),)
    trimmed, tick, foreign = message("c", 5), Message(6, b"__loom_tick__", None), Message(7, b"no-sequence")
    trimmed.value = None
    await take(delivery, other, trimmed, tick, foreign)
    assert delivery.acked == [4, 5, 6, 7]
    assert runtime.asked == []


async def test_messages_of_a_stream_that_wait_are_one_pass(delivery, runtime):
    runtime.gate = asyncio.Event()
    await take(delivery, *(message("c", n) for n in range(100)))
    runtime.gate.set()
    await settled(delivery, 100)
    assert runtime.asked in ([("c", 99)], [("c", 0), ("c", 99)])


async def test_a_message_that_comes_while_a_pass_runs_gets_its_own(delivery, runtime):
    runtime.gate = asyncio.Event()
    await take(delivery, message("c", 0))
    await until(lambda: runtime.asked, "a pass")
    await take(delivery, message("c", 1), message("c", 2))
    runtime.gate.set()
    await settled(delivery, 3)
    assert runtime.asked == [("c", 0), ("c", 2)]


async def test_chains_are_served_side_by_side_within_the_window(delivery, runtime):
    runtime.gate = asyncio.Event()
    feeding = asyncio.create_task(take(delivery, *(message(f"c{n}", 0) for n in range(10))))
    await until(lambda: len(runtime.asked) >= 4, "four passes")
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(runtime.asked) == 4
    runtime.gate.set()
    await feeding
    await settled(delivery, 10)
    assert runtime.most == 4


async def test_commands_of_a_chain_keep_their_order_through_retries(delivery, runtime):
    runtime.answers["a"] = [NotOwnerError(0), UnreachableError("Kafka", "b:9092", "bootstrap")]
    await take(
        delivery,
        command(1, SendVerb("c", "t", 1), id="a"),
        command(2, SendVerb("c", "t", 2), id="b"),
        command(3, SendVerb("d", "t", 3), key=b"d", id="other"),
    )
    await settled(delivery, 3)
    assert [given.id for given, _ in runtime.asked if given.id != "other"] == ["a", "a", "a", "b"]
    assert delivery.acked[0] == 3


async def test_a_commands_id_defaults_to_where_it_stands(delivery, runtime):
    await take(delivery, command(7, CancelVerb("c")), command(8, CancelVerb("c"), key=None))
    await settled(delivery, 2)
    assert {given.id for given, _ in runtime.asked} == {"p.commands/0/7", "p.commands/0/8"}
    assert {str(source) for _, source in runtime.asked} == {"p.commands/0/7", "p.commands/0/8"}


async def test_a_command_that_cannot_be_read_or_used_goes_to_dead(delivery, runtime, dead):
    runtime.answers["x"] = [ExecutionNotFoundError("e")]
    junk = Message(1, b"k", b"\x00garbage", "p.commands", 0, ())
    await take(delivery, junk, command(2, CancelVerb("e"), id="x"), command(3, CancelVerb("f"), id="y"))
    await settled(delivery, 3)
    found = {source: headers for source, _, headers in dead.records}
    assert set(found) == {"p.commands/0/1", "p.commands/0/2"}
    assert found["p.commands/0/1"]["error"] == b"DecodeError"
    assert found["p.commands/0/1"]["key"] == b"k"
    assert found["p.commands/0/2"]["error"] == b"ExecutionNotFoundError"
    assert b"does not exist" in found["p.commands/0/2"]["why"]
    assert dead.records[0][1] == b"\x00garbage"
    assert [given.id for given, _ in runtime.asked] == ["x", "y"]


@pytest.mark.parametrize(
    "error", [InboxFullError("c", "t", 5, 5), GateNotOpenError("c", "g"), RuntimeError("secret 4711")]
)
async def test_a_refusal_that_may_pass_is_tried_within_patience_then_dead(delivery, runtime, dead, error):
    runtime.answers["x"] = [error] * 1000
    await take(delivery, command(1, SendVerb("c", "t", 1), id="x"))
    await settled(delivery, 1)
    assert len(runtime.asked) > 1
    [(source, _, headers)] = dead.records
    assert source == "p.commands/0/1"
    assert headers["error"] == type(error).__name__.encode()
    assert b"4711" not in headers["why"]


async def test_an_outage_is_waited_out_beyond_patience(delivery, runtime, dead):
    runtime.answers["x"] = [NotOwnerError(0)] * 4  # 0.05 + 0.1 + 0.2 + 0.4 s of pauses, patience 0.2 s
    await take(delivery, command(1, SendVerb("c", "t", 1), id="x"))
    await settled(delivery, 1)
    assert len(runtime.asked) == 5
    assert dead.records == []


async def test_a_record_is_not_acknowledged_before_dead_has_it(delivery, dead):
    dead.failures = 2
    await take(delivery, Message(1, b"k", b"junk", "p.commands", 0, ()))
    await settled(delivery, 1)
    assert dead.failures == 0
    assert len(dead.records) == 1


async def test_a_message_that_cannot_be_taken_is_reported_and_does_not_hold_others(runtime, dead):
    reports = []
    delivery = Delivery(runtime, CODEC, dead, report=lambda source, error: reports.append((source, error)))
    delivery.acked = []
    error = DecodeError("inbox", "broken")
    runtime.answers["c"] = [error]
    await take(delivery, message("c", 1), message("d", 2))
    await settled(delivery, 2)
    assert reports == [(Source("p.inbox", 0, 1), error)]
    assert dead.records == []


async def test_reports_of_one_record_are_the_first_and_every_16th(runtime, dead):
    reports = []
    delivery = Delivery(runtime, CODEC, dead, report=lambda _, error: reports.append(error))
    delivery.acked = []
    runtime.answers["c"] = [NotOwnerError(0)] * 3
    await take(delivery, message("c", 1))
    await settled(delivery, 1)
    assert len(reports) == 1


async def test_closing_acknowledges_nothing_more(runtime, dead):
    delivery = Delivery(runtime, CODEC, dead)
    delivery.acked = []
    runtime.gate = asyncio.Event()
    await take(delivery, message("c", 1), message("c", 2), message("d", 3))
    await delivery.close()
    await delivery.close()
    runtime.gate.set()
    await asyncio.sleep(0)
    assert delivery.acked == []
