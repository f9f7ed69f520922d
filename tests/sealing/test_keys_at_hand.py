"""Keys in use: asked for once by all who need them, before they go stale, and never used beyond that."""

import asyncio
from dataclasses import replace

import pytest
from benches import SealedBench, started, step

from loom.errors import PayloadShreddedError, UnreachableError
from loom.schemas.envelope import Kind, NewEvent
from loom.stores.contracts import StreamAppend
from loom.stores.keys.memory import MemoryKeyStore
from loom.stores.sealing import keyring
from loom.stores.sealing.keyring import FRESH_S, KeyRing, NotAtHand
from loom.stores.sealing.opener import Opener
from loom.stores.sealing.subjects import Named
from loom.testing.conformance.event_store.owning import Listener, heard


class CountedKeys(MemoryKeyStore):
    """Counts what is asked, and lets a test hold the answers back, or fail them."""

    def __init__(self, table=None):
        super().__init__(table)
        self.asked = []
        self.open = asyncio.Event()
        self.open.set()
        self.fails = False

    async def get(self, subject):
        return await self._counted("get", super().get(subject))

    async def ensure(self, subject, uses=1):
        return await self._counted("ensure", super().ensure(subject, uses))

    async def _counted(self, name, call):
        self.asked.append(name)
        answer = await call
        await self.open.wait()
        if self.fails:
            raise UnreachableError("Redis", "nowhere", "redis_url")
        return answer


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


async def test_all_who_need_a_new_key_share_one_charge(clock):
    keys = CountedKeys()
    ring = KeyRing(keys, now=clock)
    sealed = await asyncio.gather(*(ring.sealing("s", 1) for _ in range(50)))
    assert keys.asked == ["ensure"]
    assert {key.id for key in sealed} == {sealed[0].id}
    assert ring._held["s"].left == keyring.FIRST_CHARGE - 50


async def test_a_key_that_goes_on_sealing_is_charged_more_at_once(clock):
    keys = CountedKeys()
    ring = KeyRing(keys, now=clock)
    await asyncio.gather(*(ring.sealing("s", 1) for _ in range(keyring.FIRST_CHARGE + 500)))
    assert keys.asked == ["ensure", "ensure"]
    assert ring._held["s"].left == keyring.USES_PER_CHARGE - 500


async def test_a_stale_key_is_let_go_with_what_was_charged_to_it(clock):
    ring = KeyRing(CountedKeys(), now=clock)
    await ring.sealing("s", 1)
    clock.now = FRESH_S
    await ring.sealing("t", 1)
    assert list(ring._held) == ["t"]


async def test_what_one_charge_cannot_bear_is_charged_again(clock, monkeypatch):
    monkeypatch.setattr(keyring, "FIRST_CHARGE", 10)
    monkeypatch.setattr(keyring, "USES_PER_CHARGE", 10)
    keys = CountedKeys()
    ring = KeyRing(keys, now=clock)
    await asyncio.gather(*(ring.sealing("s", 3) for _ in range(20)), ring.sealing("s", 25))
    row = keys._rows._table.rows["s"]
    assert row.keys[-1].uses >= 85
    assert row.keys[-1].uses - ring._held["s"].left == 85


async def test_a_seal_takes_only_what_is_charged_and_fresh(clock):
    ring = KeyRing(CountedKeys(), now=clock)
    with pytest.raises(NotAtHand):
        ring.use("s")
    with pytest.raises(NotAtHand):
        ring.use(None)
    await ring.sealing("s", keyring.FIRST_CHARGE - 1)
    ring.use("s")
    with pytest.raises(NotAtHand):
        ring.use("s")
    await ring.sealing("s", 1)
    clock.now = FRESH_S
    with pytest.raises(NotAtHand):
        ring.use("s")


async def test_a_key_in_use_is_asked_for_before_it_is_stale(clock):
    keys = CountedKeys()
    ring = KeyRing(keys, now=clock)
    await ring.sealing("s", 1)
    clock.now = FRESH_S * 0.7
    ring.use("s")
    assert keys.asked == ["ensure"]
    clock.now = FRESH_S * 0.8
    for _ in range(5):
        ring.use("s")
    await ring._asking["s"]
    assert keys.asked == ["ensure", "get"]
    clock.now = FRESH_S * 1.3
    ring.use("s")


async def test_a_key_destroyed_meanwhile_is_given_up_when_it_is_asked_for(clock):
    keys = CountedKeys()
    ring = KeyRing(keys, now=clock)
    await ring.sealing("s", 1)
    await keys.destroy("s")
    clock.now = FRESH_S * 0.8
    ring.use("s")
    await ring._asking["s"]
    with pytest.raises(NotAtHand):
        ring.use("s")
    with pytest.raises(PayloadShreddedError):
        await ring.sealing("s", 1)


async def test_an_asking_ahead_that_fails_is_nobodys_error(clock, caplog):
    keys = CountedKeys()
    ring = KeyRing(keys, now=clock)
    await ring.sealing("s", 1)
    keys.fails = True
    clock.now = FRESH_S * 0.8
    ring.use("s")
    while ring._asking:
        await asyncio.sleep(0)
    ring.use("s")
    clock.now = FRESH_S
    with pytest.raises(UnreachableError):
        await ring.sealing("s", 1)
    assert "never retrieved" not in caplog.text


