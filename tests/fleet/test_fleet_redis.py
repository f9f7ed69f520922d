"""Redis holds evidence and alarms only: emptied, everything carries on, and each alarm rings once."""

import asyncio
from collections import Counter

import pytest
import redis as redis_client
from fleet_support import stubborn

from loom.schemas.envelope import Kind


async def flush_with_alarms(fleet, private_redis, *, count, seconds):
    fleet.start_worker("north")
    async with fleet.client() as client:
        room = asyncio.Semaphore(64)

        async def start():
            async with room:
                return await stubborn(lambda: client.start("sleeper", seconds))

        handles = await asyncio.gather(*(start() for _ in range(count)))
        wakes = client.stores.wakes
        async with asyncio.timeout(seconds):
            while await wakes.count() < count:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        with redis_client.Redis.from_url(private_redis.url) as admin:
            admin.flushall()
        results = await asyncio.gather(*(handle.result(timeout=240) for handle in handles))
        fired = Counter()
        for handle in handles:
            log = await stubborn(lambda handle=handle: client.history(handle.execution_id))
            fired[sum(event.type == Kind.EXECUTION_RESUMED for event in log)] += 1
    assert len(set(results)) == count
    assert fired == {1: count}
    assert all(len(tokens) == 1 for tokens in fleet.effects().values())


@pytest.mark.timeout(300)
async def test_a_flushed_redis_loses_no_alarm(fleet, private_redis):
    await flush_with_alarms(fleet, private_redis, count=60, seconds=12)


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_a_thousand_alarms_outlive_a_flush(fleet, private_redis):
    await flush_with_alarms(fleet, private_redis, count=1000, seconds=60)
