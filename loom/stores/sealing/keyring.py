"""Keys at hand: a bounded cache over a key store, short-lived, so that an erasure is felt everywhere within a second."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from loom.errors import KeyUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from loom.stores.keys.contract import DataKey, KeySet, KeyStore

FRESH_S: Final = 0.5
"""How long a key is used without asking its store again (an erasure must be felt within a second)."""

MAX_SUBJECTS: Final = 16_384
USES_PER_CHARGE: Final = 4096
"""Seals charged at once to a key; what a process leaves unused when it ends is lost to nobody."""


@dataclass(slots=True)
class _Held:
    keys: KeySet
    until: float
    charged_to: str = ""
    left: int = 0


class KeyRing:
    """Keys of the subjects in use. ``now`` is a monotonic clock in seconds."""

    def __init__(self, keys: KeyStore, *, now: Callable[[], float] = time.monotonic) -> None:
        self.store = keys
        self._now = now
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._asking: dict[str, asyncio.Future[KeySet | None]] = {}

    def peek(self, subject: str) -> KeySet | None:
        """The keys if they are at hand, without asking."""
        held = self._held.get(subject)
        return held.keys if held is not None and held.until > self._now() else None

    async def opening(self, subject: str) -> KeySet | None:
        """Keys to open with; None where this node has none, for whatever reason.

        Raises:
            UnreachableError, StoreRefusedError: the key store did not answer, which says nothing of the keys.
        """
        return self.peek(subject) or await self._shared(subject)

    async def sealing(self, subject: str, uses: int) -> DataKey:
        """A key for ``uses`` seals, made on first use.

        Raises:
            PayloadShreddedError, KeyUnavailableError: as ``KeyStore.ensure``. Others as ``opening``.
        """
        held = self._held.get(subject)
        if held is not None and held.left >= uses and held.until <= self._now():
            await self._shared(subject)  # is it still there, and still current?
            held = self._held.get(subject)
        if held is None or held.left < uses or held.charged_to != held.keys.current.id:
            amount = max(uses, USES_PER_CHARGE)
            keys = await self.store.ensure(subject, amount)
            held = self._keep(subject, keys)
            if held.charged_to != keys.current.id:
                held.charged_to, held.left = keys.current.id, 0
            held.left += amount
        held.left -= uses
        return held.keys.current

    def drop(self, subject: str) -> None:
        """Forget a subject's keys at once."""
        self._held.pop(subject, None)

    async def _shared(self, subject: str) -> KeySet | None:
        """Ask the store, one call for all who ask at the same time."""
        asking = self._asking.get(subject)
        if asking is None:
            asking = self._asking[subject] = asyncio.ensure_future(self._ask(subject))
            asking.add_done_callback(lambda _: self._asking.pop(subject, None))
        return await asyncio.shield(asking)

    async def _ask(self, subject: str) -> KeySet | None:
        try:
            keys = await self.store.get(subject)
        except KeyUnavailableError:
            keys = None
        if keys is None:
            self.drop(subject)
        else:
            self._keep(subject, keys)
        return keys

    def _keep(self, subject: str, keys: KeySet) -> _Held:
        held = self._held.get(subject)
        if held is None:
            held = self._held[subject] = _Held(keys, 0.0)
            if len(self._held) > MAX_SUBJECTS:
                self._held.popitem(last=False)
        self._held.move_to_end(subject)
        held.keys, held.until = keys, self._now() + FRESH_S
        return held
