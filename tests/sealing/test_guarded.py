"""No envelope of a log that this node cannot open gets past the guarded store (system.md 2.3 to 2.5)."""

import copy
import gc
import inspect
import pickle
import traceback

import pytest
from benches import SealedBench, fact, sent, started, step

from loom.errors import (
    UNKNOWN_OWNER_REASON,
    ExecutionDeniedError,
    PayloadShreddedError,
    SealedStreamUnreadableError,
    ShardSealingMismatchError,
    public_fields,
)
from loom.ids import inbox_stream
from loom.kernel.readable import (
    assert_person_readable,
    assert_stream_readable,
    reworded,
    sealed_refusal,
)
from loom.operator import SealedDetail, is_sealed_unreadable, sealed_detail_of
from loom.schemas.envelope import Envelope, Kind, NewEvent
from loom.stores.contracts import EventStore, OwningEventStore, StreamAppend
from loom.stores.guarded import GuardedEventStore
from loom.stores.keys.memory import MemoryKeyStore
from loom.stores.memory.event_store import MemoryEventStore
from loom.stores.sealing.encrypting import EncryptingEventStore
from loom.stores.sharded import ShardedEventStore
from loom.testing.conformance.event_store import EventStoreConformance, OwningEventStoreConformance
from loom.testing.conformance.event_store.owning import Listener, heard
from loom.testing.conformance.event_store.support import take

SECRET = "planted-plaintext-7Q"


class GuardedBench(SealedBench):
    async def open(self):
        return GuardedEventStore.over(self.node())

    async def own(self, origin):
        return GuardedEventStore.over(self.node(origin=origin))


@pytest.fixture
async def bench():
    bench = GuardedBench()
    yield bench
    await bench.close()


class TestGuardedEventStore(EventStoreConformance, OwningEventStoreConformance):
    async def test_metadata_comes_back(self, bench):
        """Its markers are of a cipher that no node has: here such events are refused."""
        with pytest.raises(SealedStreamUnreadableError):
            await super().test_metadata_comes_back(bench)

    async def test_a_copy_is_verbatim_and_goes_its_own_way(self, bench):
        with pytest.raises(SealedStreamUnreadableError):
            await super().test_a_copy_is_verbatim_and_goes_its_own_way(bench)


class TestGuardedPlainStore(EventStoreConformance, OwningEventStoreConformance):
    """A node without keys, on a log without markers: as if it were not there."""

    @pytest.fixture
    async def bench(self):
        bench = SealedBench()

        async def open_(origin=None):
            bench.handles.append(MemoryEventStore(bench.log, origin=origin))
            return GuardedEventStore.over(bench.handles[-1])

        bench.open = bench.own = open_
        yield bench
        await bench.close()

    async def test_metadata_comes_back(self, bench):
        with pytest.raises(SealedStreamUnreadableError):
            await super().test_metadata_comes_back(bench)

    async def test_a_copy_is_verbatim_and_goes_its_own_way(self, bench):
        with pytest.raises(SealedStreamUnreadableError):
            await super().test_a_copy_is_verbatim_and_goes_its_own_way(bench)


async def test_it_is_what_the_inner_store_is(bench):
    guarded = await bench.open()
    assert isinstance(guarded, OwningEventStore)
    assert GuardedEventStore.over(guarded) is guarded
    assert guarded.keys is guarded._inner.keys
    plain = GuardedEventStore.over(ShardedEventStore([bench.raw()]))
    assert isinstance(plain, EventStore)
    assert not isinstance(plain, OwningEventStore)
    assert not hasattr(plain, "sealing_capability")


# -- who is refused ------------------------------------------------------------------------------------------------


async def _sealed_log(bench):
    store, log = await bench.open(), bench.chain()
    await store.append(started(log, subject="s", data_in={"x": SECRET}, identity={"t": 1}))
    await store.append(fact(log, 0, Kind.EXECUTION_SUSPENDED, waits=[]))
    await store.append(step(log, 1, SECRET))
    await store.append(sent(inbox_stream(log, "t"), "m", {"x": SECRET}))
    return store, log


def _incapable(bench):
    other_keys = MemoryKeyStore()
    return {
        "no crypto": (bench.raw(), "marker-unopenable"),
        "fewer paths": (bench.node(sensitive={}), "marker-unopenable"),
        "no keys": (bench.node(keys=MemoryKeyStore()), "key-unavailable"),
        "other keys": (bench.node(keys=other_keys), "key-unavailable"),
    }


