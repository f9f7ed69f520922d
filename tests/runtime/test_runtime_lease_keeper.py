"""The lease keeper and what runs hold, on a virtual clock: cadence, groups, deadlines, lost replies (seed, D11 8)."""

from __future__ import annotations

import asyncio

import pytest

from loom.errors import LeaseHeldError, LeaseLostError, LeaseStoreTimeoutError, UnreachableError
from loom.runtime.driver_leases import DriverLeases
from loom.runtime.lease_keeper import Grant, LeaseKeeper
from loom.runtime.signals import Signals
from loom.runtime.surroundings import Surroundings
from loom.stores.memory.lease_store import LeaseTable, MemoryLeaseStore
from loom.stores.redis.lease_store import RedisLeaseStore
from loom.testing.virtual_loop import run_virtually

TTL = 30_000
MARGIN = 5_000


class Store(MemoryLeaseStore):
    """A store whose calls are counted, and which a test takes away, slows down, or robs of its replies."""

    def __init__(self, table):
        super().__init__(table)
        self.calls, self.away, self.delay, self.lose_replies = [], False, 0.0, False

    async def _passed(self, name, ids, call):
        self.calls.append((name, sorted(ids)))
        if self.away:
            raise UnreachableError("Redis", "nowhere", "redis_url")
        if self.delay:
            await asyncio.sleep(self.delay)
        answer = await call()
        if self.lose_replies:
            await asyncio.Event().wait()
        return answer

    async def acquire_many(self, execution_ids, owner, ttl_ms):
        return await self._passed(
            "acquire",
            execution_ids,
            lambda: MemoryLeaseStore.acquire_many(self, execution_ids, owner, ttl_ms),
        )

    async def renew_many(self, execution_ids, owner, ttl_ms):
        return await self._passed(
            "renew", execution_ids, lambda: MemoryLeaseStore.renew_many(self, execution_ids, owner, ttl_ms)
        )

    async def release_many(self, execution_ids, owner):
        return await self._passed(
            "release", execution_ids, lambda: MemoryLeaseStore.release_many(self, execution_ids, owner)
        )


class Run:
    """What drives, as far as its lease is concerned."""

    def __init__(self, execution_id):
        self.id, self.lease, self.driving, self.lost, self.over = execution_id, None, True, None, False

    def drives(self):
        return self.driving

    def gone(self):
        return self.over


class Bench:
    """A keeper on a store, both on the virtual loop's clock; ``wall_s`` is added to the node's wall clock."""

    def __init__(self, *, node="n:1", fence_kept=True, table=None, **options):
        loop = asyncio.get_running_loop()
        self.loop, self.wall_s, self.fence_kept, self.told = loop, 0.0, fence_kept, []
        self.table = table or LeaseTable(lambda: round(loop.time() * 1000))
        self.store = Store(self.table)
        self.lost, self.runs = [], []
        surroundings = Surroundings(monotonic=loop.time, wall=lambda: loop.time() + self.wall_s)
        signals = Signals(on_storage_error=lambda error, about: self.told.append(error))
        mode = options.pop("on_store_error", "stop")
        self.keeper = LeaseKeeper(
            self.store,
            node,
            TTL,
            signals=signals,
            still_ours=self.still_ours,
            surroundings=surroundings,
            on_store_error=mode,
        )
        self.leases = DriverLeases(
            self.keeper, drivers=lambda: self.runs, on_lost=self.on_lost, on_store_error=mode, **options
        )

    def on_lost(self, run, reason):
        run.driving, run.lost = False, (self.loop.time(), reason)

    async def still_ours(self, execution_id):
        return self.fence_kept

    def note(self, execution_id):
        return lambda reason: self.lost.append((execution_id, reason, self.loop.time()))

    def run(self, execution_id):
        run = Run(execution_id)
        self.runs.append(run)
        return run

    def count(self, name):
        return sum(call == name for call, _ in self.store.calls)


def virtually(scenario):
    """Run a scenario in no real time."""

    def test():
        run_virtually(scenario())

    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    return test


# -- the keeper ----------------------------------------------------------------------------------------------------


