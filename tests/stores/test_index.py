"""The index of a shard: the same as one in memory, whatever has left for the file, and however it was built."""

import sqlite3
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from judge_ops import INBOXES, LOGS, STREAMS, histories, keep, run_of, state

from loom.errors import StoreError, StreamBrokenError
from loom.ids import inbox_stream
from loom.schemas.codec import decode_envelope, encode_envelope
from loom.schemas.envelope import EVENT_SCHEMA, Kind, NewEvent
from loom.stores.contracts import Snapshot, StreamAppend
from loom.stores.event_run import Beside, EventRun
from loom.stores.index import StreamIndex
from loom.stores.judge import (
    Accepted,
    AcquireFence,
    AppendOps,
    Delete,
    DropSnapshot,
    PutEvent,
    PutMark,
    PutSnapshot,
    SaveSnapshot,
    Staged,
    Truncate,
)
from loom.stores.memory.log import MemoryIndex

IDENTITY = {"cluster": "c1", "topics": {"executions": "t1"}, "partitions": 8}
few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def open_index(folder, budget=1_000_000):
    return StreamIndex(folder / "index", encode_envelope, decode_envelope, budget_bytes=budget)


@pytest.fixture
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("index")


@pytest.fixture
def index(folder):
    index = open_index(folder)
    yield index
    index.close()


@pytest.fixture(scope="module")
def two_indexes(tmp_path_factory):
    indexes = [open_index(tmp_path_factory.mktemp("index")) for _ in range(2)]
    yield indexes
    for index in indexes:
        index.close()


def write(op, *indexes):
    """Judge by the first, apply to all; return the effects."""
    staged = Staged(indexes[0])
    verdict = staged.judge(op, 100)
    for index in indexes:
        index.apply(staged.effects)
    return verdict.effects if isinstance(verdict, Accepted) else []


def log(stream_id, *kinds, size=10):
    """The events of a log, one append."""
    events = tuple(
        NewEvent(f"{stream_id}{n}", kind, {"text": "x" * size}, {"schema": EVENT_SCHEMA})
        for n, kind in enumerate(kinds)
    )
    return AppendOps((StreamAppend(stream_id, events, expected_head=-1, fence=1),))


def more(stream_id, head, kind=Kind.STEP_COMPLETED, size=10):
    event = NewEvent(f"{stream_id}{head + 1}", kind, {"text": "x" * size}, {"schema": EVENT_SCHEMA})
    return AppendOps((StreamAppend(stream_id, (event,), expected_head=head),))


def message(stream_id, n):
    event = NewEvent(f"m{n}", Kind.INBOX_MESSAGE, {}, {"schema": EVENT_SCHEMA})
    return AppendOps((StreamAppend(stream_id, (event,)),))


# -- the same as one in memory -------------------------------------------------------------------------------------

asides = st.sampled_from(("", "", "maintain", "checkpoint", "reopen"))


@few
@given(
    histories.flatmap(lambda h: st.tuples(st.just(h), st.lists(asides, min_size=len(h), max_size=len(h)))),
    st.booleans(),
)
def test_it_says_what_an_index_in_memory_says(folder, script, tight):
    budget = 1 if tight else 1_000_000
    index, oracle = open_index(folder, budget), MemoryIndex()
    index.clear()
    for op, aside in zip(*script, strict=True):
        write(op, index, oracle)
        if aside == "maintain":
            index.maintain()
        elif aside:
            index.save_checkpoint({"executions": 1}, IDENTITY, 5)
        if aside == "reopen":
            index.close()
            index = open_index(folder, budget)
            assert index.load_checkpoint(IDENTITY, 6, max_age_ms=10, ends={"executions": 1}) == {
                "executions": 1
            }
    for ours, truth in zip(state(index), state(oracle), strict=True):
        for name, expected in truth.items():
            assert ours[name] == expected, name
    for stream_id in STREAMS:
        for first in (0, 1, 3, 7):
            for limit in (0, 1, 3):
                assert index.encoded(stream_id, first, limit) == oracle.encoded(stream_id, first, limit)
                assert index.event_ids(stream_id, first, first + limit) == oracle.event_ids(
                    stream_id, first, first + limit
                )
    opened = {s for s in LOGS if (row := oracle.row(s)) is not None and row.exists and not row.finished}
    assert [info.stream_id for info in index.open_logs()] == sorted(opened)
    for chain, inbox in zip("ab", INBOXES, strict=True):
        row = oracle.row(inbox)
        assert [i.stream_id for i in index.inbox_streams(chain)] == (
            [inbox] if row is not None and row.exists else []
        )
    index.close()


