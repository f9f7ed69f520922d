"""Both ends of a request, each against a peer that the test plays by hand, record by record."""

from __future__ import annotations

import asyncio
import time

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from loom.errors import (
    DeadlineExceededError,
    OutcomeUnknownError,
    PayloadTooLargeError,
    WrongHeadError,
)
from loom.ids import inbox_stream, ulid
from loom.schemas.codec import Codec
from loom.schemas.records import AppendReply, AppendRequest, CancelOp, ReadOp, ReadReply
from loom.stores.contracts import Appended, Observation
from loom.stores.judge import AppendOps
from loom.stores.kafka import wire
from loom.stores.kafka.intake import REMEMBERED, Answers
from loom.testing.conformance.event_store.support import event, message, started, steps
from stores import StoreBench, until

pytestmark = pytest.mark.timeout(120)

CODEC = Codec()


class Records:
    """Reads one topic from its beginning, and writes to any; knows Kafka and the schemas, nothing of the store."""

    def __init__(self, bench, topic):
        self.topic = topic
        self.producer = Producer({"bootstrap.servers": bench.bootstrap})
        self.consumer = Consumer(
            {"bootstrap.servers": bench.bootstrap, "group.id": ulid(), "isolation.level": "read_uncommitted"}
        )
        self.consumer.assign([TopicPartition(topic, p, 0) for p in range(bench.partitions)])

    def _next(self, patience_s):
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            found = self.consumer.poll(0.05)
            if found is not None and found.error() is None:
                return found
        return None

    async def next(self, patience_s=20):
        found = await asyncio.to_thread(self._next, patience_s)
        assert found is not None, f"nothing came in {self.topic}"
        return found

    async def none(self, patience_s=0.5):
        assert await asyncio.to_thread(self._next, patience_s) is None

    def write(self, topic, partition, key, value):
        offsets = []
        self.producer.produce(
            topic, value, key, partition=partition, on_delivery=lambda _, m: offsets.append(m.offset())
        )
        self.producer.flush(10)
        return offsets[0]

    def close(self):
        self.consumer.close()


@pytest.fixture
async def bench(kafka_bootstrap, topic_prefix, tmp_path):
    bench = StoreBench(kafka_bootstrap, topic_prefix, tmp_path)
    yield bench
    await bench.close()


# -- the asking end: the test answers --------------------------------------------------------------------------------


class Peer(Records):
    """Plays the owner."""

    def __init__(self, bench):
        super().__init__(bench, bench.catalogue.appends)
        self.replies = bench.catalogue.replies

    async def request(self, patience_s=20):
        return CODEC.decode((await self.next(patience_s)).value(), AppendRequest)

    def answer(self, request, reply):
        self.write(self.replies, request.reply_partition, request.requester, CODEC.encode(reply))


@pytest.fixture
async def peer(bench):
    peer = Peer(bench)
    yield peer
    peer.close()


@pytest.fixture
async def client(bench):
    return await bench.client("client", deadline_ms=20_000)


async def test_an_unanswered_request_is_sent_again_with_the_same_id_and_one_answer_is_enough(
    bench, peer, client
):
    stream_id = bench.chain()
    asked = asyncio.ensure_future(client.append(started(stream_id)))
    first, second = await peer.request(), await peer.request()
    assert (first.id, first.op) == (second.id, second.op)
    assert second.timeout_ms < first.timeout_ms < 20_000
    place = Appended(stream_id, 0, 0, 17)
    peer.answer(second, wire.append_reply(second.id, [place], None))
    peer.answer(first, wire.append_reply(first.id, [place], None))
    assert await asked == place


async def test_what_is_for_others_or_unreadable_is_passed_over(bench, peer, client):
    stream_id = bench.chain()
    asked = asyncio.ensure_future(client.append(started(stream_id)))
    request = await peer.request()
    wrong = wire.append_reply(request.id, [Appended(stream_id, 7, 7, 0)], None)
    peer.write(peer.replies, request.reply_partition, "another", CODEC.encode(wrong))
    peer.write(peer.replies, request.reply_partition, request.requester, b"no record")
    peer.answer(request, wire.append_reply("another", [Appended(stream_id, 8, 8, 0)], None))
    peer.answer(request, wire.append_reply(request.id, [Appended(stream_id, 0, 0, 0)], None))
    assert (await asked).head == 0


async def test_a_refusal_of_the_only_copy_is_final(bench, peer, client):
    stream_id = bench.chain()
    asked = asyncio.ensure_future(client.append(steps(stream_id, 4)))
    request = await peer.request()
    peer.answer(request, wire.append_reply(request.id, None, WrongHeadError(stream_id, 4, 9)))
    with pytest.raises(WrongHeadError):
        await asked