@pytest.mark.parametrize("kind", ["no crypto", "fewer paths", "no keys", "other keys"])
async def test_a_node_that_cannot_open_is_refused_and_writes_nothing(bench, kind):
    _, log = await _sealed_log(bench)
    if kind == "other keys":
        other = MemoryKeyStore()
        await other.ensure("s")
        inner, reason = bench.node(keys=other), "key-unavailable"
    else:
        inner, reason = _incapable(bench)[kind]
    store = GuardedEventStore.over(inner)
    before = bench.resting()
    for call in (store.read(log), store.read(log, 0, 1), store.read(log, 2), store.read_last(log)):
        with pytest.raises(ExecutionDeniedError) as caught:
            await call
        error = caught.value
        assert is_sealed_unreadable(error)
        assert sealed_detail_of(error).reason == reason
        assert sealed_detail_of(error).sequence in {0, 2}
        assert sealed_detail_of(error).covers
    assert len(await store.read(log, 1, 1)) == 1  # nothing sealed in it, and nothing said of the rest
    events = store.subscribe(log)
    with pytest.raises(SealedStreamUnreadableError):
        await anext(events)
    events = store.subscribe(log, 1)
    assert (await take(events, 1))[0].sequence == 1
    with pytest.raises(SealedStreamUnreadableError):
        await anext(events)
    assert bench.resting() == before


async def test_inboxes_pass(bench):
    _, log = await _sealed_log(bench)
    raw, fewer, lacking, _ = (GuardedEventStore.over(s) for s, _ in _incapable(bench).values())
    assert "__loomEnc" in (await raw.read(inbox_stream(log, "t")))[0].data["payload"]
    assert (await fewer.read(inbox_stream(log, "t")))[0].data["payload"] == {"x": SECRET}
    assert (await lacking.read_last(inbox_stream(log, "t"))).data["payload"] == {"$shredded": True}


async def test_a_capable_node_reads_on(bench):
    store, log = await _sealed_log(bench)
    assert (await store.read(log))[0].data["input"] == {"x": SECRET}
    assert (await store.read_last(log)).data["output"] == SECRET
    events = store.subscribe(log)
    assert [e.sequence for e in await take(events, 3)] == [0, 1, 2]
    await events.aclose()


async def test_an_erasure_is_told_as_one(bench):
    store, log = await _sealed_log(bench)
    await bench.keys.destroy("s")
    store._inner.forget_keys("s")
    with pytest.raises(SealedStreamUnreadableError):
        await store.read(log)
    await store.append(fact(log, 2, Kind.PAYLOAD_SHREDDED, subjectId="s"))
    with pytest.raises(PayloadShreddedError):
        await store.read(log)
    events = store.subscribe(log)
    with pytest.raises(PayloadShreddedError):
        await anext(events)


async def test_sealing_without_the_current_key_is_refused_and_writes_nothing(bench):
    _, log = await _sealed_log(bench)
    stranger = GuardedEventStore.over(bench.node(keys=MemoryKeyStore(bench.table, MemoryKeyStore()._wrapper)))
    before = bench.resting()
    for call in (stranger.append(step(log, 2, 1)), stranger.append_many([step(log, 2, 1)])):
        with pytest.raises(SealedStreamUnreadableError) as caught:
            await call
        assert sealed_detail_of(caught.value).reason == "key-unavailable"
    assert bench.resting() == before


@pytest.mark.parametrize("kind", ["no crypto", "fewer paths", "no keys"])
async def test_a_listener_is_told_what_it_must_not_use_and_gets_nothing_of_it(bench, kind):
    store = GuardedEventStore.over(_incapable(bench)[kind][0])
    listener = Listener()
    store.listen(listener)
    _, log = await _sealed_log(bench)
    await heard(lambda: len(listener.of(log)) == 3)
    told = [c for c in listener.heard if c.stream_id == log]
    assert [c.unopened for c in told] == [(0,), (), (2,)]
    assert [e.data for e in listener.of(log)] == [{}, {"waits": []}, {}]
    assert [e.type for e in listener.of(log)][2] == Kind.STEP_COMPLETED
    await heard(lambda: bool(listener.of(inbox_stream(log, "t"))))


async def test_shards_that_disagree_refuse_every_log(bench):
    log = bench.chain()
    store = GuardedEventStore.over(
        ShardedEventStore([EncryptingEventStore(MemoryEventStore(bench.log), bench.keys), bench.raw()])
    )
    await store.append(started(log))
    with pytest.raises(ShardSealingMismatchError):
        await store.read(log)


# -- unmarked ------------------------------------------------------------------------------------------------------

PERSON = {"__loomEnc": "any cipher", "x": 1}