@few
@given(histories, st.randoms(use_true_random=False), st.booleans(), st.booleans())
def test_it_is_built_again_from_the_records(two_indexes, history, chance, tight, twice):
    """From what compaction may have left: the last mark of each stream, and any of the events that marks say are gone."""
    live, built = two_indexes
    live.clear()
    built.clear()
    built._table._budget = 1 if tight else 1_000_000
    oracle = MemoryIndex()
    records = [effect for op in history for effect in write(op, live, oracle)]
    for _ in range(1 + twice):
        lost = load(built, records, oracle, chance)
    for ours, theirs, truth in zip(state(built), state(live), state(oracle), strict=True):
        for name, expected in truth.items():
            assert theirs[name] == expected, name
            if (
                name in lost and expected and ours[name]
            ):  # what a deleted or trimmed event consumed is known again from the inbox's next mark
                ours[name][0]["consumed"] = expected[0]["consumed"]
            assert ours[name] == expected, name


def load(index, records, oracle, chance):
    """Load the records as a takeover does, marks first; return the inboxes of which a position consumed is lost."""
    lost = set()
    marks = [e for e in records if isinstance(e, PutMark)]
    last = {e.stream_id: e for e in marks}
    for mark in marks:
        if last[mark.stream_id] is mark or chance.random() < 0.3:
            index.load_mark(mark.stream_id, mark.row.copy())
    run = None

    def take_run():
        nonlocal run
        if run is not None:
            index.load_run(run)
        run = None

    for effect in records:
        if not isinstance(effect, PutEvent) or chance.random() < 0.3:
            take_run()
        if isinstance(effect, PutEvent):
            e = effect.envelope
            row = oracle.row(e.stream_id)
            gone = row.deleted or 0 < e.sequence < row.first
            compacted = gone and chance.random() < 0.7
            if compacted or row.deleted:
                lost.update(inbox for inbox, _ in effect.consumed)
            if compacted:
                continue
            if run is not None and (run.stream_id, run.end) != (e.stream_id, e.sequence):
                take_run()
            run = run or EventRun(e.stream_id, e.sequence)
            node = e.metadata.get("node") if effect.fence is not None else None
            keep(run, e, Beside(effect.fence, node, effect.consumed))
        elif isinstance(effect, PutSnapshot):
            index.load_snapshot(effect.snapshot.execution_id, effect.snapshot.sequence, b"snapshot")
        elif isinstance(effect, DropSnapshot):
            index.load_snapshot(effect.execution_id, -1, None)
    take_run()
    return lost


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_keeps_to_its_budget(folder):
    index = open_index(folder, budget=200_000)
    for n in range(500):
        write(log(f"e{n:03}", Kind.EXECUTION_STARTED, Kind.EXECUTION_SUSPENDED, size=500), index)
        assert index.bytes_in_memory <= 300_000
        if index.overdue:
            index.maintain()
            assert index.bytes_in_memory <= 200_000
    assert 0 < index.streams_in_memory < 150
    assert len(index.open_logs(limit=1000)) == 500
    assert [len(index.events(f"e{n:03}", 0, 9)) for n in range(500)] == [2] * 500
    index.close()


