"""JSON in a bytes field: exact both ways, and never a value that could not be read again."""

import json
import math
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from schema_strategies import JSON

from loom.errors import DecodeError, InvalidInputError
from loom.schemas.payload import MAX_JSON_DEPTH, dump, load, load_foreign, load_object


def nested(depth, leaf="[]"):
    return "[" * (depth - 1) + leaf + "]" * (depth - 1)


@given(JSON)
@example(2**64)
@example(-(10**4000))
@example({"": [1e16, -0.0, 5e-324, 1.7976931348623157e308, 0.1 + 0.2, 1e22]})
def test_comes_back_as_it_was(value):
    raw = dump(value)
    assert load(raw) == value
    assert json.loads(raw) == value
    assert dump(load(raw)) == raw


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_are_exact_and_stay_floats(number):
    back = load(dump([number]))[0]
    assert isinstance(back, float)
    assert struct.pack(">d", back) == struct.pack(">d", number)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "\ud800", {"\udfff": 1}, object()])
def test_what_json_cannot_hold_is_refused(value):
    for wrapped in (value, {"a": [1, value]}, [value] * 300):
        with pytest.raises(InvalidInputError, match="NaN") as refused:
            dump(wrapped, "input")
        assert refused.value.what == "input"


def test_an_integer_that_python_would_not_read_again_is_refused():
    assert load(dump(10**4000)) == 10**4000
    with pytest.raises(InvalidInputError):
        dump({"n": 10**4301})


def test_a_cycle_is_refused_and_a_shared_value_is_not():
    shared = [1]
    assert load(dump([shared, shared])) == [[1], [1]]
    shared.append(shared)
    with pytest.raises(InvalidInputError):
        dump(shared)


def test_text_that_only_spells_a_constant_is_data():
    assert load(dump({"NaN": "Infinity"})) == {"NaN": "Infinity"}


@pytest.mark.parametrize("leaf", ["[]", "{}", "1"])
def test_depth_has_one_limit_in_both_directions(leaf):
    levels = MAX_JSON_DEPTH if leaf != "1" else MAX_JSON_DEPTH + 1
    value = load(nested(levels, leaf).encode())
    assert dump(value).decode() == nested(levels, leaf)
    for too_deep in (levels + 2, 254, 1000, 100_000):
        with pytest.raises(DecodeError, match="deeper"):
            load(nested(too_deep, leaf).encode())
    value = []
    for depth in range(2, 1500):
        value = [value]
        if depth > MAX_JSON_DEPTH + 1:
            with pytest.raises(InvalidInputError):
                dump(value)


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[1,]", b"NaN", b"\xff", b'"\\ud800"', b"1 2", b"\xef\xbb\xbf1", b"1" * 4301]
)
def test_what_is_no_json_is_a_decode_error_that_quotes_nothing(raw):
    with pytest.raises(DecodeError) as refused:
        load(raw)
    assert refused.value.__cause__ is None
    assert str(refused.value).startswith("payload cannot be read: no JSON in UTF-8")


@given(st.binary(max_size=200) | st.text(st.sampled_from('[]{}",:0-.eEtrunfalsN\\ ')).map(str.encode))
def test_arbitrary_bytes_give_a_value_or_a_decode_error(raw):
    try:
        load(raw)
        load_object(raw)
    except DecodeError:
        pass


@pytest.mark.parametrize("raw", [b"1e999", b"[-1E400]", b'{"a":1' + b"0" * 400 + b".0}"])
def test_a_number_that_no_float_holds_is_refused_from_strangers(raw):
    with pytest.raises(DecodeError, match="too large"):
        load_foreign(raw)
    with pytest.raises(InvalidInputError):
        dump(load(raw))
    assert load_foreign(b'{"a": 1e22}') == {"a": 1e22}


def test_an_object_is_asked_for():
    assert load_object(b'{"a":1}') == {"a": 1}
    with pytest.raises(DecodeError, match="no JSON object"):
        load_object(b"[]")
