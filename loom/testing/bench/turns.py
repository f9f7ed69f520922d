"""Modes of one engine side by side: they take turns in short windows of one process.

What else the machine does meets each alike, and what a mode costs is judged turn by turn: a share of the mode beside it,
with the interval in which its median lies (95 %, from the order of the shares alone).
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from loom.testing.bench.fleet import PAYLOAD, fleet, one_step

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loom.runtime import Runtime

CONCURRENCY: Final = 256
WINDOW_S: Final = 1.0
TURNS_A_SECOND: Final = 10
"""Turns for each second asked for: a share is known to a few percent only after some thirty."""
WARM: Final = 1_000


@dataclass(frozen=True, slots=True)
class Mode:
    """A node's settings, and the subject of what is started on it (None: each its own)."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    subject: str | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """A part of what it is compared with: the median over the turns, and the interval in which it lies."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:+.1%} ({self.low:+.1%} to {self.high:+.1%})"


@dataclass(slots=True)
class Windows:
    """Of one mode: executions, seconds of the clock and of the processor (all threads) of each window."""

    taken: list[tuple[int, float, float]] = field(default_factory=list)

    @property
    def per_second(self) -> float:
        """Executions a second, in the median window."""
        return statistics.median(self._rates())

    @property
    def cpu_us(self) -> float:
        """Microseconds of processor time of an execution, in the median window."""
        return statistics.median(self._cpu())

    def slower(self, beside: Windows) -> Share:
        """The share of the other's throughput that this mode costs."""
        return _share([1 - mine / other for mine, other in zip(self._rates(), beside._rates(), strict=True)])

    def dearer(self, beside: Windows) -> Share:
        """The share of the other's processor time that this mode takes on top."""
        return _share([mine / other - 1 for mine, other in zip(self._cpu(), beside._cpu(), strict=True)])

    def _rates(self) -> list[float]:
        return [done / wall_s for done, wall_s, _ in self.taken]

    def _cpu(self) -> list[float]:
        return [cpu_s / done * 1e6 for done, _, cpu_s in self.taken]


async def take_turns(
    bootstrap: str, redis_url: str, modes: Mapping[str, Mode], *, seconds: float
) -> dict[str, Windows]:
    """One-step executions in every mode, ``TURNS_A_SECOND`` windows of each for each of ``seconds``."""
    found = {name: Windows() for name in modes}
    async with AsyncExitStack() as stack:
        runtimes = {
            name: await stack.enter_async_context(
                fleet(bootstrap, redis_url, partitions=2, node_id=f"bench-{number}", **mode.settings)
            )
            for number, (name, mode) in enumerate(modes.items())
        }
        for name, runtime in runtimes.items():
            await many(runtime, WARM, modes[name].subject)
        order = list(runtimes)
        for turn in range(max(2, round(seconds * TURNS_A_SECOND))):
            # Each follows each other as often as it goes before it.
            for name in order if turn % 2 else reversed(order):
                found[name].taken.append(await _window(runtimes[name], modes[name].subject))
    return found


async def many(runtime: Runtime, count: int, subject: str | None = None) -> None:
    """Run so many executions, all at once."""
    handles = await asyncio.gather(*(runtime.start(one_step, PAYLOAD, subject=subject) for _ in range(count)))
    await asyncio.gather(*(handle.result() for handle in handles))


async def _window(runtime: Runtime, subject: str | None) -> tuple[int, float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    ends = wall + WINDOW_S

    async def one() -> int:
        done = 0
        while time.perf_counter() < ends:
            await (await runtime.start(one_step, PAYLOAD, subject=subject)).result()
            done += 1
        return done

    done = sum(await asyncio.gather(*(one() for _ in range(CONCURRENCY))))
    return done, time.perf_counter() - wall, time.process_time() - cpu


def _share(parts: Sequence[float]) -> Share:
    """The median of shares that were taken in pairs, and its interval by the binomial order of them (95 %)."""
    ordered, count = sorted(parts), len(parts)
    reach = 0.98 * math.sqrt(count)
    low, high = math.floor((count - 1) / 2 - reach), math.ceil((count - 1) / 2 + reach)
    return Share(statistics.median(ordered), ordered[max(low, 0)], ordered[min(high, count - 1)])
