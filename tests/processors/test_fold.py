"""The fold service on a real broker: equal to the kernel's fold, whatever dies, and never backwards."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fold_bench import CODEC, History, histories, oracle, published, record, settings, write
from kafka_bench import wait_until

from loom.processors.fold import FoldService
from loom.processors.fold_partition import FoldPartition
from loom.processors.summaries import read_summaries
from loom.processors.summary import Summary
from loom.processors.summary_table import SummaryTable
from loom.schemas.envelope import Kind
from loom.schemas.records import ExecutionSummary
from loom.stores.kafka.deadline import Deadline
from loom.stores.kafka.lanes import LaneFault
from loom.topics.partitioner import partition_of


@pytest.fixture
def services():
    started = []

    def start(given, **more):
        deaths = []
        service = FoldService(given, on_death=deaths.append, **more)
        service.deaths = deaths
        started.append(service)
        service.start()
        return service

    yield start
    for service in started:
        assert service.stop()
        assert service.deaths == []


def _expected(grown):
    return {history.id: oracle(history.events) for history in grown}


def _caught_up(service, partitions):
    lag = service.stats().lag
    return len(lag) == partitions and not any(lag.values())


# -- the rules, without a broker ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_a_summary_is_what_the_kernel_folds(seed):
    history = History("e", random.Random(seed))
    summary = Summary("e")
    for _ in range(60):
        for envelope in history.events[summary.head + 1 :]:
            node = envelope.metadata.get("node")
            assert summary.apply(
                envelope.type, envelope.sequence, envelope.timestamp, node, lambda e=envelope: e.data
            )
            summary.sealed = summary.sealed or "seal" in envelope.metadata
            assert not summary.apply(envelope.type, envelope.sequence, 0, node, lambda e=envelope: e.data)
        assert summary.record() == oracle(history.events)
        assert Summary.of(summary.record()).record() == summary.record()
        history.grow()


def test_data_is_asked_for_only_where_a_field_comes_from_it():
    asked = []
    summary = Summary("e")

    def data():
        asked.append(1)
        return {"workflow": "w"}

    summary.apply(Kind.EXECUTION_STARTED, 0, 1, None, data)
    for sequence, kind in enumerate(
        (Kind.STEP_COMPLETED, Kind.DECISION_RECORDED, Kind.MESSAGE_CONSUMED, "NEW", Kind.EXECUTION_COMPLETED),
        1,
    ):
        summary.apply(kind, sequence, 1, None, data)
    assert len(asked) == 1


def test_nothing_but_short_names_enters_a_summary():
    summary = Summary("e")
    start = {
        "workflow": "w" * 10_000,
        "chainId": {"__loomEnc": "x"},
        "principal": "not a mapping",
        "parent": {"executionId": 5},
    }
    summary.apply(Kind.EXECUTION_STARTED, 0, 1, None, lambda: start)
    arms = [{"kind": "inbox", "topic": "t" * 10_000}] * 1_000 + ["junk", {"kind": "new"}]
    summary.apply(Kind.EXECUTION_SUSPENDED, 1, 1, None, lambda: {"waits": [{"arms": arms}, "junk"]})
    assert (len(summary.workflow), summary.chain_id, summary.owner, summary.parent_id) == (
        512,
        "e",
        None,
        None,
    )
    assert len(summary.waits) == 64
    assert all(len(wait) < 600 for wait in summary.waits)


def test_the_table_is_bounded_in_memory_and_forgets_nothing():
    table = SummaryTable(CODEC, resident=10)
    for number in range(100):
        summary = table.add(f"e{number}")
        summary.head = number
        table.committed([(f"e{number}", CODEC.encode(summary.record()))])
    assert len(table._recent) == 10
    assert len(table) == 100
    assert all(table.get(f"e{number}").head == number for number in range(100))
    table.committed([("e5", None)])
    assert table.get("e5") is None
    assert table.get("never") is None
    table.close()
    table.close()


# -- on a broker ----------------------------------------------------------------------------------------------------


def test_states_equal_the_kernels_fold_and_hold_committed_events_only(bench, services):
    bench.make("executions", "states")
    grown, log = histories(1, 40, 1_500)
    write(bench, log[:800])
    service = services(settings(bench))
    write(bench, log[800:], transactional_id="writer2")
    wait_until(lambda: service.stats().events == len(log), "every event folded")
    wait_until(lambda: _caught_up(service, 2), "no lag")
    assert published(bench) == _expected(grown)
    stats = service.stats()
    assert stats.summaries < stats.events
    assert stats.faults == 0
    group = bench.catalogue.group("fold")
    last = [m for m in bench.read_all(bench.catalogue.executions) if m.partition() == 0][-1]
    assert bench.committed(group, bench.catalogue.executions, 0) == last.offset() + 1


def test_a_restart_goes_on_from_states(bench, services):
    bench.make("executions", "states")
    grown, log = histories(2, 30, 900)
    first = services(settings(bench))
    write(bench, log[:500])
    wait_until(lambda: first.stats().events == 500, "the first half")
    assert first.stop()
    second = services(settings(bench, resident=3))
    write(bench, log[500:], transactional_id="writer2")
    wait_until(lambda: second.stats().events >= len(log) - 500, "the second half")
    wait_until(lambda: _caught_up(second, 2), "no lag")
    assert second.stats().events == len(log) - 500
    assert published(bench) == _expected(grown)


def test_two_services_share_the_partitions_and_one_takes_over(bench, services):
    bench.make("executions", "states")
    grown, log = histories(3, 30, 900)
    first = services(settings(bench, "n1"))
    write(bench, log[:300])
    second = services(settings(bench, "n2"))
    wait_until(lambda: len(first.stats().lag) == 1 and len(second.stats().lag) == 1, "one partition each")
    write(bench, log[300:600], transactional_id="writer2")
    assert first.stop()
    write(bench, log[600:], transactional_id="writer3")
    wait_until(lambda: first.stats().events + second.stats().events >= len(log), "every event")
    wait_until(lambda: _caught_up(second, 2), "no lag")
    assert published(bench) == _expected(grown)


def test_a_deleted_execution_leaves_states_and_junk_is_passed_over(bench, services):
    bench.make("executions", "states")
    service = services(settings(bench))
    grown, log = histories(4, 2, 20)
    write(bench, log)
    topic, gone = bench.catalogue.executions, grown[0].id
    at = partition_of(gone, 2)
    good = record(grown[0].events[0])
    bench.send(
        topic,
        at,
        (b"__loom_tick__", None, []),
        (b"no-sequence", b"junk", []),
        (b"other/0", b"junk", [("type", b"EXECUTION_STARTED"), ("timestamp", b"1")]),
        (b"other/1", b"junk", []),
        (b"late/7", good[1], good[2]),
        *((f"{gone}/{event.sequence}".encode(), None, []) for event in grown[0].events),
    )
    wait_until(lambda: service.stats().events == len(log) + 5 + len(grown[0].events), "every record read")
    assert published(bench) == {grown[1].id: oracle(grown[1].events)}


def test_summaries_are_listed_newest_first(bench, services):
    bench.make("executions", "states")
    service = services(settings(bench))
    grown, log = histories(5, 12, 200)
    write(bench, log)
    wait_until(lambda: service.stats().events == len(log), "every event folded")
    rows = read_summaries(bench.config, limit=5)
    assert [row["execution_id"] for row in rows] == sorted((h.id for h in grown), reverse=True)[:5]
    completed = read_summaries(bench.config, status="completed", workflow="order", limit=100)
    expected = {
        s.execution_id for s in _expected(grown).values() if s.status == "completed" and s.workflow == "order"
    }
    assert {row["execution_id"] for row in completed} == expected


def _taken(bench, name):
    part = FoldPartition(settings(bench, name), 0, CODEC)
    part.take(lambda: (0, 10**9), Deadline.after(20_000), lambda: None)
    return part


def test_a_fold_that_was_overtaken_is_fenced_and_writes_nothing(bench):
    bench.make("executions", "states")
    write(bench, [e for e in histories(6, 10, 100)[1] if partition_of(e.stream_id, 2) == 0])
    messages = [m for m in bench.read_all(bench.catalogue.executions) if m.partition() == 0]
    consumer = bench.member("fold")
    group = consumer.consumer_group_metadata()
    zombie = _taken(bench, "old")
    zombie.fold(messages[:10], group)
    successor = _taken(bench, "new")
    successor.fold(messages, group)
    before = published(bench)
    with pytest.raises(LaneFault):
        zombie.fold(messages[10:20], group)
    assert published(bench) == before
    # what it had restored knows the higher heads: the same events again change nothing
    again = _taken(bench, "again")
    assert again.fold(messages, group) == (len(messages), 0)
    for part in (zombie, successor, again):
        part.release()
        part.release()
    consumer.close()


_WORKER = """
import sys, time
sys.path.insert(0, {here!r})
from kafka_bench import Bench
from fold_bench import settings
from loom.processors.fold import FoldService
service = FoldService(settings(Bench({bootstrap!r}, {prefix!r}), {name!r}, session_ms=6000))
service.start()
print("started", flush=True)
sys.stdin.read()
service.stop()
"""


def _process(bench, name):
    source = _WORKER.format(
        here=str(Path(__file__).parent), bootstrap=bench.bootstrap, prefix=bench.catalogue.prefix, name=name
    )
    process = subprocess.Popen(  # noqa: S603 - our own source
        [sys.executable, "-c", source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout.readline() == b"started\n"
    return process


def test_kill_and_zombies_leave_states_equal_to_the_oracle(bench, services):
    """A process is killed mid-way, another frozen, overtaken and thawed: nothing is lost, nothing goes back."""
    bench.make("executions", "states")
    grown, log = histories(7, 60, 2_400)
    quarter = len(log) // 4
    processes = [_process(bench, "killed")]
    try:
        write(bench, log[:quarter])
        wait_until(lambda: published(bench), "summaries of the first process")
        processes[0].kill()
        processes.append(_process(bench, "frozen"))
        write(bench, log[quarter : 2 * quarter], transactional_id="writer2")
        seen = len(published(bench))
        wait_until(
            lambda: sum(s.head + 1 for s in published(bench).values()) > quarter * 1.2, "the second process"
        )
        assert seen
        processes[1].send_signal(signal.SIGSTOP)
        write(bench, log[2 * quarter : 3 * quarter], transactional_id="writer3")
        service = services(settings(bench, "last", session_ms=6000))
        total = lambda: sum(s.head + 1 for s in published(bench).values())  # noqa: E731
        wait_until(lambda: total() == 3 * quarter, "the successor of the frozen one", timeout_s=60)
        processes[1].send_signal(signal.SIGCONT)
        write(bench, log[3 * quarter :], transactional_id="writer4")
        wait_until(lambda: total() == len(log), "every event", timeout_s=60)
        assert service.stats().events
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
            process.stdin.close()
            process.stdout.close()
    assert published(bench) == _expected(grown)


def test_a_summary_that_cannot_be_read_stops_nothing_else(bench, services):
    bench.make("executions", "states")
    grown, log = histories(8, 2, 0)
    broken, sound = grown
    bench.send(bench.catalogue.states, partition_of(broken.id, 2), (broken.id.encode(), b"junk", []))
    write(bench, log)
    service = services(settings(bench))
    for history in grown:
        history.grow()
    write(bench, [history.events[-1] for history in grown], transactional_id="writer2")
    wait_until(lambda: service.stats().events == 4, "every record read")
    rows = {m.key(): m.value() for m in bench.read_all(bench.catalogue.states)}
    assert rows[broken.id.encode()] == b"junk"
    assert CODEC.decode(rows[sound.id.encode()], ExecutionSummary) == oracle(sound.events)
