"""The key store contract in memory, in a file and on a real Redis."""

import asyncio
import base64
import os

import pytest
from redis.asyncio import Redis

from loom.config import Config
from loom.errors import ConfigError, DecodeError, KeyUnavailableError, LoomError, StoreRefusedError
from loom.stores.keys.factory import open_keys
from loom.stores.keys.file import FileKeyStore
from loom.stores.keys.memory import KeyTable, MemoryKeyStore
from loom.stores.keys.redis import RedisKeyStore
from loom.stores.keys.wrapping import KekWrapper, load_kek, random_wrapper
from loom.testing.conformance.key_store import KeyStoreConformance


class Bench:
    """``make(wrapper)`` opens a handle on the one store, ``other(wrapper)`` one on another."""

    def __init__(self, make, other, resting):
        self.wrapper = random_wrapper()
        self.make, self.other, self.resting = make, other, resting
        self.opened = []

    def open(self):
        return self._keep(self.make(self.wrapper))

    def stranger(self):
        return self._keep(self.make(random_wrapper()))

    def elsewhere(self):
        return self._keep(self.other(self.wrapper))

    def _keep(self, store):
        self.opened.append(store)
        return store

    async def close(self):
        for store in self.opened:
            await store.close()


class TestMemory(KeyStoreConformance):
    @pytest.fixture
    async def bench(self):
        table = KeyTable()

        async def resting():
            return repr(table.rows).encode() + b"".join(
                k.wrapped for row in table.rows.values() for k in row.keys
            )

        return Bench(lambda w: MemoryKeyStore(table, w), lambda w: MemoryKeyStore(KeyTable(), w), resting)


class TestFile(KeyStoreConformance):
    @pytest.fixture
    async def bench(self, tmp_path):
        async def resting():
            return b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.name.startswith("keys"))

        bench = Bench(
            lambda w: FileKeyStore(tmp_path / "keys", w),
            lambda w: FileKeyStore(tmp_path / "other", w),
            resting,
        )
        yield bench
        await bench.close()


class TestRedis(KeyStoreConformance):
    @pytest.fixture
    async def bench(self, redis_url, redis_prefix):
        async def resting():
            async with Redis.from_url(redis_url) as admin:
                keys = [key async for key in admin.scan_iter(match=f"*{redis_prefix}*")]
                return b"".join([repr(await admin.hgetall(key)).encode() for key in keys])

        bench = Bench(
            lambda w: RedisKeyStore(redis_url, redis_prefix, w),
            lambda w: RedisKeyStore(redis_url, redis_prefix + "2", w),
            resting,
        )
        yield bench
        await bench.close()


# -- the key-encryption key ----------------------------------------------------------------------------------------


def _kek():
    return base64.b64encode(os.urandom(32)).decode()


async def test_an_older_kek_unwraps_and_the_first_one_wraps():
    old, new = os.urandom(32), os.urandom(32)
    secret = os.urandom(32)
    wrapped = await KekWrapper(old).wrap(secret)
    both = KekWrapper(new, old)
    assert await both.unwrap(wrapped) == secret
    assert await KekWrapper(new).unwrap(wrapped) is None
    assert await KekWrapper(new).unwrap(await both.wrap(secret)) == secret
    for broken in (b"", b"short", wrapped[:-1], wrapped + b"12345678"):
        assert await both.unwrap(broken) is None


class Counting:
    """A wrapper whose every call is told, as one of a service would be."""

    def __init__(self, ahead):
        self.ahead, self.calls, self.inner = ahead, 0, random_wrapper()

    async def wrap(self, key):
        self.calls += 1
        await asyncio.sleep(0)
        return await self.inner.wrap(key)

    async def unwrap(self, wrapped):
        return await self.inner.unwrap(wrapped)


@pytest.mark.parametrize("ahead", [1, 8])
async def test_no_two_subjects_get_a_key_that_was_made_ahead(ahead):
    wrapper = Counting(ahead)
    store = MemoryKeyStore(KeyTable(), wrapper)
    sets = await asyncio.gather(*(store.ensure(f"s{i}") for i in range(40)))
    sets += [await store.ensure(f"t{i}") for i in range(40)]
    assert len({keys.current.secret for keys in sets}) == len({keys.current.id for keys in sets}) == 80
    assert [(await store.get(keys.subject)).current for keys in sets] == [keys.current for keys in sets]
    if ahead == 1:
        assert wrapper.calls == 80, "a service is asked for no key that nobody wants"


