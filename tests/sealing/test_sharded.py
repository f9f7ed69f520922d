"""Several event stores as one: where streams lie, what may not span two, and when their sealing differs (system.md 2.2)."""

import pytest
from benches import ALL, SealedBench, sent, started, step

from loom.errors import ConfigError, InvalidInputError, ShardSealingMismatchError
from loom.ids import inbox_stream, quarantine_stream, ulid
from loom.schemas.envelope import Kind
from loom.stores.contracts import EventStore, Outgoing
from loom.stores.keys.memory import MemoryKeyStore
from loom.stores.memory.event_store import MemoryEventStore
from loom.stores.memory.log import MAX_EVENT_BYTES, MemoryLog
from loom.stores.sealing.checkpoints import plaintext_reason
from loom.stores.sealing.encrypting import EncryptingEventStore
from loom.stores.sealing.snapshots import EncryptingSnapshotStore
from loom.stores.sharded import ShardedEventStore
from loom.testing.conformance.event_store import EventStoreConformance
from loom.topics.partitioner import mint

SHARDS = 4


class ShardedBench:
    too_large = MAX_EVENT_BYTES

    def __init__(self):
        self.now = 1_000
        self.logs = [MemoryLog(self.tick, shards=SHARDS) for _ in range(SHARDS)]
        self.keys = MemoryKeyStore()
        self.handles = []

    def tick(self):
        self.now += 1
        return self.now

    async def open(self):
        shards = [EncryptingEventStore.over(MemoryEventStore(log), self.keys, ALL) for log in self.logs]
        self.handles.append(ShardedEventStore(shards))
        return self.handles[-1]

    def chain(self):
        return mint(3, SHARDS, ulid)

    def elsewhere(self):
        return mint(2, SHARDS, ulid)


@pytest.fixture
async def bench():
    bench = ShardedBench()
    yield bench
    for handle in bench.handles:
        await handle.close()


class TestSharded(EventStoreConformance):
    async def test_a_request_leaves_with_its_event_and_is_applied_once(self, bench):
        """A request never spans two shards: all receivers of the test are of one."""
        bench.elsewhere = bench.chain
        await super().test_a_request_leaves_with_its_event_and_is_applied_once(bench)


def test_it_is_an_event_store(bench):
    assert isinstance(ShardedEventStore([MemoryEventStore(bench.logs[0])]), EventStore)
    with pytest.raises(ConfigError):
        ShardedEventStore([])


async def test_a_chain_lies_in_one_shard(bench):
    store, chain = await bench.open(), bench.chain()
    streams = [chain, inbox_stream(chain), inbox_stream(chain, "t"), quarantine_stream(chain)]
    assert len({id(store.shard_for(s)) for s in streams}) == 1
    assert store.shard_for(bench.elsewhere()) is not store.shard_for(chain)
    await store.append_many([started(chain), sent(inbox_stream(chain, "t"), "m", 1)])
    assert bench.logs[3].index.rows().keys() == {chain, inbox_stream(chain, "t")}
    assert (await store.read(inbox_stream(chain, "t")))[0].data["payload"] == 1
    (at_rest,) = await store.read_at_rest(inbox_stream(chain, "t"))
    assert "__loomEnc" in at_rest.data["payload"]


async def test_nothing_spans_two_shards(bench):
    store, chain, other = await bench.open(), bench.chain(), bench.elsewhere()
    await store.append(started(chain))
    inner = Outgoing("request", "r", other, sent(inbox_stream(other, "t"), "m", 1))
    nested = Outgoing("request", "r", chain, step(chain, 0, 1, outgoing=(inner,)))
    for out in (inner, nested):
        with pytest.raises(InvalidInputError):
            await store.append(step(chain, 0, 1, outgoing=(out,)))
    with pytest.raises(InvalidInputError):
        await store.append_many([step(chain, 0, 1), started(other)])
    with pytest.raises(InvalidInputError):
        await store.copy_prefix(chain, other, 0)
    assert len(await store.read(chain)) == 1
    published = Outgoing("publish", "p", "k", b"v", topic="t")
    await store.append(step(chain, 0, 1, outgoing=(published,)))
    assert bench.logs[3].published == [published]


# -- sealing -------------------------------------------------------------------------------------------------------


def _sealing(sensitive=None, keys=None):
    return EncryptingEventStore(MemoryEventStore(SealedBench().log), keys or MemoryKeyStore(), sensitive)


def _plain():
    return MemoryEventStore(SealedBench().log)


class Silent(MemoryEventStore):
    """A store that has the method and seals nothing."""

    def sealing_capability(self):
        return None


class OtherCipher(MemoryEventStore):
    def sealing_capability(self):
        return type("Capability", (), {"cipher": "other", "covers": _sealing().sealing_capability().covers})()


def test_shards_that_agree_answer_as_one():
    store = ShardedEventStore([_sealing(), _sealing()])
    assert store.sealing_capability().covers == _sealing().sealing_capability().covers
    marker = {"v": 1, "cipher": "loom/aes-256-gcm", "covers": ["INBOX_MESSAGE.payload"]}
    assert store.sealing_capability().opens(marker)


def test_where_no_shard_has_it_the_method_is_absent():
    assert not hasattr(ShardedEventStore([_plain(), _plain()]), "sealing_capability")
    assert ShardedEventStore([Silent(SealedBench().log), _plain()]).sealing_capability() is None


def test_shards_that_differ_are_refused():
    fewer, more = _sealing(), _sealing({Kind.STEP_COMPLETED: ["output"]})
    other = OtherCipher(SealedBench().log)
    for shards in (
        (fewer, _plain()),
        (_plain(), fewer),
        (fewer, more),
        (fewer, other),
        (fewer, Silent(SealedBench().log)),
    ):
        store = ShardedEventStore(shards)
        with pytest.raises(ShardSealingMismatchError) as caught:
            store.sealing_capability()
        assert [index for index, *_ in caught.value.shards] == [0, 1]
    with pytest.raises(ShardSealingMismatchError) as caught:
        ShardedEventStore([fewer, more, _plain()]).sealing_capability()
    assert caught.value.shards == (
        (0, "loom/aes-256-gcm", fewer.sealing_capability().covers),
        (1, "loom/aes-256-gcm", more.sealing_capability().covers),
        (2, None, ()),
    )


def test_the_question_is_judged_each_time():
    one, two = _sealing(), _sealing()
    store = ShardedEventStore([one, two])
    assert store.sealing_capability() is not None
    one.register_sensitive(Kind.STEP_COMPLETED, ["output"])
    with pytest.raises(ShardSealingMismatchError):
        store.sealing_capability()
    two.register_sensitive(Kind.STEP_COMPLETED, ["output"])
    assert "STEP_COMPLETED.output" in store.sealing_capability().covers


def test_keys_are_shared_where_every_shard_shares_them():
    keys = MemoryKeyStore()
    snapshots = EncryptingSnapshotStore(object(), keys)
    assert plaintext_reason(ShardedEventStore([_sealing(keys=keys), _sealing(keys=keys)]), snapshots) is None
    mixed = ShardedEventStore([_sealing(keys=keys), _sealing()])
    assert plaintext_reason(mixed, snapshots) == "keys-not-shared"
    with pytest.raises(ShardSealingMismatchError):
        plaintext_reason(ShardedEventStore([_sealing(keys=keys), _plain()]), snapshots)
