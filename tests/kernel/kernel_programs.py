"""Flows made of data: small programs that hypothesis writes and that any process can run again."""

from __future__ import annotations

import asyncio

from loom.kernel import Context, flow, gate, receive, timer


def work(x):
    return x


def other(x):
    return x


@flow("program")
async def program(ctx: Context, ops: list) -> list:
    """Run a list of operations; the result is everything seen, in the order seen."""
    trace: list = []
    await _block(ctx, ops, trace)
    return trace


async def _block(ctx: Context, ops: list, trace: list) -> None:
    for op in ops:
        await _OPS[op[0]](ctx, op, trace)


async def _run(ctx, op, trace):
    try:
        trace.append(await ctx.run(work if op[1] % 2 else other, op[1]))
    except Exception as error:  # a failed step is part of the story
        trace.append(type(error).__name__)


async def _decide(ctx, op, trace):
    trace.append(ctx.random() if op[1] % 2 else ctx.uuid())


async def _gather(ctx, op, trace):
    await asyncio.gather(*(_block(ctx, branch, trace) for branch in op[1]))


async def _group(ctx, op, trace):
    async with asyncio.TaskGroup() as group:
        for branch in op[1]:
            group.create_task(_block(ctx, branch, trace))


async def _select(ctx, op, trace):
    arms = [[receive("a"), timer(5), gate("g")], [timer(1), receive("b")], [receive("a"), receive("b")]][
        op[1] % 3
    ]
    selected = await ctx.select(*arms)
    trace.append([selected.index, selected.kind, selected.value])


async def _race(ctx, op, trace):
    tasks = {asyncio.create_task(_block(ctx, branch, trace)) for branch in op[1]}
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:  # the order of a set: it must be the same everywhere
        trace.append(task.get_name())
    for task in pending:
        await ctx.run(work, f"cancelled {task.get_name()}")


async def _timeout(ctx, op, trace):
    try:
        async with asyncio.timeout(1 + op[1] % 7):
            await _block(ctx, op[2], trace)
    except TimeoutError:
        trace.append("timeout")


async def _all_of(ctx, op, trace):
    tasks = [asyncio.create_task(_block(ctx, branch, trace)) for branch in op[1]]
    if not tasks:
        return
    done, _ = await asyncio.wait(tasks)
    for task in done:
        await ctx.run(other, task.get_name())


async def _clock(ctx, op, trace):
    trace.append(asyncio.get_running_loop().time())
    await asyncio.sleep(op[1])


_OPS = {
    "run": _run,
    "decide": _decide,
    "gather": _gather,
    "group": _group,
    "select": _select,
    "race": _race,
    "timeout": _timeout,
    "all": _all_of,
    "clock": _clock,
}
