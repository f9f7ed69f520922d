"""The writer without faults: conditional append, group commit, answers, requests of other nodes, reads that decide."""

from __future__ import annotations

import asyncio
import gc

import pytest
from writers import append, event, streams, visible

from loom.errors import NotOwnerError, PayloadTooLargeError, StorageWriteError, WrongHeadError
from loom.stores.contracts import StreamAppend
from loom.stores.kafka.writer import StopReason, WriterState
from loom.stores.ops import AppendOps, Delete, Tick, Truncate

pytestmark = pytest.mark.timeout(120)


async def test_an_append_is_durable_and_a_repeat_is_the_same_append(writers):
    writer = writers.make("n1").serving()

    (first,) = await writer.write(append("s", 0, 3))
    (again,) = await writer.write(append("s", 0, 3))

    assert (first.first, first.head, first.repeated) == (0, 2, False)
    assert (again.first, again.head, again.repeated) == (0, 2, True)
    assert writer.ids("s") == ["e:0", "e:1", "e:2"]
    assert streams(writers.bootstrap, writers.prefix) == {"s": ["e:0", "e:1", "e:2"]}


async def test_of_two_appends_on_one_head_one_wins_and_both_answers_come_with_the_same_commit(writers):
    writer = writers.make("n1", start=False)
    mine, theirs = writer.write(append("s", 0, name="a")), writer.write(append("s", 0, name="b"))
    repeat = writer.write(append("s", 0, name="a"))
    writer.start()

    (won,) = await mine
    (repeated,) = await repeat
    with pytest.raises(WrongHeadError):
        await theirs

    assert not won.repeated
    assert repeated.repeated
    assert len(writer.transactions) == 1
    assert streams(writers.bootstrap, writers.prefix) == {"s": ["a:0"]}


async def test_what_waits_together_is_one_transaction_and_one_call_per_loop(writers):
    writer = writers.make("n1", start=False)
    waiting = [writer.write(append(f"s{i}", 0, 2)) for i in range(200)]
    calls = []
    loop = asyncio.get_running_loop()
    original = loop.call_soon_threadsafe
    loop.call_soon_threadsafe = lambda *args, **kw: calls.append(args) or original(*args, **kw)
    writer.start()

    await asyncio.gather(*waiting)

    assert len(writer.transactions) == 1
    assert len(writer.transactions[0].ops) == 200
    assert len(calls) == 1


async def test_a_transaction_is_bounded_by_count_and_by_bytes(writers):
    writer = writers.make("n1", start=False, max_ops=10, max_bytes=20_000)
    small = [writer.write(append(f"s{i}", 0)) for i in range(25)]
    large = [writer.write(append(f"l{i}", 0, size=9_000)) for i in range(5)]
    whole = writer.write(append("w", 0, 5, size=9_000))  # above max_bytes: a transaction of its own
    writer.start()

    await asyncio.gather(*small, *large, whole)

    counts = [len(t.ops) for t in writer.transactions]
    sizes = [sum(len(e.encoded) for op in t.ops for e in op.effects) for t in writer.transactions]
    assert max(counts) == 10
    assert sum(counts) == 31
    assert all(size <= 20_000 or count == 1 for size, count in zip(sizes, counts, strict=True))
    assert max(sizes) > 45_000


async def test_too_large_is_told_to_its_caller_and_to_nobody_else(writers):
    writer = writers.make("n1", start=False, max_record_bytes=10_000, max_request_bytes=30_000)
    record = writer.write(append("s", 0, size=10_001))
    request = writer.write(append("t", 0, 6, size=9_000))
    good = writer.write(append("u", 0))
    writer.start()

    with pytest.raises(PayloadTooLargeError):
        await record
    with pytest.raises(PayloadTooLargeError):
        await request
    await good
    assert streams(writers.bootstrap, writers.prefix) == {"u": ["e:0"]}


async def test_a_full_queue_refuses_what_comes_and_a_cancelled_request_is_not_written(writers):
    writer = writers.make("n1", start=False, max_waiting=3)
    waiting = [writer.write(append(f"s{i}", 0)) for i in range(3)]
    with pytest.raises(StorageWriteError):
        await writer.write(append("s3", 0))
    assert writer.saturation > 0
    waiting[1].cancel()
    writer.start()

    await asyncio.gather(waiting[0], waiting[2])

    assert set(streams(writers.bootstrap, writers.prefix)) == {"s0", "s2"}


