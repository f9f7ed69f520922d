"""The node that owns the shards cannot open the log: one that can, and owns nothing, carries on by itself (docs/adr/0021)."""

from __future__ import annotations

import asyncio

import pytest
from mixed import ALICE, KINDS, SECRET, SENSITIVE, Fleet, Trouble, seen, two_halves

from loom import child, flow, receive, timer
from loom.ids import inbox_stream
from loom.runtime.facts import CANCEL_TOPIC
from loom.schemas.codec import decode_envelope
from loom.schemas.envelope import Kind
from loom.stores.keys.memory import MemoryKeyStore
from loom.stores.sealing.encrypting import EncryptingEventStore
from loom.testing.runtime import crash, until


async def bill(amount):
    return amount + "!"


@flow("billed")
async def billed(ctx, amount):
    return await ctx.run(bill, amount)


@flow("mixed-order")
async def order(ctx, amount):
    """A step, a timer, a child, a message, a gate: whatever wakes it reaches the owner of its shard first."""
    first = await ctx.run(bill, amount)
    await ctx.sleep(0.05)
    kept = await ctx.start_child(billed, first)
    arm = await ctx.select(child(kept))
    word = await ctx.receive("go")
    seen.append(word)
    answer = await ctx.gate("approve")
    return arm.value + word + answer


@flow("parent")
async def parent(ctx, amount):
    await ctx.start_child("two-halves", amount)
    await ctx.receive("never")


FLOWS = [two_halves, billed, order, parent]


@pytest.fixture
def mixed():
    seen.clear()
    return Fleet()


def node(mixed, kind, *, owned, trouble=None, name=None):
    events = mixed.stored(kind, mixed.fleet.store(None if owned else ()))
    options = trouble.options if trouble is not None else {}
    return mixed.fleet.runtime(name or kind.replace(" ", "-"), FLOWS, events=events, **options)


def log_of(mixed, execution_id):
    return [decode_envelope(raw) for raw in mixed.resting(execution_id).get(execution_id, ())]


def drivers(mixed):
    """Who wrote what, over all logs: node names by the types of their events."""
    found = {}
    for streams in mixed.resting().values():
        for raw in streams:
            event = decode_envelope(raw)
            name = str(event.metadata.get("node", "")).split(":")[0]
            if name:
                found.setdefault(name, set()).add(event.type)
    return found


@pytest.mark.parametrize("kind", KINDS)
async def test_whatever_wakes_it_a_capable_node_carries_on(mixed, kind):
    await mixed.prepare("s")
    trouble = Trouble()
    async with (
        node(mixed, kind, owned=True, trouble=trouble),
        node(mixed, "capable", owned=False) as capable,
        mixed.node("capable") as client,
    ):
        client.flows.add(order)
        await client.start("mixed-order", SECRET, execution_id="x", subject="s", principal=ALICE)
        waits = lambda: log_of(mixed, "x")[-1].type == Kind.EXECUTION_SUSPENDED  # noqa: E731
        await until(lambda: len(log_of(mixed, "x")) > 8 and waits(), "the child's end to be taken", 20)
        await client.send("x", "go", "-2", principal=ALICE)
        await until(lambda: seen == ["-2"] and waits(), "the message to be taken", 20)
        await client.resume("x", "approve", "-3", principal=ALICE)
        await until(lambda: log_of(mixed, "x")[-1].type == Kind.EXECUTION_COMPLETED, "the end", 20)
        history = await capable.history("x", principal=ALICE)
        assert history[-1].data["output"] == f"{SECRET}!!-2-3"
        assert "__loomEnc" not in repr(history)
        await until(lambda: not mixed.fleet.wakes.slots, "the rows to go", 20)
    assert set(drivers(mixed)) == {"capable"}
    assert Kind.EXECUTION_FAILED not in {e.type for e in history}


def back_off(owner, execution_id):
    """Let a node have been refused so often that it looks again in a minute."""
    for _ in range(7):
        owner._engine.backoff.failed(execution_id, refused=True)


@pytest.mark.parametrize("backs_off", [False, True])
async def test_a_driver_that_dies_beside_an_incapable_owner_is_replaced(mixed, backs_off):
    await mixed.prepare("s")
    entered = asyncio.Event()

    async def stuck(amount):
        entered.set()
        await asyncio.Event().wait()

    @flow("dies")
    async def dies(ctx, amount):
        return await ctx.run(stuck if not entered.is_set() else bill, amount)

    def capable(name):
        events = EncryptingEventStore.over(mixed.fleet.store(()), MemoryKeyStore(mixed.keys), SENSITIVE)
        return mixed.fleet.runtime(name, [dies], events=events)

    async with node(mixed, "no keys", owned=True) as owner:
        victim = capable("victim")
        await victim.open()
        async with mixed.node("capable") as client:
            client.flows.add(dies)
            await client.start("dies", SECRET, execution_id="x", subject="s")
            await asyncio.wait_for(entered.wait(), 20)
        await crash(victim)
        if backs_off:
            back_off(owner, "x")
            await owner._engine.wakes.clear("x")  # as whoever carried on before does once it parks
        async with capable("heir") as heir:
            await until(lambda: log_of(mixed, "x")[-1].type == Kind.EXECUTION_COMPLETED, "the end", 20)
            assert (await heir.load_state("x")).output == SECRET + "!"
    assert set(drivers(mixed)) == {"heir"}
    recovered = next(e for e in log_of(mixed, "x") if e.type == Kind.EXECUTION_RECOVERED)
    assert recovered.data["previousNode"].startswith("victim:")


