"""Nobody is left asleep, and nobody is driven twice, whatever fails between two reads of one decision."""

from __future__ import annotations

import asyncio

from runtime_support import of_kind

from loom import flow
from loom.errors import DeadlineExceededError, StorageWriteError
from loom.runtime.drivers import fence_owner
from loom.schemas.envelope import Kind
from loom.stores.memory.wake_store import MemoryWakeStore
from loom.testing.runtime import MemoryFleet, until


class Between:
    """An event store that runs something before a named read, once."""

    def __init__(self, inner):
        self._inner, self.before = inner, {}

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def read_last(self, stream_id):
        await self._run("read_last")
        return await self._inner.read_last(stream_id)

    async def observe(self, stream_id):
        await self._run("observe")
        return await self._inner.observe(stream_id)

    async def _run(self, name):
        act = self.before.pop(name, None)
        if act is not None:
            await act()


@flow("waits")
async def waits(ctx):
    return await ctx.receive("go")


async def test_a_message_whose_first_look_failed_wakes_its_execution_all_the_same(fleet, trouble):
    async def fails():
        raise DeadlineExceededError("read_last", 1)

    events = Between(fleet.store())
    settings = {"max_resident": 0}
    async with fleet.runtime("node", [waits], events=events, settings=settings, **trouble.options) as node:
        await node.start(waits, execution_id="x")
        await until(lambda: not node._engine.runs)
        async with fleet.client() as client:
            events.before["read_last"] = fails
            await client.send("x", "go", 1)
        assert await node.handle("x").result(10) == 1


async def test_what_leaves_no_row_is_looked_at_again(trouble):
    """Neither the notify pass nor the row of last resort succeeds: the node itself remembers."""
    fleet = MemoryFleet(ttl_ms=600)

    class Full(MemoryWakeStore):
        away = True

        async def schedule(self, rows):
            if self.away:
                raise StorageWriteError("wake rows", "full")
            await super().schedule(rows)

    async def fails():
        raise DeadlineExceededError("observe", 1)

    events, wakes = Between(fleet.store()), Full(fleet.wakes)
    settings = {"max_resident": 0}
    node = fleet.runtime("node", [waits], events=events, settings=settings, **trouble.options)
    node._given["wakes"] = wakes
    async with node:
        await node.start(waits, execution_id="x")
        await until(lambda: not node._engine.runs)
        async with fleet.client() as client:
            events.before["observe"] = fails
            await client.send("x", "go", 1)
        assert await node.handle("x").result(10) == 1


async def test_a_start_that_another_took_between_two_reads_is_left_to_it(fleet, trouble):
    events = Between(fleet.store(()))

    async def another_takes_it():
        await fleet.store(()).acquire_fence("x", fence_owner("other:1", 0, "1"))

    async with fleet.client() as client:
        await client.start("waits", execution_id="x")
    async with fleet.runtime("node", [waits], events=events, **trouble.options) as node:
        events.before["observe"] = another_takes_it
        assert await node._engine.driving.drive_fresh("x") is False
        await asyncio.sleep(0)
        assert fleet.log.index.row("x").fence_owner == fence_owner("other:1", 0, "1")
        assert not of_kind(await node.history("x"), Kind.EXECUTION_SUSPENDED)