@pytest.mark.parametrize(
    ("kind", "data", "refused"),
    [
        (Kind.EXECUTION_STARTED, {"principal": PERSON}, True),
        (Kind.EXECUTION_STARTED, {"principal": {"actor": "a", "identity": PERSON}}, True),
        (Kind.EXECUTION_STARTED, {"principal": {"actor": PERSON}}, True),
        (Kind.EXECUTION_STARTED, {"principal": {"actor": "a", "identity": {"tenant": PERSON}}}, True),
        (Kind.OUTCOME_RECORDED, {"recordedBy": PERSON}, True),
        (Kind.EXECUTION_STARTED, {"principal": {"actor": "a", "identity": {"__loomEnc": 1}}}, False),
        (Kind.EXECUTION_STARTED, {"principal": {"actor": "__loomEnc"}}, False),
        (Kind.EXECUTION_STARTED, {"principal": {"actor": "a", "identity": {"x": {"y": PERSON}}}}, False),
        (Kind.EXECUTION_STARTED, {"input": PERSON}, False),
        (Kind.EXECUTION_STARTED, {"principal": None}, False),
        (Kind.STEP_COMPLETED, {"principal": PERSON, "output": PERSON}, False),
    ],
)
async def test_without_a_marker_only_a_sealed_person_is_refused(kind, data, refused):
    envelope = Envelope("e", "log", 0, kind, 1, data)
    assert_stream_readable("log", [envelope], None)
    if refused:
        with pytest.raises(SealedStreamUnreadableError) as caught:
            assert_person_readable(envelope, op="send")
        assert (caught.value.op, caught.value.execution_id) == ("send", "log")
    else:
        assert_person_readable(envelope)


async def test_covers_that_speak_of_another_kind_are_refused(bench):
    store, log = await _sealed_log(bench)
    stored = (await bench.raw().read(log))[2]
    event = NewEvent("e", Kind.DECISION_RECORDED, stored.data, stored.metadata)
    await bench.raw().append(StreamAppend(log, (event,), expected_head=2))
    with pytest.raises(SealedStreamUnreadableError):
        await store.read(log)


# -- the error -----------------------------------------------------------------------------------------------------


def _ordinary(op="send", execution_id="x", reason=UNKNOWN_OWNER_REASON):
    return ExecutionDeniedError(op, execution_id, reason)


def _faces(error):
    """Everything that an error shows of itself."""
    kind = type(error)
    return {
        "repr": repr(error),
        "str": str(error),
        "type": (repr(kind), kind.__name__, kind.__qualname__, kind.__module__),
        "dict": vars(error),
        "args": error.args,
        "notes": getattr(error, "__notes__", None),
        "cause": error.__cause__,
        "context": error.__context__,
        "fields": public_fields(error),
        "pickle": pickle.dumps(error),
        "copy": (type(copy.copy(error)), repr(copy.deepcopy(error))),
        "status": (error.exit_status, error.retryable),
        "text": "".join(traceback.format_exception_only(error)),
        "dir": [name for name in dir(error) if name != "__firstlineno__"],
        "slots": inspect.getattr_static(error, "__slots__", None),
    }


def test_the_refusal_shows_what_an_ordinary_denial_shows():
    detail = SealedDetail("key-unavailable", 7, ("A.b",))
    refusal = sealed_refusal("send", "x", detail)
    assert _faces(refusal) == _faces(_ordinary())
    assert _faces(reworded(refusal, "resume", "another reason")) == _faces(
        _ordinary("resume", reason="another reason")
    )
    assert _faces(reworded(refusal, "resume", execution_id="y")) == _faces(_ordinary("resume", "y"))
    assert sealed_detail_of(reworded(refusal, "resume")) == detail
    assert type(pickle.loads(pickle.dumps(refusal))) is ExecutionDeniedError
    assert sealed_detail_of(_ordinary()) is None
    assert not is_sealed_unreadable(_ordinary())


def test_nothing_reachable_from_the_refusal_names_its_cause():
    detail = SealedDetail("key-unavailable", 4711, ("A.tell-tale",))
    refusal = sealed_refusal("send", "x", detail)
    seen, queue = set(), [refusal]
    while queue:
        at = queue.pop()
        if id(at) in seen or inspect.ismodule(at) or inspect.isfunction(at) or isinstance(at, type):
            continue
        seen.add(id(at))
        assert at is not detail
        assert "tell-tale" not in (at if isinstance(at, str) else "")
        queue += gc.get_referents(at)


async def test_a_raised_refusal_leads_back_to_nothing(bench):
    _, log = await _sealed_log(bench)
    for store in (bench.node(keys=MemoryKeyStore()), bench.raw()):
        with pytest.raises(SealedStreamUnreadableError) as caught:
            await GuardedEventStore.over(store).read(log)
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None


def test_details_are_forgotten_with_their_errors():
    from loom import operator

    gc.collect()
    before = len(operator._details)
    refusal = sealed_refusal("send", "x", SealedDetail("key-unavailable", 1, ()))
    assert len(operator._details) == before + 1
    del refusal
    gc.collect()
    assert len(operator._details) == before
