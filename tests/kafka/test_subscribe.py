"""Live events, snapshots and views: what is read beside the writer's own answers."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import pytest_asyncio
from confluent_kafka import Producer

from loom.errors import IncompleteReadError
from loom.schemas.codec import Codec
from loom.schemas.envelope import Envelope
from loom.stores.kafka.sender import BrokerClock
from loom.stores.kafka.settings import KafkaSettings
from loom.stores.kafka.snapshots import KafkaSnapshotStore
from loom.stores.kafka.subscribe import PAGE_EVENTS, LiveFeed, LiveQueue, follow
from loom.stores.kafka.view import PartitionView
from loom.testing.conformance.event_store.support import message, started, steps, take
from loom.testing.conformance.snapshot_store import SnapshotStoreConformance
from stores import StoreBench, kafka_clients, timed, until

pytestmark = pytest.mark.timeout(120)


# -- joining history and live events, without a broker ---------------------------------------------------------------


def envelope(sequence):
    return Envelope(f"e{sequence}", "s", sequence, "STEP_COMPLETED", 0, {})


class Log:
    def __init__(self, count=0):
        self.events = [envelope(n) for n in range(count)]
        self.reads = 0

    async def read(self, sequence, limit):
        self.reads += 1
        return [e for e in self.events if e.sequence >= sequence][:limit]

    def append(self, queue, count=1):
        new = [envelope(len(self.events) + n) for n in range(count)]
        self.events += new
        queue.put(new)


async def got(events, count):
    return [e.sequence for e in await take(events, count)]


async def test_history_page_by_page_then_live():
    log, queue = Log(2 * PAGE_EVENTS + 3), LiveQueue()
    events = follow(queue, log.read, 5)
    assert await got(events, 2 * PAGE_EVENTS - 2) == list(range(5, 2 * PAGE_EVENTS + 3))
    reads = log.reads
    log.append(queue, 2)
    assert await got(events, 2) == [2 * PAGE_EVENTS + 3, 2 * PAGE_EVENTS + 4]
    assert log.reads == reads  # what is live is not read
    await events.aclose()


async def test_what_came_while_history_was_read_is_given_once():
    log, queue = Log(3), LiveQueue()
    queue.put(log.events[1:])
    events = follow(queue, log.read, 0)
    log.append(queue)
    assert await got(events, 4) == [0, 1, 2, 3]
    log.append(queue)
    assert await got(events, 1) == [4]
    await events.aclose()


@pytest.mark.parametrize("fault", ["gap", "overflow", "moved"])
async def test_what_does_not_join_is_read_again(fault):
    log, queue = Log(1), LiveQueue(limit=10)
    events = follow(queue, log.read, 0)
    assert await got(events, 1) == [0]
    if fault == "gap":
        log.events.append(envelope(1))
        log.append(queue)
    elif fault == "overflow":
        log.append(queue, 15)
    else:
        log.events += [envelope(1), envelope(2)]
        queue.restart()
    expected = [e.sequence for e in log.events[1:]]
    assert await got(events, len(expected)) == expected
    log.append(queue)
    assert await got(events, 1) == [len(log.events) - 1]
    await events.aclose()


async def test_a_closed_queue_ends_the_subscription():
    log, queue = Log(1), LiveQueue()
    events = follow(queue, log.read, 0)
    assert await got(events, 1) == [0]
    asyncio.get_running_loop().call_later(0.01, queue.close)
    assert [e async for e in events] == []


def test_a_feed_holds_nothing_for_streams_without_subscribers():
    feed, queue = LiveFeed(), LiveQueue()
    feed.add("s", queue)
    feed.put("other", [envelope(0)])
    feed.remove("s", queue)
    feed.remove("s", queue)
    assert len(feed) == 0


def test_the_brokers_time_is_never_taken_for_later_than_it_is():
    now = [1_000_000]
    clock = BrokerClock(lambda: now[0])
    assert clock.age_ms(700_000) == 0  # nothing is known but that record: it may be fresh
    clock.saw(1_002_000)  # the broker is 2 s ahead, at least
    assert clock.age_ms(1_000_500) == 1_500
    now[0] += 10_000
    assert clock.age_ms(1_002_000) == 10_000
    now[0] += 200_000  # an old estimate fades, once a newer one stands
    clock.saw(now[0] - 5_000)
    now[0] += 70_000
    clock.saw(now[0] - 5_000)
    now[0] += 70_000
    assert clock.age_ms(now[0] - 6_000) == 1_000


# -- on a real log ---------------------------------------------------------------------------------------------------


@pytest.fixture
async def bench(kafka_bootstrap, topic_prefix, tmp_path):
    bench = StoreBench(kafka_bootstrap, topic_prefix, tmp_path)
    yield bench
    await bench.close()


async def test_subscribers_everywhere_get_everything_through_a_move(bench):
    one, client = await bench.owner("one"), await bench.client()
    chains = [bench.chain(n % 2) for n in range(4)]
    for chain in chains:
        await client.append(started(chain, fence=None))
    seen = {}

    async def watch(name, store, chain):
        async with contextlib.aclosing(store.subscribe(chain)) as events:
            async for event in events:
                seen.setdefault((name, chain), []).append(event.sequence)

    watching = [
        asyncio.ensure_future(watch(name, store, chain))
        for chain in chains
        for name, store in (("one", one), ("client", client))
    ]

    async def grow(head, count):
        for n in range(count):
            await asyncio.gather(*(client.append(steps(chain, head + n)) for chain in chains))

    await grow(0, 10)
    two = await bench.owner("two", partitions=1)
    watching += [asyncio.ensure_future(watch("two", two, chain)) for chain in chains]
    await grow(10, 10)
    for shard in (0, 1):
        await asyncio.to_thread(bench.fence, shard)
    await grow(20, 10)
    whole = list(range(31))
    await until(lambda: len(seen) == 12 and all(len(s) == 31 for s in seen.values()))
    assert all(found == whole for found in seen.values())
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)


async def test_a_slow_subscriber_misses_nothing(bench):
    owner, chain = await bench.owner(), bench.chain()
    await owner.append(started(chain, fence=None))
    async with contextlib.aclosing(owner.subscribe(chain)) as events:
        assert await got(events, 1) == [0]
        for head in range(0, 3_000, 100):
            await owner.append(steps(chain, head, 100))
        assert await got(events, 3_000) == list(range(1, 3_001))


async def test_a_subscription_ends_with_its_store_and_leaves_no_thread(bench):
    owner, client, chain = await bench.owner(), await bench.client(), bench.chain()
    await client.append(started(chain, fence=None))
    ends = []
    for store in (client, owner):
        events = store.subscribe(chain)
        assert await got(events, 1) == [0]
        ends.append(asyncio.ensure_future(anext(events, None)))
    await client.close()
    await owner.close()
    with timed(5):
        assert await asyncio.gather(*ends) == [None, None]


class TestSnapshots(SnapshotStoreConformance):
    @pytest_asyncio.fixture
    async def bench(self, kafka_bootstrap, topic_prefix, tmp_path):
        bench = StoreBench(kafka_bootstrap, topic_prefix, tmp_path)
        owner, client = await bench.owner(), await bench.client()
        stores = [KafkaSnapshotStore(store, Codec()) for store in (client, owner)]

        class Handles:
            def open(self):
                stores.append(stores.pop(0))
                return stores[0]

        yield Handles()
        await bench.close()


async def test_a_view_answers_with_everything_committed_when_asked(bench, tmp_path):
    owner, chain = await bench.owner(), bench.chain()
    settings = KafkaSettings(bench.bootstrap, "viewer", bench.prefix, bench.partitions)
    view = PartitionView(settings, 0, tmp_path / "view.index")
    assert await view.info(chain) is None
    await owner.append(started(chain))
    for head in range(5):
        await owner.append(steps(chain, head))
        assert [e.sequence for e in await view.read(chain)] == list(range(head + 2))
    await owner.append(message(f"__loom_inbox__:{chain}:t", "m"))
    await owner.acquire_fence(chain, "n")
    assert await view.observe(chain) == await owner.observe(chain)
    assert [i.stream_id for i in await view.inbox_streams(chain)] == [f"__loom_inbox__:{chain}:t"]
    assert [i.stream_id for i in await view.open_logs()] == [chain]
    await owner.truncate(chain, 3)
    assert [e.sequence for e in await view.read(chain)] == [0, 3, 4, 5]
    await owner.delete(chain)
    assert await view.read(chain) == []
    await view.close()
    await view.close()


async def test_a_closed_view_leaves_no_client(bench, tmp_path, no_garbage_collection):
    before = kafka_clients()
    settings = KafkaSettings(bench.bootstrap, "viewer", bench.prefix, bench.partitions)
    view = PartitionView(settings, 0, tmp_path / "view.index")
    assert await view.info(bench.chain()) is None
    await view.close()
    await until(lambda: kafka_clients() <= before)


async def test_a_view_never_answers_with_less_as_if_it_were_all(bench, tmp_path):
    owner, chain = await bench.owner(), bench.chain()
    await owner.append(started(chain))
    settings = KafkaSettings(bench.bootstrap, "viewer", bench.prefix, bench.partitions)
    view = PartitionView(settings, 0, tmp_path / "view.index")
    other = Producer({"bootstrap.servers": bench.bootstrap, "transactional.id": f"{bench.prefix}other"})
    other.init_transactions(20)
    other.begin_transaction()
    other.produce(bench.catalogue.executions, None, "unrelated", partition=0)
    other.flush(10)
    await owner.append(steps(chain, 0))  # committed, and hidden from every reader behind the open transaction
    with timed(5), pytest.raises(IncompleteReadError):
        await view.read(chain, deadline_ms=1_500)
    other.abort_transaction(10)
    assert [e.sequence for e in await view.read(chain)] == [0, 1]
    await view.close()
