"""What leases cost: one-step executions without them, with lazy and with eager ones, and what Redis is asked meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import redis as redis_client

from loom.testing.bench.fleet import fleet
from loom.testing.bench.turns import WARM, Mode, many, take_turns

if TYPE_CHECKING:
    from loom.testing.bench.turns import Windows

OFF: Final = "off"
MODES: Final = {
    OFF: Mode({"leases": {"enabled": False}}),
    "lazy": Mode({"leases": {"acquire": "lazy"}}),
    "eager": Mode({"leases": {"acquire": "eager"}}),
}
COUNTED: Final = 1_000


def costs(bootstrap: str, redis_url: str, *, seconds: float) -> dict[str, Windows]:
    """Each mode's windows (see :func:`take_turns`)."""
    return take_turns(bootstrap, redis_url, MODES, seconds=seconds)


async def calls(bootstrap: str, redis_url: str) -> dict[str, int]:
    """What a node of each mode asks of Redis for 1,000 executions (a script is one call), its rhythms included."""
    found: dict[str, int] = {}
    for name, mode in MODES.items():
        async with fleet(bootstrap, redis_url, partitions=2, **mode.settings) as runtime:
            await many(runtime, WARM)
            before = _calls(redis_url)
            await many(runtime, COUNTED)
            found[name] = _calls(redis_url) - before
    return found


def _calls(redis_url: str) -> int:
    """How often scripts were called, by whomever."""
    with redis_client.Redis.from_url(redis_url) as admin:
        stats: Any = admin.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "eval"))
