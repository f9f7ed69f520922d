"""Patience with stores: what may succeed later is repeated, unchanged, within a bound (contracts: three outcomes)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from loom.errors import (
    ExecutionAlreadyExistsError,
    PayloadTooLargeError,
    StaleFenceError,
    StoreError,
    WrongHeadError,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from loom.runtime.signals import Signals
    from loom.stores.contracts import Appended, EventStore, StreamAppend

T = TypeVar("T")

FIRST_DELAY_S: Final = 0.02
MAX_DELAY_S: Final = 2.0

FINAL: Final = (WrongHeadError, StaleFenceError, ExecutionAlreadyExistsError, PayloadTooLargeError)
"""Answers that no repetition changes."""


class Patient(Protocol):
    """What patience needs of its runtime."""

    @property
    def events(self) -> EventStore:
        """Where to append."""
        ...

    @property
    def signals(self) -> Signals:
        """Whom to tell of trouble."""
        ...

    @property
    def patience_ms(self) -> int:
        """How long to repeat what does not succeed."""
        ...


async def append_patiently(host: Patient, appends: Sequence[StreamAppend], about: str) -> list[Appended]:
    """Append, and repeat unchanged while the store cannot say, or cannot write (contracts: three outcomes).

    Repeating is safe: the same event ids are appended once. Every trouble is told to ``on_storage_error``.

    Raises:
        WrongHeadError, StaleFenceError, ExecutionAlreadyExistsError: another was first; nothing was written.
        PayloadTooLargeError: no transaction can take it. PublishRefusedError: a topic of the estate does not.
        StoreError: the last trouble, once ``patience_ms`` has passed.
    """
    try:
        if len(appends) == 1:
            return [await host.events.append(appends[0])]
        return await host.events.append_many(appends)
    except StoreError as error:
        return await _again(host, lambda: host.events.append_many(appends), about, error)


async def patiently(host: Patient, call: Callable[[], Awaitable[T]], about: str) -> T:
    """Make a call of a store that may be repeated, with back-off, until it answers or patience ends.

    Raises:
        StoreError: one that no repetition cures, or the last one once ``patience_ms`` has passed.
    """
    try:
        return await call()
    except StoreError as error:
        return await _again(host, call, about, error)


async def _again(host: Patient, call: Callable[[], Awaitable[T]], about: str, first: StoreError) -> T:
    if not worth_repeating(first):
        raise first
    host.signals.repeated_storage_error(first, about)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + host.patience_ms / 1000
    delay_s = FIRST_DELAY_S
    while True:
        await asyncio.sleep(delay_s)
        delay_s = min(delay_s * 2, MAX_DELAY_S)
        try:
            answer = await call()
        except StoreError as error:
            host.signals.repeated_storage_error(error, about)
            if not worth_repeating(error) or loop.time() >= deadline:
                raise
        else:
            host.signals.settled(about)
            return answer


def worth_repeating(error: StoreError) -> bool:
    """Whether the same call may succeed later."""
    return error.retryable and not isinstance(error, FINAL)