def test_a_reading_that_nobody_maintains_makes_room_itself_and_no_more(folder):
    source = MemoryIndex()
    write(log("e", Kind.EXECUTION_STARTED, Kind.EXECUTION_COMPLETED, size=500), source)
    events = source.events("e", 0, 9)
    index = open_index(folder, budget=4_000_000)
    highest, lowest_after = 0, 6_000_000
    for n in range(4_000):
        before = index.bytes_in_memory
        index.load_run(run_of(f"e{n:04}", *events))
        highest = max(highest, before)
        if index.bytes_in_memory < before:
            lowest_after = min(lowest_after, index.bytes_in_memory)
    assert 5_900_000 < highest <= 6_000_000
    assert 4_500_000 < lowest_after < 5_500_000  # a batch of streams leaves at once, and no more
    assert [len(index.events(f"e{n:04}", 0, 9)) for n in range(0, 4_000, 100)] == [2] * 40
    index.close()


def test_a_writer_that_nobody_maintains_makes_room_itself(folder):
    index = open_index(folder, budget=100_000)
    for n in range(300):
        write(log(f"e{n}", Kind.EXECUTION_STARTED, size=500), index)
    assert index.bytes_in_memory <= 150_000
    index.close()


def test_a_closed_index_holds_nothing(folder):
    index = open_index(folder)
    write(log("e", Kind.EXECUTION_STARTED, size=1000), index)
    index.close()
    assert (index.streams_in_memory, index.bytes_in_memory) == (0, 0)
    index.close()


def test_the_streams_that_changed_longest_ago_leave_first(folder):
    index = open_index(folder, budget=100_000)
    for n in range(40):
        write(log(f"e{n:02}", Kind.EXECUTION_STARTED, size=1000), index)
    write(more("e00", 0), index)
    for n in range(40, 60):
        write(log(f"e{n:02}", Kind.EXECUTION_STARTED, size=1000), index)
    index.maintain()
    assert "e00" in index._table.entries
    assert "e01" not in index._table.entries
    assert "e59" in index._table.entries
    index.close()


def test_finished_executions_leave_nothing_in_memory(index):
    for n in range(50):
        write(log(f"e{n}", Kind.EXECUTION_STARTED, Kind.EXECUTION_COMPLETED), index)
        write(message(inbox_stream(f"e{n}", "t"), n), index)
        write(more(f"e{n}", 1, Kind.OUTCOME_RECORDED), index)
        write(message(inbox_stream(f"e{n}", "late"), n), index)
    index.maintain()
    assert (index.streams_in_memory, index.bytes_in_memory) == (0, 0)
    assert index.row("e7").status == Kind.EXECUTION_COMPLETED
    assert [i.head for i in index.inbox_streams("e7")] == [0, 0]
    assert index.open_logs() == []


def test_a_parked_execution_comes_back_with_what_it_left(index):
    write(log("e", Kind.EXECUTION_STARTED, Kind.EXECUTION_SUSPENDED), index)
    index._table._budget = 1
    index.maintain()
    assert index.streams_in_memory == 0
    assert index.row("e").head == 1
    for head in range(1, 6):
        write(more("e", head), index)
        if head % 2:
            index.maintain()
    assert [e.sequence for e in index.events("e", 0, 99)] == list(range(7))
    assert [e.sequence for e in index.events("e", 2, 2)] == [2, 3]


def test_what_was_erased_is_not_in_the_file(index, folder):
    secret = "not-for-anyone" * 10
    for stream_id in ("gone", "trimmed"):
        write(log(stream_id, Kind.EXECUTION_STARTED, Kind.STEP_COMPLETED), index)
        event = NewEvent("s", Kind.STEP_COMPLETED, {"secret": secret}, {"schema": EVENT_SCHEMA})
        write(AppendOps((StreamAppend(stream_id, (event,), expected_head=1),)), index)
        write(more(stream_id, 2), index)
    index.save_checkpoint({}, IDENTITY, 0)
    write(Delete("gone"), index)
    write(Truncate("trimmed", 3), index)
    index.save_checkpoint({}, IDENTITY, 0)
    assert [e.sequence for e in index.events("trimmed", 0, 9)] == [0, 3]
    index.close()
    assert not any(secret.encode() in path.read_bytes() for path in folder.iterdir())


