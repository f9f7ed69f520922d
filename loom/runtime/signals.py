"""What a runtime tells its host: errors of stores, of flows, denials, warnings.

A callback that raises changes nothing: what it was told is then logged by type and id, and the work goes on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import structlog

_log = structlog.get_logger("loom.runtime")

REPORT_EVERY: Final = 16
"""A repeated trouble is told the first time and then every 16th (system.md 1.6)."""

MAX_TRACKED: Final = 1024
"""How many troubles are counted at once; the oldest is forgotten."""

ErrorCallback = Callable[[BaseException, str], Any]
"""Told the error and the id (execution, stream or part of the runtime) that it concerns."""

WarnCallback = Callable[[str, str], Any]
"""Told a message and the id it concerns."""


class Signals:
    """The callbacks of a runtime, guarded; without one, the log is told."""

    def __init__(
        self,
        *,
        on_storage_error: ErrorCallback | None = None,
        on_error: ErrorCallback | None = None,
        on_warn: WarnCallback | None = None,
    ) -> None:
        self._on_storage_error = on_storage_error
        self._on_error = on_error
        self._on_warn = on_warn
        self._counts: OrderedDict[tuple[str, str], int] = OrderedDict()

    def storage_error(self, error: BaseException, about: str) -> None:
        """A store did not do what was asked; it is tried again or given up where the caller says so."""
        self._tell(self._on_storage_error, "storage_error", error, about)

    def error(self, error: BaseException, about: str) -> None:
        """An execution cannot go on here (diverged, unknown flow, sealed), or a part of the runtime failed."""
        self._tell(self._on_error, "error", error, about)

    def warn(self, message: str, about: str) -> None:
        """Something an operator may want to know."""
        if self._on_warn is None:
            _log.warning(message, about=about)
            return
        try:
            self._on_warn(message, about)
        except Exception as failure:  # noqa: BLE001 - a host's callback never stops the runtime
            _log.warning("callback failed", callback="on_warn", error=type(failure).__name__)

    def repeated_error(self, error: BaseException, about: str) -> None:
        """As ``error``, but told the first time and then every 16th, per kind and id."""
        if self._due(("error:" + type(error).__name__, about)):
            self.error(error, about)

    def repeated_storage_error(self, error: BaseException, about: str) -> None:
        """As ``storage_error``, but told the first time and then every 16th, per kind and id."""
        if self._due(("storage:" + type(error).__name__, about)):
            self.storage_error(error, about)

    def settled(self, about: str) -> None:
        """The trouble with ``about`` is over: the next one is told at once."""
        if self._counts:
            for key in [key for key in self._counts if key[1] == about]:
                del self._counts[key]

    def _due(self, key: tuple[str, str]) -> bool:
        count = self._counts.pop(key, 0)
        self._counts[key] = count + 1
        if len(self._counts) > MAX_TRACKED:
            self._counts.popitem(last=False)
        return count % REPORT_EVERY == 0

    def _tell(self, callback: ErrorCallback | None, name: str, error: BaseException, about: str) -> None:
        if callback is None:
            _log.warning(name, error=type(error).__name__, message=str(error), about=about)
            return
        try:
            callback(error, about)
        except Exception as failure:  # noqa: BLE001 - a host's callback never stops the runtime
            _log.warning("callback failed", callback=name, error=type(failure).__name__)
