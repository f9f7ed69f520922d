"""The event store in memory keeps the contract."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loom.errors import StorageWriteError, WrongHeadError
from loom.ids import ulid
from loom.schemas.envelope import NewEvent
from loom.stores.contracts import EventStore, Outgoing, OwningEventStore, StreamAppend
from loom.stores.memory.event_store import MemoryEventStore
from loom.stores.memory.log import MAX_EVENT_BYTES, MemoryLog
from loom.testing.conformance.event_store import EventStoreConformance, OwningEventStoreConformance
from loom.testing.conformance.event_store.support import event, started, steps
from loom.topics.partitioner import mint

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=10,
)


class MemoryBench:
    too_large = MAX_EVENT_BYTES

    def __init__(self):
        self.now = 1_000
        self.log = MemoryLog(self.tick)
        self.handles = []

    def tick(self):
        self.now += 1
        return self.now

    async def open(self):
        return await self.own(None)

    async def own(self, origin):
        self.handles.append(MemoryEventStore(self.log, origin=origin))
        return self.handles[-1]

    def chain(self):
        return mint(3, self.log.shards, ulid)

    def elsewhere(self):
        return mint(4, self.log.shards, ulid)


@pytest.fixture
async def bench():
    bench = MemoryBench()
    yield bench
    for handle in bench.handles:
        await handle.close()


class TestMemoryEventStore(EventStoreConformance, OwningEventStoreConformance):
    pass


class Listener:
    def __init__(self):
        self.heard, self.shards = [], []

    def committed(self, batch):
        self.heard += [(c.stream_id, [e.id for e in c.envelopes], c.origin) for c in batch]

    def gained(self, shard):
        self.shards.append(("gained", shard))

    def lost(self, shard):
        self.shards.append(("lost", shard))


async def turns():
    """Let everything that was called soon come."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_is_published_leaves_once_with_its_fact(bench):
    store, chain = await bench.open(), bench.chain()
    await store.append(started(chain))
    out = Outgoing("publish", "p1", "k", b"v", topic="estate", headers=(("h", b"1"),))
    for _ in range(2):
        await store.append(steps(chain, 0, outgoing=(out,)))
    assert bench.log.published == [out]


async def test_a_request_that_cannot_be_applied_is_kept_with_its_reason(bench):
    store, chain, child = await bench.open(), bench.chain(), bench.elsewhere()
    await store.append(started(chain))
    await store.append(started(child, node="other"))
    lost = StreamAppend(child, (event("other start"),), expected_head=-1)
    out = Outgoing("request", "r1", child, lost)
    await store.append(steps(chain, 0, outgoing=(out,)))
    ((refused, error),) = bench.log.refused
    assert refused is out
    assert isinstance(error, WrongHeadError)
    assert [e.id for e in await store.read(child)] == [f"{child}#0"]


async def test_a_request_may_send_on(bench):
    store, one, two, three = await bench.open(), bench.chain(), bench.elsewhere(), bench.elsewhere()
    last = Outgoing("request", "r2", three, started(three))
    first = Outgoing("request", "r1", two, replace(started(two), outgoing=(last,)))
    await store.append(replace(started(one), outgoing=(first,)))
    assert await store.info(three) is not None


async def test_a_handle_hears_of_the_shards_that_it_serves(bench):
    here, there = bench.chain(), bench.elsewhere()
    some, rest = MemoryEventStore(bench.log, origin="some", owned={3}), await bench.own("rest")
    listeners = Listener(), Listener()
    some.listen(listeners[0])
    rest.listen(listeners[1])
    await rest.append(started(here))
    await some.append(started(there))
    await turns()
    assert listeners[0].heard == [(here, [f"{here}#0"], None)]
    assert listeners[1].heard == [(here, [f"{here}#0"], "rest"), (there, [f"{there}#0"], None)]
    assert listeners[0].shards == [("gained", 3)]
    assert (some.owned(), some.mint_shard()) == ({3}, 3)
    some.assign({4, 5})
    await turns()
    assert listeners[0].shards[1:] == [("lost", 3), ("gained", 4), ("gained", 5)]
    some.assign(())
    assert some.mint_shard() is None
    await some.close()


async def test_a_closed_handle_writes_and_hears_nothing(bench):
    store, other, chain = await bench.open(), await bench.open(), bench.chain()
    listener = Listener()
    store.listen(listener)
    events = store.subscribe(chain)
    waiting = asyncio.ensure_future(anext(events, None))
    await turns()
    await store.close()
    assert await waiting is None
    with pytest.raises(StorageWriteError):
        await store.append(started(chain))
    await other.append(started(chain))
    await turns()
    assert listener.heard == []
    assert [s for s in bench.log._waiting.values() if s] == []


async def test_an_abandoned_subscription_leaves_nothing_behind(bench):
    store, chain = await bench.open(), bench.chain()
    await store.append(started(chain))
    events = store.subscribe(chain)
    await anext(events)
    waiting = asyncio.ensure_future(anext(events))
    await turns()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await events.aclose()
    assert bench.log._waiting == {}
    assert store._closing == set()


def test_it_is_an_owning_event_store(bench):
    store = MemoryEventStore(bench.log)
    assert isinstance(store, EventStore)
    assert isinstance(store, OwningEventStore)


@settings(max_examples=50, deadline=None)
@given(value=json_values, metadata=st.dictionaries(st.text(max_size=3), json_values, max_size=2))
def test_any_json_comes_back(value, metadata):
    async def there_and_back():
        store, typed = (
            MemoryEventStore(MemoryLog(lambda: 1)),
            {"node", "actor", "schema", "seal", "quarantine"},
        )
        stamps = {key: v for key, v in metadata.items() if key not in typed}
        new = NewEvent("e", "K", {"value": value}, stamps | {"schema": "1.25.0"})
        await store.append(StreamAppend("s", (new,), expected_head=-1))
        (read,) = await store.read("s")
        assert (read.data, read.metadata) == (new.data, new.metadata)

    asyncio.run(there_and_back())
