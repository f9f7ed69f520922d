"""Stores from settings: what a caller does not give is built here."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from loom.errors import ConfigError
from loom.stores.sealing.wiring import seal_stores

if TYPE_CHECKING:
    from collections.abc import Callable

    from loom.config import Config
    from loom.stores.contracts import Clock, EventStore, LeaseStore, SnapshotStore, WakeStore
    from loom.stores.sealing.doctor import SealingDoctor
    from loom.stores.sealing.shred import SubjectRecords

BUILDERS: Final[dict[str, str]] = {"kafka": "loom.stores.kafka", "memory": "loom.runtime.memory"}
"""Module of each ``config.storage``, imported when it is used; it has ``open_stores(config, ...)``."""


@dataclass(frozen=True, slots=True)
class Stores:
    """The stores of a node. ``leases`` None: no evidence of life; ``wakes`` None: no durable alarms.

    ``owned`` says which of them the runtime opened, and closes. ``subjects`` is what erasure and export work on,
    ``sealing`` looks at how the stores seal.
    """

    events: EventStore
    snapshots: SnapshotStore | None = None
    leases: LeaseStore | None = None
    wakes: WakeStore | None = None
    owned: tuple[Any, ...] = ()
    subjects: SubjectRecords | None = None
    sealing: SealingDoctor | None = None


Given = dict[str, Any]


async def build_stores(
    config: Config,
    given: Given,
    *,
    clock: Clock,
    drives: bool,
    node: str | None = None,
    keys: Any = None,
    on_fatal: Callable[[Exception], None] | None = None,
) -> Stores:
    """Take what the caller gave, build the rest from ``config.storage``, and seal it where there are keys.

    Raises:
        PlaintextCheckpointError: snapshots that were given would rest in plaintext beside a sealed log.
        ConfigError: a setting that the storage, or sealing, needs is missing. UnreachableError: a server does not answer.
    """
    offered = {"clock": clock, "drives": drives, "node": node, "on_fatal": on_fatal}
    made = await _made(config, given, offered)
    try:
        sealed = seal_stores(
            config, made.events, made.snapshots, keys, snapshots_given=given.get("snapshots") is not None
        )
    except BaseException:
        for store in made.owned:
            await store.close()
        raise
    opened = () if sealed.opened is None else (sealed.opened,)
    return replace(
        made,
        events=sealed.events,
        snapshots=sealed.snapshots,
        owned=made.owned + opened,
        subjects=sealed.subjects,
        sealing=sealed.doctor,
    )


async def _made(config: Config, given: Given, offered: dict[str, Any]) -> Stores:
    """What the caller gave, and the rest from ``config.storage``.

    A Kafka event store is never paired with leases in memory (clauses.md, point 14): with an event store of the
    caller's own, nothing else is made up.

    Raises:
        ConfigError: a setting that the storage needs is missing. UnreachableError: a server does not answer.
    """
    if given.get("events") is not None:
        return Stores(given["events"], given.get("snapshots"), given.get("leases"), given.get("wakes"))
    module = import_module(BUILDERS[config.storage])
    opener: Callable[..., Any] | None = getattr(module, "open_stores", None)
    if opener is None:
        raise ConfigError("storage", f"{config.storage!r} cannot be opened by this build", "use 'memory'")
    accepted = inspect.signature(opener).parameters
    built = opener(config, **{name: value for name, value in offered.items() if name in accepted})
    stores: Any = await built if inspect.isawaitable(built) else built
    made = Stores(
        stores.events,
        stores.snapshots,
        stores.leases,
        stores.wakes,
        owned=tuple(
            store
            for store in (stores.events, stores.snapshots, stores.leases, stores.wakes)
            if store is not None
        ),
    )
    return replace(made, **{name: value for name, value in given.items() if value is not None})
