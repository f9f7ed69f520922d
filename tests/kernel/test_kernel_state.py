import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_golden import VALUE, order, read
from kernel_programs import program
from kernel_support import Driver, consumed, event, keys, machine, resumed, step

from loom.errors import DecodeError, StreamBrokenError
from loom.kernel import (
    DEDUPE_WINDOW,
    ExecutionState,
    carried_inbox,
    fold,
    from_json,
    history,
    load_waits,
    to_json,
)
from loom.schemas.envelope import Envelope, Kind


def folded(*events, state=None):
    state = state or ExecutionState()
    for n, e in enumerate(events, start=state.head + 1):
        assert fold(state, Envelope(e.id, "e1", n, e.type, e.timestamp, e.data, e.metadata))
    return state


START = event(
    0,
    Kind.EXECUTION_STARTED,
    workflow="order",
    input={"n": 1},
    chainId="c1",
    subject="alice",
    principal={"actor": "alice", "identity": {"id": 1}},
    parent={"executionId": "p", "chainId": "p", "siteId": "0:1"},
)
PARK = event(
    0,
    Kind.EXECUTION_SUSPENDED,
    waits=[
        {"siteId": "0:2", "arms": [{"kind": "inbox", "topic": "t"}, {"kind": "timer", "wakeAt": 5}]},
        {"siteId": "0.1:0", "arms": [{"kind": "gate", "gate": "g"}]},
    ],
)


def test_the_start():
    state = folded(START)
    assert (state.status, state.workflow, state.chain_id, state.subject) == (
        "running",
        "order",
        "c1",
        "alice",
    )
    assert state.principal == {"actor": "alice", "identity": {"id": 1}}
    assert (state.input, state.head, state.started_at) == ({"n": 1}, 0, START.timestamp)
    assert state.parent["siteId"] == "0:1"
    assert not state.finished


def test_the_chain_is_the_execution_where_none_is_given():
    assert folded(event(0, Kind.EXECUTION_STARTED, workflow="w")).chain_id == "e1"


def test_park_and_wake():
    state = folded(START, PARK)
    assert state.status == "suspended"
    assert [w.site_id for w in load_waits(state.waits)] == ["0:2", "0.1:0"]
    woken = folded(consumed(0, "0:2", "t", {"x": 1}), resumed(0, "0:2", "inbox"), state=state)
    assert (woken.status, woken.waits) == ("running", ())
    assert list(woken.answers) == ["0:2"]
    assert woken.answers["0:2"].data["payload"] == {"x": 1}


def test_control_records_leave_the_park_unanswered():
    state = folded(
        START,
        PARK,
        event(0, Kind.ERASURE_PENDING, subjectId="alice"),
        event(0, Kind.EXECUTION_DENIED, op="query"),
        event(0, Kind.OUTCOME_RECORDED, outcome="won"),
        event(
            0, Kind.MESSAGE_CONSUMED, topic="t", messageId="k", inboxSeq=4, payload=None, reason="duplicate"
        ),
        event(0, Kind.INBOX_QUARANTINED, topic="t"),
        event(0, "FUTURE", anything=1),
    )
    assert state.status == "suspended"
    assert len(state.waits) == 2
    assert (state.erasure, state.outcome, state.cursors) == ({"alice": 2}, "won", {"t": 4})
    assert list(state.dedupe) == ["k"]
    assert state.head == 7


@pytest.mark.parametrize(
    ("kind", "data", "status", "field", "value"),
    [
        (Kind.EXECUTION_COMPLETED, {"output": 3}, "completed", "output", 3),
        (
            Kind.EXECUTION_FAILED,
            {"error": {"type": "E", "message": "m"}},
            "failed",
            "error",
            {"type": "E", "message": "m"},
        ),
        (Kind.EXECUTION_CANCELLED, {"reason": "why"}, "cancelled", "reason", "why"),
        (
            Kind.EXECUTION_CONTINUED,
            {"successorId": "e2", "workflow": "order"},
            "continued",
            "successor",
            "e2",
        ),
    ],
)
def test_endings_and_what_cannot_follow_them(kind, data, status, field, value):
    state = folded(START, PARK, event(0, kind, **data))
    assert (state.status, getattr(state, field), state.finished, state.waits) == (status, value, True, ())
    folded(
        step(0, "0:9", "late"),
        PARK,
        resumed(0, "0:2", "timer"),
        event(0, Kind.EXECUTION_RECOVERED, reason="x"),
        event(0, Kind.PAYLOAD_SHREDDED, subjectId="alice"),
        event(0, Kind.OUTCOME_RECORDED, outcome="ok"),
        state=state,
    )
    assert (state.status, state.steps, state.recovered, state.waits) == (status, 0, 0, ())
    assert (state.shredded, state.outcome, state.head) == ({"alice": 7}, "ok", 8)


