"""What an encrypting store tells a listener: committed envelopes, opened, in the order in which they were committed.

A listener is called and cannot be waited for. Where subject and keys are at hand, envelopes are opened on the spot; else
the batch waits in a queue until they are, and everything after it waits behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from loom.errors import LoomError
from loom.stores.contracts import Committed, wanted
from loom.stores.sealing.opener import Opened, Opener, Status, is_log

if TYPE_CHECKING:
    from loom.stores.contracts import CommitListener
    from loom.stores.sealing.subjects import Subjects

_log = logging.getLogger("loom.sealing")

MAX_WAITING: Final = 1024
"""Batches that wait for keys; beyond it nothing is asked for any more, and what is not at hand stays sealed."""

_Call = Callable[[], None]


class OpeningListener:
    """See :class:`loom.stores.contracts.CommitListener`. Fails closed: what cannot be opened is told in ``unopened``."""

    def __init__(self, opener: Opener, subjects: Subjects, listener: CommitListener) -> None:
        self._opener, self._subjects, self._listener = opener, subjects, listener
        self._queue: deque[Sequence[Committed] | _Call] = deque()
        self._task: asyncio.Task[None] | None = None

    def committed(self, batch: Sequence[Committed]) -> None:
        """See ``CommitListener``. What nobody wants is not opened."""
        batch = wanted(self._listener, batch)
        if not batch:
            return
        for committed in batch:
            self._subjects.note(committed.envelopes)
        if not self._queue:
            opened = [self._at_hand(committed) for committed in batch]
            if all(committed is not None for committed in opened):
                self._listener.committed([committed for committed in opened if committed is not None])
                return
        self._wait(batch)

    def gained(self, shard: int) -> None:
        """See ``CommitListener``."""
        self._in_order(lambda: self._listener.gained(shard))

    def lost(self, shard: int) -> None:
        """See ``CommitListener``."""
        self._in_order(lambda: self._listener.lost(shard))

    def __getattr__(self, name: str) -> Any:
        if name in {"notified", "wants"}:
            # May overtake: the one only asks to look again, the other is asked and tells nothing.
            return getattr(self._listener, name)
        raise AttributeError(name)

    async def close(self) -> None:
        """Tell nothing more."""
        self._queue.clear()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def _in_order(self, call: _Call) -> None:
        if self._queue:
            self._queue.append(call)
        else:
            call()

    def _wait(self, batch: Sequence[Committed]) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # nobody can ask for keys
            self._listener.committed([self._sealed(committed) for committed in batch])
            return
        self._queue.append(batch)
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._drain())

    async def _drain(self) -> None:
        while self._queue:
            waiting = self._queue[0]
            if callable(waiting):
                tell: _Call = waiting
            else:
                # Together, so that their keys are asked for together.
                opened = await asyncio.gather(*map(self._opened, waiting))
                tell = _telling(self._listener, opened)
            self._queue.popleft()
            try:
                tell()
            except Exception:  # noqa: BLE001 - as where it is called on the spot, the store goes on
                _log.exception("a commit listener failed")

    async def _opened(self, committed: Committed) -> Committed:
        at_hand = self._at_hand(committed)
        if at_hand is not None:
            return at_hand
        if len(self._queue) > MAX_WAITING:
            return self._sealed(committed)
        try:
            return self._told(committed, [await self._opener.open(e) for e in committed.envelopes])
        except LoomError as error:
            _log.warning("events of %s are handed on unopened: %s", committed.stream_id, type(error).__name__)
            return self._sealed(committed)

    def _at_hand(self, committed: Committed) -> Committed | None:
        opened = []
        for envelope in committed.envelopes:
            one = self._opener.try_open(envelope)
            if one is None:
                return None
            opened.append(one)
        return self._told(committed, opened)

    def _sealed(self, committed: Committed) -> Committed:
        opened = [
            self._opener.try_open(envelope) or Opened(envelope, Status.LOCKED)
            for envelope in committed.envelopes
        ]
        return self._told(committed, opened)

    def _told(self, committed: Committed, opened: Sequence[Opened]) -> Committed:
        if is_log(committed.stream_id):
            envelopes = tuple([one.envelope for one in opened])
            unopened = tuple([one.envelope.sequence for one in opened if one.status is not Status.READABLE])
            return Committed(committed.stream_id, envelopes, committed.origin, unopened)
        return replace(
            committed,
            envelopes=tuple(
                self._opener.redacted(one.envelope) if one.status is Status.LOCKED else one.envelope
                for one in opened
            ),
        )


def _telling(listener: CommitListener, opened: list[Committed]) -> _Call:
    return lambda: listener.committed(opened)