async def test_a_deadline_that_passes_in_the_queue_means_not_written(writers):
    writer = writers.make("n1", start=False)
    late = writer.write(append("s", 0), seconds=0)
    writer.start()
    writer.serving()

    with pytest.raises(StorageWriteError):
        await late
    await writer.write(append("s", 0))
    assert streams(writers.bootstrap, writers.prefix) == {"s": ["e:0"]}


async def test_listeners_get_what_was_committed_with_its_origin_before_the_caller_is_told(writers):
    writer = writers.make("n1").serving()

    await writer.write(append("s", 0, 2), origin="driver-1")
    (transaction,) = writer.transactions

    assert transaction.tenure == writer.tenure == 1
    (op,) = transaction.ops
    assert op.origin == "driver-1"
    assert [e.envelope.sequence for e in op.effects] == [0, 1]
    written = visible(writers.bootstrap, writers.prefix + "executions")
    assert transaction.offsets[writers.prefix + "executions"] == written[-1][0]


async def test_headers_say_what_an_index_needs(writers):
    writer = writers.make("n1").serving()
    await writer.write(append("s", 0, 2, fence=1))
    inbox = "__loom_inbox__:s:ship"
    await writer.write(AppendOps((StreamAppend(inbox, (event("m1", "INBOX_MESSAGE"),)),)))
    await writer.write(append("s", 2, fence=1, consumed=((inbox, 0),)))

    records = visible(writers.bootstrap, writers.prefix + "executions")
    heads = [{name: value.decode() for name, value in headers.items()} for *_, headers in records]

    assert [key for _, key, _, _ in records] == ["s/0", "s/1", "s/2"]
    assert [(h["type"], h["sequence"], h["id"], h["batch"]) for h in heads] == [
        ("STEP_COMPLETED", "0", "e:0", "0/2"),
        ("STEP_COMPLETED", "1", "e:1", "1/2"),
        ("STEP_COMPLETED", "2", "e:2", "0/1"),
    ]
    assert {h["fence"] for h in heads} == {"1"}
    assert heads[2]["consumed"] == f"{inbox}/0"


# -- requests of other nodes -------------------------------------------------------------------------------------


async def test_a_request_is_applied_once_whoever_reads_it(writers):
    first = writers.make("n1").serving()
    result, error = await first.remote(append("s", 0), 7)
    assert (result[0].head, error) == (0, None)
    assert first.applied("appends") == 7
    await first.remote(append("u", 0), 8)  # not the first of the partition, which writes its mark in any case
    first.stop(10_000)

    second = writers.make("n2").serving()
    assert second.applied("appends") == 8
    assert second.applied("commands") == -1
    (again,), error = await second.remote(append("s", 0), 7)
    assert again.repeated
    assert error is None
    result, error = await second.remote(
        append("t", 0), 5
    )  # below 8, and not there: it must not be applied now
    assert result is None
    assert error is not None
    await second.remote(Tick(), 9)
    assert streams(writers.bootstrap, writers.prefix) == {"s": ["e:0"], "u": ["e:0"]}


async def test_a_refused_request_is_recorded_before_its_refusal_leaves(writers):
    first = writers.make("n1").serving()
    await first.write(append("s", 0))
    _, error = await first.remote(append("s", 0, name="other"), 3)
    assert isinstance(error, WrongHeadError)
    first.stop(10_000)
    second = writers.make("n2").serving()
    assert second.applied("appends") == 3


async def test_what_cannot_be_used_is_recorded_as_done_with(writers):
    first = writers.make("n1").serving()
    first.skip_remote(source="appends", offset=4)
    first.skip_remote(source="commands", offset=9)
    await first.proof()
    first.stop(10_000)

    second = writers.make("n2").serving()
    assert (second.applied("appends"), second.applied("commands")) == (4, 9)


# -- marks -------------------------------------------------------------------------------------------------------


async def test_a_wholly_trimmed_stream_goes_on_counting_after_a_takeover(writers):
    first = writers.make("n1").serving()
    inbox = "__loom_inbox__:s:ship"
    for number in range(3):
        await first.write(AppendOps((StreamAppend(inbox, (event(f"m{number}", "INBOX_MESSAGE"),)),)))
    await first.write(Truncate(inbox, 3))
    first.stop(10_000)

    second = writers.make("n2").serving()
    (placed,) = await second.write(AppendOps((StreamAppend(inbox, (event("m3", "INBOX_MESSAGE"),)),)))
    (repeat,) = await second.write(AppendOps((StreamAppend(inbox, (event("m1", "INBOX_MESSAGE"),)),)))

    assert placed.first == 3
    assert repeat.repeated
    assert second.ids(inbox) == ["m0", "m3"]
    records = visible(writers.bootstrap, writers.prefix + "inbox")
    assert [key for _, key, value, _ in records if value is None] == [f"{inbox}/1", f"{inbox}/2"]


