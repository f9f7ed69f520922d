"""A mixed fleet on one Kafka and Redis, under kill -9: what is sealed reaches capable nodes only, and all of it completes.

Four worker processes: one capable, one without keys, one that opens fewer paths, one with another key-encryption key.
"""

import asyncio
import base64
import json
import random

import pytest
from fleet_support import stubborn

from loom import ExecutionAlreadyExistsError
from loom.ids import inbox_stream
from loom.schemas.envelope import Kind
from loom.stores.keys.redis import RedisKeyStore
from loom.stores.keys.wrapping import load_kek

CAPABLE = "capable"
SENSITIVE = {
    "EXECUTION_STARTED": ["input"],
    "STEP_COMPLETED": ["output"],
    "EXECUTION_COMPLETED": ["output"],
}
SECRET = "planted-plaintext-3F"
KEYS = {"LOOM_SEALING__KEYS": "redis", "LOOM_SEALING__KEK": "env:FLEET_KEK"}
MESSAGES = ("a", "b")
AT_ONCE = 96
"""Executions under way: enough for every worker to be killed in the middle of some, few enough for each to go on."""


def kek(letter):
    return base64.b64encode(letter * 32).decode()


KINDS = {
    CAPABLE: KEYS | {"FLEET_KEK": kek(b"k"), "LOOM_SEALING__SENSITIVE": json.dumps(SENSITIVE)},
    "without-keys": {},
    "fewer-paths": KEYS | {"FLEET_KEK": kek(b"k")},
    "other-keys": KEYS | {"FLEET_KEK": kek(b"o"), "LOOM_SEALING__SENSITIVE": json.dumps(SENSITIVE)},
}


@pytest.fixture
def mixed(fleet, monkeypatch):
    monkeypatch.setenv(
        "FLEET_KEK", kek(b"k")
    )  # of the client in this process; workers have theirs, or no keys
    fleet.spawn = lambda name: fleet.start_worker(name, flows="mixed_flows", env=KINDS[name])
    return fleet


def capable_client(fleet):
    return fleet.client(sealing={"keys": "redis", "kek": "env:FLEET_KEK", "sensitive": SENSITIVE})


async def begin(client, number):
    """Start an execution under its own id; that it is taken means that an earlier try was written."""
    execution_id = f"mixed-{number:04d}"
    try:
        return await stubborn(
            lambda: client.start(
                "sealed-busy", f"{SECRET}:{number}", execution_id=execution_id, subject=f"s{number}"
            )
        )
    except ExecutionAlreadyExistsError:
        return client.handle(execution_id)


async def send_all(client, execution_id):
    for at, message in enumerate(MESSAGES):
        await stubborn(
            lambda at=at, message=message: client.send(
                execution_id, "go", f"{SECRET}:{message}", message_id=f"m{at}", sender="test"
            )
        )


async def drive(client, number, room):
    """One execution from outside, as a capable client does it: its input and its messages leave here sealed."""
    async with room:
        handle = await begin(client, number)
        await send_all(client, handle.execution_id)
        return handle.execution_id, await handle.result(timeout=300)


async def assassin(fleet, kills, finished, rng):
    done = 0
    while done < kills and not finished.is_set():
        try:
            async with asyncio.timeout(rng.uniform(0.5, 3.0)):
                await finished.wait()
        except TimeoutError:
            name = rng.choice(sorted(KINDS))
            fleet.kill(name)
            fleet.spawn(name)
            done += 1
            await all_up(fleet)  # on a busy machine a worker takes longer to begin than kills are apart
    return done


async def all_up(fleet, patience_s=240.0):
    async with asyncio.timeout(patience_s):
        while not all(fleet.is_up(name) for name in KINDS):
            await asyncio.sleep(0.05)


async def at_rest(client, stream_id):
    return await stubborn(lambda: client.stores.events.read_at_rest(stream_id, 0, 1000))