def test_steps_recoveries_children_and_patches():
    state = folded(
        START,
        step(0, "0:0", "a", 1),
        event(0, Kind.STEP_FAILED, siteId="0:1", name="b", error={}, attempt=1, final=False, retryAt=5),
        event(0, Kind.EXECUTION_RECOVERED, reason="gone"),
        event(0, Kind.EXECUTION_RECOVERED, reason="gone"),
    )
    assert (state.steps, state.recovered, state.unproductive) == (1, 2, 2)
    folded(
        event(0, Kind.STEP_FAILED, siteId="0:1", name="b", error={}, attempt=2, final=True),
        event(0, Kind.CHILD_STARTED, siteId="0:2", childId="k1", workflow="kid", cancelWithParent=False),
        event(0, Kind.CHILD_STARTED, siteId="0:3", childId="k2", workflow="kid", cancelWithParent=True),
        event(0, Kind.DECISION_RECORDED, siteId="patched:p", kind="patched", value=True),
        state=state,
    )
    assert (state.steps, state.recovered, state.unproductive) == (2, 2, 0)
    assert state.children == {
        "k1": {"workflow": "kid", "cancelWithParent": False},
        "k2": {"workflow": "kid", "cancelWithParent": True},
    }
    assert list(state.patched) == ["p"]
    folded(consumed(0, "0:4", "__loom_child__:k1", {"status": "completed"}), state=state)
    assert list(state.children) == ["k2"]


def test_a_later_attempt_takes_the_place_of_a_failed_one():
    state = folded(
        START,
        event(0, Kind.STEP_FAILED, siteId="0:0", name="a", error={}, attempt=1, final=False, retryAt=5),
        step(0, "0:1", "b"),
        step(0, "0:0", "a"),
    )
    assert [(e.sequence, e.type) for e in history(state)] == [
        (2, Kind.STEP_COMPLETED),
        (3, Kind.STEP_COMPLETED),
    ]


def test_cursors_are_monotone_and_the_window_is_bounded():
    state = folded(START)
    events = [
        event(
            0,
            Kind.MESSAGE_CONSUMED,
            topic="t",
            messageId=f"k{n}",
            inboxSeq=n,
            payload=None,
            reason="discarded",
        )
        for n in range(DEDUPE_WINDOW + 10)
    ]
    folded(*events, state=state)
    assert state.cursors == {"t": DEDUPE_WINDOW + 9}
    assert len(state.dedupe) == DEDUPE_WINDOW == 1024
    assert next(iter(state.dedupe)) == "k10"
    folded(
        event(0, Kind.MESSAGE_CONSUMED, topic="t", messageId="k500", inboxSeq=3, payload=None), state=state
    )
    assert state.cursors == {"t": DEDUPE_WINDOW + 9}
    assert len(state.dedupe) == DEDUPE_WINDOW
    assert next(iter(state.dedupe)) == "k10"


def test_an_event_at_or_below_the_head_is_ignored_and_a_gap_is_refused():
    state = folded(START, step(0, "0:0", "a"))
    assert not fold(state, event(0, Kind.EXECUTION_CANCELLED))
    assert not fold(state, event(1, Kind.EXECUTION_CANCELLED))
    assert (state.status, state.head) == ("running", 1)
    with pytest.raises(StreamBrokenError):
        fold(state, event(3, Kind.EXECUTION_CANCELLED))
    assert (state.status, state.head) == ("running", 1)


def test_a_purged_log_goes_on_at_its_end_or_at_what_was_erased_and_nowhere_else():
    for kind in (
        Kind.EXECUTION_COMPLETED,
        Kind.EXECUTION_CONTINUED,
        Kind.ERASURE_PENDING,
        Kind.PAYLOAD_SHREDDED,
    ):
        state = folded(START)
        assert fold(state, event(7, kind, output=1, successorId="x", subjectId="s"))
        assert state.head == 7
    for kind in (Kind.STEP_COMPLETED, Kind.EXECUTION_SUSPENDED, Kind.OUTCOME_RECORDED):
        with pytest.raises(StreamBrokenError):
            fold(folded(START), event(7, kind))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 60))
