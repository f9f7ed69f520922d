"""What breaks in a mixed fleet, tried: alarms lost under an owner that cannot open, chains, events that appear under a run."""

from __future__ import annotations

import asyncio

import pytest
from mixed import ALICE, KINDS, SECRET, SENSITIVE, Fleet, Trouble, seen, two_halves

from loom import ExecutionDeniedError, child, flow
from loom.operator import is_sealed_unreadable
from loom.runtime.driving import INBOX_ROW_AT
from loom.schemas.codec import decode_envelope
from loom.schemas.envelope import EVENT_SCHEMA, Kind, NewEvent
from loom.stores.contracts import StreamAppend, WakeRow
from loom.stores.keys.memory import MemoryKeyStore
from loom.stores.sealing.encrypting import EncryptingEventStore
from loom.testing.runtime import until, until_parked

SOON_MS = 1_500
NAPS = 8


async def note(value):
    return value + "!"


@flow("sleeps")
async def sleeps(ctx, secret):
    kept = await ctx.run(note, secret)
    await ctx.sleep(SOON_MS / 1000)
    return kept


@flow("dozes")
async def dozes(ctx, secret):
    secret += await ctx.receive("go")
    await ctx.sleep(SOON_MS / 1000)
    return secret


hearing = {}


async def wait_to_hear():
    await hearing["may"].wait()


@flow("hears")
async def hears(ctx, count):
    """Nothing of it is sealed, but for its messages."""
    await ctx.run(wait_to_hear)
    return "".join([await ctx.receive("go") for _ in range(count)])


@flow("goes-on")
async def goes_on(ctx, given):
    kept = await ctx.run(note, given["secret"])
    if given["left"]:
        await ctx.continue_as_new({"secret": kept, "left": given["left"] - 1})
    return kept + await ctx.receive("go")


@flow("naps")
async def naps(ctx, secret):
    for _ in range(NAPS):
        await ctx.sleep(0.05)
        secret = await ctx.run(note, secret)
    return secret


@flow("keeps")
async def keeps(ctx, secret):
    return await ctx.run(note, secret) + await ctx.receive("go")


@flow("asks")
async def asks(ctx, _nothing):
    """Nothing of it is sealed, but for what its child tells it at its end."""
    kept = await ctx.start_child("keeps", SECRET)
    return (await ctx.select(child(kept))).value


FLOWS = [two_halves, sleeps, dozes, hears, goes_on, naps, keeps, asks]


@pytest.fixture
async def mixed():
    seen.clear()
    fleet = Fleet()
    await fleet.prepare("s")
    return fleet


def node(mixed, kind, *, owned, trouble=None, flows=FLOWS):
    events = mixed.stored(kind, mixed.fleet.store(None if owned else ()))
    options = trouble.options if trouble is not None else {}
    return mixed.fleet.runtime(kind.replace(" ", "-"), flows, events=events, **options)


def log_of(mixed, execution_id):
    return [decode_envelope(raw) for raw in mixed.resting(execution_id).get(execution_id, ())]


def types_of(mixed, execution_id):
    return [event.type for event in log_of(mixed, execution_id)]


def writers(mixed):
    found = {
        str(decode_envelope(raw).metadata.get("node", "")).split(":")[0]
        for raws in mixed.resting().values()
        for raw in raws
    }
    return found - {""}


# -- alarms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_an_alarm_that_was_lost_under_an_owner_that_cannot_open_rings_all_the_same(mixed, kind):
    """The wake store was emptied; the owner of the shard cannot read what the execution waits for."""
    async with node(mixed, "capable", owned=True) as first:
        await first.start(sleeps, SECRET, execution_id="x", subject="s", principal=ALICE)
        await until_parked(first, "x")
    mixed.fleet.wakes.flush()
    async with node(mixed, kind, owned=True), node(mixed, "capable", owned=False):
        await until(lambda: types_of(mixed, "x")[-1] == Kind.EXECUTION_COMPLETED, "the end", 20)
        await until(lambda: not mixed.fleet.wakes.slots, "the rows to go", 20)
    assert writers(mixed) == {"capable"}


