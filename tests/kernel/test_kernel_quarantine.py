"""The quarantine in the kernel: facts, fold, the delivery rule, and every race as batches on one log (seed, D9)."""

import json
from pathlib import Path

import kernel_golden as golden
import pytest

from loom.errors import SealedPayloadUnreadableError
from loom.ids import dedupe_key, inbox_stream
from loom.kernel import (
    Arm,
    ExecutionState,
    InboxMessage,
    Wait,
    carried_inbox,
    fold,
    from_json,
    is_stale,
    next_delivery,
    to_json,
)
from loom.kernel.quarantine import (
    QUARANTINE_FOLD_CAP,
    Copy,
    anchor_event,
    copy_event,
    entry_of,
    held_data,
    oldest_pinned,
    read_copy,
    release_of,
    released_data,
)
from loom.schemas.envelope import EVENT_SCHEMA, Envelope, Kind, NewEvent

NOW = 1_000_000
STAMP = {"schema": EVENT_SCHEMA}
OLGA = {"actor": "olga"}
SEALED = {"__loomEnc": "aes-256-gcm", "ct": "x"}


def message(sequence, topic="t", payload=SEALED, message_id=None):
    message_id = message_id or f"m{sequence}"
    stream = inbox_stream("c", topic)
    return InboxMessage(stream, sequence, topic, message_id, None, dedupe_key(None, message_id), payload, NOW)


def held(sequence, topic="t", held_at=None, **changes):
    data = held_data(
        topic,
        message(sequence, topic, message_id=changes.pop("message_id", None)),
        held_at or sequence + 1,
        OLGA,
        "why",
    )
    return NewEvent("h", Kind.INBOX_QUARANTINED, {**data, **changes}, STAMP)


def key(sequence):
    return dedupe_key(None, f"m{sequence}")


def released(sequence, topic="t", *, auto=False, disposition="deliver"):
    by = None if auto else OLGA
    data = released_data(topic, key(sequence), f"m{sequence}", disposition=disposition, operator=by)
    return NewEvent("r", Kind.INBOX_RELEASED, data, STAMP)


def consumed(sequence, topic="t", **data):
    given = {"topic": topic, "messageId": key(sequence), "inboxSeq": sequence, "payload": SEALED}
    answer = {} if data.get("reason") else {"siteId": "0:0", "arm": 0}
    return NewEvent("c", Kind.MESSAGE_CONSUMED, {**given, **answer, **data}, STAMP)


START = NewEvent("s", Kind.EXECUTION_STARTED, {"workflow": "w", "chainId": "c"}, STAMP)
PARK = NewEvent("p", Kind.EXECUTION_SUSPENDED, {"waits": [{"siteId": "0:0", "arms": []}]}, STAMP)


def land(state, *batch):
    for event in batch:
        place = state.head + 1
        fold(state, Envelope(f"{event.id}{place}", "e", place, event.type, NOW, event.data, event.metadata))
    return state


def parked(*batch):
    return land(ExecutionState(), START, PARK, *batch)


def queue(state, topic="t"):
    return [(e["inboxSeq"], e["state"]) for e in state.quarantined.get(topic, ())]


# Fold ---------------------------------------------------------------------------------------------------------------


def test_a_hold_moves_the_cursor_and_keeps_the_key_out_of_the_window():
    state = parked(held(3))
    assert state.quarantined == {"t": [{"key": key(3), "inboxSeq": 3, "heldAt": 4, "state": "held"}]}
    assert (state.cursors, state.dedupe, state.status) == ({"t": 3}, {}, "suspended")


def test_a_full_cycle_leaves_nothing_of_the_hold():
    never = to_json(parked(consumed(0), consumed(1)))
    cycled = to_json(parked(held(0), held(1), released(0), consumed(0), released(1), consumed(1)))
    for record in (never, cycled):
        record.pop("head")
        for answer in record["variables"]["_waitAnswers"].values():
            answer.pop("sequence")
    assert cycled == never
    assert "_quarantined" not in cycled["variables"]


