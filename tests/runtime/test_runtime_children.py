"""Children, messages to other executions, records for the estate."""

from __future__ import annotations

import asyncio

import pytest
from runtime_support import add, kinds, of_kind

from loom import ChildFailedError, FlowCancelledError, StepFailedError, child, flow, timer
from loom.schemas.envelope import Kind
from loom.testing.runtime import until


@flow("child")
async def child_flow(ctx, n):
    return await ctx.run(add, n, 1)


@flow("waiting-child")
async def waiting_child(ctx, n):
    return n + await ctx.receive("go")


async def test_a_parent_gets_its_child_s_result(fleet):
    @flow("parent")
    async def parent(ctx):
        handles = [await ctx.start_child(child_flow, n) for n in range(3)]
        return [await handle for handle in handles]

    async with fleet.runtime("node", [parent, child_flow]) as runtime:
        handle = await runtime.start(parent, subject="s", principal=None)
        assert await handle.result(5) == [1, 2, 3]
        history = await runtime.history(handle.execution_id)
        started = of_kind(history, Kind.CHILD_STARTED)
        first = (await runtime.history(started[0].data["childId"]))[0]
        assert first.data["parent"]["executionId"] == handle.execution_id
        assert first.data["subject"] == "s"


async def test_a_failed_child_raises_in_its_parent(fleet):
    @flow("failing")
    async def failing(ctx):
        raise ValueError("spoiled")

    @flow("parent")
    async def parent(ctx):
        handle = await ctx.start_child(failing)
        try:
            await handle
        except ChildFailedError as error:
            return [error.status, error.error_type, error.error_message]

    async with fleet.runtime("node", [parent, failing]) as runtime:
        assert await (await runtime.start(parent)).result(5) == ["failed", "ValueError", "spoiled"]


async def test_cancellation_reaches_children_and_their_children(fleet):
    @flow("middle")
    async def middle(ctx):
        return await (await ctx.start_child(waiting_child, 1))

    @flow("parent")
    async def parent(ctx):
        first = await ctx.start_child(middle)
        await ctx.start_child(waiting_child, 2, execution_id="independent", cancel_with_parent=False)
        return await first

    async with fleet.runtime("node", [parent, middle, waiting_child]) as runtime:
        handle = await runtime.start(parent)
        await until(lambda: len(runtime._engine.parked_runs) == 4, "all four to park")
        family = [i for i in runtime._engine.runs if i != "independent"]
        await runtime.cancel(handle.execution_id, "enough")
        for execution_id in family:
            with pytest.raises(FlowCancelledError, match="enough"):
                await runtime.handle(execution_id).result(5)
        assert await runtime.status("independent") == "suspended"
        await runtime.send("independent", "go", 1)
        assert await runtime.handle("independent").result(5) == 3


async def test_a_child_s_end_may_lose_a_select(fleet):
    @flow("parent")
    async def parent(ctx):
        handle = await ctx.start_child(waiting_child, 1)
        first = await ctx.select(child(handle), timer(0.01))
        await ctx.send(handle.id, "go", 41)
        second = await ctx.select(child(handle), timer(60))
        return [first.kind, second.kind, second.value]

    async with fleet.runtime("node", [parent, waiting_child]) as runtime:
        assert await (await runtime.start(parent)).result(5) == ["timer", "child", 42]


async def test_a_taken_child_id_is_a_failed_step(fleet):
    @flow("parent")
    async def parent(ctx):
        try:
            await ctx.start_child(child_flow, 1, execution_id="taken")
        except StepFailedError as error:
            return error.error_type

    async with fleet.runtime("node", [parent, child_flow]) as runtime:
        await (await runtime.start(child_flow, 1, execution_id="taken")).result(5)
        assert await (await runtime.start(parent)).result(5) == "ExecutionAlreadyExistsError"


async def test_a_child_that_continues_as_new_tells_its_end_once(fleet):
    @flow("again")
    async def again(ctx, n):
        if n:
            ctx.continue_as_new(n - 1)
        return "end"

    @flow("parent")
    async def parent(ctx):
        return await (await ctx.start_child(again, 3))

    async with fleet.runtime("node", [parent, again]) as runtime:
        assert await (await runtime.start(parent)).result(5) == "end"


