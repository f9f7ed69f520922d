"""The guard on delivery: ciphertext is recognised by its shape and never handed on (system.md 1).

It knows no cipher and no key, and runs on every node. A payload that still holds a sealed envelope after the store
has had its chance to open it is, by construction, sealed and not openable here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from loom.errors import InboxMessageRefusedError, PayloadShreddedError, SealedPayloadUnreadableError

if TYPE_CHECKING:
    from loom.schemas.envelope import Json

SEALED_WALK_BUDGET: Final = 100_000
"""Nodes that a walk visits before a payload counts as unverifiable."""

SEALED_KEY: Final = "__loomEnc"
SHREDDED_KEY: Final = "$shredded"


class Verdict(Enum):
    """What a walk found; the first three are judged in breadth-first order, nearest to the top first."""

    CLEAN = "clean"
    SEALED = "sealed"
    SHREDDED = "shredded"
    UNVERIFIABLE = "unverifiable"


def is_sealed_envelope(value: Any) -> bool:
    """Whether a value is a mapping with its own key ``__loomEnc`` whose value is a string."""
    return isinstance(value, Mapping) and SEALED_KEY in value and isinstance(value[SEALED_KEY], str)


def is_shredded_marker(value: Any) -> bool:
    """Whether a value is what is left of an erased (or redacted) one: ``{"$shredded": true}``."""
    return isinstance(value, Mapping) and SHREDDED_KEY in value and value[SHREDDED_KEY] is True


def inspect_payload(payload: Json, budget: int = SEALED_WALK_BUDGET) -> Verdict:
    """Walk a payload breadth-first, without recursion, and say whether it may be handed on.

    Mappings, lists and tuples are walked. A cycle never ends and so exhausts the budget; a shared reference counts
    each time it is met, as it would in the stored JSON.
    """
    visited = 1
    found = _judge(payload)
    if found is not None:
        return found
    queue: deque[Any] = deque((payload,) if isinstance(payload, _CONTAINERS) else ())
    while queue:
        node = queue.popleft()
        for child in node if type(node) is list else _children(node):
            visited += 1
            if visited > budget:
                return Verdict.UNVERIFIABLE
            kind = type(child)
            if kind in _SCALARS:
                continue
            if kind is dict or isinstance(child, Mapping):
                if SEALED_KEY in child or SHREDDED_KEY in child:
                    found = _judge(child)
                    if found is not None:
                        return found
            elif kind is not list and not isinstance(child, list | tuple):
                continue
            queue.append(child)
    return Verdict.CLEAN


_CONTAINERS: Final = (dict, list, tuple, Mapping)
_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
"""Most nodes are one of these; to be told that they are no mapping costs ten times as much."""


def _children(node: Any) -> Iterable[Any]:
    return node.values() if type(node) is dict or isinstance(node, Mapping) else node


def _judge(value: Any) -> Verdict | None:
    if isinstance(value, Mapping):
        if is_sealed_envelope(value):
            return Verdict.SEALED
        if is_shredded_marker(value):
            return Verdict.SHREDDED
    return None


def assert_deliverable(
    execution_id: str,
    message_id: str,
    topic: str,
    payload: Json,
    *,
    erased: str | None = None,
    recorded: bool = False,
) -> None:
    """Refuse a payload that this node must not hand to a flow: the one check of every delivery.

    ``erased`` names the subject if a tombstone for it is in the log: only then is the redaction marker an erased
    message; without, it is one whose key this node lacks (clauses.md, point 2). ``recorded`` says that the payload is
    an answer already in the log.

    Raises:
        SealedPayloadUnreadableError: it is sealed, redacted, or cannot be checked within the budget.
        PayloadShreddedError: it is redacted and the subject was erased.
    """
    verdict = inspect_payload(payload)
    if verdict is Verdict.CLEAN:
        return
    if verdict is Verdict.SHREDDED and erased is not None:
        raise PayloadShreddedError(erased)
    raise SealedPayloadUnreadableError(
        execution_id, message_id, topic, unverifiable=verdict is Verdict.UNVERIFIABLE, recorded=recorded
    )


_REFUSALS: Final = {
    Verdict.SEALED: ("it holds a value shaped like a sealed one", "wrap foreign ciphertext as a string"),
    Verdict.SHREDDED: ("it holds a value shaped like an erased one", "do not send the marker of an erasure"),
    Verdict.UNVERIFIABLE: ("it is too large to be checked", "send a smaller payload, or a reference"),
}


def check_ingest(execution_id: str, topic: str, payload: Json) -> None:
    """Refuse a payload dressed as a sealed or erased one, before anything is appended (system.md 1.8).

    ``payload`` is the JSON that will be stored, judged after its size was.

    Raises:
        InboxMessageRefusedError: it holds such a shape, or cannot be checked within the budget.
    """
    verdict = inspect_payload(payload)
    if verdict is not Verdict.CLEAN:
        raise InboxMessageRefusedError(execution_id, topic, *_REFUSALS[verdict])
