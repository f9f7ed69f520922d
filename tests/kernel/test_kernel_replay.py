import contextlib
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_programs import program
from kernel_support import Driver, consumed, event, key, keys, machine, replayed, resumed, step

from loom.errors import FlowDivergedError
from loom.kernel import Complete, child, flow, receive, timer
from loom.schemas.envelope import Kind

small = st.integers(0, 9)
ops = st.recursive(
    st.lists(
        st.one_of(
            st.tuples(st.just("run"), small),
            st.tuples(st.just("decide"), small),
            st.tuples(st.just("select"), small),
            st.tuples(st.just("clock"), st.integers(0, 3)),
        ),
        max_size=4,
    ),
    lambda block: st.lists(
        st.one_of(
            st.tuples(
                st.sampled_from(["gather", "group", "race", "all"]), st.lists(block, min_size=1, max_size=3)
            ),
            st.tuples(st.just("timeout"), small, block),
            st.tuples(st.just("run"), small),
            st.tuples(st.just("decide"), small),
        ),
        max_size=3,
    ),
    max_leaves=6,
)


def as_json(tree):
    return [as_json(x) for x in tree] if isinstance(tree, list | tuple) else tree


def driven(tree, seed, events=60):
    return Driver(program, as_json(tree), rng=random.Random(seed), seed=seed, fail_rate=0.2).run(events)


def cut(history, rng):
    batches, rest = [], list(history)
    while rest:
        n = rng.randrange(0, 4)
        batches.append(rest[:n])
        rest = rest[n:]
    return batches


def outstanding(d):
    return d.snapshots[-1][1]


@settings(max_examples=80, deadline=None)
@given(ops, st.integers(0, 2**32))
def test_a_history_split_in_any_way_gives_what_the_live_run_left_outstanding(tree, seed):
    d = driven(tree, seed)
    rng = random.Random(seed)
    ways = [[d.history], [[e] for e in d.history], cut(d.history, rng), cut(d.history, rng)]
    results = [replayed(program, d.value, way) for way in ways]
    for commands, m in results:
        assert commands == outstanding(d)
        assert m.history_length == d.machine.history_length
        assert m.logical_ms == d.machine.logical_ms
        m.close()


@settings(max_examples=40, deadline=None)
@given(ops, st.integers(0, 2**32))
def test_a_log_cut_anywhere_between_decisions_gives_what_was_outstanding_there(tree, seed):
    d = driven(tree, seed, 30)
    for length, expected in d.snapshots:
        commands, m = replayed(program, d.value, [d.history[:length]])
        assert commands == expected
        m.close()


@settings(max_examples=40, deadline=None)
@given(ops, st.integers(0, 2**32), st.integers(0, 30))
def test_a_run_taken_over_at_any_event_goes_on_as_if_never_moved(tree, seed, at):
    """Replay a prefix, feed the rest live: the same commands come out, one by one."""
    d = driven(tree, seed, 40)
    boundaries = [n for n, _ in d.snapshots]
    split = boundaries[min(at, len(boundaries) - 1)]
    m = machine(program, d.value, seed=seed)
    m.sources = machine(program, d.value, seed=1).sources
    m.replay(d.history[:split])
    decided = [e for e in d.history[split:] if e.type == Kind.DECISION_RECORDED]
    if not decided:  # decisions of a live run are drawn, not read
        for envelope in d.history[split:]:
            m.apply(envelope)
        assert m.outcome == d.machine.outcome
        assert {key(w) for w in m.waiting} == {k for k in outstanding(d) if k[0] == "wait"}
    m.close()


@settings(max_examples=30, deadline=None)
@given(ops, st.integers(0, 2**32))
def test_a_log_cut_anywhere_at_all_never_diverges(tree, seed):
    """A crash may leave some of an event's decisions behind: the rest are taken afresh."""
    d = driven(tree, seed, 25)
    for length in range(len(d.history) + 1):
        replayed(program, d.value, [d.history[:length]])[1].close()