@virtually
async def test_one_renewal_a_tick_for_everything_held():
    bench = Bench()
    bench.keeper.start()
    grants = await asyncio.gather(*(bench.keeper.acquire(f"e{n}", bench.note(n)) for n in range(2_500)))
    assert set(grants) == {Grant.GRANTED}
    assert bench.count("acquire") <= 4  # the first travels alone, what gathered meanwhile in chunks of 1,000
    await asyncio.sleep(31)
    assert bench.count("renew") == 9  # three ticks of three chunks
    assert all(bench.keeper.valid(f"e{n}") for n in range(2_500))
    await asyncio.gather(*(bench.keeper.release(f"e{n}") for n in range(2_500)))
    assert bench.count("release") <= 4
    assert not bench.table.rows
    await bench.keeper.close()


@virtually
async def test_a_deadline_passes_a_sixth_of_the_ttl_before_the_row_expires_counted_from_before_the_send():
    bench = Bench()
    bench.keeper.start()
    bench.store.delay = 0.9
    assert await bench.keeper.acquire("e", bench.note("e")) is Grant.GRANTED
    assert bench.loop.time() == pytest.approx(0.9)
    bench.store.away = True
    await asyncio.sleep(24.0)
    assert bench.keeper.valid("e")
    await asyncio.sleep(0.2)
    assert not bench.keeper.valid("e")
    assert bench.lost == [("e", "not renewed in time", pytest.approx((TTL - MARGIN) / 1000))]
    assert not bench.table.lease("e").expired
    await bench.keeper.close()


@virtually
async def test_a_loop_that_stood_still_is_refused_before_anything_else_runs():
    bench = Bench()
    assert await bench.keeper.acquire("e", bench.note("e")) is Grant.GRANTED
    bench.loop._now_s += 60  # SIGSTOP, and let go: nothing has run yet
    assert not bench.keeper.valid("e")


@virtually
async def test_a_wall_clock_that_jumps_ends_a_lease_too():
    bench = Bench()
    assert await bench.keeper.acquire("e", bench.note("e")) is Grant.GRANTED
    bench.wall_s = -26.0
    assert not bench.keeper.valid("e")


@virtually
async def test_a_renewal_in_flight_brings_no_lapsed_lease_back():
    bench = Bench()
    bench.keeper.start()
    await bench.keeper.acquire("e", bench.note("e"))
    await asyncio.sleep(9.9)
    bench.store.delay = 0.5
    await asyncio.sleep(0.2)  # the renewal is on its way
    bench.loop._now_s += 60
    await asyncio.sleep(1)
    assert not bench.keeper.valid("e")
    assert [reason for _, reason, _ in bench.lost] == ["not renewed in time"]
    await bench.keeper.close()


@virtually
async def test_a_lease_that_another_took_is_lost_and_a_row_that_was_emptied_is_written_again():
    bench = Bench()
    bench.keeper.start()
    await bench.keeper.acquire("e", bench.note("e"))
    bench.table.flush()
    await asyncio.sleep(11)
    assert bench.keeper.valid("e")
    assert bench.table.rows["e"].owner == "n:1"
    bench.fence_kept = False
    bench.table.flush()
    await asyncio.sleep(11)
    assert [(e, reason) for e, reason, _ in bench.lost] == [("e", "taken over")]
    assert "e" not in bench.table.rows
    await bench.keeper.close()


@virtually
async def test_a_row_of_another_stays_where_the_fence_is_unchanged():
    bench = Bench()
    bench.keeper.start()
    await bench.keeper.acquire("e", bench.note("e"))
    bench.table.flush()
    await MemoryLeaseStore(bench.table).acquire("e", "n:2", TTL)
    await asyncio.sleep(11)
    assert [(e, reason) for e, reason, _ in bench.lost] == [("e", "taken over")]
    assert bench.table.rows["e"].owner == "n:2"
    await bench.keeper.close()


