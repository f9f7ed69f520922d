from loom.stores.kafka.offsets import OffsetTracker


def test_a_position_never_passes_an_open_offset():
    offsets = OffsetTracker(5)
    assert offsets.position == 5
    for offset in (5, 7, 8):
        offsets.begin(offset)
    offsets.done(8)
    offsets.done(7)
    assert (offsets.position, offsets.open) == (5, 1)
    offsets.done(5)
    assert (offsets.position, offsets.open) == (9, 0)


def test_done_twice_is_done_once():
    offsets = OffsetTracker(0)
    offsets.begin(3)
    offsets.done(3)
    offsets.done(3)
    offsets.done(4)
    assert offsets.position == 4
