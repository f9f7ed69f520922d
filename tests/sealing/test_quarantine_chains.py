"""Holds through continue-as-new, forks, migration, cancellation, crashes: what is carried, and what is left behind."""

from __future__ import annotations

import asyncio

import pytest
from mixed import Trouble
from test_quarantine import CHAIN, OPERATOR, Chain, hold, kinds, listens, refused, release

from loom import InboxQuarantineRefusedError, InvalidInputError, QuarantineHeldError, flow, receive
from loom.ids import inbox_stream, quarantine_stream
from loom.kernel.quarantine import QUARANTINE_FOLD_CAP
from loom.kernel.state import ExecutionState, to_json
from loom.kernel.transient import make_transient
from loom.runtime.holds import held_back
from loom.schemas.envelope import EVENT_SCHEMA, Kind, NewEvent
from loom.stores.contracts import StreamAppend
from loom.stores.keys.memory import MemoryKeyStore
from loom.stores.sealing.encrypting import EncryptingEventStore
from loom.testing.runtime import crash, until, until_parked, until_rows


@flow("rotates")
async def rotates(ctx, left):
    """Goes on as new after each message of either topic; ends with the last."""
    got = await ctx.select(receive("t"), receive("u"))
    if left:
        return await ctx.continue_as_new(left - 1)
    return got.value


@pytest.fixture
async def chain():
    chain = Chain()
    await chain.started()
    return chain


class FaultyStore:
    """A store whose appends a test can hold up; everything else passes through."""

    def __init__(self, inner):
        self._inner, self.before = inner, None

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def append(self, append, **options):
        return (await self.append_many([append], **options))[0]

    async def append_many(self, appends, **options):
        if self.before is not None:
            await self.before(appends)
        return await self._inner.append_many(appends, **options)


def has(appends, kind):
    return any(event.type == kind for append in appends for event in append.events)


async def rest(node, execution_id=CHAIN):
    await until_parked(node, execution_id)


async def test_a_hold_is_carried_to_the_successor_and_released_there():
    chain = Chain(rotates)
    async with chain.node("raw", owns=True) as node:
        await node.start(rotates, 1, execution_id=CHAIN, subject="s")
        await rest(node)
        await chain.prepared()
        await chain.send("t", "m1", "m1")
        await chain.send("t", "m2", "m2")
        await hold(node)
        await hold(node)
        assert await release(node, "m1", disposition="discard", reason="before the switch")
        await chain.send("u", 1, "u1", sealed=False)
        await until(lambda: kinds(chain)[-1] == Kind.EXECUTION_CONTINUED, "the switch")
        heir = chain.log()[-1].data["successorId"]
        await rest(node, heir)
        state = await node.load_state(heir)
        assert [(e["inboxSeq"], e["heldAt"]) for e in state.quarantined["t"]] == [(1, 2)]
        # A repeat is known across the switch, whichever execution of the chain is named.
        assert not await release(node, "m1", disposition="discard")
        assert await refused(release(node, "m1")) == "invalid"
        assert [e.data["messageId"] for e in chain.copies()] == ["m2"]
    async with chain.node("capable", owns=True) as capable:
        assert await capable.handle(CHAIN, rotates).result(5) == "m2"
        await until(lambda: not chain.copies(), "the copies to be freed")


async def test_a_fork_takes_what_is_held_along_and_nothing_else(chain):
    for n in range(3):
        await chain.send("t", f"m{n}", f"m{n}")
    async with chain.node("raw") as node:
        await hold(node)
        assert await release(node, "m0", disposition="discard")
        await hold(node)
        await hold(node)
    async with chain.node("capable", owns=True, inbox_auto_release=False) as node:
        assert await release(node, "m1")
        await until(lambda: Kind.MESSAGE_CONSUMED in kinds(chain), "the delivery")
        await rest(node)
        fork = (await node.fork(CHAIN, reason="a test", principal=None)).execution_id
        copies = [e for e in chain.stream(quarantine_stream(fork)) if e.sequence]
        assert [(e.data["messageId"], e.metadata["quarantine"]["inboxSeq"]) for e in copies] == [("m2", 2)]
        assert copies[0].data["payload"]["__loomEnc"]
        state = await node.load_state(fork)
        assert (state.cursors.get("t", -1), [e["heldAt"] for e in state.quarantined["t"]]) == (-1, [1])
        assert (
            next(e for e in reversed(chain.stream(fork)) if e.type == Kind.EXECUTION_RECOVERED).data["reason"]
            == "a test"
        )
        # Its own inbox begins at the start, behind what is held.
        await node.send(fork, "t", "new", message_id="new")
        assert await node.release_inbox(fork, "t", "m2", principal=OPERATOR)
        assert await node.handle(fork, listens).result(5) == ["m1", "m2", "new"]
        await until(
            lambda: not [e for e in chain.stream(quarantine_stream(fork)) if e.sequence],
            "the copy to be freed",
        )
        assert [e.data["messageId"] for e in chain.copies()] == ["m2"]