def test_many_open_logs_are_paged_over_memory_and_file(folder):
    index = open_index(folder, budget=20_000)
    for n in range(60):
        write(log(f"e{n:02}", Kind.EXECUTION_STARTED), index)
    index.maintain()
    for n in range(0, 60, 3):  # known to the file as open, to memory as finished
        write(more(f"e{n:02}", 0, Kind.EXECUTION_COMPLETED), index)
    found, page = [], [None]
    while page:
        page = index.open_logs(found[-1] if found else "", 7)
        assert len(page) <= 7
        found += [info.stream_id for info in page]
    assert found == [f"e{n:02}" for n in range(60) if n % 3]
    index.close()


def test_readers_beside_a_writer_and_its_maintenance(folder):
    """Whatever a reader sees of a stream is whole: from its beginning, without a gap."""
    index = open_index(folder, budget=30_000)
    done, failures = threading.Event(), []

    def read():
        while not done.is_set():
            for n in range(8):
                seen = [e.sequence for e in index.events(f"e{n}", 0, 1000)]
                if seen != list(range(len(seen))):
                    failures.append(seen)
                index.info(f"e{n}")
            index.open_logs()

    def maintain():
        while not done.is_set():
            index.maintain()
            index.save_checkpoint({}, IDENTITY, 0)

    threads = [threading.Thread(target=job) for job in (read, maintain)]
    for thread in threads:
        thread.start()
    for n in range(8):
        write(log(f"e{n}", Kind.EXECUTION_STARTED), index)
    for head in range(60):
        for n in range(8):
            write(more(f"e{n}", head, size=100), index)
    done.set()
    for thread in threads:
        thread.join(30)
    assert not failures
    assert [len(index.events(f"e{n}", 0, 1000)) for n in range(8)] == [61] * 8
    index.close()


# -- the checkpoint ------------------------------------------------------------------------------------------------------


def checkpointed(folder):
    index = open_index(folder)
    write(log("open", Kind.EXECUTION_STARTED), index)
    write(log("done", Kind.EXECUTION_STARTED, Kind.EXECUTION_COMPLETED), index)
    write(AcquireFence("open", "n:2"), index)
    write(SaveSnapshot(Snapshot("open", 0, {"a": 1})), index)
    index.save_checkpoint({"executions": 7, "marks": 2}, IDENTITY, 1_000, extra={"applied": 3})
    write(log("later", Kind.EXECUTION_STARTED), index)
    index.close()
    return open_index(folder)


def test_a_checkpoint_brings_everything_back(folder):
    index = checkpointed(folder)
    ends = {"executions": 7, "marks": 99}
    assert index.load_checkpoint(IDENTITY, 1_500, max_age_ms=500, ends=ends) == {"executions": 7, "marks": 2}
    assert index.checkpoint_extra() == {"applied": 3}
    assert index.streams_in_memory == 0
    assert (index.row("open").fence, index.row("open").fence_owner) == (2, "n:2")
    assert [e.sequence for e in index.events("done", 0, 9)] == [0, 1]
    assert index.snapshot("open")[0] == 0
    assert index.row("later") is None
    assert [info.stream_id for info in index.open_logs()] == ["open"]
    index.close()


