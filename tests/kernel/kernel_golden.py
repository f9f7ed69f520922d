"""The flow whose histories are committed in ``histories/``. It must go on replaying them: change it only with them.

``python tests/kernel/kernel_golden.py`` writes the good history anew.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pydantic

sys.path.insert(0, str(Path(__file__).parent))

from kernel_support import Driver

from loom.kernel import Context, child, flow, gate, receive, timer
from loom.schemas.envelope import Envelope

HISTORIES = Path(__file__).with_name("histories")


class Line(pydantic.BaseModel):
    sku: str
    quantity: int


class Order(pydantic.BaseModel):
    number: str
    lines: list[Line]
    limit: float


class Charge(pydantic.BaseModel):
    reference: str
    amount: float


class Ship(pydantic.BaseModel):
    carrier: str


async def reserve(sku: str, quantity: int) -> bool:
    raise NotImplementedError


def charge(number: str, amount: float) -> Charge:
    raise NotImplementedError


def pack(number: str) -> None:
    raise NotImplementedError


@flow("golden-order")
async def order(ctx: Context, order: Order) -> dict[str, object]:
    started = ctx.now()
    reserved = await asyncio.gather(*(ctx.run(reserve, line.sku, line.quantity) for line in order.lines))
    token = ctx.uuid()
    sampled = ctx.patched("sampled") and ctx.random() < 0.5
    try:
        async with asyncio.timeout(30):
            charged = await ctx.run(charge, order.number, order.limit, timeout=5)
    except TimeoutError:
        charged = Charge(reference="none", amount=0)
    if charged.amount > 100:
        await ctx.gate("approve")
    race = [asyncio.create_task(ctx.run(pack, f"{order.number}-{n}", name=f"pack-{n}")) for n in range(3)]
    done, rest = await asyncio.wait(race, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    invoice = await ctx.start_child("invoice", {"token": token})
    await ctx.publish("orders", order.number, {"packed": [t.get_name() for t in done]})
    answer = await ctx.select(receive("cancel"), receive("ship", model=Ship), timer(days=3), gate("override"))
    if answer.topic == "ship":
        await ctx.send("warehouse", "shipped", {"carrier": answer.value.carrier})
    bill = await ctx.select(child(invoice), timer(hours=1))
    return {
        "reserved": reserved,
        "charge": charged.reference,
        "arm": answer.index,
        "bill": bill.value,
        "sampled": sampled,
        "seconds": (ctx.now() - started).total_seconds(),
    }


VALUE = {"number": "o-1", "lines": [{"sku": "a", "quantity": 1}, {"sku": "b", "quantity": 2}], "limit": 250.0}


def read(name: str) -> list[Envelope]:
    lines = (HISTORIES / name).read_text().splitlines()
    return [
        Envelope(e["id"], e["streamId"], e["sequence"], e["type"], e["timestamp"], e["data"])
        for e in map(json.loads, lines)
    ]


def write(name: str, history: list[Envelope]) -> None:
    HISTORIES.mkdir(exist_ok=True)
    with (HISTORIES / name).open("w") as file:
        for e in history:
            record = {
                "id": e.id,
                "streamId": e.stream_id,
                "sequence": e.sequence,
                "type": e.type,
                "timestamp": e.timestamp,
                "data": e.data,
            }
            file.write(json.dumps(record, separators=(",", ":")) + "\n")


def drive() -> Driver:
    d = Driver(order, VALUE)
    d.answer("0.1:0", True)
    d.fail("0.0:0", "OutOfReach", "timeout", final=False, retryAt=d.clock + 200)
    d.answer("0.0:0", True)
    charge_site = next(s for s, c in d.pending.items() if getattr(c, "name", "") == "charge")
    d.answer(charge_site, {"reference": "ch-9", "amount": 250.0})
    d.noise()
    d.answer(next(iter(d.pending)), {"by": "alice"})
    d.answer(next(s for s, c in d.pending.items() if getattr(c, "name", "") == "pack-1"))
    d.answer(next(iter(d.pending)))  # the child
    d.answer(next(iter(d.pending)))  # the record
    d.noise()
    d.answer(next(iter(d.pending)), {"carrier": "dhl"}, arm=1)
    d.answer(next(iter(d.pending)))  # the message
    d.answer(next(iter(d.pending)), {"status": "completed", "output": {"total": 250}}, arm=0)
    ending = {"output": d.end.output}
    d.history.append(Envelope("end", "e1", len(d.history), "EXECUTION_COMPLETED", d.clock + 9, ending))
    return d


if __name__ == "__main__":
    write("order.jsonl", drive().history)
