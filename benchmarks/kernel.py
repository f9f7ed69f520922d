"""What the kernel costs, without any store: ``python -m benchmarks.kernel``.

Each figure is the best of several rounds, in this process, on one core.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from typing import TYPE_CHECKING

from loom.kernel import Context, DecisionSources, ExecutionState, FlowMachine, RunInfo, flow, fold
from loom.schemas.envelope import Envelope, Kind

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 3
EXECUTIONS = 5_000
STEPS = 10_000
PARKED = 2_000

SOURCES = DecisionSources(now_ms=lambda: 1, random=lambda: 0.5, uuid=lambda: "id")


def work(x: int) -> int:
    return x


@flow("one")
async def one(ctx: Context, x: int) -> int:
    return await ctx.run(work, x)


@flow("many")
async def many(ctx: Context, steps: int) -> None:
    for n in range(steps):
        await ctx.run(work, n)


@flow("parked")
async def parked(ctx: Context) -> object:
    return await ctx.receive("topic")


def machine(definition, value=None) -> FlowMachine:
    return FlowMachine(definition, RunInfo("e", "e", definition.name, value, 1), SOURCES)


def completed(n: int) -> Envelope:
    data = {"siteId": f"0:{n}", "name": "work", "output": 1, "attempt": 1, "at": n}
    return Envelope(str(n), "e", n + 1, Kind.STEP_COMPLETED, n, data)


def best(run: Callable[[], float]) -> float:
    return min(run() for _ in range(ROUNDS))


def one_step() -> float:
    result = completed(0)
    began = time.perf_counter()
    for _ in range(EXECUTIONS):
        m = machine(one, 1)
        m.start()
        m.apply(result)
        m.close()
    return (time.perf_counter() - began) / EXECUTIONS


def live_steps() -> tuple[float, float]:
    """Seconds per step of the first and of the last thousand."""
    m = machine(many, STEPS)
    m.start()
    events = [completed(n) for n in range(STEPS)]
    marks = [time.perf_counter()]
    for thousand in (events[n : n + 1000] for n in range(0, STEPS, 1000)):
        for envelope in thousand:
            m.apply(envelope)
        marks.append(time.perf_counter())
    return (marks[1] - marks[0]) / 1000, (marks[-1] - marks[-2]) / 1000


def replay() -> float:
    history = [completed(n) for n in range(STEPS)]
    m = machine(many, STEPS)
    began = time.perf_counter()
    m.replay(history)
    return time.perf_counter() - began


def folding() -> float:
    started = Envelope("s", "e", 0, Kind.EXECUTION_STARTED, 1, {"workflow": "many", "input": STEPS})
    history = [started, *(completed(n) for n in range(STEPS))]
    state = ExecutionState()
    began = time.perf_counter()
    for envelope in history:
        fold(state, envelope)
    return (time.perf_counter() - began) / len(history)


def parked_bytes() -> float:
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    kept = [machine(parked) for _ in range(PARKED)]
    for m in kept:
        m.start()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return (after - before) / len(kept)


def main() -> None:
    seconds = best(one_step)
    print(f"one-step execution (machine, start, apply, close)  {seconds * 1e6:8.1f} us  {1 / seconds:8.0f}/s")
    first, last = min(live_steps() for _ in range(ROUNDS))
    print(f"a step among the first 1,000 of an execution       {first * 1e6:8.1f} us")
    print(f"a step among the last 1,000 of {STEPS:,}             {last * 1e6:8.1f} us")
    print(f"replay of {STEPS:,} steps                           {best(replay) * 1e3:8.1f} ms")
    print(f"fold of an event                                   {best(folding) * 1e6:8.2f} us")
    print(f"a parked machine in memory                         {parked_bytes():8.0f} bytes")


if __name__ == "__main__":
    main()