@pytest.mark.parametrize(
    ("identity", "now", "ends"),
    [
        (IDENTITY | {"cluster": "c2"}, 1_100, {"executions": 7, "marks": 2}),
        (IDENTITY | {"topics": {"executions": "t2"}}, 1_100, {"executions": 7, "marks": 2}),
        (IDENTITY | {"partitions": 4}, 1_100, {"executions": 7, "marks": 2}),
        (IDENTITY, 1_501, {"executions": 7, "marks": 2}),
        (IDENTITY, 999, {"executions": 7, "marks": 2}),
        (IDENTITY, 1_100, {"executions": 6, "marks": 2}),
        (IDENTITY, 1_100, {"executions": 7}),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_thrown_away(folder, identity, now, ends):
    index = checkpointed(folder)
    assert index.load_checkpoint(identity, now, max_age_ms=500, ends=ends) is None
    assert index.row("open") is None
    assert index.events("done", 0, 9) == []
    assert index.snapshot("open") is None
    assert index.checkpoint_extra() == {}
    index.close()


def test_what_left_memory_without_a_checkpoint_is_thrown_away(folder):
    index = open_index(folder)
    write(log("done", Kind.EXECUTION_STARTED, Kind.EXECUTION_COMPLETED), index)
    index.maintain()
    index.close()
    index = open_index(folder)
    assert index.load_checkpoint(IDENTITY, 0, max_age_ms=500, ends={}) is None
    assert index.row("done") is None
    index.close()


def test_a_damaged_file_is_replaced(folder):
    checkpointed(folder).close()
    for path in folder.iterdir():
        path.write_bytes(b"this is no database, and long enough to be sure" * 100)
    index = open_index(folder)
    assert index.load_checkpoint(IDENTITY, 1_100, max_age_ms=500, ends={"executions": 7, "marks": 2}) is None
    write(log("e", Kind.EXECUTION_STARTED, Kind.EXECUTION_COMPLETED), index)
    index.maintain()
    assert index.row("e").head == 1
    index.close()


def test_a_file_of_another_format_is_replaced(folder):
    checkpointed(folder).close()
    db = sqlite3.connect(folder / "index")
    db.execute("UPDATE meta SET value = '0' WHERE key = 'format'")
    db.commit()
    db.close()
    index = open_index(folder)
    assert index.row("open") is None
    index.close()


def test_a_file_that_cannot_be_written_loses_nothing(folder):
    index = open_index(folder)
    write(log("e", Kind.EXECUTION_STARTED, Kind.EXECUTION_COMPLETED), index)
    index._table.file._writer.execute("PRAGMA query_only = ON")
    with pytest.raises(StoreError):
        index.maintain()
    assert [e.sequence for e in index.events("e", 0, 9)] == [0, 1]
    index._table.file._writer.execute("PRAGMA query_only = OFF")
    index.maintain()
    assert index.streams_in_memory == 0
    assert [e.sequence for e in index.events("e", 0, 9)] == [0, 1]
    index.close()


# -- loading -------------------------------------------------------------------------------------------------------------


def test_a_stream_may_leave_memory_between_its_mark_and_its_events(folder):
    source = open_index(folder)
    write(log("e", *[Kind.EXECUTION_STARTED, *[Kind.STEP_COMPLETED] * 9]), source)
    write(Truncate("e", 4), source)
    mark = source.row("e").copy()
    built = StreamIndex(folder / "built", encode_envelope, decode_envelope, budget_bytes=1)
    built.load_mark("e", mark)
    for e in source.events("e", 0, 99):
        built.load_run(run_of("e", e))
        assert built.streams_in_memory == 0
    assert built.row("e") == source.row("e")
    assert [e.sequence for e in built.events("e", 0, 99)] == [0, *range(4, 10)]
    source.close()
    built.close()


def test_an_older_mark_that_is_read_again_takes_nothing_back(index):
    inbox = inbox_stream("e", "t")
    for n in range(4):
        write(message(inbox, n), index)
    write(Truncate(inbox, 2), index)
    mark = index.row(inbox).copy()
    consuming = StreamAppend("e", log("e", Kind.EXECUTION_STARTED).appends[0].events, consumed=((inbox, 2),))
    write(AppendOps((consuming,)), index)
    index.load_mark(inbox, mark.copy())
    assert (index.row(inbox).consumed, index.row(inbox).waiting) == (2, 1)
    write(message(inbox, 4), index)
    write(AcquireFence("e", "n:2"), index)
    fenced = index.row("e").copy()
    write(AcquireFence("e", "n:3"), index)
    index.load_mark("e", fenced)
    assert (index.row("e").fence, index.row("e").fence_owner) == (2, "n:3")
    index.load_mark(inbox, mark.copy())
    row = index.row(inbox)
    assert (row.head, row.first, row.consumed, list(row.recent)[-1]) == (4, 2, 2, "m4")
    assert [e.sequence for e in index.events(inbox, 0, 9)] == [0, 2, 3, 4]


def test_what_is_loaded_twice_costs_once_and_what_its_mark_says_is_gone_costs_nothing(index):
    source = MemoryIndex()
    write(log("e", Kind.EXECUTION_STARTED, *[Kind.STEP_COMPLETED] * 6, size=100), source)
    events = source.events("e", 0, 99)
    index.load_run(run_of("e", *events))
    once = index.bytes_in_memory
    index.load_run(run_of("e", *events))
    assert index.bytes_in_memory == once

    write(Truncate("e", 5), source)
    index.clear()
    index.load_mark("e", source.row("e").copy())
    index.load_run(run_of("e", *events))
    assert index._table.entries["e"].ids == [e.id for e in events[5:]]

    write(Delete("e"), source)
    index.clear()
    index.load_mark("e", source.row("e").copy())
    without = index.bytes_in_memory
    consuming = run_of("e", *events)
    consuming.consumed = ((inbox_stream("e", "t"), 3),)
    index.load_run(consuming)
    assert (index.bytes_in_memory, index.streams_in_memory) == (without, 1)


def test_a_mark_that_is_gone_takes_the_stream_along(index):
    write(log("e", Kind.EXECUTION_STARTED, Kind.EXECUTION_COMPLETED), index)
    index.maintain()
    write(message(inbox_stream("e"), 1), index)
    index.load_mark("e", None)
    index.load_mark(inbox_stream("e"), None)
    assert index.row("e") is None
    assert index.events("e", 0, 9) == []
    assert index.inbox_streams("e") == []
    assert (index.streams_in_memory, index.bytes_in_memory) == (0, 0)


def test_events_may_be_trimmed_before_the_mark_that_says_so_is_read(index):
    source = MemoryIndex()
    write(log("e", *[Kind.EXECUTION_STARTED, *[Kind.STEP_COMPLETED] * 6]), source)
    for e in source.events("e", 0, 99):
        if e.sequence not in {3, 4}:
            index.load_run(run_of("e", e))
    write(Truncate("e", 5), source)
    mark = source.row("e").copy()
    write(more("e", 6), source)
    (later,) = source.events("e", 7, 1)
    index.load_run(run_of("e", later))
    index.load_mark("e", mark)
    assert [e.sequence for e in index.events("e", 0, 99)] == [0, 5, 6, 7]
    assert (index.row("e").head, index.row("e").first) == (7, 5)


@pytest.mark.parametrize(
    ("meanwhile", "kept"),
    [
        (Truncate("e", 4), [0, 4, 5]),
        (Delete("e"), []),
        (more("e", 5), list(range(7))),
        (more("e", 5, Kind.EXECUTION_COMPLETED), list(range(7))),
    ],
)
@pytest.mark.parametrize("leave", [False, True])
def test_what_happens_while_the_file_is_written_is_not_lost_on_it(index, meanwhile, kept, leave, monkeypatch):
    write(log("e", Kind.EXECUTION_STARTED, *[Kind.STEP_COMPLETED] * 5), index)
    to_file = index._table.file.write

    def write_and_go_on(*args):
        to_file(*args)
        monkeypatch.undo()
        write(meanwhile, index)

    monkeypatch.setattr(index._table.file, "write", write_and_go_on)
    if leave:
        index._table._budget = int(index.bytes_in_memory * 0.9)
        index.maintain()
        index._table._budget = 1
        index.maintain()
        assert index.streams_in_memory == 0
    else:
        index.save_checkpoint({}, IDENTITY, 0)
        assert [e.sequence for e in index.events("e", 0, 99)] == kept
        index.save_checkpoint({}, IDENTITY, 0)
    assert [event[0] for event in index._table.file.events("e", 0, 99, 99)] == kept
    assert [e.sequence for e in index.events("e", 0, 99)] == kept


def test_a_stopped_stream_answers_with_the_reason(index):
    write(log("e", Kind.EXECUTION_STARTED), index)
    error = StreamBrokenError("e", 1, "a gap")
    index.stop(error)
    for ask in (lambda: index.row("e"), lambda: index.events("e", 0, 1), lambda: index.event_ids("e", 0, 1)):
        with pytest.raises(StreamBrokenError):
            ask()
    assert Staged(index).judge(more("e", 0), 1).error is error
    index.resume()
    assert index.row("e").head == 0