def test_every_split_of_one_history():
    tree = [
        ["gather", [[["run", 1], ["decide", 1]], [["select", 0]], [["race", [[["run", 2]], [["run", 3]]]]]]]
    ]
    d = driven(tree, 4, 14)
    history = d.history[:13]
    expected, _ = replayed(program, d.value, [history])
    for cuts in itertools.product([False, True], repeat=len(history) - 1):
        batches, batch = [], []
        for envelope, last in zip(history, [*cuts, True], strict=True):
            batch.append(envelope)
            if last:
                batches.append(batch)
                batch = []
        assert replayed(program, d.value, batches)[0] == expected


# Divergence ----------------------------------------------------------------------------------------------------------


def work(x):
    return x


@flow("steady")
async def steady(ctx):
    await ctx.run(work, 1)
    ctx.random()
    selected = await ctx.select(receive("t"), timer(5))
    handle = await ctx.start_child("kid", None)
    await ctx.send("e2", "topic", 1)
    await ctx.publish("out", None, 1)
    await ctx.select(child(handle))
    return selected.index


GOOD = [
    step(1, "0:0", "work", 1),
    event(2, Kind.DECISION_RECORDED, siteId="0:1", kind="random", value=0.5),
    consumed(3, "0:2", "t", 1),
    event(4, Kind.CHILD_STARTED, siteId="0:3", workflow="kid", childId="k"),
    event(5, Kind.MESSAGE_SENT, siteId="0:4", executionId="e2", topic="topic", messageId="m"),
    event(6, Kind.RECORD_PUBLISHED, siteId="0:5", topic="out"),
    consumed(7, "0:6", "__loom_child__:k", {"status": "completed", "output": None}),
    event(8, Kind.EXECUTION_COMPLETED, output=0),
]


def test_the_good_history_replays():
    assert machine(steady).replay(GOOD) == []
    assert machine(steady).replay(GOOD[:-1]) == [Complete(0)]


BAD = [
    (1, step(1, "0:0", "other", 1), "STEP_COMPLETED 'other' at 0:0", "step 'work' at 0:0"),
    (1, step(1, "0:1", "work", 1), "STEP_COMPLETED 'work' at 0:1", "step 'work' at 0:0"),
    (1, consumed(1, "0:0", "t", 1), "MESSAGE_CONSUMED 't' at 0:0", "step 'work' at 0:0"),
    (1, resumed(1, "0:0", "timer"), "EXECUTION_RESUMED 'timer' at 0:0", "step 'work' at 0:0"),
    (
        1,
        event(1, Kind.STEP_FAILED, siteId="0:0", name="x", error={}, final=True),
        "STEP_FAILED 'x' at 0:0",
        "step 'work' at 0:0",
    ),
    (
        2,
        event(2, Kind.DECISION_RECORDED, siteId="0:1", kind="uuid", value="x"),
        "'uuid' at 0:1",
        "'random' at 0:1",
    ),
    (2, event(2, Kind.DECISION_RECORDED, siteId="0:7", kind="random", value=1), "at 0:7", "'random' at 0:1"),
    (3, consumed(3, "0:2", "u", 1), "MESSAGE_CONSUMED 'u'", "a wait at 0:2 for inbox t, timer"),
    (3, consumed(3, "0:2", "t", 1, arm=1), "MESSAGE_CONSUMED", "a wait at 0:2"),
    (3, consumed(3, "0:2", "t", 1, arm=9), "MESSAGE_CONSUMED", "a wait at 0:2"),
    (3, resumed(3, "0:2", "gate", arm=1), "EXECUTION_RESUMED 'gate'", "a wait at 0:2"),
    (
        4,
        event(4, Kind.CHILD_STARTED, siteId="0:3", workflow="cat", childId="k"),
        "'cat'",
        "child 'kid' at 0:3",
    ),
    (
        5,
        event(5, Kind.MESSAGE_SENT, siteId="0:4", executionId="e3", topic="topic"),
        "MESSAGE_SENT",
        "to 'e2'",
    ),
    (
        6,
        event(6, Kind.RECORD_PUBLISHED, siteId="0:5", topic="in"),
        "RECORD_PUBLISHED 'in'",
        "a record for 'out'",
    ),
    (7, consumed(7, "0:6", "__loom_child__:z", {}), "MESSAGE_CONSUMED", "a wait at 0:6"),
    (7, event(7, Kind.EXECUTION_COMPLETED, output=0), "EXECUTION_COMPLETED", "a wait at 0:6"),
    (8, event(8, Kind.EXECUTION_FAILED, error={}), "EXECUTION_FAILED", "its end (completed)"),
    (8, event(8, Kind.EXECUTION_CONTINUED, workflow="x"), "EXECUTION_CONTINUED", "its end (completed)"),
    (8, step(8, "0:7", "work"), "STEP_COMPLETED", "its end (completed)"),
    (8, step(8, "0:0", "work"), "STEP_COMPLETED", "its end (completed)"),
]


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize(("at", "wrong", "recorded", "expected"), BAD)
def test_the_first_event_that_the_code_did_not_ask_for_is_named(at, wrong, recorded, expected, live):
    m = machine(steady)
    history = [*GOOD[: at - 1], wrong, *GOOD[at:]]
    live = live and wrong.type != Kind.DECISION_RECORDED  # decisions are read on replay only
    if live:
        m.replay(history[: at - 1])
    with pytest.raises(FlowDivergedError) as caught:
        m.apply(wrong) if live else m.replay(history)
    error = caught.value
    assert (error.execution_id, error.sequence) == ("e1", at)
    assert recorded in error.recorded
    assert expected in error.expected
    assert m.latched is error
    for envelope in GOOD:
        assert m.apply(envelope) == []
    assert m.replay(GOOD) == []
    m.close()


