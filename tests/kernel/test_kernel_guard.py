import json
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loom.errors import InboxMessageRefusedError, PayloadShreddedError, SealedPayloadUnreadableError
from loom.kernel import SEALED_WALK_BUDGET, Verdict, assert_deliverable, check_ingest, inspect_payload

SEALED = {"__loomEnc": "loom/aes-256-gcm", "data": "AAAA"}
MARKER = {"$shredded": True}


class Inheriting(dict):
    def __missing__(self, key):
        return "loom/aes-256-gcm"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


def around(value, path):
    for kind in path:
        value = {"list": [1, value], "tuple": (value,), "dict": {"k": value, "z": 1}}[kind]
    return value


@given(json_values, st.lists(st.sampled_from(["list", "tuple", "dict"]), max_size=6))
def test_an_envelope_is_found_at_any_depth_and_plain_values_are_clean(value, path):
    assert inspect_payload(around(value, path)) is Verdict.CLEAN
    assert inspect_payload(around({"v": value, "e": SEALED}, path)) is Verdict.SEALED
    assert inspect_payload(around([value, MARKER], path)) is Verdict.SHREDDED


@pytest.mark.parametrize(
    "value",
    [
        {"__loomEnc": 1},
        {"__loomEnc": None},
        {"__loomEnc": {"a": 1}},
        {"$shredded": "yes"},
        {"$shredded": False},
        {"$shredded": 1},
        "__loomEnc",
        ["__loomEnc", "x"],
        Inheriting(a=1),
        None,
        0,
        [],
        {},
    ],
)
def test_what_only_looks_alike_is_ordinary_data(value):
    assert inspect_payload(value) is Verdict.CLEAN


def test_any_mapping_counts():
    assert inspect_payload(types.MappingProxyType(SEALED)) is Verdict.SEALED
    assert inspect_payload([types.MappingProxyType({"a": SEALED})]) is Verdict.SEALED


def test_the_budget_is_a_hundred_thousand_nodes():
    assert SEALED_WALK_BUDGET == 100_000
    assert inspect_payload([0] * 99_999) is Verdict.CLEAN
    assert inspect_payload([0] * 100_000) is Verdict.UNVERIFIABLE


def test_breadth_first_a_near_envelope_wins_over_the_budget():
    deep = [0] * 200_000
    assert inspect_payload([deep, SEALED]) is Verdict.SEALED
    assert inspect_payload({"deep": {"deeper": deep}, "near": {"e": SEALED}}) is Verdict.SEALED
    assert inspect_payload({"near": {"e": SEALED}, "deep": {"deeper": deep}}) is Verdict.SEALED
    assert inspect_payload([*([0] * 100_000), SEALED]) is Verdict.UNVERIFIABLE


def test_depth_cannot_blow_the_stack():
    value = SEALED
    for _ in range(50_000):
        value = [value]
    assert inspect_payload(value) is Verdict.SEALED
    for _ in range(100_000):
        value = {"a": value}
    assert inspect_payload(value) is Verdict.UNVERIFIABLE
    while isinstance(value, list | dict) and len(value) == 1:  # take it apart: the collector recurses
        value = value.popitem()[1] if isinstance(value, dict) else value.pop()


def test_a_cycle_is_unverifiable_and_a_shared_reference_is_none():
    cycle = []
    cycle.append(cycle)
    assert inspect_payload(cycle) is Verdict.UNVERIFIABLE
    loop = {"a": {}}
    loop["a"]["b"] = loop
    assert inspect_payload(loop) is Verdict.UNVERIFIABLE
    shared = {"x": [1, 2, 3]}
    assert inspect_payload([shared] * 100) is Verdict.CLEAN


def test_assert_deliverable():
    assert_deliverable("e1", "m1", "t", {"fine": True})
    for payload, unverifiable in ((SEALED, False), ([MARKER], False), ([0] * 100_001, True)):
        with pytest.raises(SealedPayloadUnreadableError) as caught:
            assert_deliverable("e1", "m1", "t", payload)
        error = caught.value
        assert (error.execution_id, error.message_id, error.topic) == ("e1", "m1", "t")
        assert (error.unverifiable, error.recorded) == (unverifiable, False)
        assert "AAAA" not in repr(error)
        assert "AAAA" not in str(vars(error))
    with pytest.raises(SealedPayloadUnreadableError) as caught:
        assert_deliverable("e1", "m1", "t", SEALED, recorded=True, erased="alice")
    assert caught.value.recorded


def test_only_a_tombstone_makes_a_redacted_message_an_erased_one():
    with pytest.raises(PayloadShreddedError) as caught:
        assert_deliverable("e1", "m1", "t", {"deep": [MARKER]}, erased="alice")
    assert caught.value.subject == "alice"
    with pytest.raises(SealedPayloadUnreadableError):
        assert_deliverable("e1", "m1", "t", {"deep": [MARKER]})


@pytest.mark.parametrize("payload", [SEALED, {"a": [SEALED]}, MARKER, {"a": MARKER}, [0] * 100_001])
def test_ingest_refuses_what_is_dressed_up(payload):
    with pytest.raises(InboxMessageRefusedError) as caught:
        check_ingest("e1", "t", payload)
    assert "AAAA" not in str(caught.value)
    assert (caught.value.execution_id, caught.value.topic) == ("e1", "t")


def test_ingest_takes_ordinary_payloads():
    check_ingest("e1", "t", {"__loomEnc": 1, "list": [None, "__loomEnc"]})
    check_ingest("e1", "t", json.dumps(SEALED))