@pytest.mark.parametrize("became", ["refused", "written", "unsettled"])
async def test_a_refusal_of_one_of_several_copies_is_settled_first(bench, peer, client, became):
    stream_id = bench.chain()
    asked = asyncio.ensure_future(client.append(steps(stream_id, 4)))
    first, second = await peer.request(), await peer.request()
    refusal = WrongHeadError(stream_id, 4, 9)
    peer.answer(first, wire.append_reply(first.id, None, refusal))
    cancel = await peer.request()
    assert isinstance(cancel.op, CancelOp)
    assert cancel.op.request_id == second.id
    assert cancel.op.since is not None
    peer.answer(
        second, wire.append_reply(second.id, None, refusal)
    )  # of a copy: it says nothing of the others
    outcome = {
        "refused": wire.append_reply(cancel.id, None, wire.RequestExpiredError(first.id)),
        "written": wire.append_reply(cancel.id, [Appended(stream_id, 5, 5, 0)], None),
        "unsettled": wire.append_reply(cancel.id, None, wire.RequestUnsettledError(first.id)),
    }[became]
    peer.answer(cancel, outcome)
    if became == "written":
        assert (await asked).head == 5
    else:
        with pytest.raises(WrongHeadError if became == "refused" else OutcomeUnknownError):
            await asked


async def test_a_write_that_is_late_is_cancelled_and_known_as_not_written(bench, peer, client):
    asked = asyncio.ensure_future(client.append(started(bench.chain()), deadline_ms=5_000))
    request = await peer.request()
    while not isinstance(request.op, CancelOp):
        assert request.timeout_ms <= 4_000  # a copy is not applied while it is being settled
        request = await peer.request()
    peer.answer(request, wire.append_reply(request.id, None, wire.RequestExpiredError(request.op.request_id)))
    with pytest.raises(DeadlineExceededError):
        await asked


async def test_answers_that_say_ask_again_are_asked_again(bench, peer, client):
    stream_id = bench.chain()
    asked = asyncio.ensure_future(client.append(started(stream_id)))
    request = await peer.request()
    for error in (OutcomeUnknownError(stream_id, "x"), wire.RequestExpiredError(request.id)):
        peer.answer(request, wire.append_reply(request.id, None, error))
        again = await peer.request()
        assert again.id == request.id
    peer.answer(request, wire.append_reply(request.id, [Appended(stream_id, 0, 0, 0)], None))
    assert (await asked).head == 0


async def test_a_read_comes_in_parts_in_any_order_and_each_copy_is_answered_by_itself(bench, peer, client):
    stream_id = bench.chain()
    asked = asyncio.ensure_future(client.snapshot(stream_id))
    first, second = await peer.request(), await peer.request()
    assert isinstance(first.op, ReadOp)
    assert first.id != second.id
    peer.answer(first, ReadReply(first.id, part=1, more=False, values=(b"never whole",)))
    peer.answer(second, ReadReply(second.id, part=1, more=False))
    peer.answer(second, ReadReply(second.id, part=0, more=True, values=(b"value",)))
    assert await asked == b"value"


async def test_too_large_a_request_is_not_sent(bench, peer, client):
    with pytest.raises(PayloadTooLargeError):
        await client.append(big(bench.chain()))
    await peer.none()


def big(stream_id):
    append = started(stream_id)
    large = event("large", text="x" * 1_100_000)
    return type(append)(stream_id, (large,), expected_head=-1)


async def test_whoever_waits_when_the_store_closes_is_told(bench, peer, client):
    asked = asyncio.ensure_future(client.append(started(bench.chain())))
    await peer.request()
    await client.close()
    with pytest.raises(OutcomeUnknownError):
        await asked


# -- the serving end: the test asks ----------------------------------------------------------------------------------


class Asker(Records):
    """Plays a node that asks."""

    def __init__(self, bench):
        super().__init__(bench, bench.catalogue.replies)
        self.bench = bench

    def ask(self, stream_id, op, request_id=None, *, partition=None, requester="asker", timeout_ms=None):
        request_id = request_id or ulid()
        if not isinstance(op, ReadOp | CancelOp):
            op = wire.request_op(op, CODEC)
        request = AppendRequest(request_id, op, requester, 0 if requester else None, timeout_ms)
        shard = self.bench.stores[0].shard_of(stream_id) if partition is None else partition
        return self.write(self.bench.catalogue.appends, shard, "key", CODEC.encode(request))

    async def reply(self, cls=AppendReply):
        while (found := await self.next()).key() != b"asker":
            pass
        return CODEC.decode(found.value(), cls)