async def test_a_fork_of_a_successor_and_a_fork_of_a_fork_keep_what_was_carried():
    chain = Chain(rotates)
    async with chain.node("raw", owns=True) as node:
        await node.start(rotates, 1, execution_id=CHAIN, subject="s")
        await rest(node)
        await chain.prepared()
        await chain.send("t", "m1", "m1")
        await hold(node)
        await chain.send("u", 1, "u1", sealed=False)
        await until(lambda: kinds(chain)[-1] == Kind.EXECUTION_CONTINUED, "the switch")
        heir = chain.log()[-1].data["successorId"]
        await rest(node, heir)
        once = (await node.fork(heir)).execution_id
        await rest(node, once)
        twice = (await node.fork(once)).execution_id
        await rest(node, twice)
    async with chain.node("capable", owns=True) as capable:
        for each in (CHAIN, once, twice):
            assert await capable.handle(each, rotates).result(5) == "m1"


async def test_a_fork_with_a_dangling_hold_is_refused_before_anything_is_written(chain):
    await chain.send("t", "m1", "m1")
    async with chain.node("raw") as node:
        await hold(node)
        await node._engine.events.truncate(quarantine_stream(CHAIN), 2)
        before = chain.mixed.resting()
        with pytest.raises(InboxQuarantineRefusedError) as caught:
            await node.fork(CHAIN, new_id="child")
        assert (caught.value.verb, caught.value.reason) == ("fork", "invalid")
        assert chain.mixed.resting() == before
        # Its key is the way out when the copy is gone.
        state = await node.load_state(CHAIN)
        key = state.quarantined["t"][0]["key"]
        assert await release(node, key, disposition="discard")


async def test_a_flow_that_is_resumed_as_another_keeps_its_holds(chain):
    await chain.send("t", "m1", "m1")

    @flow("listens-anew")
    async def anew(ctx):
        return [(await ctx.select(receive("t"), receive("u"))).value]

    chain.flows = (anew,)
    async with chain.node("raw", owns=True) as node:
        await hold(node)
        await node.resume_as(CHAIN, anew)
        await rest(node)
        assert (await node.load_state(CHAIN)).quarantined
    async with chain.node("capable", owns=True) as capable:
        assert await capable.handle(CHAIN, anew).result(5) == ["m1"]


async def test_nothing_is_left_of_what_was_held_when_a_chain_is_cancelled(chain):
    await chain.send("t", "m1", "m1")
    async with chain.node("raw", owns=True) as owner, chain.node("raw") as client:
        await hold(client)
        assert chain.copies()
        await client.cancel(CHAIN)
        await until(lambda: not chain.copies(), "the copies to be freed")
        del owner


async def test_nothing_is_left_of_what_is_held_when_a_flow_ends(chain):
    await chain.send("t", "m1", "m1")
    async with chain.node("raw", owns=True) as node:
        await hold(node)
        for n in range(3):
            await chain.send("u", n, f"u{n}", sealed=False)
        assert await node.handle(CHAIN, listens).result(5) == [0, 1, 2]
        await until(lambda: not chain.copies(), "the copies to be freed")


async def test_what_a_crash_left_is_freed_by_whoever_takes_the_execution_up(chain):
    await chain.send("t", "m1", "m1")
    async with chain.node("raw") as node:
        await hold(node)
    node = chain.node("capable", owns=True)
    await node.open()
    truncate = node._engine.events.truncate

    async def never(stream_id, before):
        if stream_id != quarantine_stream(CHAIN):
            await truncate(stream_id, before)

    node._engine.events.truncate = never
    await until(lambda: Kind.MESSAGE_CONSUMED in kinds(chain), "the delivery")
    await crash(node)
    assert chain.copies()
    async with chain.node("capable", owns=True) as capable:
        await capable.send(CHAIN, "u", 1)
        await until(lambda: not chain.copies(), "the copies to be freed")


async def test_a_run_with_events_on_the_way_is_judged_anew_behind_a_hold(chain):
    """The owner delivers the head while another node holds it: exactly one of both happens."""
    await chain.send("t", "m1", "m1")
    async with chain.node("capable", owns=True) as owner, chain.node("raw") as other:
        outcome = None
        try:
            await hold(other)
        except InboxQuarantineRefusedError as error:
            outcome = error.reason
        for n in range(2):
            await chain.send("u", n, f"u{n}", sealed=False)
        result = await owner.handle(CHAIN, listens).result(5)
    assert sorted(map(str, result)) == ["0", "1", "m1"]
    held = [e for e in chain.log() if e.type == Kind.INBOX_QUARANTINED]
    assert bool(held) is (outcome is None)


