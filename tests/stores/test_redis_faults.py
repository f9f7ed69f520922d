"""What goes wrong between loom and Redis: each fault is a typed error, and nothing is applied twice."""

import asyncio
import contextlib

import pytest
import redis.exceptions
from redis.asyncio import Redis
from redis.crc import key_slot
from redis_bench import LossyProxy, RedisBench

from loom.errors import ConfigError, LeaseStoreTimeoutError, LoomError, StoreRefusedError, UnreachableError
from loom.stores.contracts import WakeRow
from loom.stores.redis.connection import RedisConnection, translated
from loom.stores.redis.doctor import examine
from loom.stores.redis.lease_store import RedisLeaseStore
from loom.stores.redis.wake_store import RedisWakeStore

SHARDS = frozenset(range(4))


def _wakes(url, prefix):
    return RedisWakeStore(url, prefix, partitions=4)


# -- every foreign exception ---------------------------------------------------------------------------------------

KINDS = [
    kind for kind in vars(redis.exceptions).values() if isinstance(kind, type) and issubclass(kind, Exception)
]


@pytest.mark.parametrize("kind", [*KINDS, OSError, ConnectionResetError], ids=lambda kind: kind.__name__)
def test_every_foreign_exception_becomes_an_error_of_loom(kind):
    error = kind.__new__(kind)
    error.args = ("WRONGTYPE the value is hunter2",)
    ours = translated(error, "db:6379")
    assert isinstance(ours, LoomError)
    assert "db:6379" in str(ours)
    assert "hunter2" not in str(ours)
    assert ours.exit_status in {1, 2, 3}


@pytest.mark.parametrize(
    ("kind", "ours"),
    [
        (redis.exceptions.AuthenticationError, ConfigError),
        (redis.exceptions.NoPermissionError, ConfigError),
        (redis.exceptions.MovedError, ConfigError),
        (redis.exceptions.ClusterCrossSlotError, ConfigError),
        (redis.exceptions.ClusterDownError, ConfigError),
        (redis.exceptions.MasterDownError, UnreachableError),
        (redis.exceptions.ReadOnlyError, UnreachableError),
        (redis.exceptions.BusyLoadingError, UnreachableError),
        (redis.exceptions.ConnectionError, UnreachableError),
        (redis.exceptions.MaxConnectionsError, UnreachableError),
        (ConnectionRefusedError, UnreachableError),
        (redis.exceptions.OutOfMemoryError, StoreRefusedError),
        (redis.exceptions.ResponseError, StoreRefusedError),
        (redis.exceptions.DataError, StoreRefusedError),
    ],
)
def test_each_kind_is_told_apart(kind, ours):
    assert type(translated(kind.__new__(kind), "db:6379")) is ours


@pytest.mark.parametrize(
    "url", ["redis://127.0.0.1:1", "redis://nowhere.invalid:6379", "unix:///nowhere/redis.sock"]
)
async def test_an_unreachable_server_is_named_with_its_setting(url):
    store = RedisLeaseStore(url, "p")
    with pytest.raises((UnreachableError, LeaseStoreTimeoutError)) as caught:
        await store.acquire("e", "n1", 60_000)
    assert store.connection.address in str(caught.value)
    if isinstance(caught.value, UnreachableError):
        assert caught.value.setting == "redis_url"
        assert caught.value.exit_status == 3
    await store.close()


@pytest.mark.parametrize("url", ["http://x", "redis://:hunter2/@host:port", "nonsense", ""])
def test_a_url_that_cannot_be_used_is_a_setting_and_shows_no_password(url):
    with pytest.raises(ConfigError, match="redis_url") as caught:
        RedisConnection(url, "p")
    assert "hunter2" not in str(caught.value)


def test_a_prefix_with_braces_is_refused():
    with pytest.raises(ConfigError):
        RedisConnection("redis://localhost", "{p}")