async def test_a_parents_cancellation_reaches_a_sealed_child_of_an_incapable_owner(mixed):
    """The owner hears of it and cannot act: the row that it leaves is all that tells anybody else."""
    await mixed.prepare("s")
    async with node(mixed, "no keys", owned=True) as owner, node(mixed, "capable", owned=False) as capable:
        await capable.start(parent, SECRET, execution_id="p", subject="s")
        await until(lambda: any(e.type == Kind.CHILD_STARTED for e in log_of(mixed, "p")), "the child", 20)
        child_id = next(e.data["childId"] for e in log_of(mixed, "p") if e.type == Kind.CHILD_STARTED)
        waits = lambda log: log[-1:] and log[-1].type == Kind.EXECUTION_SUSPENDED  # noqa: E731
        await until(lambda: waits(log_of(mixed, child_id)) and waits(log_of(mixed, "p")), "the parks", 20)
        unsettled = (
            owner._recovery._unsettled
        )  # nothing but the cancellation gives the owner a reason to look
        await until(lambda: not mixed.fleet.wakes.slots and not unsettled, "all to be settled", 20)
        await capable.cancel("p", "no more")
        assert mixed.fleet.log.index.row(inbox_stream(child_id, CANCEL_TOPIC)).head == 0
        await until(
            lambda: log_of(mixed, child_id)[-1].type == Kind.EXECUTION_CANCELLED, "the cancellation", 20
        )


async def test_incapable_nodes_do_not_keep_a_row_from_a_capable_one(mixed):
    """They back off without a claim, spend no recovery, and fail nothing."""
    await mixed.prepare("s")
    trouble = Trouble()
    async with (
        node(mixed, "raw", owned=True, trouble=trouble),
        node(mixed, "no keys", owned=False, trouble=trouble),
        node(mixed, "other keys", owned=False, trouble=trouble),
    ):
        async with mixed.node("capable") as client:
            await client.start(two_halves, SECRET, execution_id="x", subject="s", principal=ALICE)
        await until(lambda: len(trouble.errors) >= 3, "everyone to refuse", 20)
        assert len(log_of(mixed, "x")) == 1
        slot = mixed.fleet.wakes.slots["x", 0]
        await until(lambda: not mixed.fleet.wakes.claimed(slot), "the claim to be given back", 2)
        async with node(mixed, "capable", owned=False) as capable:
            await until(lambda: len(log_of(mixed, "x")) > 2, "the capable node", 20)
            assert await capable.status("x", principal=ALICE) in {"running", "suspended"}
    assert set(drivers(mixed)) == {"capable"}
    assert all(e.data.get("reason") != "abandoned" for e in log_of(mixed, "x"))


@pytest.mark.parametrize("timed", [False, True])
async def test_a_run_that_meets_a_sealed_message_while_it_is_busy_parks_once_it_is_not(mixed, timed):
    """The wait is refused while a step of another branch runs: the park comes after it, and a capable node goes on."""
    goes_on, met = asyncio.Event(), asyncio.Event()

    async def slow():
        met.set()
        await goes_on.wait()
        return 1

    @flow("busy")
    async def busy(ctx, _given):
        async def word():
            arms = [receive("go"), timer(3_600)] if timed else [receive("go")]
            return (await ctx.select(*arms)).value

        return await asyncio.gather(ctx.run(slow), word())

    def runtime(kind, trouble=None, **options):
        events = mixed.stored(kind, mixed.fleet.store(**options))
        more = trouble.options if trouble is not None else {}
        return mixed.fleet.runtime(kind, [busy], events=events, **more)

    trouble = Trouble()
    async with runtime("raw", trouble) as owner, mixed.node("capable") as client:
        await owner.start(busy, None, execution_id="x", subject="s")
        await asyncio.wait_for(met.wait(), 20)
        await client.send("x", "go", SECRET)
        await until(lambda: any(about == "x" for _, about in trouble.errors), "the refusal", 20)
        goes_on.set()
        await until(lambda: log_of(mixed, "x")[-1].type == Kind.EXECUTION_SUSPENDED, "the park", 20)
        async with runtime("capable", owned=()):
            await until(lambda: log_of(mixed, "x")[-1].type == Kind.EXECUTION_COMPLETED, "the end", 20)