async def test_the_1025th_hold_is_refused_by_its_reason_and_the_state_stays_small(chain):
    events = chain.mixed.fleet.store(())
    sealed = {"__loomEnc": "loom/aes-256-gcm", "ct": "x"}
    count = QUARANTINE_FOLD_CAP + 1
    for topic in range(5):
        for first in range(0, 309, 103):
            batch = tuple(
                NewEvent(
                    f"{topic}-{n}",
                    Kind.INBOX_MESSAGE,
                    {"topic": f"t{topic}", "payload": sealed, "messageId": f"{topic}-{n}"},
                    {"schema": EVENT_SCHEMA},
                )
                for n in range(first, first + 103)
            )
            await events.append(StreamAppend(inbox_stream(CHAIN, f"t{topic}"), batch))
    async with chain.node("raw", quarantine_max=1024) as node:
        state = ExecutionState()
        engine = node._engine
        facts = []
        for n in range(QUARANTINE_FOLD_CAP - 2):  # all but two at once: a hold reads the log whole
            data = {
                "topic": f"t{n % 5}",
                "inboxSeq": n // 5,
                "key": f"{n:064x}",
                "messageId": f"{n % 5}-{n // 5}",
                "heldAt": n + 1,
                "operator": {"actor": "olga"},
            }
            facts.append(NewEvent(f"h{n}", Kind.INBOX_QUARANTINED, data, {"schema": EVENT_SCHEMA}))
        seen = await engine.events.observe(CHAIN)
        await engine.events.append(StreamAppend(CHAIN, tuple(facts), observation=seen))
        await hold(node, "t4")
        await hold(node, "t4")
        with pytest.raises(InboxQuarantineRefusedError, match="1024") as caught:
            await hold(node, "t4")
        assert caught.value.reason == "invalid"
        state = await node.load_state(CHAIN)
    assert sum(map(len, state.quarantined.values())) == QUARANTINE_FOLD_CAP == count - 1
    assert len(str(to_json(state))) < 250_000


def test_a_state_that_was_folded_past_payloads_is_good_for_nothing_else():
    state = make_transient(ExecutionState(answers=None, cursors={"t": 1}, quarantined={"t": [{"key": "k"}]}))
    assert (state.cursors["t"], state.quarantined["t"][0]["key"]) == (1, "k")
    for spoil in (
        lambda: setattr(state, "head", 3),
        lambda: state.cursors.update(t=2),
        lambda: state.quarantined["t"][0].update(key="l"),
    ):
        with pytest.raises((TypeError, AttributeError)):
            spoil()
    with pytest.raises(ValueError):
        to_json(state)


async def test_a_transient_state_restores_nothing(chain):
    async with chain.node("raw", owns=True) as node:
        with pytest.raises(InvalidInputError):
            await node.restore_from_state(CHAIN, make_transient(ExecutionState(answers=None)))


async def test_a_delivery_on_its_way_when_a_hold_lands_is_not_put_behind_it():
    """A driver that hears of nothing loses to the hold: its run is dropped, and judged anew from its log."""
    chain = Chain()
    await chain.started()
    await chain.send("t", "m1", "m1")
    faulty = FaultyStore(chain.mixed.fleet.store(()))
    store = EncryptingEventStore.over(faulty, MemoryKeyStore(chain.mixed.keys))
    driver = chain.mixed.fleet.runtime("capable", [listens], events=store)
    async with chain.node("raw") as raw, driver:
        held = []

        async def hold_first(appends):
            if has(appends, Kind.MESSAGE_CONSUMED) and not held:
                held.append(await hold(raw))

        faulty.before = hold_first
        assert await driver.notify_inbox(CHAIN)
        await until(
            lambda: kinds(chain)[-1] == Kind.EXECUTION_SUSPENDED and len(kinds(chain)) > 3, "the park"
        )
        await until(lambda: not chain.copies(), "the copy to be freed")
    assert held[0].changed
    course = [k for k in kinds(chain) if k.startswith(("INBOX", "MESSAGE"))]
    assert course == [Kind.INBOX_QUARANTINED, Kind.INBOX_RELEASED, Kind.MESSAGE_CONSUMED]


async def test_whoever_gains_the_shard_looks_at_what_is_held_without_being_told(chain):
    await chain.send("t", "m1", "m1")
    async with chain.node("raw") as node:
        await hold(node)
        await node._engine.wakes.clear(CHAIN)
    async with chain.node("capable", owns=True) as capable:
        await until(lambda: Kind.MESSAGE_CONSUMED in kinds(chain), "the delivery", 3)
        await rest(capable)


