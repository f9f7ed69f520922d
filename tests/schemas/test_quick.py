"""Quick frozen dataclasses are frozen dataclasses."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace

import pytest

from loom.schemas import Envelope, NewEvent
from loom.schemas.quick import changer, quick
from loom.stores.contracts import StreamAppend


def test_they_are_made_compared_and_changed_as_before():
    event = NewEvent("a", "KIND", {"x": 1})
    assert event == NewEvent(id="a", type="KIND", data={"x": 1}, metadata={})
    assert event.metadata is not NewEvent("b", "KIND", {}).metadata
    assert replace(event, id="b").id == "b"
    assert pickle.loads(pickle.dumps(event)) == copy.copy(event) == event
    append = StreamAppend("s", (event,), expected_head=1)
    assert (append.fence, append.consumed, append.outgoing) == (None, (), ())
    assert [f.name for f in fields(Envelope)][:3] == ["id", "stream_id", "sequence"]


def test_they_stay_frozen():
    with pytest.raises(FrozenInstanceError):
        NewEvent("a", "KIND", {}).id = "b"


@pytest.mark.parametrize(
    "call", [NewEvent, lambda: NewEvent("a", "b", {}, {}, 1), lambda: NewEvent("a", x=1)]
)
def test_wrong_arguments_are_refused(call):
    with pytest.raises(TypeError):
        call()


def test_what_is_no_plain_frozen_slotted_dataclass_is_refused():
    @dataclass(frozen=True, slots=True)
    class Checks:
        a: int

        def __post_init__(self):
            pass

    @dataclass(frozen=True, slots=True)
    class Named:
        a: int = field(kw_only=True, default=1)

    @dataclass(slots=True)
    class Open:
        a: int

    for cls in (Checks, Named, Open, int):
        with pytest.raises(TypeError):
            quick(cls)


def test_a_field_that_is_not_taken_starts_with_its_default():
    @quick
    @dataclass(frozen=True, slots=True)
    class Kept:
        a: int
        made: str | None = field(default=None, init=False)

    assert (Kept(1).a, Kept(1).made) == (1, None)
    with pytest.raises(TypeError):
        Kept(1, "x")


def test_a_changer_changes_its_fields_and_keeps_all_others():
    append = StreamAppend("s", (), 4, 5, None, 7, (("x", 1),), ())
    event = NewEvent("a", "KIND", {})
    assert changer(StreamAppend, "events", "fence")(append, (event,), 9) == replace(
        append, events=(event,), fence=9
    )
    assert append.fence == 5


def test_a_changer_of_no_field_or_of_one_that_is_not_taken_is_refused():
    @dataclass(frozen=True)
    class Made:
        a: int
        b: int = field(default=0, init=False)

    for cls, name in ((StreamAppend, "other"), (Made, "a")):
        with pytest.raises(TypeError):
            changer(cls, name)
