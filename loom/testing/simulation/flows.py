"""What the simulated fleet works on: orders with steps short and long, messages, timers, children, successors."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from loom.kernel.arms import child, receive, timer
from loom.kernel.flow import FlowDefinition, flow
from loom.kernel.retry import RetryPolicy

if TYPE_CHECKING:
    from loom.testing.simulation.invariants import Invariants
    from loom.testing.simulation.node import Node

MESSAGES: Final = 4
WORD: Final = 1_000
"""What an order sends to its child, and gets back."""
PATIENT: Final = RetryPolicy(attempts=1_000, first_ms=50, max_ms=200)


def make_flows(invariants: Invariants, node: Node) -> list[FlowDefinition[..., Any]]:
    """The flows as one life of one node drives them."""
    incarnation = node.incarnation

    async def work(execution_id: str, step: str, seconds: float, value: Any) -> Any:
        """A step: it takes its time, and is counted."""
        if node.incarnation == incarnation:
            invariants.effect_began(node, execution_id, step)
        await asyncio.sleep(seconds)
        if node.incarnation == incarnation:
            node.step_ends()
        return value

    @flow("part")
    async def part(ctx: Any, given: dict[str, Any]) -> Any:
        message = await ctx.receive("go")
        return await ctx.run(work, ctx.execution_id, "part", given["long"], message)

    @flow("order")
    async def order(ctx: Any, given: dict[str, Any]) -> Any:
        if not given["seen"]:
            await ctx.run(work, ctx.execution_id, "first", given["short"], 1, retry=PATIENT)
            await ctx.run(work, ctx.execution_id, "long", given["long"], 2, retry=PATIENT)
        await asyncio.gather(
            ctx.run(work, ctx.execution_id, "left", given["short"], 3),
            ctx.run(work, ctx.execution_id, "right", given["short"], 4),
        )
        return await _messages(ctx, given, work, part)

    return [order, part]


async def _messages(ctx: Any, given: dict[str, Any], work: Any, part: Any) -> list[Any]:
    """The second half of an order: a child, its messages and a timer, half of them by a successor."""
    seen, handle = list(given["seen"]), None
    if given["child"] and not given["continued"]:
        handle = await ctx.start_child(part, {"long": given["long"]})
        await ctx.send(handle.id, "go", WORD)
    while len(seen) < MESSAGES:
        arm = await ctx.select(receive("go"), timer(given["patience"]))
        if arm.kind == "inbox":
            seen.append(arm.value)
            await ctx.run(work, ctx.execution_id, f"seen {len(seen)}", given["short"], len(seen))
        if len(seen) == MESSAGES // 2 and given["continue"] and not given["continued"]:
            if handle is not None:
                await handle
            ctx.continue_as_new(given | {"seen": seen, "continued": True})
    if handle is not None:
        ended = await ctx.select(child(handle), timer(3_600))
        assert ended.value == WORD, ended
    await ctx.sleep(given["patience"])
    return seen
