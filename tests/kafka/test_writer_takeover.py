"""Takeovers: the fence, the end by position, what is not whole, rivals, and what a partition owes."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref

import pytest
from writers import append, create_log, drop_log, event, foreign_producer, streams, until, visible

from loom.errors import NotOwnerError, StreamBrokenError, WrongHeadError
from loom.schemas.envelope import Envelope
from loom.schemas.records import StreamMark
from loom.stores.contracts import StreamAppend
from loom.stores.kafka.deadline import Deadline
from loom.stores.kafka.writer import StopReason, WriterState
from loom.stores.ops import AcquireFence, AppendOps, Truncate

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=[1, 2], ids=["one-lane", "two-lanes"])
def lanes(request):
    return request.param


def put(producer, writer, stream_id, sequence, *, batch="0/1", topic="executions", event_id=None):
    """Write an event past the writer, as a fault of its own would."""
    event_id = event_id or f"e:{sequence}"
    envelope = Envelope(event_id, stream_id, sequence, "STEP_COMPLETED", 1, {}, {"schema": "1.25.0"})
    headers = {"type": "STEP_COMPLETED", "sequence": sequence, "id": event_id, "batch": batch, "timestamp": 1}
    producer.produce(
        writer.settings.catalogue.prefix + topic,
        writer.codec.encode_envelope(envelope),
        f"{stream_id}/{sequence}",
        partition=0,
        headers=[(name, str(value)) for name, value in headers.items()],
    )


def put_mark(producer, writer, stream_id, *, head, first):
    mark = writer.codec.encode(StreamMark(stream_id, head, first, 1, anchor="e:0"))
    producer.produce(writer.settings.catalogue.marks, mark, stream_id, partition=0)


# -- the fence and the end ---------------------------------------------------------------------------------------


async def test_a_new_writer_sees_everything_and_the_old_one_writes_nothing_more(writers, lanes):
    old = writers.make("n1", confirm=lambda: False, lanes=lanes).serving()
    for number in range(5):
        await old.write(append("s", number))
    await old.write(AcquireFence("s", "driver"))

    new = writers.make("n2", lanes=lanes).serving()
    assert new.ids("s") == [f"e:{n}" for n in range(5)]
    assert new.index.row("s").fence == 1
    with pytest.raises(NotOwnerError):
        await old.write(append("s", 5, name="late"))
    assert old.stopped().stop_reason is StopReason.FENCED
    await new.write(append("s", 5))
    assert streams(writers.bootstrap, writers.prefix) == {"s": [f"e:{n}" for n in range(6)]}


async def test_a_fence_ends_the_tenure_and_not_the_assignment(writers, lanes):
    asked = []
    writer = writers.make("n1", confirm=lambda: asked.append(1) or True, lanes=lanes).serving()
    await writer.write(append("s", 0))
    for number in range(min(lanes, 2)):
        foreign_producer(writers.bootstrap, writer.settings.catalogue.log_transactional_id(0, number))

    await writer.write(
        append("s", 1, 2)
    )  # fenced in the middle: confirmed, retaken, read again, written once

    assert asked == [1]
    assert writer.tenure == 2
    assert writer.states == [s for s in WriterState if s is not WriterState.STOPPED][1:] * 2
    assert streams(writers.bootstrap, writers.prefix) == {"s": ["e:0", "e:1", "e:2"]}


async def test_a_log_that_ends_in_an_abort_marker_replays_at_once(writers):
    first = writers.make("n1").serving()
    await first.write(append("s", 0))
    first.stop(10_000)
    aborted = foreign_producer(writers.bootstrap, "foreign-" + writers.prefix)
    aborted.begin_transaction()
    for topic in ("executions", "inbox", "marks"):
        put(aborted, first, "s", 1, topic=topic, event_id="aborted")
    aborted.flush(10)
    aborted.abort_transaction(10)

    began = time.monotonic()
    second = writers.make("n2").serving()
    assert time.monotonic() - began < 5
    assert second.ids("s") == ["e:0"]


async def test_an_open_transaction_of_another_is_waited_for_and_never_read_past(writers):
    first = writers.make("n1").serving()
    await first.write(append("s", 0))
    first.stop(10_000)
    other = foreign_producer(writers.bootstrap, "foreign-" + writers.prefix)
    other.begin_transaction()
    put(other, first, "t", 0)
    other.flush(10)

    waiting = writers.make("n2")
    assert not waiting.reached(WriterState.SERVING, 1.5)
    failed = writers.make("n3", takeover_deadline_ms=1_000).stopped()
    assert failed.stop_reason is StopReason.INCOMPLETE
    assert failed.error is not None
    other.commit_transaction(10)
    waiting = writers.make("n4").serving()
    assert waiting.ids("t") == ["e:0"]


async def test_health_names_a_stuck_partition_and_its_age(writers):
    writer = writers.make("n1", stuck_after_ms=400).serving()
    await writer.write(append("s", 0))
    other = foreign_producer(writers.bootstrap, "foreign-" + writers.prefix)
    other.begin_transaction()
    put(other, writer, "t", 0)
    other.flush(10)

    await until(lambda: writer.health().stuck)
    (stuck,) = writer.health().stuck
    assert (stuck.topic, writer.health().partition) == (writers.prefix + "executions", 0)
    assert stuck.stable < stuck.end
    assert stuck.age_ms >= 400
    other.abort_transaction(10)
    await until(lambda: not writer.health().stuck)


async def test_a_log_of_another_number_of_partitions_is_refused(writers):
    writer = writers.make("n1").serving()
    await writer.write(append("s", 0))
    writer.stop(10_000)

    refused = writers.make("n2", partitions=4).stopped()
    assert refused.stop_reason is StopReason.MISMATCH
    assert "1 partitions, not 4" in str(refused.error)


# -- what is not whole -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("records", "at"),
    [
        ([(0, "0/1"), (2, "0/1")], 1),  # a gap
        ([(1, "0/1")], 0),  # no beginning
        ([(0, "0/1"), (1, "0/3"), (2, "1/3")], 3),  # the last batch is not whole
        ([(0, "0/3"), (1, "1/3"), (2, "0/1")], 2),  # a batch in the middle is not
    ],
)
async def test_a_gap_or_a_torn_batch_stops_its_stream_and_no_other(writers, records, at):
    first = writers.make("n1").serving()
    await first.write(append("good", 0, 3))
    first.stop(10_000)
    producer = foreign_producer(writers.bootstrap)
    for sequence, batch in records:
        put(producer, first, "bad", sequence, batch=batch)
    producer.flush(10)

    writer = writers.make("n2").serving()
    with pytest.raises(StreamBrokenError) as raised:
        await writer.write(append("bad", len(records)))
    assert (raised.value.stream_id, raised.value.sequence) == ("bad", at)
    with pytest.raises(StreamBrokenError):
        writer.read("bad", 0, 10)
    assert [error.stream_id for error in writer.health().broken] == ["bad"]
    await writer.write(append("good", 3))


async def test_batches_that_lie_between_each_other_are_whole(writers):
    writer = writers.make("n1", start=False)
    producer = foreign_producer(writers.bootstrap)
    for position in range(3):
        for stream_id in ("s", "s2"):  # one name begins as the other
            put(producer, writer, stream_id, position, batch=f"{position}/3")
    producer.flush(10)
    writer.start()

    writer.serving()
    assert writer.health().broken == ()
    assert writer.ids("s") == writer.ids("s2") == ["e:0", "e:1", "e:2"]


HEADERS = {"type": b"STEP_COMPLETED", "sequence": b"0", "id": b"e:0", "batch": b"0/1", "timestamp": b"1"}
NO_HEADERS = [
    None,
    [("type", None)],
    [(name, None) for name in HEADERS],
    *([(name, None if name == lost else value) for name, value in HEADERS.items()] for lost in HEADERS),
    [*({**HEADERS, "batch": b"1"}).items()],
    [*HEADERS.items(), ("fence", None)],
]
"""Headers of no event."""


async def test_records_that_are_no_events_are_passed_over(writers):
    first = writers.make("n1").serving()
    await first.write(append("good", 0, 3))
    first.stop(10_000)
    producer = foreign_producer(writers.bootstrap)
    for topic in ("executions", "inbox", "quarantine"):
        for key in (b"s/0", b"s", b"\xff\xfe/0"):
            for headers in NO_HEADERS:
                producer.produce(writers.prefix + topic, b"garbage", key, partition=0, headers=headers)
    producer.flush(10)

    writer = writers.make("n2").serving()
    assert writer.health().broken == ()
    assert writer.read("s", 0, 10) == []
    await writer.write(append("good", 3))
    assert writer.ids("good") == ["e:0", "e:1", "e:2", "e:3"]


async def test_a_key_without_a_sequence_is_no_event(writers):
    writer = writers.make("n1", start=False)
    producer = foreign_producer(writers.bootstrap)
    for key in (b"s", b"t"):
        producer.produce(
            writers.prefix + "executions", b"garbage", key, partition=0, headers=[*HEADERS.items()]
        )
    put(producer, writer, "good", 0)
    producer.flush(10)
    writer.start()

    writer.serving()
    assert [info.stream_id for info in writer.index.open_logs()] == ["good"]


async def test_garbage_for_marks_and_snapshots_is_passed_over(writers):
    first = writers.make("n1").serving()
    await first.write(append("good", 0, 3))
    first.stop(10_000)
    producer = foreign_producer(writers.bootstrap)
    for topic in ("marks", "snapshots"):
        for key in (b"s", b"\xff\xfe"):
            for sequence in (None, b"first", b"\xff"):
                headers = [("sequence", sequence)]
                producer.produce(writers.prefix + topic, b"garbage", key, partition=0, headers=headers)
    producer.flush(10)

    writer = writers.make("n2").serving()
    await writer.write(append("good", 3))
    assert writer.ids("good") == ["e:0", "e:1", "e:2", "e:3"]
    assert writer.index.snapshot("s") is None


async def test_a_stream_trimmed_while_it_was_read_is_not_broken(writers):
    writer = writers.make("n1", start=False)
    producer = foreign_producer(writers.bootstrap)
    for sequence in (0, 3, 4):
        put(producer, writer, "s", sequence)
    producer.flush(10)
    takeover = writer._takeover

    def trim_once_the_marks_were_read():
        if takeover.positions[writers.prefix + "marks"] == 0:
            put_mark(producer, writer, "s", head=4, first=3)
            producer.flush(10)

    takeover.read(Deadline.after(20_000), trim_once_the_marks_were_read)

    assert takeover.broken == {}
    assert writer.index.event_ids("s", 0, 10) == ["e:0", "e:3", "e:4"]


class Loop:
    """Something that refers to itself: only the garbage collector frees it."""

    def __init__(self):
        self.itself = self


async def test_what_stands_after_a_first_reading_counts_as_old_and_is_freed_all_the_same(writers):
    writer = writers.make("n1", start=False)
    producer = foreign_producer(writers.bootstrap)

    def made_while_it_reads(sequence):
        put(producer, writer, "s", sequence)
        producer.flush(10)
        made = []
        writer._takeover.read(Deadline.after(20_000), lambda: made.append(Loop()))
        assert gc.isenabled()
        return made[0]

    def is_old(one):
        return any(known is one for known in gc.get_objects(generation=2))

    one, another = made_while_it_reads(0), made_while_it_reads(1)
    assert is_old(one)
    assert not is_old(another)

    freed = weakref.ref(one)
    del one
    gc.collect()
    assert freed() is None


async def test_events_below_a_mark_that_are_missing_are_a_gap(writers):
    writer = writers.make("n1", start=False)
    producer = foreign_producer(writers.bootstrap)
    put(producer, writer, "s", 0)
    put_mark(producer, writer, "s", head=5, first=3)
    producer.flush(10)
    writer.start()

    writer.serving()
    with pytest.raises(StreamBrokenError):
        await writer.write(append("s", 6))


# -- rivals ------------------------------------------------------------------------------------------------------


async def test_two_owners_of_one_partition_settle(writers, lanes):
    left = writers.make("left", lanes=lanes, max_retakes=4).serving()
    right = writers.make("right", lanes=lanes, max_retakes=4).serving()

    async def insist(writer, name):
        """Append until the writer gives way; the ids that were acknowledged."""
        written = []
        try:
            for number in range(10_000):
                await writer.write(append(f"{name}-{number}", 0), seconds=30)
                written.append(f"{name}-{number}")
                if right.state is WriterState.STOPPED or left.state is WriterState.STOPPED:
                    break
        except NotOwnerError:
            pass
        return written

    acknowledged = await asyncio.gather(insist(left, "left"), insist(right, "right"))
    stopped = [w for w in (left, right) if w.state is WriterState.STOPPED]
    assert len(stopped) == 1
    assert stopped[0].stop_reason is StopReason.CONTENDED
    assert left.tenure + right.tenure <= 12
    (stayed,) = [w for w in (left, right) if w not in stopped]
    await stayed.write(append("after", 0))
    found = streams(writers.bootstrap, writers.prefix)
    assert {s for part in acknowledged for s in part} <= set(found)


# -- what a partition owes ---------------------------------------------------------------------------------------


def ticks(writers, topic):
    return [
        offset
        for offset, key, _, _ in visible(writers.bootstrap, writers.prefix + topic)
        if key == "__loom_tick__"
    ]


async def test_a_quiet_partition_that_owes_a_deletion_appends_a_tick_once_the_lag_has_passed(writers):
    writer = writers.make("n1", compaction_lag_ms=300).serving()
    await writer.write(append("s", 0, 3))
    await writer.write(Truncate("s", 2))
    assert ticks(writers, "executions") == []
    await until(lambda: ticks(writers, "executions"))
    assert ticks(writers, "inbox") == []
    assert len(ticks(writers, "executions")) == 1


async def test_the_debt_is_found_again_at_a_takeover(writers):
    first = writers.make("n1").serving()
    await first.write(append("s", 0, 3))
    await first.write(Truncate("s", 2))
    first.stop(10_000)

    second = writers.make("n2", compaction_lag_ms=300).serving()
    await until(lambda: ticks(writers, "executions"))
    second.stop(10_000)
    third = writers.make("n3", compaction_lag_ms=300).serving()
    await third.proof()
    assert len(ticks(writers, "executions")) == 1, "it was paid"


# -- checkpoints -------------------------------------------------------------------------------------------------


async def test_a_restart_reads_only_what_its_checkpoint_lacks(writers):
    first = writers.make("n1", folder="kept").serving()
    inbox = "__loom_inbox__:s:ship"
    await first.write(append("s", 0, 3))
    await first.write(AppendOps((StreamAppend(inbox, (event("m0", "INBOX_MESSAGE"),)),)))
    await first.remote(append("t", 0), 11)
    await until(first.index.checkpoint_extra)
    await first.write(append("s", 3))
    first.stop(10_000)
    first.index.close()

    second = writers.make("n1", folder="kept").serving()
    assert second._takeover.found < 6
    assert second.ids("s") == ["e:0", "e:1", "e:2", "e:3"]
    assert second.applied("appends") == 11
    await second.write(append("s", 4))

    second.stop(10_000)
    second.index.close()
    create_log(writers.bootstrap, writers.prefix + "other.")
    writers.prefix += "other."
    third = writers.make("n1", folder="kept").serving()
    assert third.read("s", 0, 10) == [], "a checkpoint of another log is thrown away"


async def test_topics_made_again_under_their_names_void_a_checkpoint(writers):
    first = writers.make("n1", folder="kept").serving()
    await first.write(append("s", 0, 3))
    await until(first.index.checkpoint_extra)
    first.stop(10_000)
    first.index.close()
    await asyncio.to_thread(drop_log, writers.bootstrap, writers.prefix)
    await asyncio.to_thread(create_log, writers.bootstrap, writers.prefix)
    other = writers.make("n2").serving()
    for number in range(20):  # beyond where the old log ended, or the end alone would tell
        await other.write(append("t", number))
    other.stop(10_000)

    again = writers.make("n1", folder="kept").serving()
    assert again.read("s", 0, 10) == []
    assert again.ids("t") == [f"e:{n}" for n in range(20)]


async def race(writers, start_process, rounds):
    """Two processes, each sure to be the owner, append on the same head again and again."""
    mine = writers.make("mine", settled_ms=0).serving()
    theirs = await start_process(
        bootstrap=writers.bootstrap, prefix=writers.prefix, node="theirs", settled_ms=0
    )
    await theirs.serving()
    winners = []
    for number in range(rounds):
        theirs.ask("s", number, name=f"theirs{number}", seconds=60)
        try:
            await mine.write(append("s", number, name=f"mine{number}"), seconds=60)
        except WrongHeadError:
            pass
        else:
            winners.append(f"mine{number}:{number}")
        answer = await theirs.answer(f"theirs{number}")
        assert answer.get("error", "WrongHeadError") == "WrongHeadError"
        if "ok" in answer:
            winners.append(f"theirs{number}:{number}")
        assert len(winners) == number + 1, "exactly one wins each round"
    assert streams(writers.bootstrap, writers.prefix) == {"s": winners}


async def test_of_two_processes_that_race_one_wins_each_round(writers, start_process):
    await race(writers, start_process, 20)


@pytest.mark.soak
@pytest.mark.timeout(3_600)
async def test_of_two_processes_that_race_one_wins_each_of_a_thousand_rounds(writers, start_process):
    await race(writers, start_process, 1_000)
