"""What may be committed: never past a record that is at work, whatever the holes and whatever the order."""

from hypothesis import given
from hypothesis import strategies as st

from loom.processors.ledger import Ledger


def test_a_hole_right_after_offset_0_holds_nothing_back():
    ledger = Ledger()
    ledger.delivered(0)
    assert ledger.settle({0}) == [0]
    ledger.delivered(12)
    ledger.delivered(13)
    assert ledger.settle({12, 13}) == [12, 13]
    assert len(ledger) == 0
    assert ledger.oldest is None


def test_the_record_after_a_hole_is_not_settled_by_itself():
    ledger = Ledger()
    for offset in (5, 9, 10):
        ledger.delivered(offset)
    assert ledger.settle({5, 10}) == [5]
    assert ledger.oldest == 9
    assert ledger.settle({10}) == []
    assert ledger.settle({9, 10}) == [9, 10]


def test_going_back_voids_what_was_delivered_after():
    ledger = Ledger()
    for offset in (3, 4, 7):
        ledger.delivered(offset)
    ledger.delivered(4)
    assert ledger.settle({3, 7}) == [3]
    assert ledger.settle({4, 7}) == [4]
    ledger.delivered(7)
    assert ledger.settle({7}) == [7]


@given(st.data())
def test_the_committable_offset_is_the_first_unsettled_one(data):
    offsets = sorted(data.draw(st.sets(st.integers(0, 60), min_size=1)))
    order = data.draw(st.permutations(offsets))
    ledger, acked, committed = Ledger(), set(), -1
    for offset in offsets:
        ledger.delivered(offset)
    for offset in order:
        acked.add(offset)
        settled = ledger.settle(acked)
        acked.difference_update(settled)
        if settled:
            assert settled[0] > committed
            committed = settled[-1]
        unsettled = [o for o in offsets if o > committed and o not in acked]
        assert ledger.oldest == (min(o for o in offsets if o > committed) if unsettled else None)
        assert not unsettled or committed < unsettled[0]
    assert committed == offsets[-1]
    assert len(ledger) == 0