@pytest.mark.parametrize("max_resident", [0, 10])
async def test_an_incapable_node_never_retires_the_row_of_what_is_held(chain, max_resident):
    await chain.send("t", "m1", "m1")
    trouble = Trouble()
    async with chain.node("raw", owns=True, trouble=trouble, max_resident=max_resident) as node:
        await hold(node)
        await chain.send("u", 1, "u1", sealed=False)
        await until(lambda: Kind.MESSAGE_CONSUMED in kinds(chain), "the delivery of the other topic")
        await until(lambda: any(type(e) is QuarantineHeldError for e, _ in trouble.errors), "the signal")
        await until(lambda: (CHAIN in node._engine.parked_runs) is bool(max_resident), "rest")
        await until_rows(node._engine.wakes, CHAIN, "refusal")
        await until(node._engine.idle, "rest")
        claims, done = [], []
        claim, complete = node._engine.wakes.claim, node._engine.wakes.complete

        async def counted(row, *given):
            claims.append(row)
            return await claim(row, *given)

        async def noted(*given):
            done.append(given)
            return await complete(*given)

        node._engine.wakes.claim, node._engine.wakes.complete = counted, noted
        node._engine.backoff.cleared(held_back(CHAIN))
        await until(lambda: len(claims) > 1, "a look through the rows, and its end")
        await until(node._engine.idle, "rest")
        assert done == []
        assert len(await node._engine.wakes.rows_of(CHAIN)) == 1
        assert not node._engine.backoff.blocked(CHAIN), "its other topics are not slowed"


async def test_a_fork_whose_hold_means_another_copy_is_refused(chain):
    await chain.send("t", "m1", "m1")
    async with chain.node("raw") as node:
        await hold(node)
        fact = chain.log()[-1]
        wrong = NewEvent("x", fact.type, {**fact.data, "topic": "u", "inboxSeq": 7}, fact.metadata)
        seen = await node._engine.events.observe(CHAIN)
        await node._engine.events.append(StreamAppend(CHAIN, (wrong,), observation=seen))
        before = chain.mixed.resting()
        with pytest.raises(InboxQuarantineRefusedError) as caught:
            await node.fork(CHAIN, new_id="child")
        assert caught.value.topic == "u"
        assert chain.mixed.resting() == before


async def test_a_wake_that_comes_while_a_refusal_is_told_is_not_lost(chain):
    await chain.send("t", "m1", "m1")
    async with chain.node("raw") as node:
        await hold(node)
        told = []

        def on_error(error, about):
            told.append(type(error))
            node._engine.driving.wake(about)

        node._signals._on_error = on_error
        node._engine.driving.wake(CHAIN)
        await until(lambda: told == [QuarantineHeldError], "the refusal")
        await until(node._engine.idle, "rest")
        (_, delay_ms) = node._engine.backoff._held[held_back(CHAIN)]
        assert delay_ms == 2_000, "it looked twice"


async def test_a_hold_ends_the_back_off_of_the_refusals_before_it(chain):
    trouble = Trouble()
    async with chain.node("raw", owns=True, trouble=trouble) as node, chain.node("raw") as other:
        await chain.send("t", "m1", "m1")
        await until(lambda: node._engine.backoff.blocked(CHAIN), "the back-off")
        for _ in range(6):
            node._engine.backoff.failed(CHAIN)  # a minute, as after many refusals
        await hold(other)
        await until(lambda: not node._engine.backoff.blocked(CHAIN), "its end")


async def test_a_copy_is_freed_by_what_is_durable_not_by_what_is_on_its_way(chain):
    """The second delivery is given out while the first travels; a crash then would lose it with its copy."""
    for n in (1, 2):
        await chain.send("t", f"m{n}", f"m{n}")
    async with chain.node("raw") as raw:
        await hold(raw)
        await hold(raw)
    faulty = FaultyStore(chain.mixed.fleet.store(()))
    store = EncryptingEventStore.over(faulty, MemoryKeyStore(chain.mixed.keys))
    travelled, may_travel = [], asyncio.Event()

    async def hold_up(appends):
        if not has(appends, Kind.MESSAGE_CONSUMED):
            return
        travelled.append(None)
        if len(travelled) == 1:
            run = driver._engine.runs[CHAIN]
            await until(lambda: len(run.state.dedupe) == 2, "the second delivery to be given out")
        else:
            await may_travel.wait()

    faulty.before = hold_up
    driver = chain.mixed.fleet.runtime("capable", [listens], events=store)
    async with driver:
        assert await driver.notify_inbox(CHAIN)
        await until(lambda: len(travelled) == 2, "the first delivery to be durable")
        run = driver._engine.runs[CHAIN]
        assert run.journal.behind
        await until(lambda: not driver._engine._tasks, "what follows from it")
        assert "m2" in [copy.data["messageId"] for copy in chain.copies()]
        may_travel.set()
        await until(lambda: not chain.copies(), "the copies to be freed")
    assert kinds(chain).count(Kind.MESSAGE_CONSUMED) == 2
