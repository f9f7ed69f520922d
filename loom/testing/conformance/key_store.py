"""What every KeyStore does (``loom.stores.keys.contract.KeyStore``): subclass it and give the fixture ``bench``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import pytest

from loom.errors import InvalidInputError, KeyUnavailableError, PayloadShreddedError
from loom.stores.keys.contract import MAX_KEY_USES, KeyStore, shares_keys

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from loom.errors import LoomError


class KeyBench(Protocol):
    """Key stores under test."""

    def open(self) -> KeyStore:
        """Return another handle on the one store, as another node has; the bench closes it."""
        ...

    def stranger(self) -> KeyStore:
        """Return a handle on the one store whose key-encryption key is another."""
        ...

    def elsewhere(self) -> KeyStore:
        """Return a store of other keys."""
        ...

    async def resting(self) -> bytes:
        """Return everything that rests of the store, as bytes."""
        ...


async def _refused(call: Awaitable[object], kind: type[LoomError]) -> None:
    with pytest.raises(kind) as caught:
        await call
    assert type(caught.value) is kind


class KeyStoreConformance:
    """The suite. What one handle did, every other sees."""

    async def test_a_subject_has_no_keys_until_something_is_sealed(self, bench: KeyBench) -> None:
        store = bench.open()
        assert isinstance(store, KeyStore)
        assert await store.get("alice") is None
        assert not await store.was_destroyed("alice")
        made = await store.ensure("alice")
        assert made.subject == "alice"
        assert len(made.current.secret) == 32
        assert await bench.open().get("alice") == made
        assert await store.get("bob") is None

    async def test_keys_are_made_once(self, bench: KeyBench) -> None:
        handles = [bench.open() for _ in range(4)]
        made = await asyncio.gather(*(handles[n % 4].ensure("alice") for n in range(12)))
        assert len({key_set.current.id for key_set in made}) == 1
        assert len({key_set.current.secret for key_set in made}) == 1

    async def test_every_subject_has_keys_of_its_own(self, bench: KeyBench) -> None:
        store = bench.open()
        subjects = ["alice", "bob", "ünïcode", "with space", "a:b#c", "{}", "x" * 1024]
        sets = [await store.ensure(subject) for subject in subjects]
        assert len({s.current.secret for s in sets}) == len({s.current.id for s in sets}) == len(subjects)
        assert [await store.get(subject) for subject in subjects] == sets

    async def test_a_rotated_key_goes_on_opening(self, bench: KeyBench) -> None:
        store = bench.open()
        first = (await store.ensure("alice")).current
        second = (await bench.open().rotate("alice")).current
        assert second.id != first.id
        keys = await store.ensure("alice")
        assert keys.keys == (first, second)
        assert keys.current == second
        assert keys.find(first.id) == first
        assert keys.find("another") is None
        assert len((await store.rotate("carol")).keys) == 1

    async def test_a_key_is_rotated_before_it_is_worn(self, bench: KeyBench) -> None:
        store, other = bench.open(), bench.open()
        first = (await store.ensure("alice", MAX_KEY_USES - 10)).current
        assert (await other.ensure("alice", 10)).current == first
        second = (await store.ensure("alice", 1)).current
        assert second.id != first.id
        assert (await other.ensure("alice", MAX_KEY_USES - 1)).current == second
        assert (await other.ensure("alice", 1)).current.id not in {first.id, second.id}
        assert len((await other.ensure("alice", 1)).keys) == 3
        for uses in (0, -1, MAX_KEY_USES + 1):
            await _refused(store.ensure("alice", uses), InvalidInputError)

    async def test_a_destroyed_key_is_gone_for_good(self, bench: KeyBench) -> None:
        store, other = bench.open(), bench.open()
        await store.ensure("alice")
        await store.rotate("alice")
        kept = await store.ensure("bob")
        assert await other.destroy("alice")
        assert await store.get("alice") is None
        assert await store.was_destroyed("alice")
        await _refused(store.ensure("alice"), PayloadShreddedError)
        await _refused(other.rotate("alice"), PayloadShreddedError)
        assert not await store.destroy("alice")
        assert await bench.open().was_destroyed("alice")
        assert await store.get("bob") == kept
        assert not await store.was_destroyed("bob")

    async def test_what_was_never_here_was_not_destroyed_here(self, bench: KeyBench) -> None:
        store = bench.open()
        assert not await store.destroy("alice")
        assert not await store.was_destroyed("alice")
        await store.ensure("alice")
        await store.destroy("alice")
        assert not await bench.elsewhere().was_destroyed("alice")

    async def test_racing_with_a_destruction_resurrects_nothing(self, bench: KeyBench) -> None:
        store, other = bench.open(), bench.open()
        await store.ensure("alice")
        calls = [
            store.destroy("alice"),
            *(other.ensure("alice") for _ in range(5)),
            *(store.rotate("alice") for _ in range(5)),
        ]
        await asyncio.gather(*calls, return_exceptions=True)
        assert await other.get("alice") is None
        assert await store.was_destroyed("alice")

    async def test_keys_under_another_kek_are_unavailable_and_never_replaced(self, bench: KeyBench) -> None:
        store, stranger = bench.open(), bench.stranger()
        made = await store.ensure("alice")
        await _refused(stranger.get("alice"), KeyUnavailableError)
        await _refused(stranger.ensure("alice"), KeyUnavailableError)
        assert not await stranger.was_destroyed("alice")
        assert await store.get("alice") == made

    async def test_equal_identities_share(self, bench: KeyBench) -> None:
        store = bench.open()
        assert store.identity() == bench.open().identity()
        assert shares_keys(store, bench.open())
        assert not shares_keys(store, bench.elsewhere())
        assert not shares_keys(store, object())
        assert not shares_keys(None, None)

    async def test_no_key_rests_bare_or_prints(self, bench: KeyBench) -> None:
        store = bench.open()
        keys = await store.ensure("alice")
        secret = keys.current.secret
        assert secret not in await bench.resting()
        assert secret.hex().encode() not in await bench.resting()
        assert repr(secret)[2:-1] not in repr(keys)
        assert secret.hex() not in repr(keys)

    async def test_nothing_of_a_destroyed_key_rests(self, bench: KeyBench) -> None:
        store = bench.open()
        key_id = (await store.ensure("alice")).current.id.encode()
        assert key_id in await bench.resting()
        await store.destroy("alice")
        assert key_id not in await bench.resting()

    async def test_a_subject_has_a_name_of_some_length(self, bench: KeyBench) -> None:
        for subject in ("", "x" * 1025, "half\ud800"):
            store = bench.open()
            refused = _refused(store.ensure(subject), InvalidInputError)
            await asyncio.gather(store.ensure("neighbour"), refused)  # asked for together, told apart
            await _refused(store.get(subject), InvalidInputError)

    async def test_closing_twice_is_closing_once(self, bench: KeyBench) -> None:
        ours, theirs = bench.open(), bench.open()
        made = await ours.ensure("alice")
        await ours.close()
        await ours.close()
        assert await theirs.get("alice") == made