def test_a_discarding_release_adds_the_key_and_a_delivering_one_does_not():
    assert list(parked(held(0), released(0, disposition="discard")).dedupe) == [key(0)]
    state = parked(held(0), released(0))
    assert (queue(state), list(state.dedupe)) == ([(0, "released")], [])


def test_only_the_oldest_held_entry_is_released():
    state = parked(held(0), held(1))
    assert queue(land(state, released(1))) == [(0, "held"), (1, "held")]
    assert queue(land(state, released(0))) == [(0, "released"), (1, "held")]
    assert queue(land(state, released(1))) == [(0, "released"), (1, "held")]
    assert queue(land(state, consumed(0))) == [(1, "held")]


def test_a_repeat_behind_the_hold_does_not_consume_the_released_entry():
    state = parked(held(0), released(0))
    land(state, consumed(0, inboxSeq=7, reason="discarded", payload=None))
    assert queue(state) == [(0, "released")]


def test_the_cap_is_of_all_topics_and_a_hold_above_it_changes_nothing():
    state = parked(*(held(n, f"t{n % 7}") for n in range(QUARANTINE_FOLD_CAP)))
    before = to_json(state)
    land(state, held(5_000, "late"))
    assert to_json(state) | {"head": 0} == before | {"head": 0}
    assert len(json.dumps(before["variables"]["_quarantined"])) < 160 * QUARANTINE_FOLD_CAP


@pytest.mark.parametrize(
    "spoil",
    [
        {"topic": ""}, {"topic": 1}, {"inboxSeq": -1}, {"inboxSeq": True}, {"inboxSeq": "1"}, {"heldAt": 0},
        {"key": "k"}, {"key": "G" * 64}, {"messageId": "m" * 257}, {"messageId": None}, {"operator": "olga"},
    ],
)  # fmt: skip
def test_a_malformed_hold_is_ignored(spoil):
    fact = NewEvent("h", Kind.INBOX_QUARANTINED, {**held(3).data, **spoil}, STAMP)
    assert entry_of(fact.data) is None
    assert (parked(fact).quarantined, parked(fact).cursors) == ({}, {})


@pytest.mark.parametrize(
    "spoil",
    [
        {"auto": True}, {"operator": None}, {"disposition": "keep"}, {"key": ""}, {"topic": None},
        {"messageId": "m" * 257},
    ],
)  # fmt: skip
def test_a_malformed_release_is_ignored(spoil):
    fact = released(0)
    data = {**fact.data, **spoil}
    assert release_of(data) is None
    assert queue(parked(held(0), NewEvent("r", fact.type, data, STAMP))) == [(0, "held")]


@pytest.mark.parametrize(
    "data",
    [
        {**released(0, auto=True).data, "disposition": "discard"},
        {**released(0, auto=True).data, "auto": False},
        {**released(0, auto=True).data, "auto": 1},
        {k: v for k, v in released(0).data.items() if k != "operator"},
    ],
)
def test_an_automatic_release_only_delivers_and_somebody_or_nobody_did_it(data):
    assert release_of(data) is None
    assert release_of(released(0, auto=True).data) == ("t", key(0), "deliver")


def test_facts_without_the_stamp_of_the_runtime_are_ignored():
    forged = NewEvent("h", Kind.INBOX_QUARANTINED, held(0).data, {"actor": "olga"})
    assert parked(forged).quarantined == {}
    assert queue(parked(held(0), NewEvent("r", Kind.INBOX_RELEASED, released(0).data, {}))) == [(0, "held")]


@pytest.mark.parametrize("name", ["order", "order-refused"])
def test_logs_that_hold_nothing_fold_byte_for_byte_as_before(name):
    state = ExecutionState()
    for envelope in golden.read(f"{name}.jsonl"):
        fold(state, envelope)
    written = json.dumps(to_json(state), separators=(",", ":")) + "\n"
    assert written == Path(golden.HISTORIES, f"{name}.state.json").read_text()


