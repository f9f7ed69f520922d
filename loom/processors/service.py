"""The processors of one node, started and stopped together."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Self

from loom.processors.app import LoopBridge, build_app
from loom.processors.bridge import RuntimeBridge
from loom.processors.fold import FoldService
from loom.processors.fold_partition import FoldSettings
from loom.processors.host import AppHost
from loom.processors.retention import Retention, retention_of
from loom.stores.contracts import OwningEventStore
from loom.topics.catalogue import Catalogue

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from loom.config import Config
    from loom.processors.bridge import Forwarder
    from loom.runtime import Client

DELIVERY: Final = "delivery"
FOLD: Final = "fold"
DRIVE: Final = "drive"


class Processors:
    """Delivery (a Faust app), fold and retention of a node, by role. Use it as ``async with`` inside the runtime's own context.

    Raises:
        ConfigError: a setting that Faust or Kafka cannot use. DeadlineExceededError: not ready in time.
    """

    def __init__(self, config: Config, runtime: Client, forwarder: Forwarder, roles: frozenset[str]) -> None:
        self._config, self._runtime, self._forwarder, self._roles = config, runtime, forwarder, roles
        self._stops: list[Callable[[], bool]] = []
        self._retention: Retention | None = None

    async def __aenter__(self) -> Self:
        try:
            if FOLD in self._roles:
                self._start_fold()
            if DELIVERY in self._roles:
                await self._start_delivery()
            if DRIVE in self._roles:
                self._start_retention()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stop()

    def _start_fold(self) -> None:
        config = self._config
        catalogue = Catalogue(config.topic_prefix, config.partitions)
        fold = FoldService(FoldSettings(config.bootstrap or "", catalogue, config.node_id, config.kafka))
        self._stops.append(fold.stop)
        fold.start()

    async def _start_delivery(self) -> None:
        bridge = LoopBridge(RuntimeBridge(self._runtime, self._forwarder), asyncio.get_running_loop())
        host = AppHost(lambda: build_app(self._config, bridge))
        self._stops.append(host.stop)
        await asyncio.to_thread(host.start)

    def _start_retention(self) -> None:
        store = self._runtime.stores.events
        if isinstance(store, OwningEventStore):
            self._retention = retention_of(self._config, self._runtime, store.owned)
            if self._retention is not None:
                self._retention.start()

    async def _stop(self) -> None:
        """In reverse, each within its own bound, off the loop: delivery may still need answers from the runtime."""
        if self._retention is not None:
            await self._retention.stop()
        while self._stops:
            await asyncio.to_thread(self._stops.pop())
