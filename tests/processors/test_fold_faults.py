"""The fold behind a proxy that hurts its requests: whatever is lost, states end equal and never went back."""

import dataclasses
import time
import uuid

import pytest
from fold_bench import CODEC, histories, oracle, published, settings, write
from kafka_bench import Bench, wait_until

from loom.processors.fold import FoldService
from loom.processors.fold_partition import FoldPartition
from loom.stores.kafka.deadline import Deadline
from loom.stores.kafka.reader import Ends
from loom.testing.proxy import Api, Side

FOLD = "*-fold-*"
ADD_OFFSETS, OFFSET_COMMIT = 25, 28  # AddOffsetsToTxn, TxnOffsetCommit


@pytest.fixture
def hurt(proxied_broker, proxy):
    """A bench around the proxy, and a fold service through it with short deadlines."""
    bench = Bench(proxied_broker.bootstrap, f"t{uuid.uuid4().hex[:12]}.", partitions=1)
    bench.make("executions", "states")
    given = dataclasses.replace(
        settings(bench), bootstrap=f"127.0.0.1:{proxy.port}", transaction_ms=3_000, commit_ms=1_500
    )
    deaths = []
    bench.service = FoldService(given, on_death=deaths.append)
    bench.service.start()
    yield bench
    proxy.clear()
    assert bench.service.stop()
    assert deaths == []


def _folded(bench, log):
    last = {}
    for envelope in log:
        last[envelope.stream_id] = envelope.sequence
    wait_until(
        lambda: {k: v.head for k, v in published(bench).items()} == last, "every event folded", timeout_s=60
    )


def test_an_end_held_past_the_deadline_and_let_go_in_a_later_transaction_does_no_harm(hurt, proxy):
    grown, log = histories(11, 20, 600)
    write(hurt, log[:200])
    _folded(hurt, log[:200])
    held = proxy.hold(Api.END_TXN, FOLD)
    write(hurt, log[200:400], transactional_id="writer2")
    assert held.caught.wait(20)
    _folded(hurt, log[:400])  # by a new tenure
    assert hurt.service.stats().faults > 0
    later = proxy.hold(Api.END_TXN, FOLD)
    write(hurt, log[400:], transactional_id="writer3")
    assert later.caught.wait(20)
    held.release()
    assert held.passed.wait(10)
    later.release()
    _folded(hurt, log)
    assert published(hurt) == {history.id: oracle(history.events) for history in grown}


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize(
    "api", [Api.PRODUCE, Api.ADD_PARTITIONS_TO_TXN, ADD_OFFSETS, OFFSET_COMMIT, Api.END_TXN]
)
def test_any_one_request_or_reply_lost_costs_time_only(hurt, proxy, api, side):
    grown, log = histories(12, 10, 200)
    write(hurt, log[:100])
    _folded(hurt, log[:100])
    rule = proxy.cut(api, FOLD, side)
    write(hurt, log[100:], transactional_id="writer2")
    assert rule.caught.wait(20)
    _folded(hurt, log)
    assert published(hurt) == {history.id: oracle(history.events) for history in grown}


def test_a_client_call_that_does_not_return_is_told(proxied_broker, proxy):
    bench = Bench(proxied_broker.bootstrap, f"t{uuid.uuid4().hex[:12]}.", partitions=1)
    bench.make("executions", "states")
    given = dataclasses.replace(
        settings(bench), bootstrap=f"127.0.0.1:{proxy.port}", transaction_ms=20_000, commit_ms=15_000
    )
    deaths = []
    service = FoldService(given, on_death=deaths.append, stall_s=3.0)
    service.start()
    held = proxy.hold(OFFSET_COMMIT, FOLD)
    write(bench, histories(13, 2, 20)[1])
    wait_until(lambda: deaths, "the news that it stands still")
    assert "the fold service has stood still" in deaths[0]
    held.release()
    assert service.stop()


ATTEMPTS = 8


@pytest.mark.timeout(300)
def test_what_a_broker_left_without_an_end_is_ended_before_states_are_restored(start_kafka):
    """A restarting broker drops the markers of a transaction, and calls it complete (docs/adr/0015)."""
    hasty = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "50"}
    broker = start_kafka(properties=hasty)
    bench = Bench(broker.bootstrap, "t.", partitions=1)
    bench.make("executions", "states")
    states = bench.catalogue.states
    ends = Ends(bench.admin, 0, broker.bootstrap)
    for _ in range(ATTEMPTS):
        name = bench.catalogue.fold_transactional_id(0).removeprefix(bench.catalogue.prefix)
        left = bench.producer(name, **{"transaction.timeout.ms": 1_000})
        left.begin_transaction()
        left.produce(states, None, b"left", partition=0)
        assert left.flush(10) == 0
        broker.kill()
        del left
        time.sleep(1.5)  # its timeout passes while the broker is away
        broker.start()
        time.sleep(3)
        if ends.stable([states]) != ends.written([states]):
            break
    else:
        pytest.skip("this broker ended every transaction")
    fold = FoldPartition(settings(bench), 0, CODEC)
    fold.take(lambda: (0, 0), Deadline.after(20_000), lambda: None)
    fold.release()
    assert ends.stable([states]) == ends.written([states])
