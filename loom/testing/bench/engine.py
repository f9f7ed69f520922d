"""Measurements of the engine on a broker and a Redis beside it."""

from __future__ import annotations

import asyncio
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from loom.config import Config
from loom.ids import ulid
from loom.processors.fold import FoldService
from loom.processors.fold_partition import FoldSettings
from loom.runtime import Client
from loom.schemas.envelope import Kind, NewEvent
from loom.stores.contracts import StreamAppend
from loom.testing.bench.apart import apart
from loom.testing.bench.fleet import PAYLOAD, fleet, make_topics, many_steps, one_step, parked
from loom.testing.bench.references import Figure, plain_read, summarise
from loom.topics.catalogue import Catalogue
from loom.topics.partitioner import mint

if TYPE_CHECKING:
    from loom.runtime import Runtime

WARM_S: Final = 1.5
AT_ONCE: Final = 256
MOST_LOGS: Final = 1_000_000
CHECKPOINT_S: Final = 10.0
"""In that time a node that serves has written its first checkpoint."""


async def executions(
    bootstrap: str,
    redis_url: str | None,
    *,
    concurrency: int,
    seconds: float,
    spread: bool = False,
    **settings: Any,
) -> Figure:
    """One-step executions a second through one process, ``concurrency`` at a time; ``spread``: over all partitions."""
    latencies: list[float] = []
    async with fleet(bootstrap, redis_url, **settings) as runtime:
        partitions = runtime.config.partitions
        from_ = time.perf_counter() + WARM_S
        ends = from_ + seconds

        async def one(number: int) -> None:
            while (began := time.perf_counter()) < ends:
                chosen = mint(number % partitions, partitions) if spread else None
                handle = await runtime.start(one_step, PAYLOAD, execution_id=chosen)
                await handle.result()
                if began >= from_:
                    latencies.append(time.perf_counter() - began)

        await asyncio.gather(*(one(number) for number in range(concurrency)))
    return summarise(latencies, seconds)


async def appends(bootstrap: str, *, in_flight: int, seconds: float, **settings: Any) -> tuple[Figure, float]:
    """Records a second of conditional appends of three events; and records a transaction."""
    done = 0
    async with fleet(bootstrap, None, partitions=1, **settings) as runtime:
        events: Any = runtime.stores.events
        from_ = time.perf_counter() + WARM_S
        ends = from_ + seconds

        async def one() -> None:
            nonlocal done
            stream, head = mint(0, 1), -1
            while (began := time.perf_counter()) < ends:
                batch = tuple(
                    NewEvent(ulid(), "STEP_COMPLETED", {"siteId": "0:0", "output": PAYLOAD}) for _ in range(3)
                )
                head = (await events.append(StreamAppend(stream, batch, expected_head=head))).head
                if began >= from_:
                    done += 3

        await asyncio.gather(*(one() for _ in range(in_flight)))
    return Figure(done / seconds), 3 * in_flight


