"""What ``loom doctor`` says of leases: the mode, rows that nobody answers for, clocks that differ (system.md 6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from loom.kernel.evidence import CONTINUE
from loom.schemas.envelope import TERMINAL_KINDS, Kind
from loom.stores.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loom.config import Config
    from loom.runtime.factory import Stores
    from loom.stores.contracts import Clock, EventStore, Lease, LeaseStore, Presence

MAX_ROWS: Final = 200
"""Leases that one look goes through, lapsed ones first."""

NAMED: Final = 5
"""Ids that one finding names; the others are counted."""

TAKEN_WITHIN_TTLS: Final = 2
"""A lapsed lease is somebody's work by then: a poll, a quiet period and a takeover fit."""

SKEW_MS: Final = 2_000
"""A beat takes a second at most, so that less may be its way to the store."""


async def lease_findings(
    config: Config, stores: Stores, store: LeaseStore, present: Sequence[Presence], clock: Clock
) -> list[Finding]:
    """What is wrong with leases, as this client sees them.

    Raises:
        StoreError: a store cannot be read now.
    """
    found = list(_mode(config, store))
    now = await store.now()
    found += _clocks(present, clock() - now)
    rows = await store.held(MAX_ROWS)
    ttls = [ttl for row in present if isinstance(ttl := row.details.get("ttlMs"), int)]
    patience_ms = TAKEN_WITHIN_TTLS * max(config.leases.ttl_ms, *ttls, 0)
    found += _unannounced(rows, present, now - patience_ms)
    found += await _lapsed(stores.events, [row for row in rows if row.expires_at < now - patience_ms])
    return found


def _mode(config: Config, store: LeaseStore) -> Iterator[Finding]:
    leases = config.leases
    if not leases.enabled:
        yield Finding(
            "leases-disabled",
            "warning",
            "leases.enabled is off here: a node with this setting shows no evidence of life",
            "leave it on, or give nodes an is_abandoned",
        )
        return
    if store.scope != "cluster":
        yield Finding(
            "leases-not-shared",
            "warning",
            "not all nodes share the lease store: what it says is no evidence, and nothing is taken over on it",
            "use one Redis for all nodes, or give nodes an is_abandoned",
        )
    if leases.on_store_error == "continue":
        yield Finding(
            "leases-outlive-outages",
            "warning",
            'leases.on_store_error is "continue": expired leases of such nodes are no proof, and nobody takes over '
            "on them alone",
            'set it to "stop", or give nodes an is_abandoned',
        )
    if leases.acquire == "lazy":
        grace_ms = leases.ttl_ms // 3 if leases.lazy_grace_ms is None else leases.lazy_grace_ms
        yield Finding(
            "leases-lazy",
            "info",
            f"leases are lazy: a start is leased once it has run for {grace_ms} ms; until then only "
            "its node's presence tells that it lives",
            'nothing; leases.acquire = "eager" leases every run at once, for two calls of Redis each',
        )


def _clocks(present: Sequence[Presence], own_ms: int) -> Iterator[Finding]:
    skews = {"this process": own_ms}
    for row in present:
        at, ttl_ms = row.details.get("at"), row.details.get("ttlMs")
        if not row.expired and isinstance(at, int) and isinstance(ttl_ms, int):
            skews[f"node {row.node}"] = at - (row.expires_at - ttl_ms)
    for name, skew in skews.items():
        if abs(skew) > SKEW_MS:
            side = "ahead of" if skew > 0 else "behind"
            yield Finding(
                "clock-skew",
                "warning",
                f"the clock of {name} is {abs(skew)} ms {side} the lease store's: its timers fire as much too "
                f"{'early' if skew > 0 else 'late'}",
                "keep clocks in step (NTP)",
            )


def _unannounced(rows: Sequence[Lease], present: Sequence[Presence], before: int) -> Iterator[Finding]:
    """Leases that stand, of nodes that show no life: they renew, so something is odd about the node."""
    known = {row.node for row in present if row.expires_at >= before}
    owners = {row.owner for row in rows if not row.expired and "~ghosts" not in row.owner} - known
    if owners:
        yield Finding(
            "presence-missing",
            "warning",
            f"leases are held by nodes that show no presence: {_named(sorted(owners))}",
            "look at their logs; restart them if they do not announce themselves within a TTL",
        )


async def _lapsed(events: EventStore, rows: Sequence[Lease]) -> list[Finding]:
    untaken, void = [], []
    for row in rows:
        info = await events.info(row.execution_id)
        if info is None or info.status in TERMINAL_KINDS:
            if not row.owner.endswith(CONTINUE):
                void.append(row.execution_id)
        elif info.status != Kind.EXECUTION_SUSPENDED:
            untaken.append(row.execution_id)
    found = []
    if untaken:
        found.append(
            Finding(
                "lease-untaken",
                "warning",
                f"their leases lapsed and nobody took them over: {_named(untaken)}",
                "see that a worker owns their partitions, knows their flows and opens their logs (its on_error says what "
                "it met); `loom recover ID` once the cause is gone",
            )
        )
    if void:
        found.append(
            Finding(
                "lease-void",
                "info",
                f"lapsed leases of what never began or has ended: {_named(void)}",
                "nothing: the owners of their partitions collect them, a page per TTL",
            )
        )
    return found


def _named(names: Sequence[str]) -> str:
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")
