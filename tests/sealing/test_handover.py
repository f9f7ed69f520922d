"""What listeners and live readers are told of sealed events: opened, in order, or told that it could not be."""

import asyncio
import logging

import pytest
from benches import SealedBench, fact, sent, started, step

from loom.errors import PayloadShreddedError, UnreachableError
from loom.ids import inbox_stream
from loom.schemas.envelope import Kind
from loom.stores.contracts import Committed
from loom.stores.keys.memory import MemoryKeyStore
from loom.stores.sealing import handover
from loom.testing.conformance.event_store.owning import Listener, heard
from loom.testing.conformance.event_store.support import take

SECRET = "planted-plaintext-7Q"


class SlowKeys(MemoryKeyStore):
    """Keys that come when the test lets them."""

    def __init__(self, table):
        super().__init__(table)
        self.gate = asyncio.Event()
        self.asked = 0
        self.fails = False

    async def get(self, subject):
        self.asked += 1
        await self.gate.wait()
        if self.fails:
            raise UnreachableError("Redis", "nowhere", "redis_url")
        return await super().get(subject)


class Ordered(Listener):
    """Remembers everything in one order."""

    def __init__(self):
        super().__init__()
        self.told = []

    def committed(self, batch):
        super().committed(batch)
        self.told += [(c.stream_id, e.sequence) for c in batch for e in c.envelopes]

    def gained(self, shard):
        super().gained(shard)
        self.told.append(("gained", shard))

    def lost(self, shard):
        super().lost(shard)
        self.told.append(("lost", shard))


@pytest.fixture
async def bench():
    bench = SealedBench()
    yield bench
    await bench.close()


async def test_with_keys_at_hand_events_are_told_on_the_spot(bench):
    store, listener, log = bench.node(origin="a"), Listener(), bench.chain()
    store.listen(listener)
    await store.append(started(log, data_in=SECRET))
    await store.append(step(log, 0, SECRET))
    await heard(lambda: len(listener.of(log)) == 2)
    assert [e.data.get("input", e.data.get("output")) for e in listener.of(log)] == [SECRET, SECRET]
    assert listener.origins(log) == ["a", "a"]
    assert {c.unopened for c in listener.heard} == {()}
    assert store._handover._task is None


async def test_what_waits_for_a_key_holds_back_what_follows(bench):
    writer, log, other = await bench.open(), bench.chain(), bench.chain()
    keys = SlowKeys(bench.table)
    node, listener = bench.node(keys=keys), Ordered()
    node.listen(listener)
    shards = len(node.owned())
    await heard(lambda: len(listener.shards) == shards)
    listener.told.clear()
    await writer.append(started(log, subject="s", data_in=SECRET))
    await writer.append(started(other))  # nothing sealed in it
    await heard(lambda: keys.asked == 1)
    node._inner.assign(set(node.owned()) - {7})
    await writer.append(step(log, 0, SECRET))
    await asyncio.sleep(0)
    assert listener.told == []
    keys.gate.set()
    await heard(lambda: len(listener.told) == 4)
    assert listener.told == [(log, 0), (other, 0), ("lost", 7), (log, 1)]
    assert [e.data.get("input", e.data.get("output")) for e in listener.of(log)] == [SECRET, SECRET]


async def test_a_log_that_cannot_be_opened_is_told_as_stored_and_said_so(bench):
    writer, log = await bench.open(), bench.chain()
    lacking, poorer = bench.node(keys=MemoryKeyStore()), bench.node(sensitive={})
    listeners = [Listener(), Listener()]
    lacking.listen(listeners[0])
    poorer.listen(listeners[1])
    await writer.append(started(log, data_in=SECRET))
    await writer.append(fact(log, 0, Kind.EXECUTION_SUSPENDED, waits=[]))
    for listener in listeners:
        await heard(lambda heard_by=listener: len(heard_by.of(log)) == 2)
        assert [c.unopened for c in listener.heard if c.stream_id == log] == [(0,), ()]
        assert "__loomEnc" in listener.of(log)[0].data["input"]


async def test_a_message_that_cannot_be_opened_is_told_redacted(bench):
    writer, log = await bench.open(), bench.chain()
    inbox = inbox_stream(log, "t")
    await writer.append(started(log))
    node, listener = bench.node(keys=MemoryKeyStore()), Listener()
    node.listen(listener)
    await writer.append(sent(inbox, "m", SECRET))
    await heard(lambda: bool(listener.of(inbox)))
    (told,) = [c for c in listener.heard if c.stream_id == inbox]
    assert told.envelopes[0].data["payload"] == {"$shredded": True}
    assert told.unopened == ()


async def test_keys_that_do_not_answer_leave_events_unopened(bench):
    writer, log = await bench.open(), bench.chain()
    keys = SlowKeys(bench.table)
    keys.fails = True
    keys.gate.set()
    node, listener = bench.node(keys=keys), Listener()
    node.listen(listener)
    await writer.append(started(log, data_in=SECRET))
    await heard(lambda: bool(listener.of(log)))
    assert listener.heard[-1].unopened == (0,)


