"""The bounded walk against its definition, on random payloads (system.md 1.1 and 1.2; the seed's D2)."""

import random
from collections.abc import Mapping

import pytest

from loom.kernel import Verdict, inspect_payload
from loom.kernel.guard import SEALED_KEY, SHREDDED_KEY

SHORT, FULL = 400, 100_000


class Inheriting(dict):
    """Answers for keys that it does not have."""

    def __missing__(self, key):
        return "loom/aes-256-gcm"


class Frozen(Mapping):
    """A mapping that is no dict."""

    def __init__(self, held):
        self.held = held

    def __getitem__(self, key):
        return self.held[key]

    def __iter__(self):
        return iter(self.held)

    def __len__(self):
        return len(self.held)


def breadth_first(payload):
    """Every node in the order of its distance from the top; endless where there is a cycle."""
    level = [payload]
    while level:
        yield from level
        level = [
            child
            for node in level
            if isinstance(node, Mapping | list | tuple)
            for child in (node.values() if isinstance(node, Mapping) else node)
        ]


def defined(payload, budget):
    """The verdict as the rule says it, a node at a time."""
    for count, node in enumerate(breadth_first(payload), 1):
        if count > budget:
            return Verdict.UNVERIFIABLE
        if isinstance(node, Mapping):
            own = dict(node.items())
            if isinstance(own.get(SEALED_KEY), str):
                return Verdict.SEALED
            if own.get(SHREDDED_KEY) is True:
                return Verdict.SHREDDED
    return Verdict.CLEAN


LOOK_ALIKES = (
    {SEALED_KEY: 1},
    {SEALED_KEY: None},
    {SEALED_KEY: [SEALED_KEY]},
    {SEALED_KEY: {"nested": "x"}},
    {SHREDDED_KEY: "true"},
    {SHREDDED_KEY: 1},
    {SEALED_KEY.upper(): "x"},
    SEALED_KEY,
    [SEALED_KEY, "loom/aes-256-gcm"],
    Inheriting(),
    Inheriting(a=1),
)
MARKERS = (
    {SEALED_KEY: "loom/aes-256-gcm", "kid": "k", "iv": "i", "ct": "c"},
    {SEALED_KEY: ""},
    {"before": 1, SEALED_KEY: "other-cipher"},
    Frozen({SEALED_KEY: "x"}),
    Inheriting({SEALED_KEY: "x"}),
    {SHREDDED_KEY: True},
)


def payload(rng):
    """A random payload: wide, deep, shared, cyclic; markers and what looks like them anywhere."""
    nodes = [rng.choice((None, True, 0, 1.5, "text", [], {}, ()))]
    for _ in range(rng.choice((1, 3, 10, 40))):
        draw = rng.random()
        if draw < 0.04:
            nodes.append(rng.choice(MARKERS))
        elif draw < 0.15:
            nodes.append(rng.choice(LOOK_ALIKES))
        else:
            inner = [rng.choice(nodes) for _ in range(rng.choice((0, 1, 2, 5)))]
            shape = rng.randrange(4)
            if shape == 0:
                nodes.append(inner)
            elif shape == 1:
                nodes.append(tuple(inner))
            else:
                keyed = {f"k{n}": value for n, value in enumerate(inner)}
                nodes.append(keyed if shape == 2 else Frozen(keyed))
    top = nodes[-1]
    for _ in range(rng.choice((0, 0, 0, 50, 2_000))):  # deep, without recursion
        top = [top] if rng.random() < 0.5 else {"d": top}
    if rng.random() < 0.05:
        loop = [top]
        loop.append(loop)
        top = loop
    return top


def walk(count, seed):
    rng = random.Random(seed)
    met = set()
    for turn in range(count):
        value = payload(rng)
        size = sum(1 for _, node in zip(range(5_000), breadth_first(value), strict=False))
        budget = max(1, size + rng.choice((-2, -1, 0, 1, 5_000)))
        told, said = inspect_payload(value, budget), defined(value, budget)
        assert told is said, (seed, turn, budget)
        met.add(told)
    assert met == set(Verdict)


def test_the_walk_is_what_it_is_defined_to_be():
    walk(SHORT, 2026)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_walk_on_a_hundred_thousand_payloads():
    walk(FULL, 7)
