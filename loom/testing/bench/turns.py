"""Modes of one engine side by side: each in a process of its own, they take turns in short windows.

What else the machine does meets each alike, and what a mode costs is judged turn by turn: a share of the mode beside it,
with the interval in which its median lies (95 %, from the order of the shares alone).
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import statistics
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from loom.testing.bench.fleet import PAYLOAD, fleet, one_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from multiprocessing.connection import Connection

    from loom.runtime import Runtime

CONCURRENCY: Final = 256
WINDOW_S: Final = 3.0
TURNS_A_SECOND: Final = 4
"""Turns for each second asked for: a share is known to a few percent only after some twenty."""
WARM: Final = 1_000
ANSWER_S: Final = 90.0
"""A process that takes longer to begin, or for a window, has failed."""


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


def take_turns(
    bootstrap: str, redis_url: str, modes: Mapping[str, Mode], *, seconds: float
) -> dict[str, Windows]:
    """One-step executions in every mode, ``TURNS_A_SECOND`` windows of each for each of ``seconds``."""
    found = {name: Windows() for name in modes}
    with ExitStack() as stack:
        nodes = {
            name: stack.enter_context(_node(bootstrap, redis_url, f"bench-{number}", mode))
            for number, (name, mode) in enumerate(modes.items())
        }
        order = list(nodes)
        for turn in range(max(2, round(seconds * TURNS_A_SECOND))):
            # Each follows each other as often as it goes before it.
            for name in order if turn % 2 else reversed(order):
                found[name].taken.append(nodes[name]())
    return found


@contextmanager
def _node(
    bootstrap: str, redis_url: str, node_id: str, mode: Mode
) -> Iterator[Callable[[], tuple[int, float, float]]]:
    """A process with a node of its own, warm; what is yielded runs a window there."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, bootstrap, redis_url, node_id, mode), daemon=True)
    process.start()
    theirs.close()

    def answer() -> Any:
        if not ours.poll(ANSWER_S):
            raise TimeoutError(f"the process of {node_id} does not answer")
        return ours.recv()

    def window() -> tuple[int, float, float]:
        ours.send(True)
        taken: tuple[int, float, float] = answer()
        return taken

    try:
        answer()
        yield window
        ours.send(False)
        process.join(ANSWER_S)
    finally:
        process.kill()
        ours.close()


def _serve(told: Connection, bootstrap: str, redis_url: str, node_id: str, mode: Mode) -> None:
    """In a process of its own: make a node, say so, and run windows as they are asked for."""

    async def serve() -> None:
        async with fleet(bootstrap, redis_url, partitions=2, node_id=node_id, **mode.settings) as runtime:
            await many(runtime, WARM, mode.subject)
            told.send(None)
            while await asyncio.to_thread(told.recv):
                told.send(await _window(runtime, mode.subject))

    asyncio.run(serve())


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
