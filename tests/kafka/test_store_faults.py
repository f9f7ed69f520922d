"""The store while the network and the broker fail under load: what was acknowledged is there, once."""

from __future__ import annotations

import asyncio
import random
import threading
import uuid

import pytest
from test_owners import Load, assert_whole, chains

from loom.errors import StoreError
from loom.testing.conformance.event_store.support import started
from loom.testing.proxy import Api, Side
from stores import StoreBench, timed, until

SHORT = {"transaction_timeout_ms": 3_000, "commit_deadline_ms": 1_500, "session_timeout_ms": 6_000}
APIS = (
    Api.PRODUCE,
    Api.FETCH,
    Api.END_TXN,
    Api.ADD_PARTITIONS_TO_TXN,
    Api.LIST_OFFSETS,
    Api.METADATA,
    Api.FIND_COORDINATOR,
    Api.INIT_PRODUCER_ID,
)


def fault(proxy, draw):
    """Do one thing to whatever comes next."""
    api, client = draw.choice(APIS), draw.choice(["owner*", "client*", "*"])
    match draw.randrange(4):
        case 0:
            proxy.cut(api, client)
        case 1:
            proxy.delay(api, draw.choice([50, 300, 1_700]), client)
        case 2:
            proxy.hold(api, client, hang_up=True)
        case _:
            proxy.disconnect()


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize(("seed", "faults"), [(1, 25), (2, 25), pytest.param(3, 500, marks=pytest.mark.soak)])
async def test_random_faults_lose_and_double_nothing(proxied_broker, proxy, tmp_path, seed, faults):
    draw = random.Random(seed)
    prefix = f"t{uuid.uuid4().hex[:12]}."
    bench = StoreBench(proxied_broker.bootstrap, prefix, tmp_path, **SHORT)
    through = f"127.0.0.1:{proxy.port}"
    try:
        owner = await bench.owner("owner", bootstrap=through, max_retakes=1_000)
        client = await bench.client("client", bootstrap=through)
        load = Load([owner, client], chains(bench, 8))
        async with load.going():
            for _ in range(faults):
                fault(proxy, draw)
                await load.grows(draw.randrange(40))
                if draw.random() < 0.3:
                    proxy.clear()
            proxy.clear()
            await until(lambda: len(load.heads) == 8)
            await load.grows(50)
        await assert_whole(client, load)
        direct = await bench.client("direct")
        await assert_whole(direct, load)
    finally:
        proxy.clear()
        await bench.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("outage_s", [8, pytest.param(30, marks=pytest.mark.soak)])
async def test_a_broker_that_is_away_for_a_while(private_kafka, topic_prefix, tmp_path, outage_s):
    bench = StoreBench(private_kafka.bootstrap, f"{topic_prefix}away.", tmp_path, session_timeout_ms=6_000)
    try:
        owner, client = await bench.owner("owner"), await bench.client("client")
        load = Load([owner, client], chains(bench, 8))
        async with load.going():
            await load.grows(100)
            await asyncio.to_thread(private_kafka.kill)
            await asyncio.sleep(outage_s)
            await asyncio.to_thread(private_kafka.restart)
            await until(lambda: len(owner.owned()) == 2, 60)
            await load.grows(100)
        await assert_whole(client, load)
    finally:
        await bench.close()


@pytest.mark.timeout(120)
async def test_a_store_closes_in_time_while_the_broker_is_away(private_kafka, tmp_path):
    bench = StoreBench(private_kafka.bootstrap, "away.", tmp_path, session_timeout_ms=6_000)
    owner, client = await bench.owner("owner"), await bench.client("client")
    waiting = []
    for store in (owner, client):
        await store.append(started(bench.chain(), fence=None))
    await asyncio.to_thread(private_kafka.kill)
    for store in (owner, client):
        waiting += [asyncio.ensure_future(store.append(started(bench.chain(n), fence=None))) for n in (0, 1)]
    await asyncio.sleep(1)  # so that the writer is in the middle of it
    with timed(15):
        await bench.close()
    outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
    assert all(isinstance(outcome, StoreError) for outcome in outcomes), outcomes
    await until(lambda: not [t for t in threading.enumerate() if t.name.startswith("loom-")], 20)


async def test_what_a_store_left_under_way_when_it_closed_is_told_as_it_is(proxied_broker, proxy, tmp_path):
    """The writer reads what became of it after the store has gone: whom it asks must still be there."""
    prefix = f"t{uuid.uuid4().hex[:12]}."
    bench = StoreBench(proxied_broker.bootstrap, prefix, tmp_path, **SHORT)
    try:
        owner = await bench.owner("owner", bootstrap=f"127.0.0.1:{proxy.port}", close_ms=300)
        await owner.append(started(bench.chain(0), fence=None))
        held = proxy.hold(Api.END_TXN, "owner*", Side.REPLY)
        committed = asyncio.ensure_future(owner.append(started(bench.chain(0), fence=None)))
        assert await asyncio.to_thread(held.caught.wait, 10)
        await owner.close()
        assert not committed.done()
        assert (await asyncio.wait_for(committed, 10)).head == 0
        await until(lambda: not [t for t in threading.enumerate() if t.name.startswith("loom-")], 20)
    finally:
        proxy.clear()
        await bench.close()
