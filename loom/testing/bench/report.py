"""Runs measurements, each in a process of its own, and prints them beside their references."""

from __future__ import annotations

import asyncio
import json
import os
import platform
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from loom.errors import ConfigError
from loom.testing import services
from loom.testing.bench import engine, leases, memory, sealing
from loom.testing.bench.apart import apart
from loom.testing.bench.references import Figure, bare_loop, raw_limit
from loom.testing.bench.turns import CONCURRENCY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from loom.testing.bench.turns import Windows

_WIDTH: Final = 72
WARM_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: what, how much, in which unit, beside what."""

    what: str
    figure: str
    beside: str = ""


@dataclass(frozen=True, slots=True)
class Where:
    """What measurements run against."""

    bootstrap: str
    redis_url: str
    seconds: float
    scale: float


def _throughput(at: Where) -> list[Row]:
    rows = []
    for concurrency in (16, 64, 256, 1024):
        bare = bare_loop(at.bootstrap, concurrency=concurrency, seconds=at.seconds)
        got = _executions(at, concurrency)
        rows.append(
            Row(f"one-step executions, {concurrency} at once", _rate(got), _share("bare loop", bare, got))
        )
        if concurrency == CONCURRENCY and hasattr(os, "sched_setaffinity"):  # not everywhere: Linux has it
            kept = apart(_on_one_core, at)
            beside = (
                f"{_share('bare loop', bare, kept)}; {kept.per_second / got.per_second:.2f} of the row above"
            )
            rows.append(Row("the same, the process kept on one core", _rate(kept), beside))
    return rows


def _executions(at: Where, concurrency: int = CONCURRENCY, *, spread: bool = False) -> Figure:
    return asyncio.run(
        engine.executions(
            at.bootstrap, at.redis_url, concurrency=concurrency, seconds=at.seconds, spread=spread
        )
    )


def _on_one_core(at: Where) -> Figure:
    """As ``taskset --cpu-list`` has it."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return _executions(at)


def _share(name: str, reference: Figure, figure: Figure) -> str:
    return f"{name} {reference.per_second:,.0f}/s: {figure.per_second / reference.per_second:.0%}"


def _rate(figure: Figure) -> str:
    return f"{figure.per_second:,.0f}/s ({_latency(figure)})"


def _spread(at: Where) -> list[Row]:
    minted, spread = _executions(at), _executions(at, spread=True)
    beside = _share("minted ids", minted, spread)
    return [Row("one-step executions over 8 partitions, 256 at once", f"{spread.per_second:,.0f}/s", beside)]


def _append(at: Where) -> list[Row]:
    got, records = asyncio.run(engine.appends(at.bootstrap, in_flight=256, seconds=at.seconds))
    raw = raw_limit(at.bootstrap, records_a_transaction=round(records), seconds=at.seconds)
    beside = _share("raw limit", raw, got)
    return [Row("conditional appends of 3 events, 256 in flight", f"{got.per_second:,.0f} records/s", beside)]


def _wake(at: Where) -> list[Row]:
    count = round(300 * at.scale)
    plain = raw_limit(at.bootstrap, records_a_transaction=4, seconds=at.seconds)
    beside = f"a plain transaction of 4 records: {_latency(plain)}"
    rows = []
    for lanes in (2, 1):
        here = asyncio.run(engine.wakes(at.bootstrap, at.redis_url, count=count, lanes=lanes))
        there = asyncio.run(engine.wakes_by_request(at.bootstrap, at.redis_url, count=count, lanes=lanes))
        replayed = asyncio.run(engine.evicted_wakes(at.bootstrap, at.redis_url, count=count, lanes=lanes))
        rows += [
            Row(f"wake, one at a time, lanes={lanes}", _latency(here), beside),
            Row(f"wake through another client, lanes={lanes}", _latency(there), beside),
            Row(f"wake of a flow that had left memory, lanes={lanes}", _latency(replayed), beside),
        ]
    return rows


def _latency(figure: Figure) -> str:
    return f"p50 {figure.p50_ms or 0:.1f}, p99 {figure.p99_ms or 0:.1f} ms"


def _fold(at: Where) -> list[Row]:
    alone = _executions(at)
    beside, events, lag = asyncio.run(
        engine.folded(at.bootstrap, at.redis_url, concurrency=256, seconds=at.seconds)
    )
    return [
        Row(
            "one-step executions with the fold service in the process, 256 at once",
            f"{beside.per_second:,.0f}/s",
            _share("without it", alone, beside),
        ),
        Row("events folded meanwhile", f"{events:,.0f}/s", f"{lag:,} offsets behind at the end"),
    ]


def _steps(at: Where) -> list[Row]:
    thousand = asyncio.run(engine.steps(at.bootstrap, at.redis_url, count=1000))
    ten = asyncio.run(engine.steps(at.bootstrap, at.redis_url, count=10_000))
    beside = f"a step among 10,000 costs {ten / 10 / thousand:.2f} of one among 1,000"
    return [Row("1,000 steps one after the other", f"{thousand:.2f} s", beside)]