def test_an_answer_given_twice_diverges():
    m = machine(steady)
    with pytest.raises(FlowDivergedError) as caught:
        m.replay([GOOD[0], GOOD[1], step(3, "0:0", "work", 1)])
    assert caught.value.sequence == 3


def test_history_after_its_end_diverges():
    m = machine(steady)
    with pytest.raises(FlowDivergedError) as caught:
        m.replay([*GOOD, step(9, "0:7", "work")])
    assert caught.value.sequence == 9
    with pytest.raises(FlowDivergedError):
        machine(steady).replay([*GOOD, event(9, Kind.EXECUTION_COMPLETED, output=0)])


def test_a_cancellation_agrees_with_any_code():
    m = machine(steady)
    assert m.replay([*GOOD[:3], event(4, Kind.EXECUTION_CANCELLED, reason="x")]) == []
    assert m.waiting == ()


def test_a_decision_that_the_code_grew_diverges_where_the_log_goes_on():
    @flow("steady")
    async def grown(ctx):
        await ctx.run(work, 1)
        ctx.random()
        ctx.uuid()
        await ctx.select(receive("t"), timer(5))

    m = machine(grown)
    with pytest.raises(FlowDivergedError) as caught:
        m.replay(GOOD[:3])
    assert (caught.value.sequence, caught.value.expected) == (3, "decision 'uuid' at 0:2")


def test_a_decision_that_the_code_lost_diverges():
    @flow("steady")
    async def shrunk(ctx):
        await ctx.run(work, 1)
        await ctx.select(receive("t"), timer(5))

    m = machine(shrunk)
    with pytest.raises(FlowDivergedError) as caught:
        m.replay(GOOD[:2])
    assert (caught.value.sequence, caught.value.recorded) == (2, "DECISION_RECORDED 'random' at 0:1")


def test_a_flow_that_swallows_everything_cannot_hide_a_divergence():
    @flow("steady")
    async def swallower(ctx):
        await ctx.run(work, 1)
        with contextlib.suppress(BaseException):
            ctx.uuid()
        for _ in range(3):
            try:
                await ctx.run(work, 2)
            except BaseException:
                continue
        return "fine"

    m = machine(swallower)
    with pytest.raises(FlowDivergedError):
        m.replay(GOOD[:3])
    assert not m.is_done
    m.close()


def test_no_payload_stands_in_a_divergence():
    m = machine(steady)
    with pytest.raises(FlowDivergedError) as caught:
        m.replay([consumed(1, "0:0", "t", {"card": "4111-1111"}, payloadX="4111")])
    assert "4111" not in str(caught.value)


def test_replay_then_live():
    m = machine(steady)
    m.replay(GOOD[:3])
    assert keys(m.apply(GOOD[3]))[0][0] == "SendMessage"
    assert keys(m.apply(GOOD[4]))[0][0] == "PublishRecord"
    assert keys(m.apply(GOOD[5])) == [("wait", "0:6", (("child", "__loom_child__:k", None, None, "k"),))]
    assert m.apply(GOOD[6]) == [Complete(0)]