async def test_whoever_stops_waiting_leaves_the_others_their_answer(clock):
    keys = CountedKeys()
    keys.open.clear()
    ring = KeyRing(keys, now=clock)
    first, second = asyncio.create_task(ring.sealing("s", 1)), asyncio.create_task(ring.sealing("s", 1))
    await asyncio.sleep(0)
    first.cancel()
    keys.open.set()
    assert (await second).id
    assert keys.asked == ["ensure", "ensure"]  # what was given up may not have come about
    assert not ring._charging


async def test_a_charge_that_fails_is_the_failure_of_all_who_need_it(clock):
    keys = CountedKeys()
    keys.fails = True
    keys.open.clear()
    ring = KeyRing(keys, now=clock)
    asking = [asyncio.create_task(ring.sealing("s", 1)) for _ in range(50)]
    await asyncio.sleep(0)
    keys.open.set()
    found = await asyncio.gather(*asking, return_exceptions=True)
    assert {type(error) for error in found} == {UnreachableError}
    assert keys.asked == ["ensure"]
    keys.fails = False
    assert (await ring.sealing("s", 1)).id


class Picky(Listener):
    """Wants what a verb wrote."""

    def wants(self, committed):
        return committed.envelopes[-1].metadata.get("node") is None


async def test_what_a_listener_does_not_want_is_not_opened(monkeypatch):
    bench = SealedBench()
    store, log, opened = bench.node(origin="a"), bench.chain(), []
    listener = Picky()
    store.listen(listener)
    opens = Opener.try_open
    monkeypatch.setattr(Opener, "try_open", lambda self, e: opened.append(e.sequence) or opens(self, e))
    await store.append(started(log, data_in="clear"))
    driven = step(log, 0, "clear")
    event = driven.events[0]
    await store.append(replace(driven, events=(replace(event, metadata=event.metadata | {"node": "n:1"}),)))
    await store.append(step(log, 1, "clear"))
    await heard(lambda: len(listener.of(log)) == 2)
    assert [e.sequence for e in listener.of(log)] == [0, 2]
    assert opened == [0, 2]
    assert listener.of(log)[1].data["output"] == "clear"
    await bench.close()


async def test_each_subject_of_many_appends_is_charged_once_for_what_it_seals(monkeypatch):
    """One whose key is not at hand is asked for, and what was sealed before is sealed again: with nothing charged twice."""
    monkeypatch.setattr(keyring, "FIRST_CHARGE", 1)
    bench = SealedBench()
    logs = [bench.chain() for _ in range(3)]
    keys = CountedKeys(bench.table)
    store = bench.node(keys=keys)
    await store.append_many([started(log, data_in="clear") for log in logs])
    assert keys.asked == ["ensure"] * 3
    assert [bench.table.rows[log].keys[-1].uses for log in logs] == [1, 1, 1]
    for log in logs:
        assert (await store.read(log))[0].data["input"] == "clear"
        assert "clear" not in repr(await bench.raw().read(log))
    await bench.close()


async def test_a_start_in_which_nothing_is_sealed_makes_no_key():
    bench = SealedBench(sensitive={})
    keys = CountedKeys(bench.table)
    await bench.node(keys=keys).append(started(bench.chain(), data_in="clear"))
    assert keys.asked == []
    await bench.close()


@pytest.mark.parametrize(
    ("kind", "subject", "kept"),
    [
        (Kind.EXECUTION_COMPLETED, None, False),
        (Kind.EXECUTION_COMPLETED, "alice", True),
        (Kind.EXECUTION_CONTINUED, None, True),
        (Kind.STEP_COMPLETED, None, True),
    ],
)
async def test_the_key_of_an_execution_alone_is_let_go_at_its_end(kind, subject, kept):
    bench = SealedBench()
    store, log = bench.node(), bench.chain()
    await store.append(started(log, subject=subject, data_in="clear"))
    event = NewEvent("end", kind, {"output": "clear"}, {})
    await store.append(StreamAppend(log, (event,), 0))
    assert list(store._ring._held) == ([subject or log] if kept else [])
    assert [e.data.get("output") for e in await store.read(log)] == [None, "clear"]
    await bench.close()


async def test_keys_at_hand_are_bounded(clock, monkeypatch):
    monkeypatch.setattr(keyring, "MAX_SUBJECTS", 3)
    ring = KeyRing(CountedKeys(), now=clock)
    for subject in "abcde":
        await ring.sealing(subject, 1)
    assert list(ring._held) == ["c", "d", "e"]


def test_a_first_event_tells_whose_its_chain_is_and_its_parents():
    parent = {"chainId": "above", "executionId": "above", "siteId": "s"}
    (event,) = started("log", subject="alice", chain="chain", parent=parent).events
    named = Named([("log", event)])
    assert named.own == {"log": "alice"}
    assert named.subjects == {"log": "alice", "chain": "alice", "above": "alice"}
    (later,) = started("chain", subject="bob").events
    assert Named([("log", event), ("chain", later)]).subjects["chain"] == "bob"


async def test_what_was_charged_to_a_key_that_was_rotated_is_lost(clock):
    keys = CountedKeys()
    ring = KeyRing(keys, now=clock)
    old = await ring.sealing("s", 1)
    await keys.rotate("s")
    clock.now = FRESH_S * 0.8
    assert ring.use("s") is old
    await ring._asking["s"]
    with pytest.raises(NotAtHand):
        ring.use("s")
    assert (await ring.sealing("s", 1)).id != old.id