async def run_mixed(fleet, *, executions, kills, seed):
    rng = random.Random(seed)
    for name in sorted(KINDS):
        fleet.spawn(name)
    await all_up(fleet)
    finished, room = asyncio.Event(), asyncio.Semaphore(AT_ONCE)
    async with capable_client(fleet) as client:
        waves = [asyncio.create_task(drive(client, number, room)) for number in range(executions)]
        killer = asyncio.create_task(assassin(fleet, kills, finished, rng))
        try:
            results = dict(await asyncio.gather(*waves))
        finally:
            finished.set()
            killed = await killer
            for wave in waves:
                wave.cancel()
        logs = await of_each(results, room, lambda e: stubborn(lambda: client.history(e)))
        resting = await of_each(results, room, lambda e: at_rest(client, e))
        inboxes = await of_each(results, room, lambda e: at_rest(client, inbox_stream(e, "go")))
    return results, logs, resting, inboxes, killed


async def of_each(ids, room, read):
    """What each execution reads as, a few at a time."""

    async def one(execution_id):
        async with room:
            return execution_id, await read(execution_id)

    return dict(await asyncio.gather(*map(one, ids)))


def judge(fleet, results, logs, resting, inboxes):
    for number, execution_id in enumerate(sorted(results)):
        log = logs[execution_id]
        secret = f"{SECRET}:{number}"
        assert results[execution_id] == f"{secret}+{SECRET}:a+{SECRET}:b"
        assert [e.sequence for e in log] == list(range(len(log)))
        assert Kind.EXECUTION_FAILED not in {e.type for e in log}
        assert log[-1].type == Kind.EXECUTION_COMPLETED
        assert "__loomEnc" not in repr(log)
        assert {str(e.metadata["node"]).split(":")[0] for e in log if "node" in e.metadata} == {CAPABLE}
        assert SECRET not in repr(resting[execution_id])
        assert SECRET not in repr(inboxes[execution_id])
        assert len(inboxes[execution_id]) == len(MESSAGES)
    handed = fleet.ledger()
    assert handed
    assert all(str(line["value"]).startswith(SECRET) for line in handed)
    assert "__loomEnc" not in repr(handed)
    assert SECRET not in fleet.tails()
    assert "Traceback" not in fleet.tails()


@pytest.mark.timeout(400)
async def test_a_mixed_fleet_under_kills(mixed):
    found = await run_mixed(mixed, executions=24, kills=2, seed=4)
    judge(mixed, *found[:-1])
    assert found[-1] >= 1


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("executions", [1000])
async def test_a_thousand_executions_in_a_mixed_fleet(mixed, executions):
    """Two idle cores need less than a quarter of an hour."""
    async with asyncio.timeout(1700):
        found = await run_mixed(mixed, executions=executions, kills=40, seed=1)
    judge(mixed, *found[:-1])
    assert found[-1] >= 5
    print(f"{found[-1]} kills, {len(found[0])} executions")  # noqa: T201


@pytest.mark.timeout(400)
async def test_everything_waits_for_a_capable_node(mixed, private_redis):
    """Before there is one, no node writes anything; then all completes, though others own partitions."""
    for name in sorted(KINDS):
        if name != CAPABLE:
            mixed.spawn(name)
    async with capable_client(mixed) as client:
        handles = {}
        for number in range(8):
            handle = await begin(client, number)
            handles[handle.execution_id] = handle
            await send_all(client, handle.execution_id)
        wakes = client.stores.wakes
        async with asyncio.timeout(120):
            while True:
                rows = [await wakes.rows_of(execution_id) for execution_id in handles]
                if all(any(row.kind == "refusal" for row in found) for found in rows):
                    break
                await asyncio.sleep(0.05)
        for execution_id in handles:
            assert [e.type for e in await at_rest(client, execution_id)] == [Kind.EXECUTION_STARTED]
        mixed.spawn(CAPABLE)
        results = {e: await handle.result(timeout=200) for e, handle in handles.items()}
        logs = {e: await client.history(e) for e in results}
        resting = {e: await at_rest(client, e) for e in results}
        inboxes = {e: await at_rest(client, inbox_stream(e, "go")) for e in results}
        keys = RedisKeyStore(private_redis.url, mixed.env["LOOM_TOPIC_PREFIX"], load_kek("env:FLEET_KEK"))
        assert await keys.get("s0") is not None
        await keys.close()
    judge(mixed, results, logs, resting, inboxes)