@pytest.mark.parametrize("kind", KINDS)
async def test_one_alarm_after_another_rings_in_time_though_the_owner_backs_off(mixed, kind):
    """Each alarm reaches the owner of the shard first, which refuses; its back-off is its own and delays nobody else."""
    async with node(mixed, kind, owned=True), node(mixed, "capable", owned=False) as capable:
        async with mixed.node("capable") as client:
            client.flows.add(naps)
            await client.start("naps", SECRET, execution_id="x", subject="s", principal=ALICE)
        assert await capable.handle("x").result(2 * NAPS) == SECRET + NAPS * "!"
    assert writers(mixed) == {"capable"}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_rebuild_of_alarms_leaves_what_it_cannot_open_to_others_and_goes_on(mixed, kind):
    async with node(mixed, "capable", owned=True) as first:
        await first.start(sleeps, SECRET, execution_id="x", subject="s", principal=ALICE)
        await until_parked(first, "x")
    async with mixed.fleet.runtime("plain", FLOWS, events=mixed.fleet.store()) as plain:
        await plain.start(sleeps, "open", execution_id="y")
        await until_parked(plain, "y")
    mixed.fleet.wakes.flush()
    trouble = Trouble()
    async with mixed.node(kind, owns=True, trouble=trouble) as rebuilding:
        rebuilding.flows.add(sleeps)
        assert await rebuilding.rebuild_wakes(dry_run=True) == 1
        assert await rebuilding.rebuild_wakes() == 1
        rows = lambda i: {slot.row.kind for key, slot in mixed.fleet.wakes.slots.items() if key[0] == i}  # noqa: E731
        await until(lambda: "refusal" in rows("x"), "the row of what was refused")
        assert any(is_sealed_unreadable(error) for error, about in trouble.errors if about == "x")


@pytest.mark.parametrize("kind", KINDS)
async def test_what_reaches_an_owner_in_the_midst_of_its_back_off_goes_to_one_that_can(mixed, kind):
    """A row for the owner alone: it was left by a wake that failed, or when a message was let go (simulation, seed 4078)."""
    async with node(mixed, "capable", owned=True) as first:
        await first.start(keeps, SECRET, execution_id="x", subject="s", principal=ALICE)
        await until_parked(first, "x")
    async with node(mixed, "capable", owned=False) as client:
        await client.send("x", "go", "-z", principal=ALICE)
    async with node(mixed, kind, owned=True) as owner:
        backoff = owner._engine.backoff
        await until(lambda: ("x", INBOX_ROW_AT) in mixed.fleet.wakes.slots, "the refusal")
        for _ in range(8):
            backoff.failed("x", refused=True)
        await owner._engine.wakes.clear("x")
        await owner._engine.wakes.schedule([WakeRow("x", INBOX_ROW_AT, "inbox")])
        async with node(mixed, "capable", owned=False):
            await until(lambda: types_of(mixed, "x")[-1] == Kind.EXECUTION_COMPLETED, "the end", 20)
        assert backoff.blocked("x")
    assert writers(mixed) == {"capable"}


class CutKeys(MemoryKeyStore):
    """Keys that can be cut off: a call waits while they are, as one for a Redis that does not answer."""

    def __init__(self, table):
        super().__init__(table)
        self.there = asyncio.Event()
        self.there.set()

    async def get(self, subject):
        await self.there.wait()
        return await super().get(subject)


@pytest.mark.parametrize("row", ["timer", "refusal"])
async def test_a_run_that_has_not_heard_what_another_wrote_voids_no_row_of_its(mixed, row):
    """What a capable node wrote waits for the keys that open it; meanwhile its alarm rings (simulation, seed 1610)."""
    keys = CutKeys(mixed.keys)
    events = EncryptingEventStore.over(mixed.fleet.store(), keys, SENSITIVE)
    async with mixed.fleet.runtime("owner", FLOWS, events=events) as owner:
        async with node(mixed, "capable", owned=False) as other:
            await owner.start(dozes, SECRET, execution_id="x", subject="s", principal=ALICE)
            await until_parked(owner, "x")
            keys.there.clear()
            events.forget_keys("s")
            await other.send("x", "go", "-z", principal=ALICE)
            await other._engine.driving.notify("x")
            await until(lambda: types_of(mixed, "x")[-1] == Kind.EXECUTION_SUSPENDED, "the other's park")
        if row == "refusal":
            await owner._engine.wakes.schedule([WakeRow("x", INBOX_ROW_AT, "refusal")])
        await asyncio.sleep(2 * SOON_MS / 1000)
        assert owner._engine.runs["x"].active, "it has not heard of it"
        assert row in {slot.row.kind for slot in mixed.fleet.wakes.slots.values()}
        keys.there.set()
        await until(lambda: types_of(mixed, "x")[-1] == Kind.EXECUTION_COMPLETED, "the end", 20)


