"""How a caller is refused an execution whose log this node cannot open, and how operators are told (system.md 2.4, 2.7).

Every verb that reads a log is wrapped. What comes out is the denial that an execution of unknown owner would get for that
verb, whatever the caller's rights; the policy is asked once, to word it, and decides nothing. Nothing is journaled.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from loom.errors import SealedStreamUnreadableError
from loom.kernel.readable import reworded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from loom.runtime.access import Gatekeeper, Principal
    from loom.runtime.signals import Signals

P = ParamSpec("P")
T = TypeVar("T")


class Refuses(Protocol):
    """What has verbs."""

    _gate: Gatekeeper
    _signals: Signals


class Holds(Protocol):
    """What names one execution, and is judged by nobody: it is its process's own."""

    execution_id: str
    _signals: Signals


def refused_as(op: str) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Awaitable[T]]]:
    """Word a sealed refusal of a verb as that verb's denial. The verb's first parameter is the execution id.

    The refusal is raised outside the handler and made anew, so that nothing leads from it to what was read.
    """

    def decorate(verb: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        @wraps(verb)
        async def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return await verb(*args, **kwargs)
            except SealedStreamUnreadableError as read:
                refusal = await _worded(read, op, args, kwargs)
            raise refusal

        return guarded

    return decorate


def refused_while_reading_as(
    op: str,
) -> Callable[[Callable[P, AsyncIterator[T]]], Callable[P, AsyncIterator[T]]]:
    """As ``refused_as``, for a verb that yields."""

    def decorate(verb: Callable[P, AsyncIterator[T]]) -> Callable[P, AsyncIterator[T]]:
        @wraps(verb)
        async def guarded(*args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
            try:
                async for item in verb(*args, **kwargs):
                    yield item
            except SealedStreamUnreadableError as read:
                refusal = await _worded(read, op, args, kwargs)
            else:
                return
            raise refusal

        return guarded

    return decorate


def refused_to_holder(op: str) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Awaitable[T]]]:
    """As ``refused_as``, for what a handle is asked: no policy judges it, so none words its refusal."""

    def decorate(asked: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        @wraps(asked)
        async def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return await asked(*args, **kwargs)
            except SealedStreamUnreadableError as read:
                held: Holds = args[0]  # type: ignore[assignment]
                refusal = reworded(read, op, execution_id=held.execution_id)
                held._signals.repeated_storage_error(refusal, held.execution_id)  # noqa: SLF001 - of the same runtime
            raise refusal

        return guarded

    return decorate


async def _worded(
    read: SealedStreamUnreadableError, op: str, args: Any, kwargs: Any
) -> SealedStreamUnreadableError:
    runtime: Refuses = args[0]
    named = kwargs.get("execution_id", args[1] if len(args) > 1 else None)
    execution_id = read.execution_id if named is None else str(named)
    principal: Principal | None = kwargs.get("principal")
    reason = await runtime._gate.word_sealed(op, execution_id, principal)  # noqa: SLF001 - the verbs' own
    refusal = reworded(read, op, reason, execution_id=execution_id)
    runtime._signals.repeated_storage_error(refusal, execution_id)  # noqa: SLF001
    return refusal
