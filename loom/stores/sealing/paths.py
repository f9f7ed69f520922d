"""Which fields are sealed: ``{EVENT_TYPE: [dot.path, ...]}``, where ``*`` stands for every key or item.

Patterns become a tree, so that one pass over an event finds every place, the highest first: what is sealed as a whole is
not searched for parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from loom.errors import ConfigError
from loom.schemas.envelope import Kind

if TYPE_CHECKING:
    from loom.schemas.envelope import Json

SETTING: Final = "sealing.sensitive"
ANY: Final = "*"
MAX_SEGMENTS: Final = 32

DEFAULT_SENSITIVE: Final[Mapping[str, tuple[str, ...]]] = {
    Kind.EXECUTION_STARTED: ("principal.identity.*",),
    Kind.INBOX_MESSAGE: ("payload",),
    Kind.MESSAGE_CONSUMED: ("payload",),
    Kind.OUTCOME_RECORDED: ("recordedBy",),
}
"""Sealed wherever there are keys (interface.md, "Configuration")."""

_CLEAR: Final[Mapping[str, tuple[str, ...]]] = {
    Kind.EXECUTION_STARTED: ("subject", "chainId", "parent", "continuedFrom", "forkedFrom"),
    Kind.INBOX_MESSAGE: ("topic", "messageId", "sender"),
    Kind.MESSAGE_CONSUMED: ("topic", "messageId", "inboxSeq", "siteId", "arm", "reason"),
    Kind.INBOX_QUARANTINED: (ANY,),
    Kind.INBOX_RELEASED: (ANY,),
    Kind.ERASURE_PENDING: (ANY,),
    Kind.PAYLOAD_SHREDDED: (ANY,),
}
"""Never sealed: by these every node, keys or not, places, passes over, holds and erases."""

Change = Callable[["Json", str, str], "Json"]
"""Given a value, the pattern that found it, and where it stands; returns what is to stand there."""


@dataclass(slots=True)
class Node:
    """A step of patterns: ``pattern`` where one ends here."""

    children: dict[str, Node] = field(default_factory=dict)
    pattern: str | None = None
    steps: tuple[tuple[str, str | None, Node], ...] = ()
    """Of one without ``ANY``: each child's name and pattern beside it, to be walked quickly."""

    def finish(self) -> None:
        """Every child is there."""
        for child in self.children.values():
            child.finish()
        if ANY not in self.children:
            self.steps = tuple((name, child.pattern, child) for name, child in self.children.items())


def is_below(entry: str, ours: str) -> bool:
    """Whether every place of the pattern ``entry`` is one of ``ours``, or inside one."""
    theirs, mine = entry.split("."), ours.split(".")
    return len(theirs) >= len(mine) and all(m in {t, ANY} for t, m in zip(theirs, mine, strict=False))


@lru_cache(2048)
def tree_of(patterns: tuple[str, ...]) -> Node:
    """The tree of patterns of one event type (``EVENT_TYPE.dot.path``, the type left out of the tree)."""
    root = Node()
    for pattern in patterns:
        node = root
        for segment in pattern.split(".")[1:]:
            node = node.children.setdefault(segment, Node())
        node.pattern = pattern
    root.finish()
    return root


def change(data: Mapping[str, Json], tree: Node, apply: Change, path: str = "") -> dict[str, Json]:
    """Return ``data`` with every found value changed; ``data`` itself, where nothing changes, and never touched.

    ``path`` is where it stands. Where only named keys are looked for, these are asked for, and no other is looked at.
    """
    changed: Any = data
    if ANY in tree.children:
        changed = _walk(data, (tree,), path, apply)
    for name, pattern, below in tree.steps:
        child = data.get(name, data)
        if child is data or (pattern is None and not child):
            continue  # it is not there, or nothing is in it
        here = f"{path}.{name}" if path else name
        after = apply(child, pattern, here) if pattern is not None else _walk(child, (below,), here, apply)
        if after is not child:
            if changed is data:
                changed = dict(data)
            changed[name] = after
    found: dict[str, Json] = changed
    return found


def _walk(value: Json, nodes: Sequence[Node], path: str, apply: Change) -> Json:
    if type(value) is dict or isinstance(value, Mapping):
        if len(nodes) == 1 and ANY not in nodes[0].children:
            return change(value, nodes[0], apply, path)
        places: Iterable[tuple[str, Json]] = value.items()
    elif isinstance(value, list | tuple):
        places = ((str(index), item) for index, item in enumerate(value))
    else:
        return value
    new: dict[str, Json] = {}
    for name, child in places:
        found = [n for node in nodes for key in {name, ANY} if (n := node.children.get(key)) is not None]
        if not found:
            continue
        ends = sorted(n.pattern for n in found if n.pattern is not None)
        here = f"{path}.{name}" if path else str(name)
        after = apply(child, ends[0], here) if ends else _walk(child, found, here, apply)
        if after is not child:
            new[name] = after
    if not new:
        return value
    if isinstance(value, Mapping):
        return {name: new.get(name, child) for name, child in value.items()}
    return [new.get(str(index), item) for index, item in enumerate(value)]


class SensitiveMap:
    """The paths of a node. ``covers`` are its patterns, sorted, without those inside others."""

    def __init__(self, sensitive: Mapping[str, Iterable[str]] | None = None) -> None:
        """Take ``sensitive`` beside the default.

        Raises:
            ConfigError: a path is none, or reaches what must stay clear.
        """
        self._patterns: dict[str, tuple[str, ...]] = {}
        self._trees: dict[str, Node] = {}
        self.tree: Callable[[str], Node | None] = self._trees.get
        """The tree of a type, None where nothing of it is sealed."""
        self.covers: tuple[str, ...] = ()
        for kind, paths in DEFAULT_SENSITIVE.items():
            self.add(kind, paths)
        for kind, more in (sensitive or {}).items():
            self.add(kind, more)

    def add(self, kind: str, paths: Iterable[str]) -> None:
        """Seal these paths of a type too, from now on.

        Raises:
            ConfigError: as the constructor.
        """
        patterns = {*self._patterns.get(kind, ()), *(_checked(kind, path) for path in paths)}
        top = (p for p in patterns if not any(is_below(p, q) for q in patterns if q != p))
        self._patterns[kind] = tuple(sorted(top))
        if patterns:
            self._trees[kind] = tree_of(self._patterns[kind])
        self.covers = tuple(sorted(p for patterns in self._patterns.values() for p in patterns))


def _checked(kind: str, path: str) -> str:
    pattern = f"{kind}.{path}"
    segments = path.split(".")
    if not kind or "." in kind or not all(segments) or len(segments) > MAX_SEGMENTS:
        raise ConfigError(SETTING, f"{pattern[:80]!r} is no path", "write EVENT_TYPE: [field.field, field.*]")
    for clear in _CLEAR.get(kind, ()):
        kept = f"{kind}.{clear}"
        if is_below(pattern, kept) or is_below(kept, pattern):
            raise ConfigError(
                SETTING, f"{pattern[:80]!r} reaches what every node must read ({kept})", "leave it out"
            )
    return pattern
