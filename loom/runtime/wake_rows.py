"""Wake rows from the log: what Redis forgot, Kafka knows (kafka.md, "Redis")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from loom.errors import ConfigError, PayloadShreddedError, SealedStreamUnreadableError
from loom.kernel.inbox import load_waits, wakes_of
from loom.runtime.driving import INBOX_ROW_AT
from loom.runtime.handle import terminal_of
from loom.schemas.envelope import Kind
from loom.stores.contracts import WakeRow

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from loom.runtime.engine import Engine
    from loom.stores.contracts import StreamInfo

PAGE: Final = 500


async def rebuild_wakes(engine: Engine, *, dry_run: bool) -> int:
    """Write the wake row of every open timer again; return how many there are. Rows that stand stay as they are.

    An execution that this node cannot open is told, and left to one that can by a refusal row.

    Raises:
        ConfigError: there is no wake store, or open executions cannot be listed from here.
    """
    if engine.wakes is None:
        raise ConfigError("redis_url", "it is not set", "name the Redis that holds the alarms")
    count = 0
    async for info in open_logs(engine):
        if info.status == Kind.EXECUTION_SUSPENDED:
            try:
                rows = await timer_rows(engine, info)
            except PayloadShreddedError:
                continue  # nobody drives it any more
            except SealedStreamUnreadableError as error:
                engine.signals.repeated_error(error, info.stream_id)
                rows = [WakeRow(info.stream_id, INBOX_ROW_AT, "refusal")]
            else:
                count += len(rows)
            if rows and not dry_run:
                await engine.wakes.schedule(rows)
                for row in rows:
                    engine.driving.hint(row.wake_at)
    return count


async def timer_rows(engine: Engine, info: StreamInfo) -> list[WakeRow]:
    """The rows that a parked execution needs."""
    park = await terminal_of(engine.events, info.stream_id, info.head, frozenset({Kind.EXECUTION_SUSPENDED}))
    waits = load_waits(park.data.get("waits", ())) if park is not None else ()
    return [WakeRow(info.stream_id, at, "timer") for at in wakes_of(waits)]


async def open_logs(engine: Engine) -> AsyncIterator[StreamInfo]:
    """Open executions of the shards served here, else of all that the store can list from outside."""
    owning = engine.owning
    owned = owning.owned() if owning is not None else frozenset()
    scan: Any = getattr(engine.events, "scan_open_logs", None)
    if owning is None or (not owned and scan is None):
        raise ConfigError("events", "open executions cannot be listed from here", "ask a worker")
    for shard in sorted(owned) if owned else range(engine.config.partitions):
        after = ""
        while True:
            page = owning.open_logs(shard, after, PAGE) if owned else await scan(shard, after, PAGE)
            if not page:
                break
            for info in page:
                yield info
            after = page[-1].stream_id
