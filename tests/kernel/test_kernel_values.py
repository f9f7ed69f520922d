import collections
import dataclasses
import datetime as dt
import decimal
import enum
import functools
import json
import types
import uuid
from collections.abc import Awaitable
from typing import Annotated, Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loom.errors import ConfigError, InvalidInputError, UnknownFlowError
from loom.kernel import Context, FlowRegistry, collect_flows, dump_json, flow, load_json
from loom.kernel.values import JSON_MAX_DEPTH, output_model


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    when: dt.date
    pair: tuple[int, int]
    color: Color
    named: int = pydantic.Field(alias="Named")


@dataclasses.dataclass
class Data:
    x: int
    inner: Any


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=25,
)


@given(json_values)
def test_json_passes_as_it_is(value):
    dumped = dump_json(value, "x")
    assert dumped == value
    assert json.loads(json.dumps(dumped)) == value
    assert load_json(dumped, None, "x") == value


def test_containers_are_fresh():
    inner = [1]
    dumped = dump_json({"a": inner}, "x")
    inner.append(2)
    assert dumped == {"a": [1]}
    loaded = load_json(dumped, None, "x")
    loaded["a"].append(3)
    assert dumped == {"a": [1]}
    typed = load_json(dumped, dict[str, Any], "x")
    typed["a"].append(3)
    assert dumped == {"a": [1]}


def test_rich_values_are_written_as_json():
    model = Model(when=dt.date(2030, 1, 2), pair=(1, 2), color=Color.RED, Named=3)
    assert dump_json([model], "x") == [{"when": "2030-01-02", "pair": [1, 2], "color": "red", "Named": 3}]
    assert dump_json(Data(1, Data(2, (3,))), "x") == {"x": 1, "inner": {"x": 2, "inner": [3]}}
    assert dump_json(collections.OrderedDict(a=Level.LOW), "x") == {"a": 1}
    assert dump_json(types.MappingProxyType({"a": 1}), "x") == {"a": 1}
    assert dump_json(decimal.Decimal("1.10"), "x") == "1.10"
    assert dump_json(uuid.UUID(int=1), "x") == "00000000-0000-0000-0000-000000000001"
    assert dump_json(dt.datetime(2030, 1, 1, tzinfo=dt.UTC), "x") == "2030-01-01T00:00:00Z"


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        b"bytes",
        object(),
        float("nan"),
        float("inf"),
        {1: "key"},
        {None: "key"},
        "\ud800",
        {"\ud800": 1},
        lambda: 1,
        Data,
        [Data(1, {1})],
        1j,
    ],
)
def test_what_has_no_json_form_is_refused(value):
    with pytest.raises(InvalidInputError):
        dump_json({"a": [value]}, "x")


def test_depth_is_bounded():
    value = 1
    for _ in range(JSON_MAX_DEPTH):
        value = [value]
    dump_json(value, "x")
    for _ in range(100_000):
        value = [value]
    with pytest.raises(InvalidInputError, match="deeper"):
        dump_json(value, "x")
    cycle = []
    cycle.append(cycle)
    with pytest.raises(InvalidInputError, match="deeper"):
        dump_json(cycle, "x")
    while isinstance(value, list):
        value = value.pop()


def test_strict_models_read_what_they_wrote():
    model = Model(when=dt.date(2030, 1, 2), pair=(1, 2), color=Color.RED, Named=3)
    assert load_json(dump_json(model, "x"), Model, "x") == model


def test_a_misfit_names_places_and_rules_and_no_bytes():
    with pytest.raises(InvalidInputError) as caught:
        load_json({"4111 1111": "secret", "pair": [1, "secret"]}, Model, "message on topic 't'")
    text = str(caught.value)
    assert "message on topic 't'" in text
    assert "Model" in text
    assert "missing" in text
    assert "secret" not in text
    assert "4111" not in text


def late() -> "Undefined":  # noqa: F821
    return 1


def unannotated(x):
    return x


async def coroutine_fn() -> list[int]:
    return [1]


def awaitable_fn() -> Awaitable[Model]:
    raise NotImplementedError


def opaque() -> object:
    return 1


def custom() -> "CustomType":
    return CustomType()


class CustomType:
    pass


def test_output_models():
    assert output_model(unannotated) is None
    assert output_model(opaque) is None
    assert output_model(coroutine_fn) == list[int]
    assert output_model(awaitable_fn) is Model
    assert output_model(functools.partial(awaitable_fn)) is Model
    assert output_model(len) is None
    with pytest.raises(ConfigError, match="Undefined"):
        output_model(late)
    with pytest.raises(ConfigError, match="CustomType"):
        load_json({}, output_model(custom), "x")


# Flows ---------------------------------------------------------------------------------------------------------------


@flow("typed")
async def typed(ctx: Context, order: Model) -> Model:
    """Takes a model."""
    return order


@flow("json")
async def plain(ctx: Context, value: Any) -> Any:
    return value


@flow("none")
async def nothing(ctx: Context) -> None:
    return None


@flow("bounded")
async def bounded(ctx: Context, n: Annotated[int, pydantic.Field(ge=1)] = 1) -> int:
    return n


also = typed

GOOD = {"when": "2030-01-02", "pair": [1, 2], "color": "red", "Named": 3}


def test_definitions_know_their_types():
    assert (typed.name, typed.takes_input, typed.input_model, typed.output_model) == (
        "typed",
        True,
        Model,
        Model,
    )
    assert (typed.__name__, typed.__doc__) == ("typed", "Takes a model.")
    assert repr(typed) == "<flow 'typed'>"
    assert plain.input_model is None
    assert not nothing.takes_input
    assert typed.parse_input(GOOD).named == 3
    assert typed.accept_input(typed.parse_input(GOOD)) == GOOD
    assert typed.load_output(GOOD).named == 3
    assert bounded.parse_input(2) == 2
    for definition, value in ((typed, {}), (nothing, 1), (bounded, 0), (bounded, "x")):
        with pytest.raises(InvalidInputError):
            definition.parse_input(value)


async def test_a_definition_is_still_callable():
    assert await plain(None, 3) == 3


@pytest.mark.parametrize("fn", [lambda ctx: 1, len])
def test_what_is_no_flow_is_refused(fn):
    with pytest.raises(ConfigError):
        flow("x")(fn)


def test_signatures_are_checked():
    async def none():
        pass

    async def many(ctx, a, b):
        pass

    for fn in (none, many):
        with pytest.raises(ConfigError):
            flow("x")(fn)
    for name in ("", "  ", None):
        with pytest.raises(ConfigError):
            flow(name)


def test_a_registry_is_an_object():
    registry = FlowRegistry([typed, plain])
    registry.add(typed)
    assert registry.get("typed") is typed
    assert "json" in registry
    assert (len(registry), registry.names, list(registry)) == (2, ("typed", "json"), [typed, plain])
    with pytest.raises(UnknownFlowError, match="typed"):
        registry.get("other")
    with pytest.raises(ConfigError, match="defined both"):
        registry.add(flow("typed")(plain.fn))


def test_collect_flows_finds_each_once():
    import sys

    assert collect_flows(sys.modules[__name__]) == [typed, plain, nothing, bounded]