def test_fold_and_snapshot_agree_at_any_point(seed, at):
    tree = [
        ["gather", [[["run", 1], ["decide", 1]], [["select", 0]], [["select", 2], ["clock", 2]]]],
        ["run", 3],
    ]
    d = Driver(program, tree, rng=random.Random(seed), seed=seed, fail_rate=0.3).run(60)
    whole, state = folded(*d.history), folded(*d.history[: at + 1])
    record = json.loads(json.dumps(to_json(state)))
    again = from_json(record)
    assert json.loads(json.dumps(to_json(again))) == record
    for e in d.history[at + 1 :]:
        fold(again, e)
    assert to_json(again) == to_json(whole)


def test_a_flow_replays_from_a_state_alone():
    log = read("order.jsonl")[:15]
    state = from_json(json.loads(json.dumps(to_json(folded(*log)))))
    from_log, from_state = machine(order, VALUE), machine(order, VALUE, seed=9)
    assert keys(from_log.replay(log)) == keys(from_state.replay(history(state)))
    assert from_log.logical_ms == from_state.logical_ms
    assert from_log.history_length == from_state.history_length


def test_wire_names_of_the_folded_record():
    state = folded(
        START,
        consumed(0, "0:0", "t", {"secret": 1}),
        step(0, "0:1", "a", 5),
        event(0, Kind.ERASURE_PENDING, subjectId="alice"),
    )
    variables = to_json(state)["variables"]
    assert variables["_inbox"]["cursors"] == {"t": 0}
    assert variables["_waitAnswers"]["0:0"]["payload"] == {"secret": 1}
    assert variables["_results"]["0:1"]["output"] == 5
    assert variables["_erasure"] == {"alice": 3}
    assert "_quarantined" not in variables
    assert "_shredded" not in variables


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: r.update(version=2),
        lambda r: r.pop("variables"),
        lambda r: r.pop("head"),
        lambda r: r["variables"].pop("_inbox"),
        lambda r: r["variables"].update(_waitAnswers=[1]),
        lambda r: r["variables"]["_results"].update(x={"no": "type"}),
        lambda r: r.update(waits=None),
    ],
)
def test_a_snapshot_of_another_shape_is_a_decode_error(spoil):
    record = to_json(folded(START, step(0, "0:0", "a")))
    spoil(record)
    with pytest.raises(DecodeError):
        from_json(record)


def test_a_lean_state_keeps_no_answers_and_cannot_be_saved():
    state = folded(START, step(0, "0:0", "a", "big"), state=ExecutionState(answers=None))
    assert (state.steps, state.answers) == (1, None)
    for use in (history, to_json):
        with pytest.raises(ValueError, match="lean"):
            use(state)


# Continue-as-new -----------------------------------------------------------------------------------------------------


def test_the_inbox_is_carried():
    state = folded(
        START,
        event(0, Kind.CHILD_STARTED, siteId="0:0", childId="open", workflow="kid"),
        event(0, Kind.CHILD_STARTED, siteId="0:1", childId="over", workflow="kid"),
        consumed(0, "0:2", "__loom_child__:over", {"status": "completed"}, inboxSeq=2),
        consumed(0, "0:3", "t", 1, inboxSeq=7),
    )
    state.cursors["__loom_child__:open"] = 1
    carried = json.loads(json.dumps(carried_inbox(state)))
    assert carried["inbox"]["cursors"] == {"__loom_child__:open": 1, "t": 7}
    successor = folded(
        event(
            0,
            Kind.EXECUTION_STARTED,
            workflow="order",
            chainId="c1",
            continuedFrom={"executionId": "e0", "carried": carried},
        )
    )
    assert (successor.continued_from, successor.chain_id) == ("e0", "c1")
    assert successor.cursors == carried["inbox"]["cursors"]
    assert list(successor.dedupe) == list(state.dedupe)
    assert "quarantined" not in carried


@pytest.mark.parametrize(
    "carried",
    [
        None,
        [],
        {"inbox": None},
        {"inbox": {"cursors": {"a": -1, "b": "x", "c": True, "d": None}, "keys": [1, "short", None]}},
        {"inbox": {"cursors": [], "keys": "f" * 64}},
    ],
)
def test_ill_formed_parts_of_a_carried_inbox_are_ignored(carried):
    start = event(
        0, Kind.EXECUTION_STARTED, workflow="w", continuedFrom={"executionId": "e0", "carried": carried}
    )
    state = folded(start)
    assert (state.cursors, state.dedupe) == ({}, {})
    assert state.status == "running"


def test_a_carried_window_is_bounded():
    ks = [f"{n:064x}" for n in range(2000)]
    start = event(
        0,
        Kind.EXECUTION_STARTED,
        workflow="w",
        continuedFrom={"executionId": "e0", "carried": {"inbox": {"keys": ks}}},
    )
    assert list(folded(start).dedupe) == ks[-1024:]