async def test_a_deleted_id_refuses_reuse_after_a_takeover(writers):
    first = writers.make("n1").serving()
    await first.write(append("s", 0, 2))
    await first.write(Delete("s"))
    first.stop(10_000)

    second = writers.make("n2").serving()
    with pytest.raises(Exception, match="taken"):
        await second.write(append("s", 0))
    assert second.read("s", 0, 10) == []


@pytest.mark.parametrize("op", [Truncate("s", 2), Delete("s")])
async def test_tombstones_and_their_mark_are_one_transaction(writers, op):
    writer = writers.make("n1").serving()
    await writer.write(append("s", 0, 3))
    await writer.write(op)

    def opened(topic, key):
        """The transaction that a record opens at its place, and all places of that transaction."""
        records = visible(writers.bootstrap, writers.prefix + topic)
        (*_, headers) = [r for r in records if r[1] == key][-1]
        name, _, places = headers["transaction"].decode().split(";")
        return name, sorted(places.split(","))

    both = [f"{writers.prefix}executions/0", f"{writers.prefix}marks/0"]
    first_dropped = "s/1" if isinstance(op, Truncate) else "s/0"
    assert opened("executions", first_dropped) == opened("marks", "s")
    assert opened("marks", "s")[1] == both


# -- reads that decide -------------------------------------------------------------------------------------------


async def test_a_deciding_read_needs_a_commit_of_this_tenure(writers):
    old = writers.make("n1", confirm=lambda: False).serving()
    await old.write(append("s", 0))
    await old.proof()
    new = writers.make("n2").serving()
    await new.write(append("s", 1))

    assert old.ids("s") == ["e:0"]  # stale, and it does not know
    with pytest.raises(NotOwnerError):
        await old.proof()
    assert old.stopped().stop_reason is StopReason.FENCED


@pytest.mark.parametrize("owner", [True, False])
async def test_a_caller_who_knows_more_than_the_writer_is_not_refused_from_stale_memory(writers, owner):
    old = writers.make("n1", confirm=lambda: owner).serving()
    await old.write(append("s", 0))
    new = writers.make("n2", confirm=lambda: not owner).serving()
    await new.write(append("s", 1))

    further = old.write(append("s", 2))
    if owner:
        (placed,) = await further
        assert placed.first == 2
    else:
        with pytest.raises(NotOwnerError):
            await further
    with pytest.raises(WrongHeadError):  # no writer has more, and this one has proved it
        await (old if owner else new).write(append("s", 9))


async def test_deciding_reads_share_a_transaction_and_leave_no_event(writers):
    writer = writers.make("n1").serving()
    await asyncio.gather(*(writer.proof() for _ in range(50)))

    assert writer.transactions == []
    keys = {key for _, key, _, _ in visible(writers.bootstrap, writers.prefix + "marks")}
    assert "__loom_partition__" in keys
    assert streams(writers.bootstrap, writers.prefix) == {}


# -- the end -----------------------------------------------------------------------------------------------------


async def test_a_stopped_writer_hands_back_what_it_did_not_write(writers):
    writer = writers.make("n1").serving()
    await writer.write(append("s", 0))
    assert writer.stop(10_000)
    assert writer.state is WriterState.STOPPED
    assert writer.stop_reason is StopReason.REVOKED

    for refused in (writer.write(append("s", 1)), writer.proof()):
        with pytest.raises(NotOwnerError):
            await refused
    with pytest.raises(NotOwnerError):
        writer.read("s", 0, 1)


async def test_an_abandoned_writer_begins_nothing_more(writers):
    writer = writers.make("n1", start=False)
    waiting = [writer.write(append(f"s{i}", 0)) for i in range(5)]
    writer.abandon()
    writer.start()

    for refused in waiting:
        with pytest.raises(NotOwnerError):
            await refused
    assert writer.stopped().stop_reason is StopReason.LOST
    assert streams(writers.bootstrap, writers.prefix) == {}


async def test_a_transaction_that_is_over_leaves_nothing_for_the_collector(writers):
    """What it held is freed with its last reference: else a busy writer's events pile up until they are collected."""
    writer = writers.make("n1").serving()
    await writer.write(append("s", 0))
    gc.collect()
    gc.disable()
    try:
        for at in range(40):
            await asyncio.gather(*(writer.write(append(f"t{at}-{i}", 0, 5)) for i in range(10)))
        assert len(writer.transactions) >= 40
        assert gc.collect() < 40
    finally:
        gc.enable()