def test_a_state_with_holds_survives_a_snapshot_and_shares_nothing_with_it():
    record = json.loads(json.dumps(to_json(parked(held(0), held(1), held(0, "u"), released(0)))))
    state = from_json(record)
    before = json.dumps(record)
    land(state, consumed(0), released(1, disposition="discard"))
    assert list(state.quarantined) == ["u"]
    assert json.dumps(record) == before


# Continue-as-new -----------------------------------------------------------------------------------------------------


def successor(carried):
    data = {"workflow": "w", "chainId": "c", "continuedFrom": {"executionId": "e0", "carried": carried}}
    return land(ExecutionState(), NewEvent("s", Kind.EXECUTION_STARTED, data, STAMP))


def test_holds_are_carried():
    state = parked(held(0), held(4), held(2, "u"), released(0))
    heir = successor(json.loads(json.dumps(carried_inbox(state))))
    assert (heir.quarantined, heir.cursors) == (state.quarantined, state.cursors)
    land(heir, consumed(0))
    assert (queue(heir), queue(state)) == ([(4, "held")], [(0, "released"), (4, "held")])


E0 = {"key": key(0), "inboxSeq": 0, "heldAt": 1, "state": "held"}


@pytest.mark.parametrize(
    "bad",
    [
        [], "t", [E0, {**E0, "state": "released"}], [{**E0, "state": "released"}, {**E0, "state": "released"}],
        [{**E0, "state": "gone"}], [{**E0, "heldAt": 0}], [{**E0, "inboxSeq": 9}], [None], [E0, {}],
    ],
)  # fmt: skip
def test_ill_formed_parts_of_carried_holds_are_ignored(bad):
    carried = {"inbox": {"cursors": {"t": 5, "u": 5}, "keys": []}, "quarantined": {"t": bad, "u": [E0]}}
    assert list(successor(carried).quarantined) == ["u"]
    assert successor({**carried, "quarantined": bad}).quarantined == {}


def test_carried_holds_are_capped():
    many = {f"t{n}": [E0] for n in range(QUARANTINE_FOLD_CAP + 9)}
    cursors = dict.fromkeys(many, 0)
    state = successor({"inbox": {"cursors": cursors, "keys": []}, "quarantined": many})
    assert len(state.quarantined) == QUARANTINE_FOLD_CAP


# The delivery rule ---------------------------------------------------------------------------------------------------

T_THEN_U = [Wait("0:0", (Arm("inbox", topic="t"), Arm("inbox", topic="u")))]
UNREAD = {"t": [message(1, payload=2)], "u": [message(0, "u", payload=3, message_id="u0")]}


def plan(state, copy=None, **options):
    given = {} if copy is None else {"t": copy}
    return next_delivery(state, T_THEN_U, UNREAD, now_ms=NOW, held=given, **options)


def test_a_node_that_can_open_the_copy_releases_and_delivers_in_one_batch():
    found = plan(parked(held(0)), message(0, payload=1)).delivery
    assert (found.arm, found.message.payload, found.message.sequence) == (0, 1, 0)
    assert found.release == released(0, auto=True).data
    assert release_of(found.release) == ("t", key(0), "deliver")


@pytest.mark.parametrize("payload", [SEALED, {"a": SEALED}, {"$shredded": True}])
def test_a_node_that_cannot_passes_the_topic_over_and_never_reads_behind_the_hold(payload):
    found = plan(parked(held(0)), message(0, payload=payload))
    assert (found.delivery.message.topic, found.delivery.release) == ("u", None)
    assert [(s.topic, s.message_id, s.inbox_seq, s.awaits) for s in found.skipped] == [("t", "m0", 0, "node")]


def test_without_its_copy_a_hold_stands():
    found = plan(parked(held(0)))
    assert (found.delivery.message.topic, found.skipped[0].awaits) == ("u", "node")