@virtually
async def test_another_s_live_lease_is_held_and_an_expired_one_is_taken():
    bench = Bench()
    await MemoryLeaseStore(bench.table).acquire("e", "n:2", 1_000)
    assert await bench.keeper.acquire("e", bench.note("e")) is Grant.HELD
    await asyncio.sleep(1.1)
    assert await bench.keeper.acquire("e", bench.note("e")) is Grant.GRANTED


@virtually
async def test_calls_are_bounded_and_a_store_that_hangs_wedges_nobody():
    bench = Bench()
    bench.store.lose_replies = True
    assert await bench.keeper.acquire("e", bench.note("e")) is Grant.UNKNOWN
    assert bench.loop.time() == pytest.approx(1.0)
    assert isinstance(bench.told[0], LeaseStoreTimeoutError)
    assert not bench.keeper.valid("e")
    assert await bench.keeper.acquire("f", bench.note("f")) is Grant.UNSENT  # it failed a moment ago
    assert await bench.keeper.acquire("e", bench.note("e"), urgent=True) is Grant.UNKNOWN
    assert bench.keeper.calls.quiet
    bench.store.lose_replies = False
    assert await bench.keeper.acquire("e", bench.note("e"), urgent=True) is Grant.GRANTED
    assert bench.keeper.calls.quiet  # for one TTL after the first answer
    await asyncio.sleep(31)
    assert not bench.keeper.calls.quiet
    await bench.keeper.close()


@virtually
async def test_a_release_that_is_late_is_applied_before_the_lease_is_taken_anew():
    bench = Bench()
    await bench.keeper.acquire("e", bench.note("e"))
    bench.store.delay = 1.5
    await bench.keeper.release("e")  # given up after a second; the store applies it half a second later
    assert bench.loop.time() == pytest.approx(1.0)
    assert bench.keeper.doubts("e")
    bench.store.delay = 0
    assert await bench.keeper.acquire("e", bench.note("e"), urgent=True) is Grant.GRANTED
    assert bench.loop.time() == pytest.approx(1.5)
    await asyncio.sleep(5)
    assert bench.table.rows["e"].owner == "n:1"
    assert bench.keeper.valid("e")
    await bench.keeper.close()


@virtually
async def test_a_release_that_failed_is_tried_again_until_no_row_is_left():
    bench = Bench()
    bench.keeper.start()
    await bench.keeper.acquire("e", bench.note("e"))
    bench.store.away = True
    await bench.keeper.release("e")
    assert bench.keeper.doubts("e")
    bench.store.away = False
    await asyncio.sleep(11)
    assert not bench.keeper.doubts("e")
    assert not bench.table.rows
    await bench.keeper.close()


@virtually
async def test_a_release_that_overtakes_its_acquire_leaves_no_row():
    bench = Bench()
    bench.store.delay = 0.5
    asking = asyncio.ensure_future(bench.keeper.acquire("e", bench.note("e")))
    await asyncio.sleep(0.1)
    await bench.keeper.release("e")
    assert await asking is Grant.CANCELLED
    await asyncio.sleep(2)
    assert not bench.table.rows
    assert not bench.keeper.held


@virtually
async def test_forget_leaves_the_row_to_expire():
    bench = Bench()
    bench.keeper.start()
    await bench.keeper.acquire("e", bench.note("e"))
    bench.keeper.forget("e")
    assert not bench.keeper.valid("e")
    await asyncio.sleep(31)
    assert bench.table.lease("e").expired
    assert bench.lost == []
    await bench.keeper.close()


@virtually
async def test_closing_tells_who_still_holds():
    bench = Bench()
    bench.keeper.start()
    await bench.keeper.acquire("e", bench.note("e"))
    await bench.keeper.close()
    assert [(e, reason) for e, reason, _ in bench.lost] == [("e", "closed")]
    assert await bench.keeper.acquire("e", bench.note("e")) is Grant.CLOSED
    assert "e" in bench.table.rows


