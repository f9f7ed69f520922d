"""The examples do what they say, on the stores in memory; ``make demo`` runs them on Kafka and Redis."""

from __future__ import annotations

import asyncio
import json

import pytest

import loom
from examples import orders

ORDER = {
    "card": "tok-1",
    "items": [{"sku": "lamp", "price": 4200}, {"sku": "bulb", "price": 350, "quantity": 2}],
}
CLERK = loom.Principal("clerk")


@pytest.fixture
def ledger(tmp_path, monkeypatch):
    """What the outside world saw, as (effect, stage)."""
    file = tmp_path / "ledger.jsonl"
    monkeypatch.setenv("ORDERS_LEDGER", str(file))
    monkeypatch.setattr(orders, "COURIER_SECONDS", 0.01)
    monkeypatch.setattr(orders, "PACKING_SECONDS", 0.0)
    return lambda: [
        (line["effect"], line["stage"]) for line in map(json.loads, file.read_text().splitlines())
    ]


@pytest.fixture
async def runtime():
    async with loom.Runtime(loom.Config(storage="memory"), flows=[orders.order]) as running:
        yield running


async def test_an_order_is_charged_reserved_packed_and_handed_over(runtime, ledger):
    handle = await runtime.start(orders.order, orders.Order.model_validate(ORDER), principal=CLERK)
    await runtime.send(handle.execution_id, "ship", {"carrier": "post"}, message_id="m1", principal=CLERK)
    async with asyncio.timeout(20):
        receipt = await handle.result()
    assert receipt == orders.Receipt(
        order=handle.execution_id, status="shipped", total=4900, tracking=f"post-{handle.execution_id}"
    )
    seen = ledger()
    assert sorted(seen[:3]) == [("charge", "done"), ("reserve bulb", "done"), ("reserve lamp", "done")]
    assert seen[3:] == [("pack", "begun"), ("pack", "done"), ("hand over", "done")]


async def test_a_cancelled_order_gives_the_money_back(runtime, ledger):
    handle = await runtime.start("order", ORDER, principal=CLERK)
    await runtime.send(handle.execution_id, "cancel", None, message_id="m1", principal=CLERK)
    async with asyncio.timeout(20):
        receipt = await handle.result()
    assert orders.Receipt.model_validate(receipt).status == "refunded"
    assert ledger()[3:] == [("refund", "done")]


async def test_an_order_of_nothing_is_refused(runtime, ledger):
    with pytest.raises(loom.InvalidInputError):
        await runtime.start("order", {"card": "tok-1", "items": []}, principal=CLERK)
