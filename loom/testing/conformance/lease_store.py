"""What every LeaseStore does (``loom.stores.contracts.LeaseStore``): subclass it and give the fixture ``bench``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from loom.stores.contracts import LeaseStore

LONG: Final = 60_000
"""A time to live, in ms, that no test outlasts."""

SHORT: Final = 600
"""A time to live, in ms, that a test lets pass."""


class LeaseBench(Protocol):
    """A lease store under test."""

    def open(self) -> LeaseStore:
        """Return another handle on the one store, as another node has."""
        ...

    async def advance(self, ms: int) -> None:
        """Return once ``ms`` have passed on the store's own clock."""
        ...

    async def empty(self) -> None:
        """Empty the store behind its handles, as a server that lost its data."""
        ...


class LeaseStoreConformance:
    """The suite. Two handles, ``ours`` and ``theirs``, stand for two nodes."""

    async def test_a_free_lease_is_taken_for_its_ttl(self, bench: LeaseBench) -> None:
        lease = await bench.open().acquire("e", "n1", LONG)
        assert lease is not None
        assert (lease.execution_id, lease.owner, lease.expired) == ("e", "n1", False)
        assert lease.expires_at - lease.acquired_at == LONG
        assert await bench.open().get("e") == lease

    async def test_a_held_lease_is_refused_and_unchanged(self, bench: LeaseBench) -> None:
        ours, theirs = bench.open(), bench.open()
        lease = await ours.acquire("e", "n1", LONG)
        assert await theirs.acquire("e", "n2", LONG * 2) is None
        assert await theirs.get("e") == lease

    async def test_the_holder_acquires_again_and_keeps_its_start(self, bench: LeaseBench) -> None:
        ours = bench.open()
        first = await ours.acquire("e", "n1", LONG)
        await bench.advance(2)
        again = await ours.acquire("e", "n1", LONG)
        assert first is not None
        assert again is not None
        assert again.acquired_at == first.acquired_at
        assert again.expires_at > first.expires_at

    async def test_one_of_two_racing_handles_gets_each_lease(self, bench: LeaseBench) -> None:
        ours, theirs = bench.open(), bench.open()
        for round_ in range(50):
            answers = await asyncio.gather(
                ours.acquire(f"e{round_}", "n1", LONG), theirs.acquire(f"e{round_}", "n2", LONG)
            )
            won = [lease for lease in answers if lease is not None]
            assert len(won) == 1
            assert await ours.get(f"e{round_}") == won[0]

    async def test_one_of_two_racing_handles_takes_an_expired_lease(self, bench: LeaseBench) -> None:
        ours, theirs = bench.open(), bench.open()
        ids = [f"e{n}" for n in range(20)]
        await ours.acquire_many(ids, "dead", SHORT)
        await bench.advance(SHORT)
        mine, others = await asyncio.gather(
            ours.acquire_many(ids, "n1", LONG), theirs.acquire_many(ids, "n2", LONG)
        )
        assert mine | others == set(ids)
        assert not mine & others

    async def test_acquire_many_agrees_with_acquire(self, bench: LeaseBench) -> None:
        ours, theirs = bench.open(), bench.open()
        await theirs.acquire("held", "n2", LONG)
        await theirs.acquire("dead", "n2", SHORT)
        await ours.acquire("own", "n1", LONG)
        await bench.advance(SHORT)
        assert await ours.acquire_many(["held", "dead", "own", "free"], "n1", LONG) == {"dead", "own", "free"}
        assert await ours.acquire_many([], "n1", LONG) == set()

    async def test_a_batch_may_be_large(self, bench: LeaseBench) -> None:
        ours = bench.open()
        ids = [f"e{n}" for n in range(2_500)]
        assert await ours.acquire_many(ids, "n1", LONG) == set(ids)
        assert await ours.renew_many(ids, "n1", LONG) == set(ids)
        assert await ours.release_many(ids, "n1") == set(ids)

    async def test_renewing_extends_what_is_still_ours_and_makes_nothing(self, bench: LeaseBench) -> None:
        ours, theirs = bench.open(), bench.open()
        before = await ours.acquire("own", "n1", SHORT)
        await theirs.acquire("held", "n2", LONG)
        assert await ours.renew_many(["own", "held", "never"], "n1", LONG) == {"own"}
        after = await ours.get("own")
        assert before is not None
        assert after is not None
        assert after.expires_at > before.expires_at
        assert after.acquired_at == before.acquired_at
        assert await ours.get("never") is None

    async def test_an_expired_untaken_lease_is_renewed(self, bench: LeaseBench) -> None:
        ours = bench.open()
        await ours.acquire("e", "n1", SHORT)
        await bench.advance(SHORT)
        assert await ours.renew_many(["e"], "n1", LONG) == {"e"}
        lease = await ours.get("e")
        assert lease is not None
        assert not lease.expired
        assert await bench.open().acquire("e", "n2", LONG) is None

    async def test_renewing_never_takes_a_lease_back(self, bench: LeaseBench) -> None:
        ours, theirs = bench.open(), bench.open()
        await ours.acquire("e", "n1", SHORT)
        await bench.advance(SHORT)
        assert await theirs.acquire("e", "n2", SHORT) is not None
        assert await ours.renew_many(["e"], "n1", LONG) == set()
        await bench.advance(SHORT)
        assert await ours.renew_many(["e"], "n1", LONG) == set()
        lease = await ours.get("e")
        assert lease is not None
        assert lease.owner == "n2"

    async def test_only_the_owner_releases(self, bench: LeaseBench) -> None:
        ours, theirs = bench.open(), bench.open()
        await ours.acquire_many(["a", "b"], "n1", LONG)
        assert await theirs.release_many(["a", "b"], "n2") == set()
        assert await ours.release_many(["a", "never"], "n1") == {"a"}
        assert await ours.release_many(["a"], "n1") == set()
        assert await ours.get("a") is None
        assert await ours.get("b") is not None

    async def test_an_expired_lease_stays_as_evidence(self, bench: LeaseBench) -> None:
        ours = bench.open()
        await ours.acquire("e", "n1", SHORT)
        await bench.advance(SHORT * 2)
        lease = await ours.get("e")
        assert lease is not None
        assert (lease.owner, lease.expired) == ("n1", True)

    async def test_expired_leases_are_paged_by_id(self, bench: LeaseBench) -> None:
        ours = bench.open()
        dead = [f"e{n}" for n in (3, 1, 4, 2, 5)]
        await ours.acquire_many(dead, "dead", SHORT)
        await ours.acquire_many(["e0", "e9", "e25"], "n1", LONG)
        assert await ours.expired(10) == []
        await bench.advance(SHORT)
        first = await ours.expired(2)
        assert [lease.execution_id for lease in first] == ["e1", "e2"]
        assert all(lease.expired and lease.owner == "dead" for lease in first)
        assert [lease.execution_id for lease in await ours.expired(10, after="e2")] == ["e3", "e4", "e5"]
        assert await ours.expired(10, after="e5") == []
        assert [lease.execution_id for lease in await ours.expired(10)] == sorted(dead)

    async def test_a_lease_that_lives_again_is_no_longer_listed(self, bench: LeaseBench) -> None:
        ours = bench.open()
        await ours.acquire_many(["a", "b", "c", "d", "e"], "dead", SHORT)
        await bench.advance(SHORT)
        assert len(await ours.expired(10)) == 5
        await ours.renew_many(["a"], "dead", LONG)
        await ours.release_many(["b"], "dead")
        await ours.acquire("c", "n1", LONG)
        await ours.steal("d", "n1", LONG)
        assert [lease.execution_id for lease in await ours.expired(10)] == ["e"]

    async def test_stealing_takes_a_live_lease(self, bench: LeaseBench) -> None:
        ours, theirs = bench.open(), bench.open()
        await theirs.acquire("e", "n2", LONG)
        lease = await ours.steal("e", "n1", LONG)
        assert (lease.owner, lease.expired) == ("n1", False)
        assert await ours.get("e") == lease
        assert await theirs.renew_many(["e"], "n2", LONG) == set()
        assert await theirs.release_many(["e"], "n2") == set()
        assert (await ours.steal("free", "n1", LONG)).owner == "n1"

    async def test_presence_says_who_lives_and_what_it_opens(self, bench: LeaseBench) -> None:
        ours = bench.open()
        row = await ours.beat("n1", LONG, ["INBOX_MESSAGE.payload"], {"zone": "a b"})
        assert (row.node, row.expired, row.covers) == ("n1", False, ("INBOX_MESSAGE.payload",))
        assert await bench.open().presence(["n1", "never"]) == {"n1": row}
        assert await bench.open().present() == [row]
        await ours.beat("n1", LONG)
        assert (await ours.presence(["n1"]))["n1"].covers == ()

    async def test_presence_expires_and_is_renewed(self, bench: LeaseBench) -> None:
        ours = bench.open()
        await ours.beat("n1", SHORT)
        await bench.advance(SHORT)
        assert (await ours.presence(["n1"]))["n1"].expired
        assert [row.expired for row in await ours.present()] == [True]
        await ours.beat("n1", LONG)
        assert not (await ours.presence(["n1"]))["n1"].expired

    async def test_leaving_ends_presence_and_keeps_the_row(self, bench: LeaseBench) -> None:
        ours = bench.open()
        await ours.beat("n1", LONG, ["x"])
        await ours.beat("n2", LONG)
        await ours.leave("n1")
        await ours.leave("never")
        rows = await ours.presence(["n1", "n2", "never"])
        assert {node: row.expired for node, row in rows.items()} == {"n1": True, "n2": False}
        ended = rows["n1"]
        assert ended.covers == ("x",)
        await bench.advance(2)
        await ours.leave("n1")
        assert (await ours.presence(["n1"]))["n1"].expires_at == ended.expires_at

    async def test_a_forgotten_node_is_gone(self, bench: LeaseBench) -> None:
        ours = bench.open()
        await ours.beat("n1", LONG)
        await ours.forget_node("n1")
        await ours.forget_node("n1")
        assert await ours.present() == []

    async def test_the_epoch_changes_only_when_the_store_is_emptied(self, bench: LeaseBench) -> None:
        ours, theirs = bench.open(), bench.open()
        before = await ours.epoch()
        await ours.acquire("e", "n1", LONG)
        assert await theirs.epoch() == before
        await bench.empty()
        after = await theirs.epoch()
        assert after != before
        assert await ours.epoch() == after

    async def test_every_call_works_on_an_emptied_store(self, bench: LeaseBench) -> None:
        ours = bench.open()
        await ours.acquire_many(["a", "b"], "n1", LONG)
        await ours.beat("n1", LONG)
        await bench.empty()
        assert await ours.renew_many(["a"], "n1", LONG) == set()
        assert await ours.release_many(["a"], "n1") == set()
        assert await ours.get("a") is None
        assert await ours.expired(10) == []
        assert await ours.presence(["n1"]) == {}
        assert await ours.present() == []
        await ours.leave("n1")
        assert await ours.acquire("a", "n1", LONG) is not None
        assert (await ours.steal("b", "n1", LONG)).owner == "n1"

    async def test_rows_are_listed_as_they_lapse(self, bench: LeaseBench) -> None:
        ours = bench.open()
        assert (await ours.held(10), await ours.count()) == ([], 0)
        await ours.acquire("late", "n1", LONG * 2)
        await ours.acquire("soon", "n2", LONG)
        await ours.acquire_many(["gone", "gone too"], "n1", SHORT)
        await bench.advance(SHORT)
        seen = [(lease.execution_id, lease.owner, lease.expired) for lease in await ours.held(10)]
        assert seen == [
            ("gone", "n1", True),
            ("gone too", "n1", True),
            ("soon", "n2", False),
            ("late", "n1", False),
        ]
        assert await ours.expired(10) == [lease for lease in await ours.held(10) if lease.expired]
        assert [lease.execution_id for lease in await ours.held(3)] == ["gone", "gone too", "soon"]
        assert await ours.held(10) == await ours.held(4)
        assert await ours.count() == 4
        now = await ours.now()
        assert all(lease.expired == (lease.expires_at <= now) for lease in await ours.held(10))

    async def test_closing_twice_is_closing_once(self, bench: LeaseBench) -> None:
        ours, theirs = bench.open(), bench.open()
        await ours.acquire("e", "n1", LONG)
        await ours.close()
        await ours.close()
        assert await theirs.get("e") is not None

    async def test_names_are_kept_as_given(self, bench: LeaseBench) -> None:
        ours = bench.open()
        owner = 'node one:01J {x}\n"~continue'
        lease = await ours.acquire("A._~@=+-z", owner, LONG)
        assert lease is not None
        assert lease.owner == owner
        assert await ours.get("A._~@=+-z") == lease
        assert (await ours.beat(owner, LONG)).node == owner
        assert list(await ours.presence([owner])) == [owner]

    async def test_the_scope_is_told(self, bench: LeaseBench) -> None:
        assert bench.open().scope in {"cluster", "process"}