async def test_a_run_that_others_went_past_takes_no_wake_once_its_shard_comes_back(mixed):
    """It was parked at a message that its node cannot open, and stayed when the shard went (simulation, seed 4699)."""
    stores = {name: mixed.fleet.store(()) for name in ("raw", "capable")}

    def give(name):
        for store in stores.values():
            store.assign(())
        stores[name].assign(range(mixed.fleet.partitions))

    async with (
        mixed.fleet.runtime("raw", FLOWS, events=stores["raw"]) as raw,
        mixed.fleet.runtime("capable", FLOWS, events=mixed.stored("capable", stores["capable"])) as capable,
    ):
        hearing["may"] = asyncio.Event()
        give("raw")
        await raw.start(hears, 2, execution_id="x", subject="s")
        await until(lambda: "x" in raw._engine.runs, "the run")
        stale = raw._engine.runs["x"]
        give("capable")
        await capable.send("x", "go", "a")
        hearing["may"].set()
        await until(lambda: types_of(mixed, "x").count(Kind.EXECUTION_SUSPENDED) == 2, "the other's park")
        assert raw._engine.runs.get("x") is stale
        give("raw")
        await asyncio.sleep(1.5)
        await capable.send("x", "go", "b")
        assert await capable.handle("x").result(20) == "ab"
    assert not stale.active


# -- chains --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_a_chain_goes_on_though_its_owner_can_open_none_of_it(mixed, kind):
    async with node(mixed, kind, owned=True), node(mixed, "capable", owned=False) as capable:
        async with mixed.node("capable") as client:
            client.flows.add(goes_on)
            given = {"secret": SECRET, "left": 3}
            await client.start("goes-on", given, execution_id="x", subject="s", principal=ALICE)
            await client.send("x", "go", "-z", principal=ALICE)
        assert await capable.handle("x").result(20) == f"{SECRET}!!!!-z"
    assert writers(mixed) == {"capable"}


# -- families and keys ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["raw", "no keys", "other keys"])
async def test_a_sealed_child_of_a_parent_in_the_clear_tells_its_end_past_their_owner(mixed, kind):
    async with node(mixed, "capable", owned=True) as first:
        async with mixed.node("raw") as client:
            client.flows.add(asks)
            await client.start("asks", None, execution_id="p", subject="s")
        await until(lambda: Kind.CHILD_STARTED in types_of(mixed, "p"), "the child")
        child_id = next(e.data["childId"] for e in log_of(mixed, "p") if e.type == Kind.CHILD_STARTED)
        await until(lambda: {"p", child_id} <= first._engine.parked_runs.keys(), "the parks")
    assert all("seal" not in event.metadata for event in log_of(mixed, "p"))
    assert "seal" in log_of(mixed, child_id)[0].metadata
    async with node(mixed, kind, owned=True), node(mixed, "capable", owned=False):
        async with mixed.node("capable") as client:
            await client.send(child_id, "go", "-z")
        await until(lambda: types_of(mixed, child_id)[-1] == Kind.EXECUTION_COMPLETED, "the child's end", 20)
        await until(lambda: types_of(mixed, "p")[-1] == Kind.EXECUTION_COMPLETED, "the parent's end", 20)
    async with mixed.node("capable") as client:
        assert (await client.load_state("p")).output == f"{SECRET}!-z"
    assert writers(mixed) == {"capable"}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_key_is_rotated_in_the_middle_under_an_owner_that_has_none(mixed, kind):
    async with mixed.node("capable") as client:
        client.flows.add(keeps)
        await client.start("keeps", SECRET, execution_id="x", subject="s", principal=ALICE)
        async with node(mixed, kind, owned=True), node(mixed, "capable", owned=False) as capable:
            await until(lambda: types_of(mixed, "x")[-1] == Kind.EXECUTION_SUSPENDED, "the park", 20)
            before = (await MemoryKeyStore(mixed.keys).get("s")).current.id
            assert (await MemoryKeyStore(mixed.keys).rotate("s")).current.id != before
            await client.send("x", "go", "-z", principal=ALICE)
            await until(lambda: types_of(mixed, "x")[-1] == Kind.EXECUTION_COMPLETED, "the end", 20)
            history = await capable.history("x", principal=ALICE)
    assert history[-1].data["output"] == f"{SECRET}!-z"
    assert "__loomEnc" not in repr(history)


