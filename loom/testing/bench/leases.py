"""What leases cost: one-step executions without them, with lazy and with eager ones, and what Redis is asked meanwhile.

The modes take turns in short windows of one process, so that what else the machine does meets each alike.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import redis as redis_client

from loom.testing.bench.fleet import PAYLOAD, fleet, one_step

if TYPE_CHECKING:
    from loom.runtime import Runtime

MODES: Final[dict[str, dict[str, Any]]] = {
    "off": {"enabled": False},
    "lazy": {"acquire": "lazy"},
    "eager": {"acquire": "eager"},
}
CONCURRENCY: Final = 256
WINDOW_S: Final = 1.0
COUNTED: Final = 1_000


@dataclass(slots=True)
class Cost:
    """Of one mode: executions, seconds of the clock and of the processor of each window; and calls of Redis.

    ``calls`` are what the node asks of Redis for 1,000 executions (a script is one call), its rhythms included.
    """

    windows: list[tuple[int, float, float]] = field(default_factory=list)
    calls: int = 0

    @property
    def per_second(self) -> float:
        """Executions a second, in the median window."""
        return statistics.median(done / wall_s for done, wall_s, _ in self.windows)

    @property
    def cpu_us(self) -> float:
        """Microseconds of processor time of an execution, all threads, in the best window: the least disturbed."""
        return min(cpu_s / done for done, _, cpu_s in self.windows) * 1e6


async def costs(bootstrap: str, redis_url: str, *, seconds: float) -> dict[str, Cost]:
    """Each mode's cost, from ``seconds`` of windows each."""
    found = {mode: Cost() for mode in MODES}
    for mode, settings in MODES.items():
        async with fleet(bootstrap, redis_url, partitions=2, leases=settings) as runtime:
            await _many(runtime, COUNTED)  # warm
            before = _calls(redis_url)
            await _many(runtime, COUNTED)
            found[mode].calls = _calls(redis_url) - before
    async with AsyncExitStack() as stack:
        runtimes = {
            mode: await stack.enter_async_context(
                fleet(bootstrap, redis_url, partitions=2, leases=settings, node_id=f"bench-{mode}")
            )
            for mode, settings in MODES.items()
        }
        for runtime in runtimes.values():
            await _many(runtime, COUNTED)
        order = list(runtimes)
        for turn in range(max(2, round(seconds / WINDOW_S))):
            for mode in order if turn % 2 else reversed(order):
                await _window(runtimes[mode], found[mode])
    return found


async def _window(runtime: Runtime, cost: Cost) -> None:
    wall, cpu = time.perf_counter(), time.process_time()
    ends = wall + WINDOW_S

    async def one() -> int:
        done = 0
        while time.perf_counter() < ends:
            await (await runtime.start(one_step, PAYLOAD)).result()
            done += 1
        return done

    done = sum(await asyncio.gather(*(one() for _ in range(CONCURRENCY))))
    cost.windows.append((done, time.perf_counter() - wall, time.process_time() - cpu))


async def _many(runtime: Runtime, count: int) -> None:
    handles = await asyncio.gather(*(runtime.start(one_step, PAYLOAD) for _ in range(count)))
    await asyncio.gather(*(handle.result() for handle in handles))


def _calls(redis_url: str) -> int:
    """How often scripts were called, by whomever."""
    with redis_client.Redis.from_url(redis_url) as admin:
        stats: Any = admin.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "eval"))
