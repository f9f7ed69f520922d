"""A message to a flow that rests for it: sent and delivered in one append, or not at all (docs/adr/0038)."""

from __future__ import annotations

import asyncio

import pytest
from runtime_support import FaultyStore, has, kinds, of_kind

from loom import flow, receive, timer
from loom.errors import OutcomeUnknownError, SealedPayloadUnreadableError, StorageWriteError
from loom.ids import dedupe_key, inbox_stream
from loom.kernel import inbox
from loom.kernel.inbox import InboxMessage
from loom.runtime import facts
from loom.runtime.listener import Listener
from loom.runtime.sending import APART_MS
from loom.schemas.envelope import Kind
from loom.stores.contracts import StreamAppend
from loom.testing.runtime import until, until_parked

IN_ONE = [Kind.MESSAGE_CONSUMED, Kind.EXECUTION_RESUMED, Kind.EXECUTION_COMPLETED]


@flow("receiver")
async def receiver(ctx, count):
    return [await ctx.receive("go") for _ in range(count)]


@pytest.fixture
def events(fleet):
    return FaultyStore(fleet.store())


@pytest.fixture
def deaf(monkeypatch):
    """This process hears of no message by itself."""
    monkeypatch.setattr(Listener, "_inbox", lambda _self, _committed: None)


async def resting(runtime, execution_id):
    await until_parked(runtime, execution_id)
    return runtime._engine.runs[execution_id]


async def other_message(fleet, execution_id, payload, topic="go"):
    """Another node's message, of which this process has not heard."""
    key = dedupe_key(None, f"other-{payload}")
    event = facts.message(
        topic, payload, message_id=f"other-{payload}", sender=None, event_id=key, metadata=facts.STAMP
    )
    await fleet.store(()).append(StreamAppend(inbox_stream(execution_id, topic), (event,)))


async def inbox_of(runtime, execution_id, topic="go"):
    stored = await runtime.stores.events.read(inbox_stream(execution_id, topic))
    return [event.data["payload"] for event in stored]


def consumed(history):
    return [(e.data["inboxSeq"], e.data["payload"]) for e in of_kind(history, Kind.MESSAGE_CONSUMED)]


async def test_a_message_and_all_that_comes_of_it_are_one_append(fleet, events):
    async with fleet.runtime("node", [receiver], events=events) as runtime:
        handle = await runtime.start(receiver, 1)
        await until_parked(runtime, handle.execution_id)
        before = len(events.appended)
        await runtime.send(handle.execution_id, "go", {"n": 1})
        assert await handle.result(5) == [{"n": 1}]
        (together,) = events.appended[before:]
        log, message = together
        assert (log.stream_id, [e.type for e in log.events]) == (handle.execution_id, IN_ONE)
        assert message.stream_id == inbox_stream(handle.execution_id, "go")
        assert await inbox_of(runtime, handle.execution_id) == [{"n": 1}]
        assert [(r["topic"], r["state"]) for r in await runtime.inbox(handle.execution_id)] == []


async def test_the_sender_is_answered_when_the_message_is_durable(fleet, events):
    release = asyncio.Event()

    async def hold(appends):
        if has(appends, Kind.INBOX_MESSAGE):
            await release.wait()

    events.before = hold
    async with fleet.runtime("node", [receiver], events=events) as runtime:
        handle = await runtime.start(receiver, 1)
        await until_parked(runtime, handle.execution_id)
        sent = asyncio.create_task(runtime.send(handle.execution_id, "go", 1))
        await until(lambda: not runtime._engine.parked_runs)
        await asyncio.sleep(0.05)
        assert not sent.done()
        assert kinds(await runtime.history(handle.execution_id))[-1] == Kind.EXECUTION_SUSPENDED
        release.set()
        await sent
        assert await handle.result(5) == [1]