async def test_messages_between_executions(fleet):
    @flow("sender")
    async def sender(ctx, target):
        return await ctx.send(target, "go", 5)

    async with fleet.runtime("node", [sender, waiting_child]) as runtime:
        target = await runtime.start(waiting_child, 1)
        handle = await runtime.start(sender, target.execution_id)
        assert await handle.result(5) == f"{handle.execution_id}/0:0"
        assert await target.result(5) == 6


@pytest.mark.parametrize(
    ("target", "payload", "error"),
    [
        ("nobody", 1, "ExecutionNotFoundError"),
        ("self", "x" * 70_000, "InboxMessageRefusedError"),
    ],
)
async def test_a_message_that_cannot_be_sent_is_a_failed_step(fleet, target, payload, error):
    @flow("sender")
    async def sender(ctx):
        try:
            await ctx.send(ctx.execution_id if target == "self" else target, "go", payload)
        except StepFailedError as failed:
            return failed.error_type

    async with fleet.runtime("node", [sender]) as runtime:
        assert await (await runtime.start(sender)).result(5) == error


async def test_a_record_is_published_in_the_transaction_of_its_fact(fleet):
    @flow("publisher")
    async def publisher(ctx):
        both = asyncio.gather(ctx.publish("out", "k", {"n": 1}, headers={"h": "v"}), ctx.run(add, 1, 1))
        return (await both)[1]

    async with fleet.runtime("node", [publisher], settings={"publish_topics": ["out"]}) as runtime:
        handle = await runtime.start(publisher)
        assert await handle.result(5) == 2
        (record,) = fleet.log.published
        assert (record.topic, record.key, record.body, record.headers) == (
            "out",
            "k",
            b'{"n":1}',
            (("h", b"v"),),
        )
        assert kinds(await runtime.history(handle.execution_id)).count(Kind.RECORD_PUBLISHED) == 1


async def test_a_topic_that_is_not_allowed_is_a_failed_step(fleet):
    @flow("publisher")
    async def publisher(ctx):
        try:
            await ctx.publish("secret", None, b"x")
        except StepFailedError as error:
            return error.error_type

    async with fleet.runtime("node", [publisher]) as runtime:
        assert await (await runtime.start(publisher)).result(5) == "PublishRefusedError"
        assert fleet.log.published == []


async def test_a_topic_that_refuses_the_record_is_a_failed_step(fleet):
    from runtime_support import FaultyStore, has

    from loom.errors import PublishRefusedError

    @flow("publisher")
    async def publisher(ctx):
        await ctx.run(add, 1, 1)
        try:
            await ctx.publish("out", None, b"x")
        except StepFailedError as error:
            return error.error_type

    def refuse(appends):
        if has(appends, Kind.RECORD_PUBLISHED):
            raise PublishRefusedError("out", "it is gone", "make it")

    events = FaultyStore(fleet.store())
    events.before = refuse
    settings = {"publish_topics": ["out"]}
    async with fleet.runtime("node", [publisher], events=events, settings=settings) as runtime:
        assert await (await runtime.start(publisher)).result(5) == "PublishRefusedError"


async def test_a_cancel_that_a_store_delays_reaches_the_child_all_the_same(fleet):
    from runtime_support import FaultyStore, has

    from loom.errors import StorageWriteError

    @flow("parent")
    async def parent(ctx):
        return await (await ctx.start_child(waiting_child, 1, execution_id="kid"))

    failures = []

    def refuse(appends):
        if has(appends, Kind.EXECUTION_CANCELLED) and appends[0].stream_id == "kid" and len(failures) < 6:
            failures.append(1)
            raise StorageWriteError("kid", "away")

    events = FaultyStore(fleet.store())
    events.before = refuse
    settings = {"storage_patience_ms": 20}
    async with fleet.runtime("node", [parent, waiting_child], events=events, settings=settings) as runtime:
        handle = await runtime.start(parent)
        await until(lambda: len(runtime._engine.parked_runs) == 2)
        await runtime.cancel(handle.execution_id)
        await until(lambda: fleet.log.index.row("kid").finished)
        assert failures
