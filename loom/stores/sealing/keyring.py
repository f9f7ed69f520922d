"""Keys at hand: a bounded cache over a key store, short-lived, so that an erasure is felt everywhere within a second."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from loom.errors import KeyUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from loom.stores.keys.contract import DataKey, KeySet, KeyStore

FRESH_S: Final = 0.5
"""How long a key is used without asking its store again (an erasure must be felt within a second)."""

AHEAD_S: Final = FRESH_S / 4
"""A key that is used with less than this left is asked for again, so that nobody has to wait for it."""

MAX_SUBJECTS: Final = 16_384
FIRST_CHARGE: Final = 64
"""Seals charged to a key that is not in use here: most subjects are one execution, of few events."""

USES_PER_CHARGE: Final = 4096
"""Seals charged at once to a key in use. What is left when it is let go is lost to nobody, but brings its rotation nearer."""


class NotAtHand(Exception):  # noqa: N818 - a signal between the parts of this package, never a caller's
    """A key has to be asked for first."""


@dataclass(slots=True)
class _Held:
    """Keys until they are stale; so many uses of the current one are charged and ``left``."""

    keys: KeySet
    until: float
    left: int

    def renew(self, keys: KeySet, until: float, uses: int) -> None:
        """Take the keys as they were just told, with so many more uses of the current one.

        What was charged to a key that is no longer current is lost.
        """
        if keys.current.id != self.keys.current.id:
            self.left = 0
        self.keys, self.until = keys, until
        self.left += uses


class KeyRing:
    """Keys of the subjects in use. ``now`` is a monotonic clock in seconds."""

    def __init__(self, keys: KeyStore, *, now: Callable[[], float] = time.monotonic) -> None:
        self.store = keys
        self._now = now
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._asking: dict[str, asyncio.Future[KeySet | None]] = {}
        self._charging: dict[str, asyncio.Future[None] | None] = {}  # None: nobody else waits for it

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

    def use(self, subject: str | None) -> DataKey:
        """The key for one seal, charged and at hand.

        Raises:
            NotAtHand: ask :meth:`sealing` instead.
        """
        held = None if subject is None else self._held.get(subject)
        if held is None or held.left < 1:
            raise NotAtHand
        left_s = held.until - self._now()
        if left_s <= 0:
            raise NotAtHand
        if left_s < AHEAD_S and subject not in self._asking:
            self._begin_asking(held.keys.subject)
        held.left -= 1
        return held.keys.current

    async def sealing(self, subject: str, uses: int) -> DataKey:
        """A key for ``uses`` seals, made on first use.

        Raises:
            PayloadShreddedError, KeyUnavailableError: as ``KeyStore.ensure``. Others as ``opening``.
        """
        held = self._held.get(subject)
        if held is not None and held.left >= uses and held.until <= self._now():
            await self._shared(subject)  # is it still there, and still current?
            held = self._held.get(subject)
        while held is None or held.left < uses:
            # Whoever asked first was given at least what it needs; others may have to ask again.
            await self._charged(subject, uses)
            held = self._held.get(subject)
        held.left -= uses
        return held.keys.current

    def drop(self, subject: str) -> None:
        """Forget a subject's keys at once."""
        self._held.pop(subject, None)

    async def _shared(self, subject: str) -> KeySet | None:
        """Ask once for all who want a subject's keys at the same time."""
        return await asyncio.shield(self._asking.get(subject) or self._begin_asking(subject))

    def _begin_asking(self, subject: str) -> asyncio.Future[KeySet | None]:
        asked = self._asking[subject] = asyncio.ensure_future(self._ask(subject))
        asked.add_done_callback(partial(self._asked, subject))
        return asked

    def _asked(self, subject: str, asked: asyncio.Future[KeySet | None]) -> None:
        self._asking.pop(subject, None)
        if not asked.cancelled():
            asked.exception()  # seen, also where nobody waits: whoever needs the keys will ask again

    async def _charged(self, subject: str, uses: int) -> None:
        """Charge once for all who need it at the same time: the first does it, and its failure is everybody's.

        No task of its own: most subjects are one execution, and this is on its way to the first event.
        """
        if subject in self._charging:
            others = self._charging[subject]
            if others is None:
                others = self._charging[subject] = asyncio.get_running_loop().create_future()
            await asyncio.wait((others,))
            if not others.cancelled():  # else its caller gave up, and another has to
                others.result()
            return
        self._charging[subject] = None
        amount = max(uses, USES_PER_CHARGE if subject in self._held else FIRST_CHARGE)
        try:
            self._keep(subject, await self.store.ensure(subject, amount), amount)
        except BaseException as error:
            others = self._charging.pop(subject)
            if others is not None and isinstance(error, asyncio.CancelledError):
                others.cancel()
            elif others is not None:
                others.set_exception(error)
                others.exception()  # seen, also where those who waited are gone
            raise
        others = self._charging.pop(subject)
        if others is not None:
            others.set_result(None)

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

    def _keep(self, subject: str, keys: KeySet, uses: int = 0) -> None:
        now, held = self._now(), self._held.get(subject)
        if held is not None:
            self._held.move_to_end(subject)
            held.renew(keys, now + FRESH_S, uses)
            return
        self._held[subject] = _Held(keys, now + FRESH_S, uses)
        # Of most subjects, each one execution, there is no further use: they go, the longest unasked for first.
        while len(self._held) > MAX_SUBJECTS or next(iter(self._held.values())).until <= now:
            self._held.popitem(last=False)
