"""What every SnapshotStore does (``loom.stores.contracts.SnapshotStore``): subclass it and give the fixture ``bench``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from loom.stores.contracts import Snapshot

if TYPE_CHECKING:
    from loom.schemas.envelope import Json
    from loom.stores.contracts import SnapshotStore


class SnapshotBench(Protocol):
    """A snapshot store under test."""

    def open(self) -> SnapshotStore:
        """Return another handle on the one store, as another node has."""
        ...


class SnapshotStoreConformance:
    """The suite. What one handle saved, every other loads."""

    async def test_what_is_saved_is_loaded(self, bench: SnapshotBench) -> None:
        snapshot = Snapshot(
            "e", 7, {"a": [1, {"b": None}], "text": "ä\u0000\U0001f600"}, {"schema": "1.25.0"}
        )
        await bench.open().save(snapshot)
        assert await bench.open().load_latest("e") == snapshot
        assert await bench.open().load_latest("never") is None

    async def test_the_later_snapshot_stands(self, bench: SnapshotBench) -> None:
        store = bench.open()
        for sequence in (3, 9, 5, 0):
            await store.save(Snapshot("e", sequence, {"at": sequence}))
        assert await store.load_latest("e") == Snapshot("e", 9, {"at": 9})

    async def test_racing_saves_leave_the_latest(self, bench: SnapshotBench) -> None:
        handles = [bench.open() for _ in range(4)]
        saves = [handles[n % 4].save(Snapshot("e", n, {"at": n})) for n in (5, 19, 2, 17, 11, 3, 13, 7)]
        await asyncio.gather(*saves)
        assert await handles[0].load_latest("e") == Snapshot("e", 19, {"at": 19})

    async def test_saving_the_same_again_changes_nothing(self, bench: SnapshotBench) -> None:
        store, snapshot = bench.open(), Snapshot("e", 3, {"a": 1})
        await store.save(snapshot)
        await store.save(snapshot)
        assert await store.load_latest("e") == snapshot

    async def test_deleting_is_idempotent_and_leaves_others(self, bench: SnapshotBench) -> None:
        store = bench.open()
        await store.save(Snapshot("e", 3, {}))
        await store.save(Snapshot("f", 3, {}))
        await store.delete("e")
        await store.delete("e")
        await store.delete("never")
        assert await store.load_latest("e") is None
        assert await store.load_latest("f") is not None

    async def test_a_deleted_slot_takes_an_earlier_snapshot(self, bench: SnapshotBench) -> None:
        store = bench.open()
        await store.save(Snapshot("e", 9, {"at": 9}))
        await store.delete("e")
        await store.save(Snapshot("e", 2, {"at": 2}))
        assert await store.load_latest("e") == Snapshot("e", 2, {"at": 2})

    async def test_a_saved_state_is_not_the_callers_object(self, bench: SnapshotBench) -> None:
        store = bench.open()
        state: dict[str, Json] = {"list": [1]}
        await store.save(Snapshot("e", 3, state))
        state["list"].append(2)
        loaded = await store.load_latest("e")
        assert loaded is not None
        assert loaded.state == {"list": [1]}
        loaded.state["list"].append(3)
        assert await store.load_latest("e") == Snapshot("e", 3, {"list": [1]})

    async def test_closing_twice_is_closing_once(self, bench: SnapshotBench) -> None:
        ours, theirs = bench.open(), bench.open()
        await ours.save(Snapshot("e", 3, {}))
        await ours.close()
        await ours.close()
        assert await theirs.load_latest("e") is not None
