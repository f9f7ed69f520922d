"""Several owners of one log: they share it, hand it over, are killed, blocked and fenced; what was acknowledged stays."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from loom.errors import LoomError, OutcomeUnknownError, WrongHeadError
from loom.testing.conformance.event_store.support import started, steps
from stores import StoreBench, until

pytestmark = pytest.mark.timeout(240)

SESSION_MS = 6_000
LONG_SESSION_MS = 70_000
"""Much longer than ``until`` waits, and so longer than what is left of it when a killed process is up again."""


@pytest.fixture
async def bench(kafka_bootstrap, topic_prefix, tmp_path):
    bench = StoreBench(kafka_bootstrap, topic_prefix, tmp_path, partitions=4, session_timeout_ms=SESSION_MS)
    yield bench
    await bench.close()


class OwnerProcess:
    def __init__(self, process):
        self.process = process
        self.owned = 0
        self.said = []

    async def read(self):
        async for line in self.process.stdout:
            words = line.decode().split()
            self.said.append(words[0])
            if words[0] == "owned":
                self.owned = int(words[1])

    def tell(self, text):
        self.process.stdin.write(f"{text}\n".encode())

    def kill(self, number=signal.SIGKILL):
        self.process.send_signal(number)


@asynccontextmanager
async def owner_process(bench, node, **settings):
    given = {
        "bootstrap": bench.bootstrap,
        "node": node,
        "topic_prefix": bench.prefix,
        "partitions": bench.partitions,
        "data_dir": str(bench.folder),
        "session_timeout_ms": SESSION_MS,
    } | settings
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("owner_process.py")),
        json.dumps(given),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    owner = OwnerProcess(process)
    reading = asyncio.ensure_future(owner.read())
    try:
        yield owner
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading


class Load:
    """Appends to many streams at once; every stream is one writer's, so the expected heads are known."""

    def __init__(self, stores, chains):
        self.stores, self.chains = stores, chains
        self.heads = {}
        self.acknowledged = 0
        self.slowest_s = 0.0
        self.stopping = False
        self.running = []

    async def run(self, stream_id, place):
        await self.append(place, started(stream_id, fence=None))
        head = 0
        while not self.stopping:
            await self.append(place, steps(stream_id, head))
            head += 1
            self.heads[stream_id] = head

    async def append(self, place, append):
        """Repeat it unchanged until it is acknowledged, as a driver does; a wrong head would be a lost or doubled event."""
        while True:
            store = self.stores[place % len(self.stores)]
            began = time.monotonic()
            try:
                await store.append(append, deadline_ms=30_000)
            except WrongHeadError:
                raise
            except LoomError as error:
                if not error.retryable:
                    raise
                continue
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            self.acknowledged += 1
            return

    @asynccontextmanager
    async def going(self):
        self.running = [asyncio.ensure_future(self.run(c, n)) for n, c in enumerate(self.chains)]
        try:
            yield self
            await self.ends()
        finally:
            for task in self.running:
                task.cancel()
            await asyncio.gather(*self.running, return_exceptions=True)

    async def ends(self):
        """Stop once everything asked for is acknowledged; somebody has to own the partitions until then."""
        self.stopping = True
        await asyncio.wait_for(asyncio.gather(*self.running), 60)

    async def grows(self, count):
        wanted = self.acknowledged + count
        await until(lambda: self.acknowledged >= wanted)


async def assert_whole(store, load):
    for stream_id in load.chains:
        events = await store.read(stream_id, limit=100_000)
        assert [e.sequence for e in events] == list(range(len(events)))
        assert [e.id for e in events] == [f"{stream_id}#{n}" for n in range(len(events))]
        assert len(events) == load.heads[stream_id] + 1


def chains(bench, count):
    return [bench.chain(n % bench.partitions) for n in range(count)]


async def test_owners_share_and_take_over_from_one_that_stops(bench):
    one = await bench.owner("one", session_timeout_ms=LONG_SESSION_MS)
    two = await bench.owner("two", partitions=1)
    await until(lambda: len(one.owned()) == len(two.owned()) == 2)
    assert not one.owned() & two.owned()
    load = Load([one, two], chains(bench, 12))
    async with load.going():
        await load.grows(200)
        load.stores = [two]
        began = time.monotonic()
        await one.close()
        await until(lambda: len(two.owned()) == 4)
        assert time.monotonic() - began < LONG_SESSION_MS / 1000
        await load.grows(200)
        three = await bench.owner("three", partitions=2)
        load.stores = [two, three]
        await load.grows(200)
    await assert_whole(three, load)


