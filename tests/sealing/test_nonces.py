"""Nonces are random but in tests, and only tests can have it otherwise (system.md 2.9)."""

import ast
import os
from pathlib import Path

import pytest
from benches import SealedBench, sent, started, step

import loom
from loom.entropy import Entropy
from loom.errors import ConfigError
from loom.ids import inbox_stream
from loom.stores.contracts import Snapshot
from loom.stores.keys.memory import MemoryKeyStore
from loom.stores.memory.snapshot_store import MemorySnapshotStore
from loom.stores.sealing import nonces
from loom.stores.sealing.encrypting import EncryptingEventStore
from loom.stores.sealing.nonces import NONCE_BYTES, nonce_source, random_nonce
from loom.stores.sealing.snapshots import EncryptingSnapshotStore
from loom.testing.crypto import seeded_iv_source

PLACE = ("s", 0, "e", "p")


def test_without_a_source_nonces_are_random():
    assert nonce_source(None) is random_nonce
    made = [random_nonce(PLACE) for _ in range(5000)]
    assert len(set(made)) == len(made)
    assert {len(nonce) for nonce in made} == {NONCE_BYTES}
    assert all(len({nonce[at] for nonce in made}) == 256 for at in range(NONCE_BYTES))
    assert isinstance(nonces._bits, Entropy)


def test_nothing_without_the_brand_is_taken():
    class Pretender:
        def __call__(self, place):
            return b"0" * 12

    seeded = seeded_iv_source(1)
    for source in (Pretender(), lambda _: b"0" * 12, type(seeded)(1), seeded.__call__, os.urandom):
        with pytest.raises(ConfigError) as caught:
            nonce_source(source)
        assert caught.value.setting == "iv_source"
        for wrap in (EncryptingEventStore, EncryptingSnapshotStore):
            with pytest.raises(ConfigError):
                wrap(object(), MemoryKeyStore(), iv_source=source)
    assert nonce_source(seeded) is seeded


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"LOOM_ENV": "test"},
        {"LOOM_ENV": "production", "PYTEST_CURRENT_TEST": "x"},
        {"LOOM_ENV": "Production", "PYTEST_VERSION": "9"},
        {"PYTEST_CURRENT_TEST": ""},
    ],
)
def test_outside_a_test_nothing_seeded_runs(monkeypatch, environment):
    seeded = seeded_iv_source(1)
    with monkeypatch.context() as patch:
        for name in ("LOOM_ENV", "PYTEST_CURRENT_TEST", "PYTEST_VERSION"):
            patch.delenv(name, raising=False)
        for name, value in environment.items():
            patch.setenv(name, value)
        for use in (lambda: seeded_iv_source(1), lambda: nonce_source(seeded), lambda: seeded(PLACE)):
            with pytest.raises(ConfigError):
                use()
        assert len(random_nonce(PLACE)) == 12


def test_a_seed_gives_every_place_its_own():
    seeded = seeded_iv_source(7)
    places = [
        (stream, sequence, event, path)
        for stream in ("a", "b", "a1")
        for sequence in (None, 0, 1, 10)
        for event in ("", "e", "1e")
        for path in ("p", "p.0")
    ]
    drawn = [seeded(place) for place in places]
    assert len(set(drawn)) == len(places)
    assert drawn == [seeded_iv_source(7)(place) for place in places]
    assert not set(drawn) & {seeded_iv_source(8)(place) for place in places}


async def _log(seed):
    bench = SealedBench()
    bench.keys = MemoryKeyStore(bench.table, ids=iter(f"key{n}" for n in range(99)).__next__)
    store = bench.node(keys=bench.keys, iv_source=seeded_iv_source(seed))
    await store.append(started("01J00000000000000000000000", data_in={"a": 1}, identity={"b": 2}))
    await store.append(step("01J00000000000000000000000", 0, "x"))
    await store.append(sent(inbox_stream("01J00000000000000000000000", "t"), "m", [1]))
    resting = bench.resting()
    await bench.close()
    return resting


async def test_the_same_seed_and_keys_give_the_same_log(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("loom.stores.keys.store._secret", lambda: b"k" * 32)
        assert await _log(1) == await _log(1)
        assert await _log(1) != await _log(2)


async def test_the_same_seed_gives_the_same_snapshot(monkeypatch):
    async def resting():
        inner = MemorySnapshotStore()
        keys = MemoryKeyStore(ids=lambda: "k")
        store = EncryptingSnapshotStore(inner, keys, iv_source=seeded_iv_source(1))
        await store.save(Snapshot("e", 3, {"a": 1}))
        return await inner.load_latest("e")

    with monkeypatch.context() as patch:
        patch.setattr("loom.stores.keys.store._secret", lambda: b"k" * 32)
        assert await resting() == await resting()


def test_no_other_code_can_give_a_source():
    """``brand`` is named by its own module and ``loom.testing.crypto`` alone, and nothing passes ``iv_source`` on."""
    branding, passing = set(), set()
    root = Path(loom.__file__).parent
    for file in root.rglob("*.py"):
        name = file.relative_to(root).as_posix()
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names = (
                {alias.name for alias in node.names}
                if isinstance(node, ast.ImportFrom | ast.Import)
                else set()
            )
            if isinstance(node, ast.Name):
                names.add(node.id)
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            if names & {"brand", "_branded"}:
                branding.add(name)
            if isinstance(node, ast.keyword) and node.arg == "iv_source":
                passing.add(name)
    assert branding == {"stores/sealing/nonces.py", "testing/crypto.py"}
    assert passing == set()


def test_random_nonces_are_made_in_one_place():
    """In the wing that seals nothing draws random bytes but ``nonces``; a cipher is handed its nonce."""
    root = Path(loom.__file__).parent / "stores" / "sealing"
    drawing = {
        file.name
        for file in root.rglob("*.py")
        if any(
            word in file.read_text("utf-8")
            for word in ("Entropy", "urandom", "token_bytes", "import random", "secrets")
        )
    }
    assert drawing == {"nonces.py"}