async def test_the_queue_is_bounded(bench, monkeypatch):
    monkeypatch.setattr(handover, "MAX_WAITING", 3)
    writer, log = await bench.open(), bench.chain()
    keys = SlowKeys(bench.table)
    node, listener = bench.node(keys=keys), Listener()
    node.listen(listener)
    await writer.append(started(log, subject="s"))
    for head in range(10):
        await writer.append(step(log, head, SECRET))
    await heard(lambda: keys.asked == 1)
    keys.fails = True
    keys.gate.set()
    await heard(lambda: len(listener.of(log)) == 11)
    assert [e.sequence for e in listener.of(log)] == list(range(11))
    assert [c.unopened for c in listener.heard if c.stream_id == log][1:] == [(n,) for n in range(1, 11)]
    assert keys.asked <= 5


async def test_a_listener_that_fails_stops_nobody(bench):
    class Failing(Listener):
        def committed(self, batch):
            super().committed(batch)
            raise RuntimeError("no")

    writer, log = await bench.open(), bench.chain()
    node, listener = bench.node(), Failing()
    node.listen(listener)
    await writer.append(started(log, data_in=SECRET))
    await writer.append(step(log, 0, SECRET))
    await heard(lambda: len(listener.of(log)) == 2)


async def test_closing_ends_the_waiting(bench):
    writer, log = await bench.open(), bench.chain()
    keys = SlowKeys(bench.table)
    node, listener = bench.node(keys=keys), Listener()
    node.listen(listener)
    await writer.append(started(log, data_in=SECRET))
    await heard(lambda: keys.asked == 1)
    await node.close()
    assert listener.of(log) == []
    assert node._handover._task.done()


def test_without_a_loop_what_is_not_at_hand_stays_sealed():
    """A store that tells from a thread of its own, where nobody can ask for a key."""
    from loom.schemas.envelope import Envelope
    from loom.stores.sealing.encrypting import EncryptingEventStore
    from loom.stores.sealing.handover import OpeningListener

    store = EncryptingEventStore(object(), MemoryKeyStore())
    listener = Listener()
    data = {"payload": {"__loomEnc": "x"}}
    seal = {"v": 1, "cipher": "loom/aes-256-gcm", "covers": ["MESSAGE_CONSUMED.payload"]}
    envelope = Envelope("e", "log", 3, Kind.MESSAGE_CONSUMED, 1, data, {"seal": seal})
    handover = OpeningListener(store._opener, store._subjects, listener)
    handover.committed([Committed("log", (envelope,), None)])
    assert listener.heard == [Committed("log", (envelope,), None, (3,))]


# -- live readers --------------------------------------------------------------------------------------------------


async def test_a_live_reader_sees_open_events(bench):
    store, log = await bench.open(), bench.chain()
    await store.append(started(log, data_in=SECRET))
    events = store.subscribe(log)
    assert (await take(events, 1))[0].data["input"] == SECRET
    await store.append(step(log, 0, SECRET))
    assert (await take(events, 1))[0].data["output"] == SECRET
    await events.aclose()


@pytest.mark.parametrize("why", ["locked", "foreign"])
async def test_a_live_reader_is_spared_what_cannot_be_opened(bench, why, caplog):
    writer, log = await bench.open(), bench.chain()
    told = []
    options = {"keys": MemoryKeyStore()} if why == "locked" else {"sensitive": {}}
    node, quiet = bench.node(on_dropped=told.append, **options), bench.node(**options)
    await writer.append(started(log, subject="s", data_in=SECRET))
    await writer.append(fact(log, 0, Kind.EXECUTION_SUSPENDED, waits=[]))
    for head in range(1, 20):
        await writer.append(step(log, head, SECRET))
    await writer.append(fact(log, 20, Kind.EXECUTION_RESUMED, siteId="0:0"))
    events = node.subscribe(log)
    assert [e.sequence for e in await take(events, 2)] == [1, 21]
    await events.aclose()
    assert [(d.code, d.stream_id, d.reason) for d in told] == [("sealed-event-dropped", log, why)] * 2
    assert [d.sequence for d in told] == [0, 17]
    assert {d.subject for d in told} == ({"s"} if why == "locked" else {""})
    with caplog.at_level(logging.WARNING):
        events = quiet.subscribe(log)
        await take(events, 1)
        await events.aclose()
    assert "sealed-event-dropped" in caplog.text
    assert "__loomEnc" not in caplog.text
    assert SECRET not in caplog.text


async def test_an_erasure_is_felt_by_warm_nodes_within_a_second(bench):
    store, log = await bench.open(), bench.chain()
    await store.append(started(log, subject="s", data_in=SECRET))
    other = await bench.open()
    await other.read(log)
    await bench.keys.destroy("s")
    loop = asyncio.get_running_loop()
    since = loop.time()
    await store.append(fact(log, 0, Kind.PAYLOAD_SHREDDED, subjectId="s"))

    async def refused():
        while True:
            await other.read(log)
            await asyncio.sleep(0.01)

    with pytest.raises(PayloadShreddedError):
        await refused()
    assert loop.time() - since < 1