def test_automatic_release_may_be_off():
    found = plan(parked(held(0)), message(0, payload=1), auto_release=False)
    assert (found.delivery.message.topic, found.skipped[0].awaits) == ("u", "operator")


def test_a_released_head_is_delivered_and_refuses_the_execution_where_it_cannot_be_opened():
    state = parked(held(0), released(0))
    found = plan(state, message(0, payload=1), auto_release=False).delivery
    assert (found.message.payload, found.release) == (1, None)
    for copy in (message(0), message(0, payload={"$shredded": True}), None):
        with pytest.raises(SealedPayloadUnreadableError):
            plan(state, copy)


@pytest.mark.parametrize("release", [[], [released(0)]])
@pytest.mark.parametrize("copy", [None, message(0), message(0, payload=1)])
def test_an_entry_delivered_meanwhile_is_dropped_on_any_node(release, copy):
    """A message of the same identity came on another topic, and was delivered there."""
    state = parked(held(0), consumed(3, "v", messageId=key(0)), PARK, *release)
    found = plan(state, copy, auto_release=False)
    (drop,) = found.disposals
    assert found.delivery is None
    facts = [] if drop.release is None else [NewEvent("r", Kind.INBOX_RELEASED, drop.release, STAMP)]
    assert bool(facts) is not bool(release)
    facts.append(NewEvent("c", Kind.MESSAGE_CONSUMED, drop.data(), STAMP))
    assert drop.data()["payload"] is None
    assert not is_stale(state, facts)
    assert land(state, *facts).quarantined == {}
    assert plan(state).delivery.message.sequence == 1


# Races: two batches built on one state, in either order ---------------------------------------------------------------

AUTO = [released(0, auto=True), consumed(0)]
MANUAL = [released(0)]
DISCARD = [released(0, disposition="discard")]


@pytest.mark.parametrize(
    ("what", "first", "second", "left"),
    [
        ("two capable nodes", AUTO, AUTO, []),
        ("a manual release was first", MANUAL, AUTO, [(0, "released")]),
        ("the automatic one was first", AUTO, MANUAL, []),
        ("a discard was first", DISCARD, AUTO, []),
        ("the delivery was before the discard", AUTO, DISCARD, []),
        ("two operators", MANUAL, MANUAL, [(0, "released")]),
        ("an operator releases what another discarded", DISCARD, MANUAL, []),
        ("an operator discards what another released", MANUAL, DISCARD, [(0, "released")]),
        ("what came behind the hold", [], [consumed(1)], [(0, "held")]),
        ("what came behind, after the release", MANUAL, [consumed(1)], [(0, "released")]),
        ("a repeat of the held message", [], [consumed(0, inboxSeq=1)], [(0, "held")]),
        ("a repeat as a duplicate", [], [consumed(0, inboxSeq=1, reason="duplicate")], [(0, "held")]),
        ("a second holder of the same head", [], [held(0)], [(0, "held")]),
        ("a release of a younger entry", [held(1)], [released(1)], [(0, "held"), (1, "held")]),
    ],
)  # fmt: skip
def test_whoever_is_second_is_stale(what, first, second, left):
    state = parked(held(0))
    assert not is_stale(state, first)
    land(state, *first)
    if first and first[-1].type == Kind.MESSAGE_CONSUMED:
        land(state, PARK)
    assert is_stale(state, second), what
    assert queue(state) == left


def test_a_delivery_built_before_the_hold_and_a_hold_built_before_the_delivery():
    built = [consumed(0)]
    assert not is_stale(parked(), built)
    assert is_stale(parked(held(0)), built)
    assert not is_stale(parked(), [held(0)])
    assert is_stale(parked(consumed(0), PARK), [held(0)])


def test_a_delivery_of_another_topic_is_not_touched_by_the_hold():
    assert not is_stale(parked(held(0)), [consumed(0, "u")])