async def test_a_key_that_dies_in_the_middle_without_an_intent_stops_the_flow_and_says_nothing_false(mixed):
    began, gate = asyncio.Event(), asyncio.Event()

    async def held(value):
        began.set()
        await gate.wait()
        return value

    @flow("works")
    async def works(ctx, value):
        return await ctx.run(held, value)

    trouble = Trouble()
    async with node(mixed, "capable", owned=True, trouble=trouble, flows=[works]) as owner:
        await owner.start(works, SECRET, execution_id="x", subject="s", principal=ALICE)
        await asyncio.wait_for(began.wait(), 10)
        before = types_of(mixed, "x")
        await MemoryKeyStore(mixed.keys).destroy("s")
        owner._engine.events._inner.forget_keys("s")
        gate.set()
        await until(lambda: "x" not in owner._engine.runs, "the run to go")
        await until(lambda: any(about == "x" for _, about in trouble.storage), "a word")
        with pytest.raises(ExecutionDeniedError):
            await owner.load_state("x", principal=ALICE)
    assert types_of(mixed, "x") == before
    assert not {Kind.EXECUTION_FAILED, Kind.PAYLOAD_SHREDDED} & set(before)


# -- under a run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["raw", "poorer"])
@pytest.mark.parametrize("owned", [True, False], ids=["heard of", "found out"])
async def test_what_is_sealed_under_a_run_of_a_node_that_cannot_open_it_moves_the_run(mixed, kind, owned):
    """A control record, sealed, appears behind the events of a run: its node stops, and a capable one takes over."""
    began, gate = asyncio.Event(), asyncio.Event()

    async def held(value):
        began.set()
        await gate.wait()
        return value + "!"

    @flow("works")
    async def works(ctx, value):
        return await ctx.run(held, value)

    trouble = Trouble()
    async with node(mixed, kind, owned=True, trouble=trouble, flows=[works]) as first:
        if not owned:
            first._engine.owning._inner.listen(_Deaf())
        await first.start(works, "open", execution_id="x", subject="s")
        await asyncio.wait_for(began.wait(), 10)
        sealing = EncryptingEventStore.over(
            mixed.fleet.store(()),
            MemoryKeyStore(mixed.keys),
            {**SENSITIVE, Kind.EXECUTION_DENIED: ("reason",)},
        )
        denial = NewEvent(
            "d", Kind.EXECUTION_DENIED, {"op": "send", "reason": SECRET}, {"schema": EVENT_SCHEMA}
        )
        seen_now = await sealing.observe("x")
        await sealing.append(StreamAppend("x", (denial,), observation=seen_now))
        gate.set()
        await until(lambda: "x" not in first._engine.runs, "the run to go")
        await until(
            lambda: any(is_sealed_unreadable(e) for e, about in trouble.errors if about == "x"), "a word"
        )
        rich = mixed.fleet.runtime("rich", [works], events=sealing)
        async with rich:
            await until(lambda: types_of(mixed, "x")[-1] == Kind.EXECUTION_COMPLETED, "the end", 20)
    assert Kind.EXECUTION_FAILED not in types_of(mixed, "x")


class _Deaf:
    """A listener that is told nothing more."""

    def committed(self, batch):
        pass

    def gained(self, shard):
        pass

    def lost(self, shard):
        pass