async def test_a_client_is_served_through_every_move(bench):
    client = await bench.client()
    await bench.owner("one")
    load = Load([client], chains(bench, 8))
    async with load.going():
        await load.grows(50)
        two = await bench.owner("two", partitions=2)
        await load.grows(50)
        for shard in range(4):
            await asyncio.to_thread(bench.fence, shard)
        await load.grows(50)
        await bench.stores[1].close()
        await until(lambda: len(two.owned()) == 4)
        await load.grows(50)
    await assert_whole(client, load)


async def test_after_kill_9_another_owner_takes_over_within_a_session(bench):
    client = await bench.client()
    load = Load([client], chains(bench, 8))
    async with owner_process(bench, "victim") as victim:
        await until(lambda: victim.owned == 4)
        survivor = await bench.owner("survivor", partitions=2)
        async with load.going():
            await load.grows(100)
            victim.kill()
            await until(lambda: len(survivor.owned()) == 4)
            await load.grows(100)
    await assert_whole(survivor, load)


async def test_the_same_node_comes_back_at_once_after_kill_9(bench):
    client = await bench.client()
    load = Load([client], chains(bench, 8))
    async with load.going():
        async with owner_process(bench, "same", session_timeout_ms=LONG_SESSION_MS) as first:
            await until(lambda: first.owned == 4)
            await load.grows(100)
            first.kill()
            await first.process.wait()
        async with owner_process(bench, "same") as again:
            began = time.monotonic()
            await until(lambda: again.owned == 4)
            assert (
                time.monotonic() - began < LONG_SESSION_MS / 1000
            )  # the session of the first was not waited for
            await load.grows(100)
            await until(lambda: len(load.heads) == 8)
            await load.ends()
            again.tell("close")
            await until(lambda: "closed" in again.said)
    await bench.owner("other")
    await assert_whole(client, load)


async def test_a_blocked_event_loop_does_not_keep_its_partitions(bench):
    bounds = {"max_poll_interval_ms": SESSION_MS, "loop_bound_ms": 1_000}
    client = await bench.client()
    load = Load([client], chains(bench, 8))
    async with owner_process(bench, "blocked", **bounds) as blocked:
        await until(lambda: blocked.owned == 4)
        other = await bench.owner("other", partitions=2)
        await until(lambda: blocked.owned == 2)
        async with load.going():
            await load.grows(50)
            blocked.tell(f"block {3 * SESSION_MS / 1000}")
            await until(lambda: len(other.owned()) == 4)
            assert "unblocked" not in blocked.said
            await load.grows(50)
            await until(lambda: blocked.owned == 2)  # it joins again once its loop runs
            await load.grows(50)
        await assert_whole(client, load)


async def test_a_stopped_owner_that_resumes_steps_down(bench):
    client = await bench.client()
    load = Load([client], chains(bench, 8))
    async with owner_process(bench, "stopped") as stopped:
        await until(lambda: stopped.owned == 4)
        other = await bench.owner("other", partitions=2)
        await until(lambda: stopped.owned == 2)
        async with load.going():
            await load.grows(100)
            stopped.kill(signal.SIGSTOP)
            await until(lambda: len(other.owned()) == 4)
            await load.grows(50)
            stopped.kill(signal.SIGCONT)
            await until(lambda: len(other.owned()) == 2)
            await load.grows(50)
        await assert_whole(client, load)


@pytest.mark.parametrize("rounds", [100, pytest.param(1_000, marks=pytest.mark.soak)])
async def test_of_two_stores_that_race_exactly_one_wins_each_round(bench, rounds):
    one, two = await bench.owner("one"), await bench.client()
    stream_id = bench.chain()
    await one.append(started(stream_id, fence=None))
    wins = {"one": 0, "two": 0}

    async def race(store, name, head):
        event = steps(stream_id, head).events[0]
        mine = type(event)(f"{name}:{head}", event.type, {"by": name}, event.metadata)
        try:
            await store.append(type(steps(stream_id, head))(stream_id, (mine,), expected_head=head))
        except WrongHeadError:
            return 0
        except OutcomeUnknownError:
            pytest.fail("an outcome stayed unknown")
        wins[name] += 1
        return 1

    for head in range(rounds):
        # the client's request takes longer: the owner waits for it, now more, now less
        later = asyncio.ensure_future(race(two, "two", head))
        await asyncio.sleep((head % 10) / 1_000)
        assert await race(one, "one", head) + await later == 1
    events = await two.read(stream_id, limit=rounds + 1)
    assert [e.sequence for e in events] == list(range(rounds + 1))
    assert all(wins.values()), wins
