import pytest
from hypothesis import given
from hypothesis import strategies as st

from loom.errors import PayloadShreddedError, SealedPayloadUnreadableError
from loom.ids import dedupe_key, inbox_stream
from loom.kernel import (
    Arm,
    ExecutionState,
    InboxMessage,
    Wait,
    dump_waits,
    find_gate,
    fold,
    is_stale,
    load_waits,
    message_of,
    next_delivery,
    topics_of,
    wakes_of,
)
from loom.schemas.envelope import Envelope, Kind, NewEvent

NOW = 1_000_000


def message(sequence, topic="t", payload=None, message_id=None, timestamp=NOW, sender=None):
    message_id = message_id or f"m{sequence}"
    return InboxMessage(
        inbox_stream("c1", topic),
        sequence,
        topic,
        message_id,
        sender,
        dedupe_key(sender, message_id),
        payload,
        timestamp,
    )


def inbox(topic):
    return Arm("inbox", topic=topic)


def at(wake_at):
    return Arm("timer", wake_at=wake_at)


def state(**fields):
    return ExecutionState(execution_id="e1", status="suspended", **fields)


def wait(site, *arms):
    return Wait(site, arms)


def plan(waits, unread, of=None, **options):
    return next_delivery(of or state(), waits, unread, now_ms=NOW, **options)


def test_reading_a_message():
    data = {"topic": "t", "payload": {"a": 1}, "messageId": "m1", "sender": "wms"}
    envelope = Envelope("x", inbox_stream("c1", "t"), 5, Kind.INBOX_MESSAGE, 9, data)
    read = message_of(envelope)
    assert (read.sequence, read.topic, read.message_id, read.sender) == (5, "t", "m1", "wms")
    assert (read.key, read.payload, read.timestamp) == (dedupe_key("wms", "m1"), {"a": 1}, 9)
    assert message_of(Envelope("x", "s", 0, Kind.INBOX_MESSAGE, 9, {"topic": "t"})).message_id == "x"


def test_the_first_message_past_the_cursor_is_next():
    unread = {"t": [message(3), message(4), message(5)]}
    p = plan([wait("0:0", inbox("t"))], unread, state(cursors={"t": 3}))
    assert p.disposals == ()
    assert (p.delivery.site_id, p.delivery.arm, p.delivery.kind, p.delivery.message.sequence) == (
        "0:0",
        0,
        "inbox",
        4,
    )
    assert p.delivery.consumed_data() == {
        "topic": "t",
        "messageId": dedupe_key(None, "m4"),
        "inboxSeq": 4,
        "payload": None,
        "siteId": "0:0",
        "arm": 0,
    }
    assert p.delivery.resumed_data() == {"siteId": "0:0", "arm": 0, "kind": "inbox"}


def test_nothing_there_is_nothing_to_do():
    p = plan([wait("0:0", inbox("t"), at(NOW + 1))], {})
    assert (p.disposals, p.delivery) == ((), None)


def test_park_order_decides_between_waits_and_arms():
    unread = {"a": [message(0, "a")], "b": [message(0, "b")]}
    waits = [wait("0:0", Arm("gate", gate="g"), inbox("b"), inbox("a")), wait("0:1", inbox("a"))]
    assert (plan(waits, unread).delivery.site_id, plan(waits, unread).delivery.arm) == ("0:0", 1)
    waits.reverse()
    assert (plan(waits, unread).delivery.site_id, plan(waits, unread).delivery.arm) == ("0:1", 0)


def test_a_due_timer_has_its_place_in_the_order():
    unread = {"a": [message(0, "a")]}
    first = plan([wait("0:0", at(NOW), inbox("a"))], unread).delivery
    assert (first.arm, first.kind, first.message) == (0, "timer", None)
    assert first.resumed_data() == {"siteId": "0:0", "arm": 0, "kind": "timer"}
    with pytest.raises(ValueError, match="timer"):
        first.consumed_data()
    assert plan([wait("0:0", inbox("a"), at(NOW))], unread).delivery.kind == "inbox"
    assert plan([wait("0:0", at(NOW + 1), inbox("a"))], unread).delivery.kind == "inbox"


