"""What the simulated fleet works on: orders with steps short and long, messages, timers, children, successors.

Every value has the order's ``word`` in it, which is what is sealed; whatever a flow is handed must have it in the clear.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from loom.kernel.arms import child, receive, timer
from loom.kernel.flow import FlowDefinition, flow
from loom.kernel.retry import RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from loom.testing.simulation.invariants import Invariants
    from loom.testing.simulation.node import Node

MESSAGES: Final = 4
TO_CHILD: Final = 1_000
"""What an order sends to its child, and gets back."""
LATE_S: Final = 3_600
PATIENT: Final = RetryPolicy(attempts=1_000, first_ms=50, max_ms=200)


def make_flows(invariants: Invariants, node: Node) -> list[FlowDefinition[..., Any]]:
    """The flows as one life of one node drives them."""
    incarnation = node.incarnation

    def handed(value: Any) -> Any:
        return invariants.handed(value, node)

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
        message = handed(await ctx.receive("go"))
        return handed(await ctx.run(work, ctx.execution_id, "part", handed(given)["long"], message))

    @flow("order")
    async def order(ctx: Any, given: dict[str, Any]) -> Any:
        async def step(name: str, seconds: float, **options: Any) -> None:
            handed(await ctx.run(work, ctx.execution_id, name, seconds, [name, given["word"]], **options))

        handed(given)
        if not given["seen"]:
            await step("first", given["short"], retry=PATIENT)
            await step("long", given["long"], retry=PATIENT)
        await asyncio.gather(step("left", given["short"]), step("right", given["short"]))
        return await _messages(ctx, given, step, handed, part)

    return [order, part]


async def _messages(
    ctx: Any,
    given: dict[str, Any],
    step: Callable[[str, float], Awaitable[None]],
    handed: Callable[[Any], Any],
    part: Any,
) -> list[Any]:
    """The second half of an order: a child, its messages and a timer, half of them by a successor."""
    seen, handle = list(given["seen"]), None
    to_child = [TO_CHILD, given["word"]]
    if given["child"] and not given["continued"]:
        handle = await ctx.start_child(part, {"long": given["long"], "word": given["word"]})
        await ctx.send(handle.id, "go", to_child)
    while len(seen) < MESSAGES:
        message = await _next(ctx, given["patience"])
        if message is not None:
            seen.append(handed(message))
            await step(f"seen {len(seen)}", given["short"])
        if len(seen) == MESSAGES // 2 and given["continue"] and not given["continued"]:
            if handle is not None:
                await handle
            ctx.continue_as_new(given | {"seen": seen, "continued": True})
    if handle is not None:
        ended = await ctx.select(child(handle), timer(LATE_S))
        assert handed(ended.value) == to_child
    if given["patience"]:
        await ctx.sleep(given["patience"])
    return seen


async def _next(ctx: Any, patience: float | None) -> Any:
    """The next message; None where patience ends first. Without it, nothing but the message wakes the flow."""
    if patience is None:
        return await ctx.receive("go")
    arm = await ctx.select(receive("go"), timer(patience))
    return arm.value if arm.kind == "inbox" else None
