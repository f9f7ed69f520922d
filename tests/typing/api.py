"""loom as a typed user sees it: checked by mypy in strict mode (``make types``), never run."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, assert_type

from pydantic import BaseModel

import loom
from loom import Context, Principal, RetryPolicy, child, flow, gate, receive, timer


class Order(BaseModel):
    card: str
    total: int


class Ship(BaseModel):
    carrier: str


class Receipt(BaseModel):
    status: str


async def charge(card: str, total: int) -> str:
    return f"{card}-{total}"


def weigh(parcels: int) -> float:
    return parcels * 1.5


@flow("order")
async def order(ctx: Context, request: Order) -> Receipt:
    payment = await ctx.run(charge, request.card, request.total, retry=RetryPolicy(attempts=3), timeout=5)
    assert_type(payment, str)
    weight = await ctx.run(weigh, 2)
    assert_type(weight, float)
    both = await asyncio.gather(ctx.run(charge, "a", 1), ctx.run(weigh, 1))
    assert_type(both, tuple[str, float])

    ship = await ctx.receive("ship", Ship)
    assert_type(ship, Ship)
    plain = await ctx.receive("note")
    assert_type(plain, Any)

    handle = await ctx.start_child(refund, request)
    arm = await ctx.select(receive("ship", model=Ship), gate("approve"), child(handle), timer(days=3))
    assert_type(arm.index, int)
    assert_type(arm.kind, str)
    assert_type(ctx.random(), float)
    assert_type(ctx.uuid(), str)
    assert_type(ctx.patched("fee"), bool)
    await ctx.sleep(timedelta(seconds=1))
    if weight > 10:
        ctx.continue_as_new(request)
    return Receipt(status="shipped")


@flow("refund")
async def refund(ctx: Context, request: Order) -> bool:
    return await ctx.gate("allowed", bool)


async def run() -> None:
    alice = Principal("alice")
    async with loom.Runtime(loom.Config(storage="memory")) as runtime:
        handle = await runtime.start(order, Order(card="tok-1", total=1), principal=alice)
        assert_type(handle.execution_id, str)
        await runtime.send(
            handle.execution_id, "ship", {"carrier": "post"}, message_id="m1", sender="wms", principal=alice
        )
        receipt = await handle.result()
        assert_type(receipt, Receipt)
        try:
            await runtime.load_state(handle.execution_id, principal=alice)
        except loom.ExecutionDeniedError as denied:
            assert_type(denied.execution_id, str)


async def from_elsewhere() -> None:
    async with loom.Client(loom.Config()) as client:
        handle = await client.start("order", {"card": "tok-1", "total": 1}, principal=Principal("alice"))
        await client.send(handle.execution_id, "ship", {"carrier": "post"}, message_id="m1")
        await client.cancel(handle.execution_id, reason="ordered twice")
