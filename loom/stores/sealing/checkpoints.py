"""When a folded state may rest in a snapshot store beside an encrypting event store: the one predicate (system.md 3.2)."""

from __future__ import annotations

from typing import Any, Literal

from loom.errors import PlaintextCheckpointError
from loom.stores.keys.contract import shares_keys

Reason = Literal["not-sealed", "keys-not-shared"]


def seals(events: Any) -> bool:
    """Whether an event store seals at all: it has a capability that covers something.

    Raises:
        ShardSealingMismatchError: its shards disagree.
    """
    asked = getattr(events, "sealing_capability", None)
    capability = None if asked is None else asked()
    return capability is not None and bool(capability.covers)


def plaintext_reason(events: Any, snapshots: Any) -> Reason | None:
    """Why a checkpoint would rest readable to those without the keys of its log; None where it would not.

    It is allowed only into a store that seals whole states and shares the event store's keys: static paths on the same
    keys leave the answers of waits in the clear. A store whose ``keys`` is no key store counts as a plain one.

    Raises:
        ShardSealingMismatchError: as ``seals``.
    """
    if snapshots is None or not seals(events):
        return None
    if getattr(snapshots, "seals_whole_state", False) is not True:
        return "not-sealed"
    if not shares_keys(getattr(events, "keys", None), getattr(snapshots, "keys", None)):
        return "keys-not-shared"
    return None


def check_checkpoints(events: Any, snapshots: Any, *, allow_plaintext: bool = False) -> None:
    """Refuse a pair of stores under which a checkpoint would rest in plaintext.

    Raises:
        PlaintextCheckpointError: it would, and ``allow_plaintext`` is not set. ShardSealingMismatchError: as ``seals``.
    """
    reason = None if allow_plaintext else plaintext_reason(events, snapshots)
    if reason is not None:
        raise PlaintextCheckpointError(reason)
