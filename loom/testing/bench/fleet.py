"""What every measurement of the engine stands on: topics of its own, a runtime in this process, flows that do little."""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from loom.config import Config
from loom.kernel import Context, flow
from loom.runtime import Runtime
from loom.runtime.collector import calm_collector
from loom.topics import provisioning
from loom.topics.catalogue import Catalogue
from loom.topics.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PAYLOAD: Final = {"text": "x" * 100}
READY_S: Final = 60.0


async def echo(value: Any) -> Any:
    """The cheapest step there is."""
    return value


@flow("one-step")
async def one_step(ctx: Context, given: Any) -> Any:
    """One step, then the end."""
    return await ctx.run(echo, given)


@flow("parked")
async def parked(ctx: Context, given: Any) -> Any:
    """Waits for one message."""
    del given
    return await ctx.receive("go")


@flow("many-steps")
async def many_steps(ctx: Context, count: int) -> int:
    """Steps one after the other."""
    for number in range(count):
        await ctx.run(echo, number)
    return count


FLOWS: Final = (one_step, parked, many_steps)


@asynccontextmanager
async def fleet(
    bootstrap: str, redis_url: str | None, *, partitions: int = 8, prefix: str | None = None, **settings: Any
) -> AsyncIterator[Runtime]:
    """A runtime in this process that owns all partitions of a fresh log (or of ``prefix``)."""
    with tempfile.TemporaryDirectory(prefix="loom-bench-") as folder:
        fresh = prefix is None
        config = Config(
            bootstrap=bootstrap,
            redis_url=redis_url,
            topic_prefix=prefix or f"bench{uuid.uuid4().hex[:8]}.",
            partitions=partitions,
            **({"data_dir": Path(folder)} | settings),
        )
        if fresh:
            await asyncio.to_thread(make_topics, config)
        calm_collector()  # as ``loom worker`` does
        async with Runtime(config, flows=FLOWS) as runtime:
            await owning(runtime, partitions)
            yield runtime


def make_topics(config: Config) -> None:
    """Create the topics of a configuration."""
    cluster, catalogue = Cluster(config.bootstrap or ""), Catalogue(config.topic_prefix, config.partitions)
    provisioning.apply(cluster, provisioning.plan(cluster, catalogue))


async def owning(runtime: Runtime, partitions: int) -> None:
    """Wait until the runtime's store writes every partition."""
    events: Any = runtime.stores.events
    async with asyncio.timeout(READY_S):
        while len(events.owned()) < partitions:  # noqa: ASYNC110 - the runtime is the one listener
            await asyncio.sleep(0.005)
