"""A thread beside a writer that keeps its index within memory, and its checkpoint young."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from loom.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from loom.stores.index import StreamIndex

_log = logging.getLogger("loom.kafka.index")

CHECK_EVERY_S: Final = 0.25
CHECKPOINT_EVERY_S: Final = 15.0
_FAILED_FOR_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """What a checkpoint is to say: taken on the writer's thread, after everything before ``positions`` was applied."""

    positions: Mapping[str, int]
    identity: Mapping[str, Any]
    extra: Mapping[str, Any]
    now_ms: int


class IndexKeeper:
    """The thread, from ``start`` to ``stop``. The writer offers states; the youngest is saved now and then.

    ``each`` is called at every check: what has to be done while the writer's own thread waits for a broker.

    Attributes:
        yields: whether the writer has more urgent work, such as a takeover; it then sees to memory itself.
    """

    def __init__(self, index: StreamIndex, name: str, each: Callable[[], None]) -> None:
        self._index, self._each = index, each
        self._offered: CheckpointState | None = None
        self._saved_at = time.monotonic() - CHECKPOINT_EVERY_S
        self._failed_until = 0.0
        self.yields = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"loom-index-{name}", daemon=True)

    @property
    def wants(self) -> bool:
        """Whether it is time to offer a state."""
        return self._offered is None and time.monotonic() - self._saved_at >= CHECKPOINT_EVERY_S

    def offer(self, state: CheckpointState) -> None:
        """Give a state to save."""
        self._offered = state

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after what it is writing."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(CHECK_EVERY_S):
            self._each()
            if time.monotonic() >= self._failed_until:
                try:
                    self._keep()
                except StoreError as error:
                    _log.warning("%s: the index file cannot be written: %s", self._thread.name, error)
                    self._failed_until = time.monotonic() + _FAILED_FOR_S

    def _keep(self) -> None:
        if self._index.overdue and not self.yields:
            self._index.maintain()
        state = self._offered
        if state is not None:
            self._offered, self._saved_at = None, time.monotonic()
            self._index.save_checkpoint(state.positions, state.identity, state.now_ms, extra=state.extra)
