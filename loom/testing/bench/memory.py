"""What a parked and a finished execution keep in memory: resident bytes of a process of its own, before and after."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import TYPE_CHECKING

from loom.testing.bench.engine import AT_ONCE, park_many
from loom.testing.bench.fleet import PAYLOAD, fleet, one_step

if TYPE_CHECKING:
    from typing import Any

_PAGE = 4096


def resident() -> int:
    """Resident bytes of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


async def parked_bytes(bootstrap: str, redis_url: str | None, *, count: int, **settings: Any) -> float:
    """Resident bytes per parked execution."""
    async with fleet(bootstrap, redis_url, **settings) as runtime:
        await park_many(runtime, AT_ONCE)
        before = resident()
        await park_many(runtime, count)
        return (resident() - before) / count


async def finished_bytes(bootstrap: str, redis_url: str | None, *, count: int, **settings: Any) -> float:
    """Resident bytes per finished execution, after a first tenth that fills what is bounded."""
    async with fleet(bootstrap, redis_url, **settings) as runtime:

        async def run(number: int) -> None:
            for _ in range(number // AT_ONCE + 1):
                await (await runtime.start(one_step, PAYLOAD)).result()

        await asyncio.gather(*(run(count // 10) for _ in range(AT_ONCE)))
        before = resident()
        await asyncio.gather(*(run(count) for _ in range(AT_ONCE)))
        return (resident() - before) / count