def test_after_a_release_only_the_released_entry_is_delivered_and_only_once():
    state = parked(held(0), held(1), released(0))
    assert not is_stale(state, [consumed(0)])
    assert is_stale(state, [consumed(0), consumed(0)])
    assert is_stale(state, [consumed(1)])
    assert is_stale(state, [consumed(0, messageId=key(9))])


def test_discard_and_expiry_act_behind_the_hold_and_never_on_it():
    state = parked(held(4))
    for reason in ("discarded", "expired"):
        assert not is_stale(state, [consumed(5, reason=reason, payload=None)])
        assert is_stale(state, [consumed(4, reason=reason, payload=None)])


def test_a_duplicate_ahead_of_the_next_hold_may_be_passed():
    state = parked(consumed(8, "v"), PARK, held(0))
    repeat = consumed(8, inboxSeq=1, reason="duplicate", payload=None)
    assert not is_stale(state, [repeat, held(2)])
    assert is_stale(state, [consumed(9, inboxSeq=1, reason="duplicate", payload=None)])


def test_the_last_place_goes_to_one():
    state = parked(*(held(n, f"t{n}") for n in range(QUARANTINE_FOLD_CAP - 1)))
    mine, yours = held(0, "mine"), held(0, "yours")
    assert not is_stale(state, [mine])
    assert is_stale(state, [mine, yours])
    assert is_stale(land(state, mine), [yours])


def test_a_malformed_fact_is_stale():
    assert is_stale(parked(), [held(0, key="k")])
    assert is_stale(parked(held(0)), [NewEvent("r", Kind.INBOX_RELEASED, {"topic": "t"}, STAMP)])


# Copies --------------------------------------------------------------------------------------------------------------


def stored(sequence, topic="t", payload=SEALED):
    data = {"topic": topic, "payload": payload, "messageId": f"m{sequence}"}
    seal = {"v": 1, "cipher": "loom/aes-256-gcm", "covers": ["INBOX_MESSAGE.payload"]}
    metadata = {"schema": EVENT_SCHEMA, "actor": "a", "seal": seal, "node": "n:1"}
    return Envelope("x", inbox_stream("c", topic), sequence, Kind.INBOX_MESSAGE, NOW, data, metadata)


def test_a_copy_is_what_is_stored_and_says_where_it_stood():
    original = stored(7)
    event = copy_event("c", key(7), "t", original)
    assert event.id == f"quarantine:c:{key(7)}:7"
    assert event.data is original.data
    assert event.metadata["seal"] is original.metadata["seal"]
    assert event.metadata["quarantine"] == {"topic": "t", "inboxSeq": 7}
    copy = read_copy(Envelope(event.id, "q", 3, event.type, NOW, event.data, event.metadata))
    assert copy == Copy(3, key(7), "t", 7)
    entry = {"key": key(7), "inboxSeq": 7, "heldAt": 3, "state": "held"}
    assert copy.is_of("t", entry)
    for other in ({**entry, "inboxSeq": 8}, {**entry, "key": key(8)}):
        assert not copy.is_of("t", other)
    assert not copy.is_of("u", entry)


def test_the_anchor_is_no_copy():
    anchor = anchor_event("c")
    assert anchor.data == {"anchor": True}
    assert read_copy(Envelope(anchor.id, "q", 0, anchor.type, NOW, anchor.data, anchor.metadata)) is None


def test_a_copy_is_kept_while_it_is_held_or_on_its_way():
    copies = [Copy(n + 1, key(n), "t", n) for n in range(4)]
    state = parked(held(0), held(1))
    assert oldest_pinned(state, copies) == 1
    land(state, released(0), consumed(0))
    assert oldest_pinned(state, copies) == 2
    land(state, released(1, disposition="discard"))
    assert oldest_pinned(state, copies) == 3, "its original lies above the cursor: the fact may be on its way"
    land(state, consumed(2), consumed(3))
    assert oldest_pinned(state, copies) is None