@pytest.fixture
async def owner(bench):
    return await bench.owner()


@pytest.fixture
async def asker(bench, owner):
    asker = Asker(bench)
    yield asker
    asker.close()


async def test_a_repeated_request_is_applied_once_and_answered_each_time(bench, owner, asker):
    stream_id = inbox_stream(bench.chain(), "t")
    op = AppendOps((message(stream_id, "m"),))
    replies = []
    for _ in range(3):
        asker.ask(stream_id, op, "same")
        replies.append(await asker.reply())
    assert replies[0].request_id == "same"
    assert replies[0].error is None
    assert replies[0] == replies[1] == replies[2]
    assert len(await owner.read(stream_id)) == 1
    await owner.close()
    again = await bench.owner("next")
    asker.ask(stream_id, op, "same")
    repeated = await asker.reply()
    assert repeated.appended[0].repeated
    assert repeated.appended[0].first == 0
    assert len(await again.read(stream_id)) == 1


async def test_copies_that_come_together_are_one_request(bench, owner, asker):
    stream_id = inbox_stream(bench.chain(), "t")
    op = AppendOps((message(stream_id, "m"),))
    for _ in range(5):
        asker.ask(stream_id, op, "same")
    same = await asker.reply()
    assert (same.request_id, same.error) == ("same", None)
    assert len(await owner.read(stream_id)) == 1


async def test_an_undecodable_request_goes_to_dead_and_the_next_one_is_served(bench, owner, asker):
    stream_id = bench.chain()
    dead = Records(bench, bench.catalogue.dead)
    unreadable = {
        asker.write(bench.catalogue.appends, 0, "key", b"no record"): b"no record",
        asker.write(bench.catalogue.appends, 0, "key", b""): b"",
    }
    asker.ask(stream_id, AppendOps((started(stream_id, fence=None),)))
    assert (await asker.reply()).error is None
    for _ in unreadable:
        found = await dead.next()
        headers = dict(found.headers())
        source, partition, offset = headers["source"].decode().split("/")
        assert (source, partition) == (bench.catalogue.appends, "0")
        assert (found.value() or b"") == unreadable[int(offset)]
        assert headers["error"] == b"DecodeError"
        assert headers["why"]
        assert headers["key"] == b"key"
    dead.close()
    await owner.close()
    # what is buried is done with: the next owner does not bury it again
    again = await bench.owner("next")
    late = Records(bench, bench.catalogue.dead)
    await again.read(stream_id)
    for _ in unreadable:
        await late.next()
    await late.none()
    late.close()


async def test_a_request_in_the_wrong_partition_is_forwarded(bench, owner, asker):
    stream_id = bench.chain(1)
    asker.ask(stream_id, AppendOps((started(stream_id, fence=None),)), partition=0)
    assert (await asker.reply()).error is None
    assert [e.sequence for e in await owner.read(stream_id)] == [0]


async def test_a_request_across_partitions_goes_to_dead(bench, owner, asker):
    dead = Records(bench, bench.catalogue.dead)
    chains = bench.chain(0), bench.chain(1)
    asker.ask(chains[0], AppendOps(tuple(started(c, fence=None) for c in chains)))
    assert dict((await dead.next()).headers())["error"] == b"DecodeError"
    dead.close()
    assert [await owner.read(c) for c in chains] == [[], []]


async def test_a_refused_request_that_nobody_waits_for_goes_to_dead(bench, owner, asker):
    stream_id = bench.chain()
    dead = Records(bench, bench.catalogue.dead)
    asker.ask(stream_id, AppendOps((steps(stream_id, 7),)), requester=None)
    headers = dict((await dead.next()).headers())
    assert headers["error"] == b"WrongHeadError"
    dead.close()


async def test_a_request_past_its_time_is_not_applied(bench):
    bench.make("n", owns=False)
    asker = Asker(bench)
    stream_id, kept = bench.chain(), bench.chain()
    asker.ask(stream_id, AppendOps((started(stream_id, fence=None),)), "late", timeout_ms=1)
    asker.ask(kept, AppendOps((started(kept, fence=None),)), "in time", timeout_ms=60_000)
    owner = await bench.owner()
    replies = {r.request_id: r for r in [await asker.reply(), await asker.reply()]}
    assert replies["late"].error.name == "RequestExpiredError"
    assert replies["in time"].error is None
    assert await owner.read(stream_id) == []
    asker.close()