async def test_a_flow_of_which_a_branch_is_at_work_gets_its_message_once_that_is_durable(
    fleet, events, handed_over
):
    """It would start steps on it at once: there is no park whose end they wait for."""
    ran, at_work, release = [], asyncio.Event(), asyncio.Event()

    async def note():
        ran.append(1)

    @flow("branches")
    async def branches(ctx):
        async def reacts():
            await ctx.receive("go")
            await ctx.run(note)

        await asyncio.gather(ctx.run(at_work.wait), reacts())

    async def hold(appends):
        if has(appends, Kind.INBOX_MESSAGE):
            await release.wait()

    events.before = hold
    async with fleet.runtime("node", [branches], events=events) as runtime:
        handle = await runtime.start(branches)
        run = runtime._engine.runs[handle.execution_id]
        await until(lambda: run.machine.waiting and not run.journal.behind)
        sent = asyncio.create_task(runtime.send(handle.execution_id, "go", 1))
        await until(lambda: handed_over)
        await asyncio.sleep(0.05)
        assert (handed_over, ran) == ([False], [])
        release.set()
        await sent
        at_work.set()
        await handle.result(5)
        assert ran == [1]


async def test_what_the_flow_does_to_its_message_changes_nothing_that_is_stored(runtime):
    @flow("greedy")
    async def greedy(ctx):
        given = await ctx.receive("go")
        given["list"].append("more")
        given.clear()

    handle = await runtime.start(greedy)
    await until_parked(runtime, handle.execution_id)
    await runtime.send(handle.execution_id, "go", {"list": [1]})
    await handle.result(5)
    assert await inbox_of(runtime, handle.execution_id) == [{"list": [1]}]
    assert consumed(await runtime.history(handle.execution_id)) == [(0, {"list": [1]})]


async def test_another_message_that_was_first_is_delivered_first(fleet, events, handed_over, trouble):
    """The flow had the second one already; what it made of it is forgotten with the run."""
    seen = []

    @flow("looks")
    async def looks(ctx, count):
        for _ in range(count):
            seen.append(await ctx.receive("go"))
        return seen[-count:]

    async def be_first(appends):
        if len(appends) == 2:
            events.before = None
            await other_message(fleet, execution_id, "first")

    events.before = be_first
    async with fleet.runtime("node", [looks], events=events, **trouble.options) as runtime:
        handle = await runtime.start(looks, 2)
        execution_id = handle.execution_id
        await until_parked(runtime, execution_id)
        await runtime.send(execution_id, "go", "mine")
        assert await handle.result(5) == ["first", "mine"]
        assert handed_over[0] is True
        assert seen == ["mine", "first", "mine"]
        assert consumed(await runtime.history(execution_id)) == [(0, "first"), (1, "mine")]
        assert await inbox_of(runtime, execution_id) == ["first", "mine"]
    assert trouble.errors == []


async def test_after_one_that_came_to_nothing_messages_go_by_themselves_for_a_while(
    fleet, events, handed_over
):
    async def be_first(appends):
        if len(appends) == 2:
            events.before = None
            await other_message(fleet, execution_id, "first")

    events.before = be_first
    async with fleet.runtime("node", [receiver], events=events) as runtime:
        handle = await runtime.start(receiver, 4)
        execution_id = handle.execution_id
        await until_parked(runtime, execution_id)
        await runtime.send(execution_id, "go", "second")
        await until_parked(runtime, execution_id)
        await runtime.send(execution_id, "go", "third")
        await until_parked(runtime, execution_id)
        assert handed_over == [True]
        sending = runtime._verbs._sending
        sending._apart._clock = lambda: fleet.clock() + APART_MS  # time passes
        await runtime.send(execution_id, "go", "fourth")
        assert await handle.result(5) == ["first", "second", "third", "fourth"]
        assert handed_over == [True, True]
        assert not sending._apart.known(execution_id)


async def test_an_unknown_outcome_is_repeated_and_stands_once(fleet, events, trouble):
    def lose(appends):
        if len(appends) == 2:
            events.after = None
            raise OutcomeUnknownError(appends[0].stream_id, "the reply was lost")

    events.after = lose
    async with fleet.runtime("node", [receiver], events=events, **trouble.options) as runtime:
        handle = await runtime.start(receiver, 1)
        await until_parked(runtime, handle.execution_id)
        await runtime.send(handle.execution_id, "go", 1)
        assert await handle.result(5) == [1]
        assert await inbox_of(runtime, handle.execution_id) == [1]
        assert kinds(await runtime.history(handle.execution_id))[2:] == IN_ONE
    assert trouble.errors == []


