"""Tasks, futures and handles of a flow's event loop, and the scopes that number what a flow asks for."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, Final

from loom.errors import NotDeterministicError

if TYPE_CHECKING:
    from types import FrameType

    from loom.kernel.loop import FlowLoop

AS_COMPLETED: Final = "as_completed"
WAIT_FOR: Final = "wait_for"

_ENSURE_FUTURE: Final = frozenset({"_ensure_future", "ensure_future"})


class Scope:
    """Where calls are counted: one per task, so that racing tasks can never swap ids (system.md 0)."""

    __slots__ = ("_calls", "_children", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._calls = 0
        self._children = 0

    def next_site(self) -> str:
        """Id of the next call in this scope: ``0:3``."""
        n = self._calls
        self._calls = n + 1
        return f"{self.name}:{n}"

    def next_child(self) -> str:
        """Name of the next task that this scope starts: ``0.1``."""
        n = self._children
        self._children = n + 1
        return f"{self.name}.{n}"


class FlowTask(asyncio.Task[Any]):
    """A task of a flow. It hashes by its order of creation, so sets of tasks iterate alike in every process."""

    __slots__ = ("_hash", "scope")

    def __init__(
        self, coro: Any, loop: FlowLoop, scope: Scope, order: int, context: contextvars.Context | None = None
    ) -> None:
        self._hash = order
        self.scope = scope
        super().__init__(Shell(coro), loop=loop, name=scope.name, context=context)
        # Out of asyncio's process-wide set of tasks, where the first tasks of all flows would share one hash.
        asyncio.tasks._unregister_task(self)  # noqa: SLF001 - the documented hook of loop implementers

    def __hash__(self) -> int:
        return self._hash


class FlowFuture(asyncio.Future[Any]):
    """A future of a flow; hashes like ``FlowTask``."""

    __slots__ = ("_hash",)

    def __init__(self, loop: FlowLoop, order: int) -> None:
        self._hash = order
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._hash


class FlowHandle(asyncio.Handle):
    """A callback that is ready to run; leaner than its base, of which it uses nothing but the type."""

    __slots__ = ("args", "callback", "context")

    def __init__(
        self, callback: Callable[..., Any], args: tuple[Any, ...], context: contextvars.Context | None
    ) -> None:
        self.callback: Callable[..., Any] | None = callback
        self.args = args
        self.context = contextvars.copy_context() if context is None else context

    def cancel(self) -> None:
        """Do not run it."""
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self.callback is None

    def __repr__(self) -> str:
        return f"<flow handle {'cancelled' if self.cancelled() else self.callback!r}>"


class FlowTimer(asyncio.TimerHandle):
    """A callback that waits for a durable timer: ``ready`` is what runs then, ``site_id`` the timer's site."""

    __slots__ = ("ready", "site_id")

    def __init__(self, when: float, ready: FlowHandle, loop: FlowLoop) -> None:
        super().__init__(when, _nothing, (), loop, ready.context)
        self.ready = ready
        self.site_id = ""


def _nothing() -> None:
    """The base's callback; ``FlowTimer.ready`` holds the real one."""


class Shell(Coroutine[Any, Any, Any]):
    """Drives a coroutine for its task, and words asyncio's refusal of foreign futures as ours."""

    __slots__ = ("_coro", "close", "send")

    close: Any
    send: Any

    def __init__(self, coro: Coroutine[Any, Any, Any]) -> None:
        self._coro = coro
        self.send = coro.send
        self.close = coro.close

    def throw(self, error: Any, *rest: Any) -> Any:
        """Throw into the coroutine; a task's complaint about another loop's future becomes NotDeterministicError."""
        if type(error) is RuntimeError and _is_foreign(error):
            error = NotDeterministicError("awaiting something of another event loop")
        return self._coro.throw(error, *rest)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coro.__await__()


def _is_foreign(error: RuntimeError) -> bool:
    text = str(error)
    return text.startswith("Task ") and ("attached to a different loop" in text or "got bad yield" in text)


def started_by() -> str:
    """Which function of asyncio asks the caller for a task around a coroutine, of those that matter to us, else "".

    ``as_completed`` goes through a set of coroutines, which hash by address: their tasks would start, and be numbered,
    in an order of chance. ``wait_for`` makes a task in Python 3.11 and none from 3.12 on: it must number alike.
    """
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - who called create_task is all there is to see
    if frame is None or frame.f_code.co_name not in _ENSURE_FUTURE:
        return ""
    while frame is not None and frame.f_code.co_name in _ENSURE_FUTURE:
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") != "asyncio.tasks":
        return ""
    name = frame.f_code.co_qualname
    if name == WAIT_FOR:
        return WAIT_FOR
    return AS_COMPLETED if "ascompleted" in name.replace("_", "").lower() else ""