async def test_a_cancel_says_what_became_of_everything_before_it(bench, owner, asker):
    stream_id = bench.chain()
    since = asker.ask(stream_id, AppendOps((started(stream_id, fence=None),)), "written")
    asker.ask(stream_id, CancelOp("written", since), partition=0)
    asker.ask(stream_id, CancelOp("never", since), partition=0)
    asker.ask(stream_id, CancelOp("never", None), partition=0)
    written, cancelled, never, unknown = [await asker.reply() for _ in range(4)]
    assert cancelled.appended == written.appended
    assert cancelled.error is None
    assert never.error.name == "RequestExpiredError"
    assert unknown.error.name == "RequestUnsettledError"
    await owner.close()
    await bench.owner("next")
    asker.ask(stream_id, CancelOp("written", since), partition=0)  # another tenure does not know
    assert (await asker.reply()).error.name == "RequestUnsettledError"


async def test_queries(bench, owner, asker):
    stream_id, nothing = bench.chain(), bench.chain()
    await owner.append(started(stream_id))
    await owner.append(steps(stream_id, 0, 400, fence=1))
    asker.ask(stream_id, ReadOp("events", stream_id, 1, 10))
    page = await asker.reply(ReadReply)
    assert [CODEC.decode_envelope(v).sequence for v in page.values] == list(range(1, 11))
    asker.ask(stream_id, ReadOp("last", stream_id))
    (last,) = (await asker.reply(ReadReply)).values
    assert CODEC.decode_envelope(last).sequence == 400
    asker.ask(nothing, ReadOp("last", nothing))
    assert (await asker.reply(ReadReply)).values == ()
    asker.ask(stream_id, ReadOp("info", stream_id))
    assert (await asker.reply(ReadReply)).info.head == 400
    asker.ask(nothing, ReadOp("info", nothing))
    assert (await asker.reply(ReadReply)).info is None
    asker.ask(stream_id, ReadOp("no such query", stream_id))
    assert (await asker.reply(ReadReply)).error.name == "DecodeError"


async def test_a_long_read_comes_in_parts(bench, owner, asker):
    stream_id = bench.chain()
    await owner.append(started(stream_id))
    for head in range(0, 40, 4):
        events = tuple(event(f"{stream_id}#{head + n}", text="x" * 50_000) for n in range(1, 5))
        await owner.append(type(started(stream_id))(stream_id, events, expected_head=head))
    client = await bench.client()
    assert [e.sequence for e in await client.read(stream_id)] == list(range(41))
    asker.ask(stream_id, ReadOp("events", stream_id))
    parts = [await asker.reply(ReadReply)]
    while parts[-1].more:
        parts.append(await asker.reply(ReadReply))
    assert len(parts) > 2
    assert [p.part for p in parts] == list(range(len(parts)))


async def test_a_deleted_stream_is_observed_with_its_fence_from_everywhere(bench, owner):
    client, stream_id = await bench.client(), bench.chain()
    await client.append(started(stream_id))
    await client.delete(stream_id)
    assert await client.observe(stream_id) == await owner.observe(stream_id) == Observation(-1, 1, None)


async def test_a_fence_taken_by_request_is_the_last_one(bench, owner):
    client, stream_id = await bench.client(), bench.chain()
    await client.append(started(stream_id))
    tokens = await asyncio.gather(*(client.acquire_fence(stream_id, f"n:{n}") for n in range(6)))
    assert sorted(tokens) == [2, 3, 4, 5, 6, 7]
    assert (await owner.observe(stream_id)).fence == 7


async def test_a_notification_reaches_the_owners_runtime(bench, owner):
    told = []

    class Told:
        def committed(self, batch): ...
        def gained(self, shard): ...
        def lost(self, shard): ...
        def notified(self, execution_id):
            told.append(execution_id)

    owner.listen(Told())
    client, chain = await bench.client(), bench.chain()
    await client.notify(chain)
    await owner.notify(chain)
    await until(lambda: told == [chain, chain])


def test_answers_are_remembered_up_to_a_bound_and_then_nothing_is_claimed():
    answers = Answers(10)
    assert answers.begin("a", 10)
    assert not answers.begin("a", 11)
    assert answers.of("a") is None
    assert not answers.settles("a", 10)
    answers.done("a", AppendReply("a", number=1))
    assert answers.of("a") == AppendReply("a", number=1)
    assert answers.settles("never", 10)
    assert not answers.settles("never", 9)
    assert not answers.settles("never", None)
    for n in range(REMEMBERED):
        answers.begin(f"r{n}", 20 + n)
    assert answers.of("a") is None
    assert not answers.settles("a", 10)
    assert answers.settles("later", 20)
    answers.done("r5", None)  # it was not applied, and a copy may be
    assert answers.begin("r5", 99_999)