async def test_a_kek_comes_from_a_variable_or_a_file(monkeypatch, tmp_path):
    text = _kek()
    monkeypatch.setenv("SOME_KEK", text)
    (tmp_path / "kek").write_text(f"{text}\n{_kek()}\n")
    secret = os.urandom(32)
    wrapped = await load_kek("env:SOME_KEK").wrap(secret)
    assert await load_kek(f"file:{tmp_path / 'kek'}").unwrap(wrapped) == secret


@pytest.mark.parametrize("value", ["", "no base64!", base64.b64encode(b"x" * 31).decode(), "ä"])
def test_a_kek_that_cannot_be_used_is_told_without_showing_it(value, monkeypatch, tmp_path):
    monkeypatch.setenv("SOME_KEK", value)
    (tmp_path / "kek").write_text(value, "utf-8")
    for source in ("env:SOME_KEK", f"file:{tmp_path / 'kek'}"):
        with pytest.raises(ConfigError) as caught:
            load_kek(source)
        assert caught.value.setting == "sealing.kek"
        assert not value or value not in str(caught.value)


@pytest.mark.parametrize("source", [None, "", "env:", "SOME_KEK", "file:/nowhere/at/all"])
def test_a_source_that_names_no_kek_is_refused(source):
    with pytest.raises(ConfigError):
        load_kek(source)


# -- settings ------------------------------------------------------------------------------------------------------


async def test_settings_open_a_store(monkeypatch, tmp_path):
    monkeypatch.setenv("SOME_KEK", _kek())
    monkeypatch.delenv("LOOM_REDIS_URL", raising=False)
    sealing = {"kek": "env:SOME_KEK"}

    def opened(keys, **more):
        return open_keys(Config(storage="memory", sealing=sealing | {"keys": keys}, **more))

    assert open_keys(Config(storage="memory")) is None
    assert isinstance(opened("memory"), MemoryKeyStore)
    store = opened(f"file:{tmp_path / 'keys'}")
    assert isinstance(store, FileKeyStore)
    await store.close()
    store = opened("redis", redis_url="redis://user:geheim@127.0.0.1:1/3", topic_prefix="p.")
    assert isinstance(store, RedisKeyStore)
    assert store.identity() == "redis://127.0.0.1:1/3#p."
    await store.close()
    with pytest.raises(ConfigError, match="redis_url"):
        opened("redis")
    sealing = {}
    with pytest.raises(ConfigError, match="sealing.kek"):
        opened(f"file:{tmp_path / 'keys'}")


# -- the file ------------------------------------------------------------------------------------------------------


async def test_a_file_of_keys_is_its_owners_alone(tmp_path):
    store = FileKeyStore(tmp_path / "keys", random_wrapper())
    await store.ensure("alice")
    assert (tmp_path / "keys").stat().st_mode & 0o077 == 0
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]
    await store.close()
    with pytest.raises(StoreRefusedError, match="closed"):
        await store.get("alice")


async def test_a_file_that_is_none_is_told(tmp_path):
    with pytest.raises(ConfigError, match="sealing.keys"):
        FileKeyStore(tmp_path / "no" / "folder", random_wrapper())
    (tmp_path / "keys").write_bytes(b"no database at all" * 100)
    store = FileKeyStore(tmp_path / "keys", random_wrapper())
    with pytest.raises(StoreRefusedError, match="file of keys"):
        await store.ensure("alice")
    await store.close()


async def test_handles_on_one_file_charge_one_key(tmp_path):
    wrapper = random_wrapper()
    stores = [FileKeyStore(tmp_path / "keys", wrapper) for _ in range(3)]
    sets = await asyncio.gather(*(stores[n % 3].ensure("alice", 7) for n in range(12)))
    assert len({s.current.id for s in sets}) == 1
    for store in stores:
        await store.close()


# -- rows that others wrote ----------------------------------------------------------------------------------------


async def test_a_row_that_is_none_is_told_without_its_text(redis_url, redis_prefix):
    store = RedisKeyStore(redis_url, redis_prefix, random_wrapper())
    async with Redis.from_url(redis_url) as admin:
        for row in ('{"k":[["id","zz",1]]}', "nonsense", '{"k":3}', "[]"):
            await admin.hset(store.connection.key("keys", "rows"), "alice", row)
            with pytest.raises(DecodeError) as caught:
                await store.get("alice")
            assert row not in str(caught.value)
    await store.close()


async def test_an_unreachable_redis_is_told_as_such():
    store = RedisKeyStore("redis://127.0.0.1:1", "p", random_wrapper(), timeout_ms=500)
    for call in (store.get("alice"), store.ensure("alice"), store.destroy("alice")):
        with pytest.raises(LoomError) as caught:
            await call
        assert type(caught.value).__name__ == "UnreachableError"
        assert not isinstance(caught.value, KeyUnavailableError)
    await store.close()
