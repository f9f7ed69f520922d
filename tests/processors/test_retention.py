"""Retention on its own: what is swept, and what is left for the next time."""

from loom.errors import StorageWriteError
from loom.processors.retention import Retention
from loom.runtime.removal import RemovalReport


class Remover:
    def __init__(self, faults=(), kept=()):
        self.asked, self.faults, self.kept = [], list(faults), kept

    async def expire_chain(self, chain_id, last_id, ended_before):
        assert last_id == chain_id + "9"
        self.asked.append((chain_id, ended_before))
        if chain_id in self.faults:
            raise StorageWriteError(chain_id, "a fault")
        return None if chain_id in self.kept else RemovalReport(chain_id, (chain_id,))


def retention(remover, owned, finished, **more):
    def read(partition, before, limit):
        assert before == 900
        return [(chain, chain + "9") for chain in finished[partition]][:limit]

    return Retention(100, remover, lambda: frozenset(owned), read, now=lambda: 1_000, **more)


async def test_a_sweep_removes_what_ended_before_in_the_partitions_written_here():
    remover = Remover(kept=("b",))
    swept = retention(remover, {0, 2}, {0: ["a", "b"], 1: ["c"], 2: ["d"]})
    assert await swept.sweep() == (2, False)
    assert remover.asked == [("a", 900), ("b", 900), ("d", 900)]


async def test_a_chain_that_cannot_be_removed_now_stops_no_other():
    remover = Remover(faults=("a",))
    assert await retention(remover, {0}, {0: ["a", "b"]}).sweep() == (1, False)


async def test_a_full_sweep_says_that_more_may_be_left_unless_it_removed_nothing():
    finished = {0: ["a", "b", "c"]}
    assert await retention(Remover(), {0}, finished, max_a_sweep=2).sweep() == (2, True)
    assert await retention(Remover(kept="abc"), {0}, finished, max_a_sweep=2).sweep() == (0, False)