async def wakes(bootstrap: str, redis_url: str | None, *, count: int, **settings: Any) -> Figure:
    """From ``send`` to the completion of a flow parked on ``receive``, one at a time."""
    latencies: list[float] = []
    async with fleet(bootstrap, redis_url, **settings) as runtime:
        for number in range(count + count // 10):
            handle = await runtime.start(parked, None)
            await is_parked(runtime, handle.execution_id)
            began = time.perf_counter()
            await runtime.send(handle.execution_id, "go", PAYLOAD)
            await handle.result()
            if number >= count // 10:
                latencies.append(time.perf_counter() - began)
    return summarise(latencies, sum(latencies))


async def wakes_by_request(bootstrap: str, redis_url: str | None, *, count: int, **settings: Any) -> Figure:
    """As :func:`wakes`, sent by a client that owns nothing: the message is a request to the owner."""
    latencies: list[float] = []
    async with (
        fleet(bootstrap, redis_url, **settings) as runtime,
        Client(runtime.config.model_copy(update={"node_id": "bench-client"})) as client,
    ):
        for number in range(count + count // 10):
            handle = await runtime.start(parked, None)
            await is_parked(runtime, handle.execution_id)
            began = time.perf_counter()
            await client.send(handle.execution_id, "go", PAYLOAD)
            await handle.result()
            if number >= count // 10:
                latencies.append(time.perf_counter() - began)
    return summarise(latencies, sum(latencies))


async def evicted_wakes(bootstrap: str, redis_url: str | None, *, count: int, **settings: Any) -> Figure:
    """As :func:`wakes`, of flows that left memory when they parked: each is replayed first."""
    return await wakes(bootstrap, redis_url, count=count, max_resident=0, **settings)


async def folded(
    bootstrap: str, redis_url: str | None, *, concurrency: int, seconds: float, **settings: Any
) -> tuple[Figure, float, int]:
    """As :func:`executions`, with the fold service in the same process; also its events a second and its last lag."""
    prefix = f"bench{uuid.uuid4().hex[:8]}."
    config = Config(bootstrap=bootstrap, topic_prefix=prefix)
    await asyncio.to_thread(make_topics, config)
    fold = FoldService(FoldSettings(bootstrap, Catalogue(prefix, config.partitions), "bench"))
    fold.start()
    try:
        began = time.perf_counter()
        done = await executions(
            bootstrap, redis_url, concurrency=concurrency, seconds=seconds, prefix=prefix, **settings
        )
        stats, took = fold.stats(), time.perf_counter() - began
    finally:
        await asyncio.to_thread(fold.stop)
    return done, stats.events / took, sum(stats.lag.values())


async def steps(bootstrap: str, redis_url: str | None, *, count: int, **settings: Any) -> float:
    """Seconds for ``count`` steps one after the other, from start to result."""
    async with fleet(bootstrap, redis_url, **settings) as runtime:
        await (await runtime.start(many_steps, 50)).result()
        began = time.perf_counter()
        await (await runtime.start(many_steps, count)).result()
        return time.perf_counter() - began


async def park_many(runtime: Runtime, count: int) -> None:
    """Start executions that park, ``AT_ONCE`` at a time; return once all are parked."""

    async def some(number: int) -> None:
        for _ in range(number):
            await runtime.start(parked, PAYLOAD)

    shares = [count // AT_ONCE + (share < count % AT_ONCE) for share in range(AT_ONCE)]
    await asyncio.gather(*map(some, shares))
    async with asyncio.timeout(60):
        while not all_parked(runtime.stores.events):  # noqa: ASYNC110 - nothing announces a park
            await asyncio.sleep(0.2)


def all_parked(events: Any) -> bool:
    """Whether every open log of the shards that are written here rests: as the log says, for those too that left memory."""
    logs = (info for shard in events.owned() for info in events.open_logs(shard, limit=MOST_LOGS))
    return all(info.status == Kind.EXECUTION_SUSPENDED for info in logs)


async def is_parked(runtime: Runtime, execution_id: str) -> None:
    """Wait until an execution rests."""
    async with asyncio.timeout(60):
        while await runtime.parked_at_sequence(execution_id) is None:  # noqa: ASYNC110 - nothing announces a park
            await asyncio.sleep(0.002)


@dataclass(frozen=True, slots=True)
class Starts:
    """Seconds until a node that starts serves one partition; and that a plain consumer takes to read it."""

    full: float
    with_checkpoint: float
    empty: float
    plain_read: float


def takeover(bootstrap: str, *, events: int) -> Starts:
    """How long a node takes to start over a log of ``events`` events. One process fills it, and each node is another."""
    prefix = apart(_made, bootstrap)
    empty = apart(_opened, bootstrap, prefix, {}, 0.0)
    apart(_filled, bootstrap, prefix, events)
    with tempfile.TemporaryDirectory(prefix="loom-bench-") as folder:
        kept = {"data_dir": Path(folder), "node_id": "bench-kept"}
        full = apart(_opened, bootstrap, prefix, kept, CHECKPOINT_S)
        warm = apart(_opened, bootstrap, prefix, kept, 0.0)
    return Starts(full, warm, empty, apart(plain_read, bootstrap, Catalogue(prefix, 1).executions))


def _made(bootstrap: str) -> str:
    """The prefix of a new log of one partition."""

    async def make() -> str:
        async with fleet(bootstrap, None, partitions=1) as runtime:
            return runtime.config.topic_prefix

    return asyncio.run(make())


def _filled(bootstrap: str, prefix: str, events: int) -> None:
    async def write() -> None:
        async with fleet(bootstrap, None, partitions=1, prefix=prefix) as runtime:
            await fill(runtime, events)

    asyncio.run(write())


def _opened(bootstrap: str, prefix: str, settings: dict[str, Any], stays_s: float) -> float:
    """Seconds from opening a node to its owning the one partition, where it then stays for a while."""

    async def open_node() -> float:
        began = time.perf_counter()
        async with fleet(bootstrap, None, partitions=1, prefix=prefix, **settings):
            took = time.perf_counter() - began
            await asyncio.sleep(stays_s)
        return took

    return asyncio.run(open_node())


async def fill(runtime: Runtime, count: int) -> None:
    """Append finished executions of ten events until there are ``count`` events."""
    store: Any = runtime.stores.events

    async def one() -> None:
        batch = tuple(
            NewEvent(ulid(), "EXECUTION_COMPLETED" if last else "STEP_COMPLETED", {"output": PAYLOAD})
            for last in [False] * 9 + [True]
        )
        await store.append(StreamAppend(mint(0, 1), batch, expected_head=-1))

    for _ in range(count // (10 * AT_ONCE) + 1):
        await asyncio.gather(*(one() for _ in range(AT_ONCE)))
