"""A state that may be looked at and nothing else: folded past payloads that were never opened (system.md 4.9)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from loom.kernel.state import ExecutionState


@dataclass(slots=True)
class TransientState(ExecutionState):
    """A frozen private copy. ``to_json`` refuses it, so it cannot be saved; whoever restores a state refuses it too."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError("a state that was folded past sealed payloads cannot be changed, saved or given away")


def make_transient(state: ExecutionState) -> TransientState:
    """Copy a lean state and freeze the copy deeply.

    Raises:
        TypeError: it holds a value that cannot be copied.
    """
    frozen = object.__new__(TransientState)
    for one in fields(state):
        object.__setattr__(frozen, one.name, _freeze(copy.deepcopy(getattr(state, one.name))))
    return frozen


def _freeze(value: Any) -> Any:
    if isinstance(value, Mapping):
        return MappingProxyType({key: _freeze(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(map(_freeze, value))
    return value