def test_duplicates_and_the_expired_are_disposed_of_on_the_way():
    known = dedupe_key(None, "m0")
    unread = {
        "t": [
            message(0),
            message(1, payload={"stale": 1}, timestamp=NOW - 100),
            message(2, message_id="m1"),
            message(3, payload={"fresh": 1}, timestamp=NOW - 99),
            message(4),
        ]
    }
    p = plan([wait("0:0", inbox("t"))], unread, state(dedupe={known: None}), ttl_ms=100)
    assert [(d.message.sequence, d.reason) for d in p.disposals] == [
        (0, "duplicate"),
        (1, "expired"),
        (2, "duplicate"),
    ]
    assert p.disposals[1].data() == {
        "topic": "t",
        "messageId": dedupe_key(None, "m1"),
        "inboxSeq": 1,
        "payload": None,
        "reason": "expired",
    }
    assert p.delivery.message.sequence == 3


def test_disposals_are_journaled_even_where_nothing_can_be_delivered():
    p = plan(
        [wait("0:0", inbox("t"), inbox("u"))],
        {"t": [message(0)]},
        state(dedupe={dedupe_key(None, "m0"): None}),
    )
    assert [d.reason for d in p.disposals] == ["duplicate"]
    assert p.delivery is None


def test_two_waits_on_one_topic_see_the_same_head_once():
    known = {dedupe_key(None, "m0"): None}
    waits = [wait("0:0", at(NOW + 5), inbox("t")), wait("0:1", inbox("t"))]
    p = plan(waits, {"t": [message(0), message(1)]}, state(dedupe=known))
    assert len(p.disposals) == 1
    assert (p.delivery.site_id, p.delivery.arm) == ("0:0", 1)


@pytest.mark.parametrize("payload", [{"__loomEnc": "x"}, {"a": [{"$shredded": True}]}])
def test_a_sealed_head_holds_the_whole_execution(payload):
    waits = [wait("0:0", inbox("sealed")), wait("0:1", inbox("plain"))]
    unread = {
        "sealed": [message(0), message(1, "sealed", payload)],
        "plain": [message(0, "plain", None, "p0")],
    }
    of = state(dedupe={dedupe_key(None, "m0"): None})
    with pytest.raises(SealedPayloadUnreadableError) as caught:
        plan(waits, unread, of)
    assert (caught.value.message_id, caught.value.topic, caught.value.recorded) == ("m1", "sealed", False)
    waits.reverse()
    assert plan(waits, unread, of).delivery.site_id == "0:1"


def test_a_sealed_duplicate_needs_no_check():
    unread = {"t": [message(0, payload={"__loomEnc": "x"}), message(1)]}
    p = plan([wait("0:0", inbox("t"))], unread, state(dedupe={dedupe_key(None, "m0"): None}))
    assert (p.disposals[0].reason, p.delivery.message.sequence) == ("duplicate", 1)


def test_an_erased_message_says_so():
    with pytest.raises(PayloadShreddedError):
        plan([wait("0:0", inbox("t"))], {"t": [message(0, payload={"$shredded": True})]}, erased="alice")


def test_nothing_behind_a_hold_is_read():
    of = state(quarantined={"t": [{"key": "k", "inboxSeq": 0, "heldAt": 1, "state": "held"}]})
    unread = {"t": [message(1, payload={"__loomEnc": "x"})], "u": [message(0, "u")]}
    p = plan([wait("0:0", inbox("t"), inbox("u"))], unread, of)
    assert p.delivery.message.topic == "u"
    assert plan([wait("0:0", inbox("t"))], unread, of).delivery is None


