"""What every WakeStore does (``loom.stores.contracts.WakeStore``): subclass it and give the fixture ``bench``."""

from __future__ import annotations

import asyncio
from itertools import permutations
from typing import TYPE_CHECKING, Final, Protocol

from loom.stores.contracts import WakeRow
from loom.topics.partitioner import partition_of

if TYPE_CHECKING:
    from loom.stores.contracts import WakeStore

LONG: Final = 60_000
"""How long a claim stands, in ms, that no test outlasts."""

SHORT: Final = 600
"""How long a claim stands, in ms, that a test lets pass."""

NOW: Final = 1_700_000_000_000


class WakeBench(Protocol):
    """A wake store under test."""

    partitions: int

    def open(self) -> WakeStore:
        """Return another handle on the one store, as another node has."""
        ...

    async def advance(self, ms: int) -> None:
        """Return once ``ms`` have passed on the store's own clock."""
        ...

    async def empty(self) -> None:
        """Empty the store behind its handles, as a server that lost its data."""
        ...


class WakeStoreConformance:
    """The suite. Instants of rows are the caller's; claims are judged on the store's clock."""

    async def test_rows_come_due_earliest_first(self, bench: WakeBench) -> None:
        store, shards = bench.open(), frozenset(range(bench.partitions))
        late = WakeRow("a", NOW + 1, "timer")
        rows = [
            WakeRow("c", NOW, "timer"),
            WakeRow("b", NOW, "inbox"),
            WakeRow("d", NOW - 5, "refusal", 3, 1),
        ]
        await store.schedule([late, *rows])
        assert await store.due(NOW, 10, shards=shards) == [rows[2], rows[1], rows[0]]
        assert await store.due(NOW, 2, shards=shards) == [rows[2], rows[1]]
        assert await store.due(NOW + 1, 10, shards=shards) == [rows[2], rows[1], rows[0], late]
        assert await store.due(NOW - 6, 10, shards=shards) == []
        assert await store.count() == len(rows) + 1

    async def test_only_the_shards_asked_for_are_answered(self, bench: WakeBench) -> None:
        store = bench.open()
        rows = [WakeRow(f"e{n}", NOW, "timer") for n in range(40)]
        await store.schedule(rows)
        for shard in range(bench.partitions):
            found = await store.due(NOW, 100, shards=frozenset([shard]))
            here = sorted(
                r.execution_id for r in rows if partition_of(r.execution_id, bench.partitions) == shard
            )
            assert [row.execution_id for row in found] == here
        assert await store.due(NOW, 100, shards=frozenset()) == []

    async def test_refusal_rows_are_listed_only_when_wanted(self, bench: WakeBench) -> None:
        store, shards = bench.open(), frozenset(range(bench.partitions))
        refusals = [WakeRow("e", NOW - n, "refusal", 1) for n in range(30)]
        await store.schedule([*refusals, WakeRow("e", NOW, "timer")])
        assert await store.due(NOW, 5, shards=shards, refused=False) == [WakeRow("e", NOW, "timer", 1)]
        found = await store.due(NOW, 100, shards=shards)
        assert len(found) == len(refusals)

    async def test_refusal_rows_of_a_shard_are_paged(self, bench: WakeBench) -> None:
        store = bench.open()
        rows = [WakeRow(f"e{n}", 0, "refusal") for n in range(40)]
        await store.schedule([*rows, WakeRow("t", NOW, "timer"), WakeRow("later", NOW + 1, "refusal")])
        assert await store.claim(rows[0], "n1", LONG)
        found: list[WakeRow] = []
        for shard in range(bench.partitions):
            here: list[WakeRow] = []
            while page := await store.refusals(NOW, 3, shard=shard, offset=len(here)):
                here += page
            assert {partition_of(row.execution_id, bench.partitions) for row in here} <= {shard}
            found += here
        assert sorted(found, key=lambda row: int(row.execution_id[1:])) == rows

    async def test_a_claim_is_given_back(self, bench: WakeBench) -> None:
        ours, theirs = bench.open(), bench.open()
        row = WakeRow("e", 0, "refusal")
        await ours.schedule([row])
        assert await ours.claim(row, "n1", LONG)
        assert not await theirs.claim(row, "n2", LONG)
        assert await ours.claim(row, "n1", 0)
        assert await theirs.claim(row, "n2", LONG)

    async def test_a_refusal_row_asked_for_again_outlives_the_claim(self, bench: WakeBench) -> None:
        store = bench.open()
        row = WakeRow("e", 0, "refusal")
        await store.schedule([row])
        assert await store.claim(row, "n1", LONG)
        await store.schedule([row])
        assert await store.complete("e", 0)
        assert await store.rows_of("e") == [row]
        assert await store.claim(row, "n2", LONG)

    async def test_rows_that_meet_on_a_key_merge_alike_in_any_order(self, bench: WakeBench) -> None:
        store = bench.open()
        rows = [
            WakeRow("e", NOW, "refusal", 7, 1),
            WakeRow("e", NOW, "timer"),
            WakeRow("e", NOW, "inbox", 2, 4),
        ]
        for order in permutations(rows):
            await store.schedule(order)
            assert await store.rows_of("e") == [WakeRow("e", NOW, "timer", 7, 4)]
            await store.clear("e")
        for order in permutations([rows[0], rows[2]]):
            await store.schedule(order)
            assert await store.rows_of("e") == [WakeRow("e", NOW, "refusal", 7, 4)]
            await store.clear("e")

    async def test_scheduling_again_changes_nothing(self, bench: WakeBench) -> None:
        store = bench.open()
        row = WakeRow("e", NOW, "refusal", 7, 2)
        await store.schedule([row])
        await store.schedule([row, WakeRow("e", NOW, "refusal", 5, 1)])
        assert await store.rows_of("e") == [row]
        assert await store.count() == 1

    async def test_a_claim_keeps_others_off_and_the_row_out_of_sight(self, bench: WakeBench) -> None:
        ours, theirs, shards = bench.open(), bench.open(), frozenset(range(bench.partitions))
        row = WakeRow("e", NOW, "timer")
        await ours.schedule([row, WakeRow("f", NOW, "timer")])
        assert await ours.claim(row, "n1", LONG)
        assert await ours.claim(row, "n1", LONG)
        assert not await theirs.claim(row, "n2", LONG)
        assert [due.execution_id for due in await theirs.due(NOW, 10, shards=shards)] == ["f"]
        assert [due.execution_id for due in await theirs.due(NOW, 1, shards=shards)] == ["f"]
        assert not await ours.claim(WakeRow("never", NOW, "timer"), "n1", LONG)

    async def test_one_of_two_racing_handles_claims_each_row(self, bench: WakeBench) -> None:
        ours, theirs = bench.open(), bench.open()
        rows = [WakeRow(f"e{n}", NOW, "timer") for n in range(30)]
        await ours.schedule(rows)
        for row in rows:
            claims = await asyncio.gather(ours.claim(row, "n1", LONG), theirs.claim(row, "n2", LONG))
            assert sorted(claims) == [False, True]

    async def test_a_claim_ends_with_its_time(self, bench: WakeBench) -> None:
        ours, theirs, shards = bench.open(), bench.open(), frozenset(range(bench.partitions))
        row = WakeRow("e", NOW, "timer")
        await ours.schedule([row])
        assert await ours.claim(row, "n1", SHORT)
        await bench.advance(SHORT)
        assert await theirs.due(NOW, 10, shards=shards) == [row]
        assert await theirs.claim(row, "n2", LONG)
        assert not await ours.claim(row, "n1", LONG)

    async def test_a_completed_row_is_gone(self, bench: WakeBench) -> None:
        store, row = bench.open(), WakeRow("e", NOW, "timer")
        await store.schedule([row, WakeRow("e", NOW + 1, "timer")])
        assert await store.claim(row, "n1", LONG)
        assert await store.complete("e", NOW)
        assert not await store.complete("e", NOW)
        assert not await store.complete("never", NOW)
        assert [left.wake_at for left in await store.rows_of("e")] == [NOW + 1]

    async def test_an_inbox_row_asked_for_again_outlives_the_claim(self, bench: WakeBench) -> None:
        ours, theirs, shards = bench.open(), bench.open(), frozenset(range(bench.partitions))
        row = WakeRow("e", NOW, "inbox")
        await ours.schedule([row])
        assert await ours.claim(row, "n1", LONG)
        await theirs.schedule([row])
        assert await ours.complete("e", NOW)
        assert await theirs.due(NOW, 10, shards=shards) == [row]
        assert await theirs.claim(row, "n2", LONG)
        assert await theirs.complete("e", NOW)
        assert await ours.count() == 0

    async def test_a_timer_scheduled_under_a_claim_goes_with_it(self, bench: WakeBench) -> None:
        store = bench.open()
        row = WakeRow("e", NOW, "timer", 1)
        await store.schedule([row])
        assert await store.claim(row, "n1", LONG)
        await store.schedule([WakeRow("e", NOW, "timer", 2)])
        assert await store.complete("e", NOW)
        assert await store.rows_of("e") == []

    async def test_a_hold_moves_a_row_in_one_step(self, bench: WakeBench) -> None:
        store = bench.open()
        await store.schedule([WakeRow("e", NOW, "refusal", 7, 1)])
        held = WakeRow("e", NOW + 100, "refusal", 6, 2)
        assert await store.move("e", NOW, held)
        assert await store.rows_of("e") == [WakeRow("e", NOW + 100, "refusal", 7, 2)]
        assert not await store.move("e", NOW, held)
        assert await store.count() == 1

    async def test_pollers_that_hold_the_same_row_leave_one(self, bench: WakeBench) -> None:
        handles = [bench.open() for _ in range(4)]
        await handles[0].schedule([WakeRow("e", NOW, "refusal", 7, 0)])
        held = WakeRow("e", NOW + 100, "refusal", 7, 1)
        moved = await asyncio.gather(*(store.move("e", NOW, held) for store in handles))
        assert sorted(moved) == [False, False, False, True]
        assert await handles[0].rows_of("e") == [held]

    async def test_a_hold_merges_into_what_stands_at_its_target(self, bench: WakeBench) -> None:
        store = bench.open()
        await store.schedule([WakeRow("e", NOW, "refusal", 7, 1), WakeRow("e", NOW + 9, "timer")])
        assert await store.move("e", NOW, WakeRow("e", NOW + 9, "refusal", 7, 2))
        assert await store.rows_of("e") == [WakeRow("e", NOW + 9, "timer", 7, 2)]

    async def test_a_hold_never_completes_a_timers_key(self, bench: WakeBench) -> None:
        store = bench.open()
        await store.schedule([WakeRow("e", NOW, "refusal", 7, 1), WakeRow("e", NOW, "timer")])
        assert not await store.move("e", NOW, WakeRow("e", NOW + 9, "refusal", 7, 2))
        assert [row.wake_at for row in await store.rows_of("e")] == [NOW]
        assert await store.move("e", NOW, WakeRow("e", NOW + 9, "timer"))
        assert [row.wake_at for row in await store.rows_of("e")] == [NOW + 9]

    async def test_a_moved_row_is_unclaimed(self, bench: WakeBench) -> None:
        ours, theirs = bench.open(), bench.open()
        row, held = WakeRow("e", NOW, "refusal", 7), WakeRow("e", NOW + 9, "refusal", 7, 1)
        await ours.schedule([row])
        assert await ours.claim(row, "n1", LONG)
        assert await ours.move("e", NOW, held)
        assert await theirs.claim(held, "n2", LONG)

    async def test_the_rows_of_an_execution_are_its_own(self, bench: WakeBench) -> None:
        store = bench.open()
        await store.schedule(
            [WakeRow(i, NOW + n, "timer") for i in ("e", "e1", "E", "e-", "e.x") for n in (2, 0, 1)]
        )
        assert [row.wake_at for row in await store.rows_of("e")] == [NOW, NOW + 1, NOW + 2]
        assert {row.execution_id for row in await store.rows_of("e")} == {"e"}
        assert await store.clear("e") == 3
        assert await store.clear("e") == 0
        assert await store.rows_of("e") == []
        assert len(await store.rows_of("e1")) == 3

    async def test_a_batch_may_be_large(self, bench: WakeBench) -> None:
        store, shards = bench.open(), frozenset(range(bench.partitions))
        rows = [WakeRow(f"e{n % 300}", NOW + n, "timer") for n in range(2_500)]
        await store.schedule(rows)
        await store.schedule([])
        assert await store.count() == len(rows)
        assert await store.due(NOW + 10_000, 5_000, shards=shards) == rows

    async def test_an_unknown_kind_and_a_move_across_executions_are_refused(self, bench: WakeBench) -> None:
        store = bench.open()
        await store.schedule([WakeRow("e", NOW, "timer")])
        for attempt in (
            store.schedule([WakeRow("f", NOW, "timer"), WakeRow("f", NOW, "alarm")]),
            store.move("e", NOW, WakeRow("e", NOW + 1, "alarm")),
            store.move("e", NOW, WakeRow("f", NOW + 1, "timer")),
        ):
            try:
                await attempt
            except ValueError:
                continue
            raise AssertionError("a row that no store can keep was taken")
        assert await store.count() == 1

    async def test_the_epoch_changes_only_when_the_store_is_emptied(self, bench: WakeBench) -> None:
        ours, theirs = bench.open(), bench.open()
        before = await ours.epoch()
        await ours.schedule([WakeRow("e", NOW, "timer")])
        assert await theirs.epoch() == before
        await bench.empty()
        after = await theirs.epoch()
        assert after != before
        assert await ours.epoch() == after

    async def test_every_call_works_on_an_emptied_store(self, bench: WakeBench) -> None:
        store, shards, row = bench.open(), frozenset(range(bench.partitions)), WakeRow("e", NOW, "timer")
        await store.schedule([row])
        await bench.empty()
        assert await store.due(NOW, 10, shards=shards) == []
        assert not await store.claim(row, "n1", LONG)
        assert not await store.complete("e", NOW)
        assert not await store.move("e", NOW, WakeRow("e", NOW + 1, "timer"))
        assert await store.rows_of("e") == []
        assert await store.clear("e") == 0
        assert await store.count() == 0
        await store.schedule([row])
        assert await store.due(NOW, 10, shards=shards) == [row]

    async def test_closing_twice_is_closing_once(self, bench: WakeBench) -> None:
        ours, theirs = bench.open(), bench.open()
        await ours.schedule([WakeRow("e", NOW, "timer")])
        await ours.close()
        await ours.close()
        assert await theirs.count() == 1