async def test_what_a_real_server_refuses(private_redis):
    admin = Redis.from_url(private_redis.url)
    leases, wakes = RedisLeaseStore(private_redis.url, "p"), _wakes(private_redis.url, "p")
    await wakes.schedule([WakeRow("e", 5, "timer")])

    await admin.config_set("maxmemory", 1)
    with pytest.raises(StoreRefusedError, match="memory"):
        await leases.acquire("e", "n1", 60_000)
    await admin.config_set("maxmemory", 0)

    await admin.set(leases.connection.key("leases", "rows"), "not a hash")
    with pytest.raises(StoreRefusedError, match="loom doctor"):
        await leases.acquire("e", "n1", 60_000)

    await admin.execute_command("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(UnreachableError, match="replica"):
        await wakes.schedule([WakeRow("e", 6, "timer")])
    assert [finding.code for finding in await examine(wakes.connection)] == ["redis-replica"]
    await admin.execute_command("REPLICAOF", "NO", "ONE")

    await admin.config_set("requirepass", "hunter2")
    locked = _wakes(private_redis.url, "p")
    with pytest.raises(ConfigError, match="credentials"):
        await locked.count()
    await admin.config_set("requirepass", "")
    for closing in (admin, leases, wakes, locked):
        await (closing.aclose() if closing is admin else closing.close())


# -- lost answers --------------------------------------------------------------------------------------------------

LEASE_CALLS = {
    "acquire": lambda s: s.acquire("free", "n1", 60_000),
    "acquire_many": lambda s: s.acquire_many(["free", "held", "own"], "n1", 60_000),
    "renew_many": lambda s: s.renew_many(["own", "held"], "n1", 60_000),
    "release_many": lambda s: s.release_many(["own", "held"], "n1"),
    "steal": lambda s: s.steal("held", "n1", 60_000),
    "expired": lambda s: s.expired(10),
    "beat": lambda s: s.beat("node", 60_000),
    "leave": lambda s: s.leave("node"),
    "forget_node": lambda s: s.forget_node("node"),
    "epoch": lambda s: s.epoch(),
}
WAKE_CALLS = {
    "schedule": lambda s: s.schedule([WakeRow("e", 7, "refusal", 4, 2), WakeRow("g", 7, "timer")]),
    "claim": lambda s: s.claim(WakeRow("e", 5, "timer"), "n1", 60_000),
    "complete": lambda s: s.complete("e", 5),
    "move": lambda s: s.move("e", 6, WakeRow("e", 9, "refusal", 3, 2)),
    "clear": lambda s: s.clear("e"),
    "due": lambda s: s.due(9, 9, shards=SHARDS),
}


async def _lease_rows(store):
    await store.acquire_many(["own"], "n1", 60_000)
    await store.acquire_many(["held"], "n2", 60_000)
    await store.beat("node", 60_000, ["x"])
    await store.epoch()


async def _wake_rows(store):
    await store.schedule(
        [WakeRow("e", 5, "timer"), WakeRow("e", 6, "refusal", 3, 1), WakeRow("f", 5, "inbox")]
    )


@pytest.mark.parametrize("how", ["cut", "silence"])
@pytest.mark.parametrize(
    ("make", "prepare", "calls", "name"),
    [(RedisLeaseStore, _lease_rows, LEASE_CALLS, name) for name in LEASE_CALLS]
    + [(_wakes, _wake_rows, WAKE_CALLS, name) for name in WAKE_CALLS],
    ids=[*LEASE_CALLS, *WAKE_CALLS],
)
async def test_a_call_whose_answer_was_lost_is_sent_once_and_may_be_repeated(
    redis_url, redis_prefix, how, make, prepare, calls, name
):
    once, twice = (RedisBench(redis_url, f"{redis_prefix}.{n}", make) for n in ("once", "twice"))
    for bench in (once, twice):
        await prepare(bench.open())
    await calls[name](once.open())
    async with LossyProxy(redis_url) as proxy:
        store = make(proxy.url, twice.prefix)
        await store.epoch()  # connected, and the script cache no longer plays a part
        proxy.lose = how
        with pytest.raises((UnreachableError, LeaseStoreTimeoutError)):
            await calls[name](store)
        assert proxy.lost == 1
        proxy.lose = None
        await calls[name](store)
        await store.close()
    shape = [
        {key.replace(b.prefix, ""): held for key, held in (await b.dump()).items()} for b in (once, twice)
    ]
    assert shape[0] == shape[1]
    assert shape[0]
    for bench in (once, twice):
        await bench.close()


async def test_a_lease_call_is_bounded_by_a_sixth_of_its_ttl(redis_url, redis_prefix):
    async with LossyProxy(redis_url) as proxy:
        store = RedisLeaseStore(proxy.url, redis_prefix)
        await store.epoch()
        proxy.lose = "silence"
        for ttl_ms, bound in ((1_200, 200), (2_400, 400), (60_000, 1_000)):
            with pytest.raises(LeaseStoreTimeoutError, match=f"within {bound} ms"):
                await store.renew_many(["e"], "n1", ttl_ms)
        await store.close()


async def test_a_stopped_server_is_an_error_in_time_and_no_call_is_doubled(private_redis):
    leases, wakes = RedisLeaseStore(private_redis.url, "p"), _wakes(private_redis.url, "p")
    await leases.acquire("e", "n1", 60_000)
    private_redis.pause()
    with pytest.raises(LeaseStoreTimeoutError):
        await leases.renew_many(["e"], "n1", 600)
    with pytest.raises(UnreachableError, match="no answer within"):
        await wakes.count()
    private_redis.resume()
    assert await leases.renew_many(["e"], "n1", 60_000) == {"e"}
    assert await wakes.count() == 0
    await leases.close()
    await wakes.close()


async def test_a_connection_killed_between_two_calls_is_replaced(redis_url, redis_prefix):
    bench = RedisBench(redis_url, redis_prefix, RedisLeaseStore)
    store = bench.open()
    await store.acquire("e", "n1", 60_000)
    client_id = await store.connection.command("CLIENT", "ID")
    admin = Redis.from_url(redis_url)
    await admin.client_kill_filter(_id=client_id)
    try:
        lease = await store.get("e")
    except UnreachableError:  # the hang-up was not yet seen when the call was sent
        lease = await store.get("e")
    assert lease.owner == "n1"
    await admin.aclose()
    await bench.close()


async def test_a_cancelled_call_leaves_no_answer_for_the_next(redis_url, redis_prefix):
    bench = RedisBench(redis_url, redis_prefix, RedisLeaseStore)
    store = bench.open()
    await store.acquire("e", "n1", 60_000)
    for _ in range(50):
        calls = [asyncio.create_task(store.get("never")) for _ in range(8)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert (await store.get("e")).owner == "n1"
    await bench.close()


async def test_no_cancellation_is_lost(redis_url, redis_prefix):
    """A task that polls ends when it is told to, wherever in a call it is told."""
    connection = RedisConnection(redis_url, redis_prefix)

    async def poll():
        while True:
            await connection.command("PING")

    for steps in range(600):
        polling = asyncio.create_task(poll())
        for _ in range(steps % 30):
            await asyncio.sleep(0)
        polling.cancel()
        ended, _ = await asyncio.wait([polling], timeout=5)
        polling.cancel()
        assert ended
    await connection.close()


async def test_many_calls_share_few_connections(private_redis):
    store = RedisLeaseStore(private_redis.url, "p")
    leases = await asyncio.gather(*(store.acquire(f"e{n}", "n1", 60_000) for n in range(300)))
    assert all(leases)
    assert len((await store.connection.command("CLIENT", "LIST")).splitlines()) <= 8
    await store.close()


# -- the server's contents -----------------------------------------------------------------------------------------


async def test_an_emptied_and_a_restarted_server_show_another_epoch(private_redis):
    admin = Redis.from_url(private_redis.url)
    leases, wakes = RedisLeaseStore(private_redis.url, "p"), _wakes(private_redis.url, "p")
    seen = [(await leases.epoch(), await wakes.epoch())]
    assert seen == [(await leases.epoch(), await wakes.epoch())]
    await admin.flushall()
    seen.append((await leases.epoch(), await wakes.epoch()))
    await leases.acquire("e", "n1", 60_000)
    private_redis.restart()
    for store in (leases, wakes):  # each pool holds connections of the process that ended
        with contextlib.suppress(UnreachableError):
            await store.epoch()
    seen.append((await leases.epoch(), await wakes.epoch()))
    assert (await leases.get("e")).owner == "n1"  # kept by the append-only file
    assert len({epoch for pair in seen for epoch in pair}) == 6
    for closing in (leases, wakes):
        await closing.close()
    await admin.aclose()


async def test_no_row_has_a_key_expiry_and_each_script_keeps_to_one_slot(redis_url, redis_prefix):
    leases, wakes = (
        RedisBench(redis_url, redis_prefix, RedisLeaseStore),
        RedisBench(redis_url, redis_prefix, _wakes),
    )
    await _lease_rows(leases.open())
    await _wake_rows(wakes.open())
    admin = Redis.from_url(redis_url, decode_responses=True)
    keys = [key async for key in admin.scan_iter(match=f"*{redis_prefix}*")]
    assert keys
    assert {await admin.ttl(key) for key in keys} == {-1}
    store = wakes.open()
    for group in [leases.open()._keys, *store._keys]:
        assert len({key_slot(key.encode()) for key in group}) == 1
    assert len({key_slot(group[0].encode()) for group in store._keys}) > 1
    await admin.aclose()
    await leases.close()
    await wakes.close()


async def test_doctor_names_what_would_lose_rows(private_redis, start_redis):
    connection = RedisConnection(private_redis.url, "p")
    assert await examine(connection) == []
    admin = Redis.from_url(private_redis.url)
    await admin.config_set("maxmemory-policy", "allkeys-lru")
    await admin.config_set("maxmemory", await admin.info("memory") and 1)
    codes = {finding.code: finding.severity for finding in await examine(connection)}
    assert codes == {"redis-evicts": "error", "redis-full": "warning"}
    await connection.close()
    await admin.aclose()

    volatile = RedisConnection(start_redis().url, "p")
    assert [(f.code, f.severity) for f in await examine(volatile)] == [("redis-not-durable", "warning")]
    await volatile.close()