async def test_a_store_that_stays_away_leaves_the_flow_without_the_message(fleet, events, trouble):
    """No effect of it starts; the sender is told; the flow has what comes first once the store is back."""
    ran, away = [], asyncio.Event()

    async def note(what):
        ran.append(what)

    @flow("notes")
    async def notes(ctx):
        await ctx.run(note, await ctx.receive("go"))

    def refuse(appends):
        if has(appends, Kind.INBOX_MESSAGE) and not away.is_set():
            raise StorageWriteError(appends[0].stream_id, "the broker is away")

    events.before = refuse
    settings = {"storage_patience_ms": 100, "recovery_interval_ms": 50}
    async with fleet.runtime("node", [notes], events=events, settings=settings, **trouble.options) as runtime:
        handle = await runtime.start(notes)
        await until_parked(runtime, handle.execution_id)
        with pytest.raises(StorageWriteError):
            await runtime.send(handle.execution_id, "go", "lost")
        assert ran == []
        away.set()
        await runtime.send(handle.execution_id, "go", "kept")
        await handle.result(5)
        assert ran == ["kept"]
        assert consumed(await runtime.history(handle.execution_id)) == [(0, "kept")]


async def test_a_repeat_that_the_chain_has_forgotten_but_its_inbox_has_not_is_one_message(
    fleet, handed_over, monkeypatch
):
    monkeypatch.setattr(inbox, "DEDUPE_WINDOW", 1)
    async with fleet.runtime("node", [receiver]) as runtime:
        handle = await runtime.start(receiver, 3)
        for message_id in ("m0", "m1", "m0", "m2"):
            await until_parked(runtime, handle.execution_id)
            await runtime.send(handle.execution_id, "go", message_id, message_id=message_id)
        assert await handle.result(5) == ["m0", "m1", "m2"]
        assert await inbox_of(runtime, handle.execution_id) == ["m0", "m1", "m2"]
        assert handed_over[:3] == [True, True, True]


async def test_messages_on_their_way_are_not_overtaken(fleet, events, handed_over):
    """A burst is sent one behind the other; none of it costs the run its place in memory."""
    async with fleet.runtime("node", [receiver], events=events) as runtime:
        handle = await runtime.start(receiver, 60)
        await until_parked(runtime, handle.execution_id)
        run = runtime._engine.runs[handle.execution_id]
        for n in range(0, 60, 6):
            await asyncio.gather(*(runtime.send(handle.execution_id, "go", m) for m in range(n, n + 6)))
            assert runtime._engine.runs.get(handle.execution_id) in {run, None}
        assert await handle.result(5) == list(range(60))
        assert True in handed_over
        together = [a for a in events.appended if len(a) == 2]
        assert len(together) == handed_over.count(True)


async def test_a_message_whose_append_is_under_way_is_not_overtaken(fleet, events, handed_over):
    at_work, release = asyncio.Event(), asyncio.Event()

    @flow("works-first")
    async def works_first(ctx):
        await ctx.run(at_work.wait)
        return [await ctx.receive("go") for _ in range(2)]

    async def hold(appends):
        if has(appends, Kind.INBOX_MESSAGE):
            events.before = None
            await release.wait()

    events.before = hold
    async with fleet.runtime("node", [works_first], events=events) as runtime:
        handle = await runtime.start(works_first)
        first = asyncio.create_task(runtime.send(handle.execution_id, "go", 1))
        await until(lambda: events.before is None, "the first append")
        at_work.set()
        await until_parked(runtime, handle.execution_id)
        await runtime.send(handle.execution_id, "go", 2)
        release.set()
        await first
        assert await handle.result(5) == [2, 1]
        assert handed_over == [
            False
        ]  # the first, at a flow that was at work; the second was not even offered


async def test_a_message_of_which_this_process_has_not_heard_yet_comes_first(
    runtime, fleet, handed_over, deaf
):
    handle = await runtime.start(receiver, 2)
    run = await resting(runtime, handle.execution_id)
    await other_message(fleet, handle.execution_id, "first")
    await runtime.send(handle.execution_id, "go", "second")
    assert handed_over == [False]
    run.waiting.doubt()
    run.look()
    assert await handle.result(5) == ["first", "second"]


async def test_a_message_on_an_earlier_arm_comes_first_though_it_was_not_read_yet(
    runtime, fleet, handed_over, deaf
):
    @flow("two-topics")
    async def two_topics(ctx):
        return [(await ctx.select(receive("a"), receive("b"))).value for _ in range(2)]

    handle = await runtime.start(two_topics)
    run = await resting(runtime, handle.execution_id)
    await other_message(fleet, handle.execution_id, "first", "a")
    run.waiting.doubt()
    await runtime.send(handle.execution_id, "b", "second")
    assert handed_over == [False]
    run.waiting.doubt()
    run.look()
    assert await handle.result(5) == ["first", "second"]


