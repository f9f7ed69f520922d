"""An order: charge and reserve at once, wait for the warehouse, pack, wait for the courier, hand over.

Run it on a node, then start and message it from anywhere::

    loom worker --flows examples.orders
    loom start order --id order-17 --input '{"card": "tok-1", "items": [{"sku": "lamp", "price": 4200}]}'
    loom send order-17 ship '{"carrier": "post"}' --message-id m1
    loom show order-17

Each step gets the order's id: a payment provider or a warehouse takes it as the key under which an effect, asked for
twice because a node died in between, is done once. Here the outside world is a file, named by ``ORDERS_LEDGER``.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

from pydantic import BaseModel, Field

from loom import Context, flow, receive, timer

COURIER_SECONDS = float(os.environ.get("ORDERS_COURIER_SECONDS", "2"))
PACKING_SECONDS = float(os.environ.get("ORDERS_PACKING_SECONDS", "0.2"))


class Item(BaseModel):
    """A line of an order; ``price`` in cents."""

    sku: str
    price: int = Field(ge=0)
    quantity: int = Field(default=1, ge=1)


class Order(BaseModel):
    """What a customer asks for."""

    card: str
    items: list[Item] = Field(min_length=1)


class Ship(BaseModel):
    """The warehouse's word that the order may leave."""

    carrier: str


class Receipt(BaseModel):
    """How an order ended; ``total`` in cents."""

    order: str
    status: str
    total: int
    tracking: str | None = None


@flow("order")
async def order(ctx: Context, request: Order) -> Receipt:
    """Charge and reserve; ship when told to, or give the money back when cancelled or forgotten for three days."""
    me = ctx.execution_id
    total = sum(item.price * item.quantity for item in request.items)
    payment, *_ = await asyncio.gather(
        ctx.run(charge, me, request.card, total),
        *(ctx.run(reserve, me, item.sku, item.quantity) for item in request.items),
    )
    word = await ctx.select(receive("ship", model=Ship), receive("cancel"), timer(days=3))
    if word.topic != "ship":
        await ctx.run(refund, me, payment)
        return Receipt(order=me, status="refunded", total=0)
    parcel = await ctx.run(pack, me)
    await ctx.sleep(seconds=COURIER_SECONDS)
    tracking = await ctx.run(hand_over, me, parcel, word.value.carrier)
    return Receipt(order=me, status="shipped", total=total, tracking=tracking)


async def charge(order_id: str, card: str, total: int) -> str:
    """Take the money."""
    del card
    note("charge", order_id, total=total)
    return f"payment of {order_id}"


async def reserve(order_id: str, sku: str, quantity: int) -> str:
    """Put goods aside."""
    note(f"reserve {sku}", order_id, quantity=quantity)
    return f"{quantity} x {sku}"


async def pack(order_id: str) -> str:
    """Takes a while, so a node may well die in the middle of it."""
    note("pack", order_id, "begun")
    await asyncio.sleep(PACKING_SECONDS)
    note("pack", order_id)
    return f"parcel of {order_id}"


async def hand_over(order_id: str, parcel: str, carrier: str) -> str:
    """Give the parcel to the courier."""
    del parcel
    note("hand over", order_id, carrier=carrier)
    return f"{carrier}-{order_id}"


async def refund(order_id: str, payment: str) -> None:
    """Give the money back."""
    del payment
    note("refund", order_id)


def note(effect: str, order_id: str, stage: str = "done", **details: object) -> None:
    """The outside world: one line an effect, in the file named by ``ORDERS_LEDGER``; nothing where it is not set."""
    ledger = os.environ.get("ORDERS_LEDGER")
    if ledger:
        line = {
            "effect": effect,
            "order": order_id,
            "stage": stage,
            "at": time.time(),
            "pid": os.getpid(),
            **details,
        }
        with Path(ledger).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