def test_child_arms_are_inbox_arms():
    topic = "__loom_child__:k"
    arm = Arm("child", topic=topic, child_id="k")
    p = plan([wait("0:0", arm)], {topic: [message(0, topic, {"status": "completed"})]})
    assert (p.delivery.kind, p.delivery.resumed_data()["kind"]) == ("child", "child")


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.booleans()), max_size=25),
    st.lists(st.sampled_from(["a", "b", "ab", "ba"]), max_size=20),
)
def test_each_message_is_consumed_once_in_order_per_topic(sent, asked):
    """Deliver until nothing is left: FIFO per topic, at most once per identity, every message disposed of."""
    streams = {"a": [], "b": []}
    for topic, number, old in sent:
        stream = streams[topic]
        stream.append(message(len(stream), topic, None, f"m{number}", NOW - 1000 if old else NOW))
    of = ExecutionState()
    fold(of, Envelope("s", "e1", 0, Kind.EXECUTION_STARTED, NOW, {"workflow": "w"}))
    delivered = []
    for n, topics in enumerate(asked):
        waits = [wait(f"0:{n}", *(inbox(t) for t in topics))]
        unread = {t: [m for m in streams[t] if m.sequence > of.cursors.get(t, -1)] for t in topics_of(waits)}
        p = next_delivery(of, waits, unread, now_ms=NOW, ttl_ms=500)
        facts = [d.data() for d in p.disposals] + ([p.delivery.consumed_data()] if p.delivery else [])
        batch = [NewEvent(f"{of.head}-{i}", Kind.MESSAGE_CONSUMED, data) for i, data in enumerate(facts)]
        assert not is_stale(of, batch)
        for new in batch:
            fold(of, Envelope(new.id, "e1", of.head + 1, new.type, NOW, new.data))
        assert not batch or is_stale(of, batch)
        if p.delivery:
            delivered.append(p.delivery.message)
    identities = [m.key for m in delivered]
    assert len(identities) == len(set(identities))
    for topic in "ab":
        places = [m.sequence for m in delivered if m.topic == topic]
        assert places == sorted(places)


# Stale batches -------------------------------------------------------------------------------------------------------


def fact(topic="t", sequence=5, key="k", **data):
    return NewEvent(
        "x", Kind.MESSAGE_CONSUMED, {"topic": topic, "inboxSeq": sequence, "messageId": key, **data}
    )


OPEN = ({"siteId": "0:0", "arms": []},)


@pytest.mark.parametrize(
    ("batch", "stale"),
    [
        ([fact(siteId="0:0")], False),
        ([fact(reason="expired"), fact(sequence=6, key="l", siteId="0:0")], False),
        ([fact(sequence=4, siteId="0:0")], True),
        ([fact(sequence=3, reason="duplicate")], True),
        ([fact(), fact(key="l", siteId="0:0")], True),
        ([fact(key="known", siteId="0:0")], True),
        ([fact(key="known", reason="duplicate")], False),
        ([fact(siteId="0:0"), fact(topic="u", sequence=0, siteId="0:0")], True),
        ([fact(siteId="0:7")], True),
        ([fact(topic="held", siteId="0:0")], True),
        ([NewEvent("x", Kind.EXECUTION_RESUMED, {"siteId": "0:0"})], False),
        ([], False),
    ],
)
def test_a_batch_built_on_an_older_state_is_stale(batch, stale):
    of = state(cursors={"t": 4}, dedupe={"known": None}, quarantined={"held": [{}]}, waits=OPEN)
    assert is_stale(of, batch) is stale


def test_a_running_execution_answers_waits_that_no_park_recorded():
    of = ExecutionState(status="running", waits=())
    assert not is_stale(of, [fact(siteId="0:7")])


# Waits on the wire ---------------------------------------------------------------------------------------------------


def test_waits_go_to_the_wire_and_back():
    waits = (
        wait(
            "0:0",
            inbox("t"),
            at(5),
            Arm("gate", gate="g"),
            Arm("child", topic="__loom_child__:k", child_id="k"),
        ),
        wait("0.1:2", inbox("t"), inbox("u"), at(3), at(5)),
    )
    wire = dump_waits(waits)
    assert wire[0] == {
        "siteId": "0:0",
        "arms": [
            {"kind": "inbox", "topic": "t"},
            {"kind": "timer", "wakeAt": 5},
            {"kind": "gate", "gate": "g"},
            {"kind": "child", "topic": "__loom_child__:k", "childId": "k"},
        ],
    }
    assert load_waits(wire) == waits
    assert topics_of(waits) == ("t", "__loom_child__:k", "u")
    assert wakes_of(waits) == (3, 5)
    assert find_gate(waits, "g") == ("0:0", 2)
    assert find_gate(waits, "h") is None
