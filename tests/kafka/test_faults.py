"""Faults between a writer and its broker, by a proxy (pitfalls.md, "Transactions"; kafka.md, "The poison rule")."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from writers import append, event, foreign_producer, streams, until, visible

from loom.errors import (
    NotOwnerError,
    PayloadTooLargeError,
    PublishRefusedError,
    StorageWriteError,
    WrongHeadError,
)
from loom.stores.contracts import Outgoing, StreamAppend
from loom.stores.kafka.writer import StopReason
from loom.stores.ops import AppendOps
from loom.testing.proxy import Api, Side

pytestmark = pytest.mark.timeout(120)
WRITER = "*-log-0.*"
HASTY = {"transaction_timeout_ms": 1_500, "commit_deadline_ms": 800}
PATIENT = {"transaction_timeout_ms": 15_000, "commit_deadline_ms": 12_000}


@pytest.fixture(params=[1, 2], ids=["one-lane", "two-lanes"])
def lanes(request):
    return request.param


def log(hurt):
    return streams(hurt.direct, hurt.prefix)


async def test_an_end_held_past_the_deadline_and_let_go_in_a_later_transaction_ends_nothing_else(
    hurt, proxy, lanes
):
    writer = hurt.make("n1", lanes=lanes).serving()
    await writer.write(append("s", 0))
    held = proxy.hold(Api.END_TXN, WRITER)
    doubtful = writer.write(append("s", 1, 2))
    assert await asyncio.to_thread(held.caught.wait, 10)
    (done,) = await doubtful  # the commit deadline passed; a new tenure read the log and wrote it again
    assert writer.tenure == 2
    assert (done.first, done.head) == (1, 2)

    # a later transaction, open when the held request arrives: begun, its records sent, its own end not yet
    later_end = proxy.hold(Api.END_TXN, WRITER)
    later = writer.write(append("s", 3, 2))
    assert await asyncio.to_thread(later_end.caught.wait, 10)
    held.release()
    assert await asyncio.to_thread(held.passed.wait, 10)
    later_end.release()
    await later
    await writer.write(append("s", 5))

    assert log(hurt) == {"s": [f"e:{n}" for n in range(6)]}


@pytest.mark.parametrize("at", [Api.PRODUCE, Api.END_TXN])
async def test_a_client_that_resends_an_end_by_itself_poisons_the_tenure_though_the_commit_succeeds(
    hurt, proxy, lanes, at
):
    writer = hurt.make("n1", lanes=lanes).serving()
    await writer.write(append("s", 0))
    held = proxy.hold(Api.END_TXN, WRITER, hang_up=True)
    await writer.write(append("s", 1))  # resent over a new connection, and committed
    assert held.caught.is_set()

    open_transaction = proxy.hold(at, WRITER)
    later = writer.write(append("s", 2, 2))
    assert await asyncio.to_thread(open_transaction.caught.wait, 10)
    tenure = writer.tenure
    held.release()
    assert await asyncio.to_thread(held.passed.wait, 10)
    open_transaction.release()
    (placed,) = await later

    assert not placed.repeated, "the later transaction ended by its own decision"
    assert writer.tenure == tenure == 2, "a new tenure began before it, and none was needed after it"
    assert log(hurt) == {"s": [f"e:{n}" for n in range(4)]}


async def test_a_commit_whose_reply_is_lost_is_success_and_one_copy(hurt, proxy, lanes):
    writer = hurt.make("n1", lanes=lanes).serving()
    await writer.write(append("s", 0))
    lost = proxy.drop(Api.END_TXN, WRITER, Side.REPLY)
    (done,) = await writer.write(append("s", 1, 3))
    assert lost.caught.is_set()
    assert (done.first, done.head) == (1, 3)
    assert done.repeated, "it stood in the log, and was found there"
    (again,) = await writer.write(append("s", 1, 3))

    assert again.repeated
    assert log(hurt) == {"s": ["e:0", "e:1", "e:2", "e:3"]}


@pytest.mark.parametrize("side", list(Side))
@pytest.mark.parametrize("api", [Api.PRODUCE, Api.ADD_PARTITIONS_TO_TXN, Api.END_TXN, Api.INIT_PRODUCER_ID])
@pytest.mark.parametrize("act", ["cut", "drop", "delay"])
async def test_any_one_request_or_reply_hurt_costs_time_only(hurt, proxy, act, api, side):
    writer = hurt.make("n1", **HASTY).serving()
    await writer.write(append("s", 0))
    rule = {
        "cut": lambda: proxy.cut(api, WRITER, side),
        "drop": lambda: proxy.drop(api, WRITER, side),
        "delay": lambda: proxy.delay(api, 400, WRITER, side),
    }[act]()
    if api is Api.INIT_PRODUCER_ID:
        proxy.disconnect()  # the next transaction begins with a new tenure
    for number in range(1, 4):
        await writer.write(append("s", number))

    assert rule.caught.is_set()
    assert log(hurt) == {"s": ["e:0", "e:1", "e:2", "e:3"]}


@pytest.mark.parametrize("side", list(Side))
@pytest.mark.parametrize("api", [Api.LIST_OFFSETS, Api.FETCH, Api.METADATA, Api.INIT_PRODUCER_ID])
@pytest.mark.parametrize("act", ["cut", "drop"])
async def test_a_takeover_whose_questions_get_no_answer_still_reads_everything(hurt, proxy, act, api, side):
    first = hurt.make("n1", bootstrap=hurt.direct).serving()
    for number in range(3):
        await first.write(append("s", number))
    first.stop(10_000)
    getattr(proxy, act)(api, side=side, times=2)

    second = hurt.make("n2", **HASTY).serving(40)
    assert second.ids("s") == ["e:0", "e:1", "e:2"]


# -- takeover in the middle of a transaction ---------------------------------------------------------------------


async def test_a_takeover_before_the_old_writer_committed_shows_nothing_of_it(hurt, proxy, lanes):
    old = hurt.make("old", lanes=lanes, confirm=lambda: False, **PATIENT).serving()
    await old.write(append("s", 0))
    held = proxy.hold(Api.END_TXN, "old-*")
    doubtful = old.write(append("s", 1, 2, name="old"))
    assert await asyncio.to_thread(held.caught.wait, 10)

    new = hurt.make("new", lanes=lanes, bootstrap=hurt.direct).serving()
    assert new.ids("s") == ["e:0"]
    await new.write(append("s", 1, name="new"))
    held.release()

    with pytest.raises(NotOwnerError):  # known: it was not written
        await doubtful
    assert old.stopped().stop_reason is StopReason.FENCED
    assert log(hurt) == {"s": ["e:0", "new:1"]}


async def test_a_takeover_after_the_old_writer_committed_loses_nothing_of_it(hurt, proxy, lanes):
    old = hurt.make("old", lanes=lanes, confirm=lambda: False, **PATIENT).serving()
    await old.write(append("s", 0))
    held = proxy.hold(Api.END_TXN, "old-*", Side.REPLY)
    doubtful = old.write(append("s", 1, 2, name="old"))
    assert await asyncio.to_thread(held.caught.wait, 10)

    new = hurt.make("new", lanes=lanes, bootstrap=hurt.direct).serving()
    assert new.ids("s") == ["e:0", "old:1", "old:2"]
    await new.write(append("s", 3, name="new"))
    held.release()

    (done,) = await doubtful
    assert (done.first, done.head) == (1, 2)
    assert log(hurt) == {"s": ["e:0", "old:1", "old:2", "new:3"]}


async def test_a_fenced_writer_reads_what_became_of_its_last_transaction(hurt, proxy, lanes):
    old = hurt.make("old", lanes=lanes, confirm=lambda: False, **PATIENT).serving()
    await old.write(append("s", 0))
    lost = proxy.cut(Api.END_TXN, "old-*", Side.REPLY)
    blocked = proxy.hold(
        Api.END_TXN, "old-*", skip=1
    )  # the client sends it again, and must not hear of its success
    doubtful = old.write(append("s", 1, 2, name="old"))
    assert await asyncio.to_thread(lost.caught.wait, 10)
    new = hurt.make("new", lanes=lanes, bootstrap=hurt.direct).serving()
    blocked.release()

    (done,) = await doubtful
    assert (done.first, done.head) == (1, 2)
    assert new.ids("s") == ["e:0", "old:1", "old:2"]
    assert old.stopped().stop_reason is StopReason.FENCED


@pytest.mark.parametrize("committed", [False, True], ids=["before-its-commit", "after-its-commit"])
async def test_a_writer_stopped_in_the_middle_and_resumed_says_what_is_true_and_steps_down(
    hurt, proxy, start_process, committed
):
    old = await start_process(
        bootstrap=f"127.0.0.1:{proxy.port}", prefix=hurt.prefix, node="old", confirm=False, **hurt.settings
    )
    await old.serving()
    old.ask("s", 0, name="first")
    await old.answer("first")
    held = proxy.hold(Api.END_TXN, "old-*", Side.REPLY if committed else Side.REQUEST)
    old.ask("s", 1, 2, name="old")
    assert await asyncio.to_thread(held.caught.wait, 10)
    old.signal(signal.SIGSTOP)

    new = hurt.make("new", bootstrap=hurt.direct).serving()
    head = 2 if committed else 0
    assert len(new.ids("s")) == head + 1
    await new.write(append("s", head + 1, 2, name="new"))
    held.release()
    old.signal(signal.SIGCONT)
    old.ask("s", head + 1, name="zombie")

    answer = await old.answer("old")
    assert ("ok" in answer) == committed, answer
    zombie = await old.answer("zombie")
    assert zombie["error"] in {"NotOwnerError", "WrongHeadError"}
    await old.hear(lambda line: line.get("state") == "stopped" and line["reason"] == "fenced")
    kept = ["first:0", "old:1", "old:2"] if committed else ["first:0"]
    assert log(hurt) == {"s": [*kept, f"new:{head + 1}", f"new:{head + 2}"]}


async def test_a_transaction_that_outlives_its_timeout_without_a_rival_is_written_once(
    hurt, proxy, start_process
):
    lone = await start_process(
        bootstrap=f"127.0.0.1:{proxy.port}", prefix=hurt.prefix, node="lone", confirm=True, **hurt.settings
    )
    await lone.serving()
    lone.ask("s", 0, name="first")
    await lone.answer("first")
    held = proxy.hold(Api.END_TXN, "lone-*")
    lone.ask("s", 1, 2, name="slow", seconds=60)
    assert await asyncio.to_thread(held.caught.wait, 10)
    lone.signal(signal.SIGSTOP)
    # the broker ends the transaction by itself: the records are no more in the way of what is stable
    probe = foreign_producer(hurt.direct)
    probe.produce(hurt.prefix + "executions", None, "__loom_tick__", partition=0)
    probe.flush(10)
    topic = hurt.prefix + "executions"
    await until(lambda: visible(hurt.direct, topic)[-1][1] == "__loom_tick__", 60)
    held.release()
    lone.signal(signal.SIGCONT)

    answer = await lone.answer("slow")
    assert answer.get("ok", [])[:2] == [1, 2], answer
    assert log(hurt) == {"s": ["first:0", "slow:1", "slow:2"]}


# -- records that are refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["client", "broker"])
async def test_an_oversize_event_in_the_middle_shows_nothing_and_only_its_caller_is_told(hurt, where):
    limits = {"client": {"kafka": {"message.max.bytes": 20_000}}, "broker": {"max_record_bytes": 3_000_000}}[
        where
    ]
    size = 30_000 if where == "client" else 2_900_000
    writer = hurt.make("n1", start=False, max_bytes=8_000_000, **limits)
    before = writer.write(append("a", 0, 2))
    events = tuple(event(f"e:{n}", size=size if n == 1 else 20) for n in range(3))
    middle = writer.write(AppendOps((StreamAppend("m", events, expected_head=-1),)), seconds=60)
    after = writer.write(append("z", 0, 2))
    writer.start()

    await asyncio.gather(before, after)
    with pytest.raises(PayloadTooLargeError if where == "client" else StorageWriteError):
        await middle
    await writer.write(append("a", 2))
    assert log(hurt) == {"a": ["e:0", "e:1", "e:2"], "z": ["e:0", "e:1"]}


async def test_a_full_client_queue_aborts_the_whole_and_all_of_it_goes_again(hurt):
    writer = hurt.make("n1", start=False, kafka={"queue.buffering.max.messages": 10})
    small = [writer.write(append(f"s{n}", 0, 3)) for n in range(8)]
    never = writer.write(append("w", 0, 30))
    writer.start()

    await asyncio.gather(*small)
    with pytest.raises(StorageWriteError):
        await never
    assert log(hurt) == {f"s{n}": ["e:0", "e:1", "e:2"] for n in range(8)}


# -- publish -----------------------------------------------------------------------------------------------------


def publish(stream_id, topic, *, first=0, value=b"v", key="k"):
    out = Outgoing("publish", f"{stream_id}:{first}:out", key, value, topic, (("why", b"test"),))
    events = (event(f"e:{first}", "RECORD_PUBLISHED"),)
    return AppendOps((StreamAppend(stream_id, events, expected_head=first - 1, outgoing=(out,)),))


def make_topic(hurt, name, **config):
    admin = AdminClient({"bootstrap.servers": hurt.direct})
    admin.create_topics([NewTopic(hurt.prefix + name, 1, 1, config=config)])[hurt.prefix + name].result(20)
    return hurt.prefix + name


async def test_a_published_record_leaves_with_its_fact(hurt):
    topic = make_topic(hurt, "out")
    writer = hurt.make("n1", publish_topics=frozenset({topic})).serving()
    await writer.write(publish("s", topic))
    (record,) = visible(hurt.direct, topic)
    assert record[1:] == ("k", b"v", {"why": b"test"})
    assert log(hurt) == {"s": ["e:0"]}


async def test_a_target_that_cannot_be_written_is_refused_before_anything_is_staged(hurt):
    missing, forbidden = hurt.prefix + "missing", make_topic(hurt, "forbidden")
    writer = hurt.make("n1", start=False, publish_topics=frozenset({missing}), max_record_bytes=10_000)
    writer.start()
    good = writer.write(append("a", 0))
    for target, value in ((missing, b"v"), (forbidden, b"v"), (missing, b"v" * 10_001)):
        with pytest.raises(PublishRefusedError):
            await writer.write(publish("s", target, value=value))
    await good
    assert writer.tenure == 1
    assert log(hurt) == {"a": ["e:0"]}


async def test_one_bad_target_does_not_keep_others_from_being_written(hurt):
    narrow, wide = make_topic(hurt, "narrow", **{"max.message.bytes": "1000"}), make_topic(hurt, "wide")
    writer = hurt.make("n1", start=False, publish_topics=frozenset({narrow, wide}))
    bad = writer.write(publish("bad", narrow, value=os.urandom(5_000)), seconds=60)
    fine = writer.write(publish("fine", wide), seconds=60)
    plain = [writer.write(append(f"s{n}", 0)) for n in range(20)]
    writer.start()

    await asyncio.gather(fine, *plain)
    with pytest.raises(PublishRefusedError):
        await bad
    assert [len(t.ops) for t in writer.transactions][0] == 20, "the next transaction leaves publishers out"
    assert set(log(hurt)) == {"fine", *(f"s{n}" for n in range(20))}
    assert len(visible(hurt.direct, wide)) == 1


# -- answers that rest on something ------------------------------------------------------------------------------


async def test_an_answer_that_rests_on_an_aborted_transaction_is_judged_again(hurt):
    writer = hurt.make("n1", start=False, kafka={"message.max.bytes": 20_000})
    doomed = append("s", 0, name="doomed", size=30_000)
    first = writer.write(doomed)
    conflict = writer.write(
        append("s", 0, name="other")
    )  # beside the first it is a conflict, without it it is not
    repeat = writer.write(doomed)  # beside the first it is a repeat
    writer.start()

    for refused in (first, repeat):
        with pytest.raises((PayloadTooLargeError, WrongHeadError)):
            await refused
    (placed,) = await conflict
    assert (placed.first, placed.repeated) == (0, False)
    assert log(hurt) == {"s": ["other:0"]}


async def test_a_deciding_read_needs_a_commit_that_was_sent_after_it_was_asked(hurt, proxy):
    writer = hurt.make("n1", **PATIENT).serving()
    await writer.write(append("s", 0))
    ends = lambda: sum(n for (api, _), n in proxy.seen.items() if api == Api.END_TXN)  # noqa: E731
    before = ends()
    held = proxy.hold(Api.END_TXN, WRITER, Side.REPLY)
    under_way = writer.write(append("s", 1))
    assert await asyncio.to_thread(held.caught.wait, 10)
    proof = writer.proof()
    held.release()
    await under_way
    assert ends() == before + 1
    await proof
    assert ends() == before + 2


async def test_what_the_client_says_between_two_transactions_ends_the_tenure_too(hurt, proxy, lanes):
    writer = hurt.make("n1", lanes=lanes).serving()
    await writer.write(append("s", 0))
    proxy.disconnect()
    await until(writer._tenures.lanes.disturbance)
    await writer.write(append("s", 1))
    assert writer.tenure == 2
