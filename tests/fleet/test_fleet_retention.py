"""A worker with a retention removes chains that ended long enough ago, and nothing else."""

import asyncio

from fleet_support import stubborn

from loom import ExecutionNotFoundError
from loom.ids import inbox_stream


async def test_what_ended_before_is_removed_with_its_inbox_and_what_runs_is_kept(fleet):
    fleet.start_worker("north", env={"LOOM_RETENTION_MS": "1000"})
    async with fleet.client() as client:
        ended, open_ = [await stubborn(lambda: client.start("letters", 0)) for _ in range(2)]
        await stubborn(lambda: client.send(ended.execution_id, "elsewhere", "unread"))
        await stubborn(lambda: client.cancel(ended.execution_id))
        events = client.stores.events
        async with asyncio.timeout(60):
            while await events.info(ended.execution_id) is not None:
                await asyncio.sleep(0.2)
        assert await events.list_inboxes(ended.execution_id) == []
        assert await events.read(inbox_stream(ended.execution_id, "elsewhere")) == []
        assert await stubborn(open_.status) == "suspended"
        try:
            await client.status(ended.execution_id)
        except ExecutionNotFoundError:
            return
        raise AssertionError("it is still there")