async def test_a_run_need_not_hear_of_what_it_was_handed(runtime, handed_over, deaf):
    handle = await runtime.start(receiver, 3)
    for n in range(3):
        run = await resting(runtime, handle.execution_id)
        assert run.waiting.feeds.unread == {"go": []}
        await runtime.send(handle.execution_id, "go", n)
    assert await handle.result(5) == [0, 1, 2]
    assert handed_over == [True, True, True]


async def test_beside_a_message_that_cannot_be_opened_here_it_goes_by_itself(fleet, trouble, handed_over):
    @flow("two-topics")
    async def two_topics(ctx):
        return (await ctx.select(receive("a"), receive("b"))).value

    async with fleet.runtime("node", [two_topics], **trouble.options) as runtime:
        handle = await runtime.start(two_topics)
        run = await resting(runtime, handle.execution_id)
        stream_id = inbox_stream(handle.execution_id, "a")
        sealed = InboxMessage(stream_id, 0, "a", "m", None, "k" * 64, {"__loomEnc": "..."}, 0)
        run.waiting.feeds.seed("a", [sealed])
        await runtime.send(handle.execution_id, "b", "open")
        assert handed_over == [False]
        assert await inbox_of(runtime, handle.execution_id, "b") == ["open"]
        await until(lambda: trouble.errors, "the refusal")
        assert {type(error) for error, _ in trouble.errors} == {SealedPayloadUnreadableError}


async def test_one_that_waits_for_a_lease_is_not_passed_over(runtime, handed_over, monkeypatch):
    handle = await runtime.start(receiver, 2)
    run = await resting(runtime, handle.execution_id)
    monkeypatch.setattr(runtime._engine, "may_wake", lambda _run: False)
    await runtime.send(handle.execution_id, "go", "first")
    await until(lambda: run.waiting.feeds.unread["go"], "the first to be heard of")
    monkeypatch.undo()
    await runtime.send(handle.execution_id, "go", "second")
    assert await handle.result(5) == ["first", "second"]


async def test_a_run_that_needs_a_lease_is_woken_under_one(fleet, handed_over):
    settings = {"leases": {"ttl_ms": 600, "acquire": "eager"}}
    async with fleet.runtime("node", [receiver], settings=settings) as runtime:
        handle = await runtime.start(receiver, 1)
        run = await resting(runtime, handle.execution_id)
        assert run.lease is None
        await runtime.send(handle.execution_id, "go", 1)
        assert handed_over == [False]
        assert await handle.result(5) == [1]


async def test_a_timer_that_is_due_comes_before_the_message(skipping, handed_over):
    @flow("chooses")
    async def chooses(ctx):
        arm = await ctx.select(timer(5), receive("go"))
        return arm.index

    handle = await skipping.start(chooses)
    await until_parked(skipping, handle.execution_id)
    skipping._engine.now = lambda: 1 << 50
    await skipping.send(handle.execution_id, "go", 1)
    assert await handle.result(5) == 0
    assert handed_over == [False]


async def test_a_message_that_the_flow_does_not_wait_for_goes_by_itself(runtime, handed_over):
    handle = await runtime.start(receiver, 1)
    await until_parked(runtime, handle.execution_id)
    await runtime.send(handle.execution_id, "other", 1)
    assert handed_over == [False]
    assert await inbox_of(runtime, handle.execution_id, "other") == [1]
    await runtime.send(handle.execution_id, "go", 2)
    assert await handle.result(5) == [2]


async def test_a_flow_that_continues_on_a_message_hands_the_rest_to_its_heir(runtime, handed_over):
    @flow("relay")
    async def relay(ctx, left):
        given = await ctx.receive("go")
        if left:
            await ctx.continue_as_new(left - 1)
        return given

    handle = await runtime.start(relay, 2)
    for n in range(3):
        await until(lambda: runtime._engine.parked_runs, "a park")
        await runtime.send(handle.execution_id, "go", n)
    assert await handle.result(5) == 2
    assert handed_over == [True, True, True]
    assert await inbox_of(runtime, handle.execution_id) == [0, 1, 2]
