"""Which markers a node opens, and which places a pattern finds (clauses.md, point 4)."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loom.schemas.payload import dump, load
from loom.stores.keys.contract import DataKey, KeySet
from loom.stores.sealing.cipher import CIPHER, NotOpened, is_ours, open_value, seal_value
from loom.stores.sealing.marker import SealingCapability, SealMarker, read_marker
from loom.stores.sealing.paths import SensitiveMap, change, is_below, tree_of

OURS = SealingCapability(CIPHER, lambda: ("A.input", "A.list.*.secret", "A.map.*", "B.x.y"))


def _marker(*covers, v=1, cipher=CIPHER):
    return {"v": v, "cipher": cipher, "covers": list(covers)}


@pytest.mark.parametrize(
    "covers",
    [
        ["A.input"],
        ["A.input.deep.er"],
        ["A.input.*"],
        ["A.map.*"],
        ["A.map.key"],
        ["A.map.key.deep", "B.x.y"],
        ["A.list.*.secret"],
        ["A.list.0.secret.more"],
    ],
)
def test_what_is_equal_to_or_below_ours_opens(covers):
    assert OURS.opens(_marker(*covers))
    assert OURS.opens(SealMarker(CIPHER, tuple(covers)))


@pytest.mark.parametrize(
    "covers",
    [
        ["A"],
        ["A.map"],
        ["A.*"],
        ["A.other"],
        ["A.inputs"],
        ["B.input"],
        ["B.x"],
        ["B.x.*"],
        ["A.list.*"],
        ["A.list.*.other"],
        ["A.input", "A.other"],
        ["A.input", ""],
        ["A.input", "A..x"],
        ["A.input", 1],
        ["A.input", None],
        [],
    ],
)
def test_what_is_not_does_not(covers):
    assert not OURS.opens(_marker(*covers))


@pytest.mark.parametrize(
    "marker",
    [
        None,
        [],
        "seal",
        {},
        _marker("A.input", v=2),
        _marker("A.input", v=0),
        _marker("A.input", v="1"),
        _marker("A.input", v=True),
        _marker("A.input", v=1.0),
        _marker("A.input", cipher="other"),
        _marker("A.input", cipher=None),
        _marker("A.input") | {"extra": 1},
        {"v": 1, "cipher": CIPHER},
        {"v": 1, "cipher": CIPHER, "covers": "A.input"},
        {"v": 1, "cipher": CIPHER, "covers": {"A.input": 1}},
        {"v": 1, "cipher": CIPHER, "covers": None},
    ],
)
def test_malformed_and_unknown_markers_do_not(marker):
    assert not OURS.opens(marker)


def test_a_node_that_seals_nothing_opens_nothing():
    assert not SealingCapability(CIPHER, tuple).opens(_marker("A.input"))


def test_a_marker_comes_back_as_it_was_written():
    marker = SealMarker(CIPHER, ("A.a", "A.b"))
    assert read_marker(marker.to_json()) == marker


# -- paths ---------------------------------------------------------------------------------------------------------

_names = st.sampled_from(["a", "b", "c", "0", "1"])
_json = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_names, inner, max_size=3)),
    max_leaves=20,
)
_data = st.dictionaries(_names, _json, max_size=4)
_paths = st.lists(
    st.lists(st.one_of(_names, st.just("*")), min_size=1, max_size=4).map(".".join), min_size=1, max_size=4
)


def _places(value, path):
    """Every place at or under a value, by its names."""
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in items:
        yield from _places(child, (*path, str(name)))


@given(_data, _paths)
def test_a_pass_finds_the_highest_places_and_nothing_else(data, paths):
    before = copy.deepcopy(data)
    patterns = SensitiveMap({"K": paths}).covers
    tree = SensitiveMap({"K": paths}).tree("K")
    found = {}

    def mark(value, pattern, path):
        assert pattern in patterns
        found[tuple(path.split("."))] = value
        return ["marked", value]

    changed = change(data, tree, mark)
    assert data == before

    def named(path):
        return any(
            is_below(".".join(("K", *path)), f"K.{p}") and len(path) == p.count(".") + 1 for p in paths
        )

    wanted = {path: value for path, value in _places(data, ()) if named(path)}
    highest = {p: v for p, v in wanted.items() if not any(p[:n] in wanted for n in range(1, len(p)))}
    assert found == highest
    if not found:
        assert changed is data
    assert change(changed, tree, lambda marked, _p, _at: marked[1]) == before


def test_what_lies_inside_another_path_is_left_out():
    covers = SensitiveMap({"K": ["a.b", "a", "x.*", "x.y.z", "x.y"]}).covers
    assert [c for c in covers if c.startswith("K.")] == ["K.a", "K.x.*"]


# -- values --------------------------------------------------------------------------------------------------------

KEYS = KeySet("s", (DataKey("k1", b"1" * 32), DataKey("k2", b"2" * 32)))


@given(_json, st.binary(min_size=12, max_size=12))
def test_what_was_sealed_opens_to_the_same(value, nonce):
    sealed = seal_value(KEYS.current, value, nonce)
    assert is_ours(sealed)
    assert is_ours(load(dump(sealed)))
    opened = open_value(KEYS, sealed)
    assert opened == value
    assert repr(opened) == repr(value)


@given(st.sampled_from(["iv", "ct", "kid", "__loomEnc"]), st.text(max_size=40))
def test_a_changed_envelope_never_opens(name, text):
    sealed = seal_value(KEYS.current, {"a": 1}, b"n" * 12)
    broken = {**sealed, name: text}
    if broken != sealed:
        with pytest.raises(NotOpened):
            open_value(KEYS, broken)


@given(_json)
def test_arbitrary_values_never_open(value):
    with pytest.raises(NotOpened):
        open_value(KEYS, value)


def test_a_context_binds():
    sealed = seal_value(KEYS.current, 1, b"n" * 12, aad=("ctx", "ctx|e|1"))
    assert sealed["aad"] == "ctx"
    assert open_value(KEYS, sealed, aad=("ctx", "ctx|e|1")) == 1
    without = {name: value for name, value in sealed.items() if name != "aad"}
    for envelope, aad in (
        (sealed, ("ctx", "ctx|e|2")),
        (sealed, ("other", "ctx|e|1")),
        (sealed, None),
        (without, ("ctx", "ctx|e|1")),
        (without, None),
    ):
        with pytest.raises(NotOpened):
            open_value(KEYS, envelope, aad=aad)


def test_a_tree_is_shared_and_bounded():
    assert tree_of(("K.a",)) is tree_of(("K.a",))
    assert tree_of.cache_info().maxsize is not None