def _takeover(at: Where) -> list[Row]:
    rows = []
    for events in (100_000, round(1_000_000 * at.scale)):
        found = engine.takeover(at.bootstrap, events=events)
        beside = (
            f"with a local checkpoint {found.with_checkpoint:.2f} s, of an empty log {found.empty:.2f} s; "
            f"a plain consumer reads it in {found.plain_read:.2f} s"
        )
        what = f"start of a node that takes over {events:,} events of a partition"
        rows.append(Row(what, f"{found.full:.2f} s", beside))
    return rows


def _memory(at: Where) -> list[Row]:
    count = round(100_000 * at.scale)
    held = asyncio.run(memory.parked_bytes(at.bootstrap, at.redis_url, count=count))
    gone = asyncio.run(memory.finished_bytes(at.bootstrap, at.redis_url, count=count))
    return [
        Row(f"resident per parked execution, {count:,} parked", f"{held:,.0f} bytes"),
        Row(f"resident per finished execution, {count:,} finished", f"{gone:,.0f} bytes"),
    ]


def _sealing(at: Where) -> list[Row]:
    found = sealing.costs(at.bootstrap, at.redis_url, seconds=at.seconds)
    median, best = sealing.walk_us()
    return [
        *_beside("one-step executions, {}", found, sealing.UNSEALED),
        Row("the guard's walk on a payload of 64 KiB", f"{median:,.0f} µs", f"best {best:,.0f} µs"),
    ]


def _leases(at: Where) -> list[Row]:
    calls = asyncio.run(leases.calls(at.bootstrap, at.redis_url))
    found = leases.costs(at.bootstrap, at.redis_url, seconds=at.seconds)
    return [
        *_beside("one-step executions, leases {}", found, leases.OFF),
        *(Row(f"calls of Redis for 1,000 executions, leases {mode}", f"{n:,}") for mode, n in calls.items()),
    ]


def _beside(what: str, found: Mapping[str, Windows], reference: str) -> list[Row]:
    """A row for each mode, with what it costs beside the reference, turn by turn."""
    plain = found[reference]
    rows = []
    for name, mode in found.items():
        beside = f"costs {mode.slower(plain)} of throughput, {mode.dearer(plain)} of processor time"
        rows.append(
            Row(
                f"{what.format(name)}, {CONCURRENCY} at once",
                f"{mode.per_second:,.0f}/s, {mode.cpu_us:,.0f} µs of processor",
                f"median of {len(mode.taken)} turns" if name == reference else beside,
            )
        )
    return rows


MEASUREMENTS: Final[dict[str, Callable[[Where], list[Row]]]] = {
    "throughput": _throughput,
    "spread": _spread,
    "append": _append,
    "wake": _wake,
    "fold": _fold,
    "steps": _steps,
    "takeover": _takeover,
    "memory": _memory,
    "sealing": _sealing,
    "leases": _leases,
}


def run(names: list[str], *, seconds: float, scale: float, flush_each: bool, as_json: bool) -> None:
    """Start a broker and a Redis, warm them up, run the named measurements (all where none is named), print.

    Raises:
        ConfigError: a name that is none.
    """
    unknown = [name for name in names if name not in MEASUREMENTS]
    if unknown:
        raise ConfigError(
            "bench", f"there is no measurement {unknown[0]!r}", f"choose from {', '.join(MEASUREMENTS)}"
        )
    properties = {"log.flush.interval.messages": "1"} if flush_each else {}
    with services.kafka(properties=properties, for_long=True) as broker, services.redis() as redis:
        where = Where(broker.bootstrap, redis.url, seconds, scale)
        for _ in range(3):
            services.warm_up(broker.bootstrap)
        apart(_warm, where)
        flushes = ", the broker flushing each append" if flush_each else ""
        how = (
            f"Python {platform.python_version()}, {os.cpu_count()} cores; Redis and the broker on the same machine: "
            f"{broker.note}, after {WARM_S:g} s of transactions{flushes}; {seconds:g} s a figure"
        )
        if not as_json:
            _say(how)
        rows = []
        for name in names or MEASUREMENTS:
            measured = apart(MEASUREMENTS[name], where)
            rows += measured
            if not as_json:
                for row in measured:
                    _say(f"{row.what:<{_WIDTH}}  {row.figure:<{_WIDTH // 2}}  {row.beside}".rstrip())
    if as_json:
        _say(json.dumps({"how": how, "rows": [asdict(row) for row in rows]}))


def _say(line: str) -> None:
    """Print a line at once: a run that is stopped has shown what it had measured."""
    print(line, flush=True)  # noqa: T201 - its output


def _warm(at: Where) -> list[Row]:
    """Thousands of transactions, small ones and large: a JVM is at its speed only after them."""
    raw_limit(at.bootstrap, records_a_transaction=1000, seconds=WARM_S / 5)
    raw_limit(at.bootstrap, records_a_transaction=4, seconds=4 * WARM_S / 5)
    return []