@virtually
async def test_mode_continue_outlives_an_outage_and_still_yields_to_whoever_took_over():
    bench = Bench(on_store_error="continue")
    bench.keeper.start()
    await bench.keeper.acquire("e", bench.note("e"))
    bench.store.away = True
    await asyncio.sleep(120)
    assert bench.keeper.valid("e")
    bench.store.away, bench.fence_kept = False, False
    await MemoryLeaseStore(bench.table).acquire("e", "n:2", TTL)
    await asyncio.sleep(11)
    assert [(e, reason) for e, reason, _ in bench.lost] == [("e", "taken over")]
    await bench.keeper.close()


# -- what runs hold ------------------------------------------------------------------------------------------------


@virtually
async def test_a_short_run_costs_no_call_of_the_store():
    bench = Bench()
    bench.leases.start()
    for n in range(100):
        run = bench.run(f"e{n}")
        await asyncio.sleep(0.5)
        run.driving = False
        bench.runs.remove(run)
        assert bench.leases.leave(run) is None
    await asyncio.sleep(60)
    assert bench.store.calls == []
    await bench.leases.close()


@virtually
async def test_a_run_that_goes_on_is_leased_after_the_grace_and_gives_it_back():
    bench = Bench()
    bench.leases.start()
    run = bench.run("e")
    await asyncio.sleep(9.9)
    assert bench.store.calls == []
    await asyncio.sleep(3)
    assert run.lease.valid()
    assert bench.table.rows["e"].owner == "n:1"
    await bench.leases.leave(run)
    assert not bench.table.rows
    await bench.leases.close()


@virtually
async def test_lazily_the_grace_is_configured():
    bench = Bench(grace_ms=1_000)
    bench.leases.start()
    run = bench.run("e")
    await asyncio.sleep(1.6)
    assert run.lease.granted
    await bench.leases.close()


@virtually
async def test_a_duplicate_of_a_live_driver_is_taken_over_at_its_grace():
    bench = Bench()
    bench.leases.start()
    run = bench.run("e")
    await MemoryLeaseStore(bench.table).acquire("e", "n:2", 600_000)
    await asyncio.sleep(13)
    assert run.lost[1] == "taken over"
    assert not run.lease.valid()
    await bench.leases.close()


@virtually
async def test_a_lazy_acquire_whose_reply_is_lost_fences_itself_at_its_first_send_plus_ttl_minus_margin():
    bench = Bench()
    bench.leases.start()
    run = bench.run("e")
    bench.store.lose_replies = True
    await asyncio.sleep(13)
    sent = next(iter(bench.table.rows.values())).acquired_at / 1000
    assert run.lease.valid()
    await asyncio.sleep(60)
    assert run.lost == (pytest.approx(sent + (TTL - MARGIN) / 1000), "its acquire was never answered")
    await bench.leases.close()


@virtually
async def test_a_lazy_acquire_that_is_answered_at_last_drives_on():
    bench = Bench()
    bench.leases.start()
    run = bench.run("e")
    bench.store.lose_replies = True
    await asyncio.sleep(20)
    bench.store.lose_replies = False
    await asyncio.sleep(60)
    assert run.lost is None
    assert run.lease.granted
    assert run.lease.valid()
    await bench.leases.close()


@virtually
async def test_a_lazy_acquire_that_was_never_sent_drives_on_without_one():
    bench = Bench()
    bench.leases.start()
    await asyncio.sleep(5)
    run = bench.run("e")
    await asyncio.sleep(9.4)
    bench.keeper.calls.failed_at = bench.loop.time()  # another call failed a moment ago
    await asyncio.sleep(3.5)
    assert bench.store.calls == []
    assert run.lease.valid()
    await asyncio.sleep(60)
    assert run.lease.granted
    await bench.leases.close()


@virtually
async def test_eagerly_no_answer_is_no_lease_and_another_s_is_stood_down_on():
    bench = Bench(eager=True)
    run = Run("e")
    bench.store.away = True
    with pytest.raises(LeaseStoreTimeoutError):
        await bench.leases.enter(run)
    bench.store.away = False
    await asyncio.sleep(10)
    await MemoryLeaseStore(bench.table).acquire("e", "n:2", TTL)
    with pytest.raises(LeaseHeldError):
        await bench.leases.enter(run)
    await bench.leases.close()
    with pytest.raises(LeaseLostError):
        await bench.leases.enter(Run("f"))


