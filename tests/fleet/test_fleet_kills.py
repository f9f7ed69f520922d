"""Kill -9 of workers under load: everything completes, every result and message is used once, in order."""

import asyncio
import random
from collections import Counter

import pytest
from fleet_support import stubborn

from loom.schemas.envelope import Kind

MESSAGES = 3


async def drive(client, number):
    """One execution from outside: start it, send its messages (each twice), wait for its end."""
    handle = await stubborn(lambda: client.start("busy", number))
    for message in range(MESSAGES):
        for _ in range(2):
            await stubborn(
                lambda message=message: client.send(
                    handle.execution_id, "go", message, message_id=f"m{message}", sender="test"
                )
            )
    return handle.execution_id, await handle.result(timeout=600)


class Kills:
    """How many have happened."""

    def __init__(self):
        self.done = 0

    async def reach(self, count):
        while self.done < count:
            await asyncio.sleep(0.05)


async def after(kills, count, call, *args):
    await kills.reach(count)
    return await call(*args)


async def up(fleet, name, finished):
    async with asyncio.timeout(120):
        while not (fleet.is_up(name) or finished.is_set()):
            await asyncio.sleep(0.05)


async def assassin(fleet, names, kills, most, finished, rng):
    """Kill one worker after the other, each a random while after it went to work, and start it again at once."""
    while kills.done < most and not finished.is_set():
        name = rng.choice(names)
        await up(fleet, name, finished)
        try:
            async with asyncio.timeout(rng.uniform(0.5, 3.0)):
                await finished.wait()
        except TimeoutError:
            fleet.kill(name)
            fleet.start_worker(name)
            kills.done += 1


async def kill_under_load(fleet, *, executions, kills, seed):
    """The executions begin as kills go on, the last ones after the last kill: each kill finds some at work."""
    rng = random.Random(seed)
    names = ["north", "south"]
    for name in names:
        fleet.start_worker(name)
    finished = asyncio.Event()
    for name in names:
        await up(fleet, name, finished)
    async with fleet.client() as client:
        happened = Kills()
        killer = asyncio.create_task(assassin(fleet, names, happened, kills, finished, rng))
        waves = [
            asyncio.create_task(after(happened, number * kills // (executions - 1), drive, client, number))
            for number in range(executions)
        ]
        try:
            results = dict(await asyncio.gather(*waves))
        finally:
            finished.set()
            await killer
            for wave in waves:
                wave.cancel()
        histories = {
            execution: await stubborn(lambda e=execution: client.history(e)) for execution in results
        }
    return results, histories, happened.done


def judge(results, histories, effects):
    """Results against the logs, the logs against the world."""
    assert sorted(result["number"] for result in results.values()) == list(range(len(results)))
    for execution, result in results.items():
        log = histories[execution]
        assert [event.sequence for event in log] == list(range(len(log)))
        assert result["messages"] == list(range(MESSAGES))
        completed = [event.data for event in log if event.type == Kind.STEP_COMPLETED]
        assert max(Counter(step["siteId"] for step in completed).values()) == 1
        assert sorted(result["steps"]) == sorted(step["output"] for step in completed)
        done = [token for (owner, _), tokens in effects.items() if owner == execution for token in tokens]
        assert set(result["steps"]) <= set(done)
        answers = [e.data for e in log if e.type == Kind.MESSAGE_CONSUMED and "siteId" in e.data]
        assert [answer["payload"] for answer in answers] == list(range(MESSAGES))
        assert [answer["inboxSeq"] for answer in answers] == sorted(answer["inboxSeq"] for answer in answers)
        assert log[-1].type == Kind.EXECUTION_COMPLETED
        assert sum(event.type == Kind.EXECUTION_COMPLETED for event in log) == 1


@pytest.mark.timeout(400)
async def test_workers_are_killed_under_load(fleet):
    results, histories, killed = await kill_under_load(fleet, executions=30, kills=4, seed=1)
    judge(results, histories, fleet.effects())
    assert killed == 4


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1])
async def test_fifty_kills_under_two_hundred_executions(fleet, seed):
    results, histories, killed = await kill_under_load(fleet, executions=200, kills=50, seed=seed)
    judge(results, histories, fleet.effects())
    assert killed == 50
    print(f"{killed} kills, {len(results)} executions")  # noqa: T201