@virtually
async def test_in_mode_continue_a_rejected_acquire_drives_unleased():
    bench = Bench(eager=True, on_store_error="continue")
    run = Run("e")
    bench.store.away = True
    await bench.leases.enter(run)
    await asyncio.sleep(120)
    assert run.lease.valid()
    assert not run.lease.granted
    await bench.leases.close()


@virtually
async def test_the_last_of_two_holds_gives_back_and_a_wish_to_forget_is_remembered():
    bench = Bench()
    one, two = Run("e"), Run("e")
    await bench.leases.enter(one)
    await bench.leases.enter(two)
    assert bench.count("acquire") == 1
    assert bench.leases.leave(one, forget=True) is None
    assert two.lease.valid()
    assert bench.leases.leave(two) is None
    await asyncio.sleep(1)
    assert "e" in bench.table.rows
    assert not bench.keeper.held
    await bench.leases.close()


@virtually
async def test_a_loss_reaches_every_hold():
    bench = Bench()
    bench.keeper.start()
    one, two = Run("e"), Run("e")
    await bench.leases.enter(one)
    await bench.leases.enter(two)
    bench.fence_kept = False
    bench.table.flush()
    await asyncio.sleep(11)
    assert one.lost[1] == two.lost[1] == "taken over"
    assert not one.lease.valid()
    await bench.leases.close()


@virtually
async def test_a_parked_run_whose_release_is_in_doubt_asks_before_it_goes_on():
    bench = Bench()
    run, looks = Run("e"), []
    await bench.leases.enter(run)
    bench.store.away = True
    await bench.leases.leave(run)
    bench.store.away = False
    await asyncio.sleep(11)
    assert bench.leases.may_wake(run, lambda: looks.append(1)) is False
    await asyncio.sleep(1)
    assert looks == [1]
    assert bench.leases.may_wake(run, lambda: None)
    assert run.lease.valid()
    await bench.leases.leave(run)
    assert bench.leases.may_wake(run, lambda: None)  # nothing of ours stands: it costs nothing again
    assert run.lease is None
    await bench.leases.close()


@virtually
async def test_an_execution_that_is_proved_parked_is_taken_whoever_holds_it():
    bench = Bench()
    await MemoryLeaseStore(bench.table).acquire("e", "n:2", TTL)
    run = Run("e")
    await bench.leases.steal(run)
    assert run.lease.valid()
    assert bench.table.rows["e"].owner == "n:1"
    await bench.leases.close()


async def test_on_a_real_redis(redis_url, redis_prefix):
    store, theirs = (RedisLeaseStore(redis_url, redis_prefix) for _ in range(2))
    lost = []
    keeper = LeaseKeeper(store, "n:1", 6_000, signals=Signals())
    keeper.start()
    assert await keeper.acquire("e", lost.append) is Grant.GRANTED
    assert await keeper.acquire("f", lost.append) is Grant.GRANTED
    before = (await theirs.get("e")).expires_at
    await until_true(lambda: theirs.get("e"), lambda lease: lease.expires_at > before)
    await keeper.release("e")
    assert await theirs.get("e") is None
    await theirs.steal("f", "n:2", 60_000)
    await until_true(lambda: asyncio.sleep(0, lost), lambda told: told == ["taken over"])
    assert not keeper.valid("f")
    await keeper.close()
    await asyncio.gather(store.close(), theirs.close())


async def until_true(ask, holds):
    async with asyncio.timeout(10):
        while not holds(await ask()):
            await asyncio.sleep(0.01)


@virtually
async def test_a_driver_that_stops_while_its_lease_is_asked_for_leaves_none_behind():
    bench = Bench()
    bench.store.delay = 0.5
    run = bench.run("e")
    entering = asyncio.create_task(bench.leases.enter(run))
    await asyncio.sleep(0.2)
    run.over = True
    assert bench.leases.leave(run) is None  # it has none yet
    with pytest.raises(LeaseLostError):
        await entering
    await bench.leases.settle(5)
    assert not bench.table.rows
    assert not bench.keeper.held
    await bench.leases.close()
