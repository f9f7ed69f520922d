"""The event loop of one flow run: deterministic, stepped by the kernel, without I/O.

A flow's tasks run here, on the thread of whatever loop steps it; ``asyncio.gather``, ``TaskGroup``, ``wait``,
``wait_for``, ``timeout``, locks and queues work as usual. Timers (``asyncio.sleep`` among them) become durable ones,
asked of the machine. Everything that would reach outside is refused (system.md 0, "Flow context").
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from types import FrameType
from typing import Any, Final, Protocol

from loom.errors import FlowStuckError, NotDeterministicError

MAX_CALLBACKS: Final = 100_000
"""Callbacks that one step of a flow may run before it counts as spinning."""

MAX_COMPLAINTS: Final = 16
_ROOT_SCOPE: Final = "0"
_CALLBACK_SCOPE: Final = "c"
_CLOSE_ROUNDS: Final = 8


class TimerPort(Protocol):
    """What the loop asks of its machine: a durable timer for each ``call_at``."""

    def timer_asked(self, scope: Scope, handle: FlowTimer) -> None:
        """Make a durable timer; when it fires, the machine puts ``handle`` back with ``FlowLoop.fire``."""
        ...

    def timer_dropped(self, handle: FlowTimer) -> None:
        """The flow no longer wants the timer."""
        ...


class Scope:
    """Where calls are counted: one per task, so that racing tasks can never swap ids."""

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
        super().__init__(coro, loop=loop, name=scope.name, context=context)
        # Out of asyncio's process-wide set of tasks: there, first tasks of all flows would share one hash.
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
    """A callback that is ready to run."""

    __slots__ = ()

    def __init__(
        self,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        loop: FlowLoop,
        context: contextvars.Context | None,
    ) -> None:
        # Not the base's: it asks for debug mode and keeps a traceback slot, on every callback of every flow.
        self._callback = callback
        self._args = args
        self._loop = loop
        self._context = contextvars.copy_context() if context is None else context
        self._cancelled = False
        self._source_traceback = None
        self._repr = None


class FlowTimer(asyncio.TimerHandle):
    """A callback that waits for a durable timer. ``site_id`` is the site of that timer."""

    __slots__ = ("site_id",)

    def __init__(
        self,
        when: float,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        loop: FlowLoop,
        context: contextvars.Context | None,
    ) -> None:
        super().__init__(when, callback, args, loop, context)
        self.site_id = ""


class Shell(Coroutine[Any, Any, Any]):
    """Drives a coroutine for its task and words asyncio's refusal of foreign futures as ours."""

    __slots__ = ("_coro", "_throw", "close", "send")

    def __init__(self, coro: Coroutine[Any, Any, Any]) -> None:
        self._coro = coro
        self.send = coro.send
        self.close = coro.close
        self._throw = coro.throw

    def throw(self, error: Any, *rest: Any) -> Any:
        """Throw into the coroutine; a task's complaint about another loop's future becomes NotDeterministicError."""
        if type(error) is RuntimeError and _is_foreign(error):
            error = NotDeterministicError("awaiting something of another event loop")
        return self._throw(error, *rest)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coro.__await__()


def _is_foreign(error: RuntimeError) -> bool:
    text = str(error)
    return text.startswith("Task ") and ("attached to a different loop" in text or "got bad yield" in text)


class FlowLoop(asyncio.AbstractEventLoop):
    """Event loop of one flow run."""

    def __init__(self, timers: TimerPort) -> None:
        self.timers = timers
        self.now_ms = 0
        self.complaints: deque[str] = deque(maxlen=MAX_COMPLAINTS)
        self._ready: deque[asyncio.Handle] = deque()
        self._tasks: list[FlowTask] = []
        self._sweep_at = 64
        self._order = 0
        self._callbacks_scope = Scope(_CALLBACK_SCOPE)
        self._running = False
        self._closed = False

    # Stepping ---------------------------------------------------------------------------------------------------

    def start_root(self, coro: Coroutine[Any, Any, Any]) -> FlowTask:
        """Make the flow's first task, scope ``0``; it runs at the next step."""
        return self._new_task(coro, Scope(_ROOT_SCOPE), None)

    def run_until_quiet(self) -> None:
        """Run ready callbacks, those that they make ready among them, until none is left.

        Raises:
            FlowStuckError: more than ``MAX_CALLBACKS`` ran: the flow spins.
        """
        outer = events._get_running_loop()  # noqa: SLF001 - the documented hook of loop implementers
        outer_task = asyncio.current_task(outer) if outer is not None else None
        hooks = sys.get_asyncgen_hooks()
        if outer_task is not None:
            asyncio.tasks._leave_task(outer, outer_task)  # type: ignore[attr-defined]  # noqa: SLF001 - as above
        events._set_running_loop(self)  # noqa: SLF001 - as above
        # An async generator that a flow leaves unfinished is dropped, not finalised at an instant of the collector's
        # choice, and certainly not on the outer loop.
        sys.set_asyncgen_hooks(firstiter=None, finalizer=_drop_generator)
        self._running = True
        try:
            self._drain()
        finally:
            self._running = False
            sys.set_asyncgen_hooks(*hooks)
            events._set_running_loop(outer)  # noqa: SLF001 - as above
            if outer_task is not None:
                asyncio.tasks._enter_task(outer, outer_task)  # type: ignore[attr-defined]  # noqa: SLF001 - as above

    def _drain(self) -> None:
        ready = self._ready
        popleft = ready.popleft
        budget = MAX_CALLBACKS
        while ready:
            handle = popleft()
            if handle._cancelled:
                continue
            if budget == 0:
                raise FlowStuckError(MAX_CALLBACKS)
            budget -= 1
            try:
                handle._context.run(handle._callback, *handle._args)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - a callback's error is reported, and its task has it too
                if not isinstance(error, SystemExit):
                    self.call_exception_handler({"message": "callback of a flow failed", "exception": error})

    def fire(self, timer: FlowTimer) -> None:
        """Put a timer's callback among those ready."""
        self._ready.append(timer)

    @property
    def scope(self) -> Scope:
        """The scope of the task that runs now (of plain callbacks where none does)."""
        task = asyncio.current_task(self)
        return task.scope if type(task) is FlowTask else self._callbacks_scope

    # What asyncio asks of a loop --------------------------------------------------------------------------------

    def call_soon(
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Run a callback in this step, after those already ready."""
        handle = FlowHandle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run a callback when a durable timer fires, ``delay`` seconds of logical time from now."""
        return self.call_at(self.now_ms / 1000 + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run a callback when a durable timer fires, at ``when`` seconds of logical time."""
        timer = FlowTimer(when, callback, args, self, context)
        if when * 1000 <= self.now_ms:
            self._ready.append(timer)
        else:
            self.timers.timer_asked(self.scope, timer)
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Tell the machine that a timer is given up; asyncio calls this once, before or after it fired."""
        if isinstance(handle, FlowTimer) and handle.site_id:
            self.timers.timer_dropped(handle)

    def time(self) -> float:
        """Logical time in seconds since the epoch: that of the last event that entered."""
        return self.now_ms / 1000

    def create_future(self) -> asyncio.Future[Any]:
        """Make a future that hashes by its order of creation."""
        self._order += 1
        return FlowFuture(self, self._order)

    def create_task(  # type: ignore[override]
        self, coro: Any, *, name: object = None, context: contextvars.Context | None = None, **_unused: Any
    ) -> asyncio.Task[Any]:
        """Start a task in a scope of its own, named after its parent's.

        Raises:
            NotDeterministicError: ``asyncio.as_completed`` over coroutines: it starts them in an order of chance.
        """
        if self._closed:
            coro.close()
            raise RuntimeError("the run of this flow is over")
        if _from_as_completed():
            coro.close()
            raise NotDeterministicError(
                "asyncio.as_completed over coroutines (give it tasks: they start in an order of chance otherwise)"
            )
        task = self._new_task(coro, Scope(self.scope.next_child()), context)
        if name is not None:
            task.set_name(name)
        return task

    def _new_task(self, coro: Any, scope: Scope, context: contextvars.Context | None) -> FlowTask:
        self._order += 1
        task = FlowTask(Shell(coro), self, scope, self._order, context)
        tasks = self._tasks
        tasks.append(task)
        if len(tasks) > self._sweep_at:
            self._tasks = tasks = [t for t in tasks if not t.done()]
            self._sweep_at = max(64, 2 * len(tasks))
        return task

    def get_debug(self) -> bool:
        """Debug mode is for loops that do I/O."""
        return False

    def set_debug(self, enabled: bool) -> None:
        """Change nothing: debug mode must not change what a flow does."""

    def is_running(self) -> bool:
        """Whether a step is under way."""
        return self._running

    def is_closed(self) -> bool:
        """Whether the run is over."""
        return self._closed

    def get_task_factory(self) -> None:
        """Tasks are made one way only."""

    def get_exception_handler(self) -> None:
        """Complaints are kept in ``complaints``."""

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """As ``call_exception_handler``."""
        self.call_exception_handler(context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep what asyncio would log, by message and type of error; the driver may report it."""
        if not self._closed:
            error = context.get("exception")
            kind = f": {type(error).__name__}" if error is not None else ""
            self.complaints.append(f"{context.get('message', 'error')}{kind}")

    async def shutdown_asyncgens(self) -> None:
        """Nothing is kept of async generators."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """There is no executor."""

    def close(self) -> None:
        """Close every unfinished task, children before parents, with bounded effort; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._ready.clear()
        tasks, self._tasks = self._tasks, []
        outer = events._get_running_loop()  # noqa: SLF001 - as in run_until_quiet
        events._set_running_loop(self)  # noqa: SLF001 - as in run_until_quiet
        try:
            for task in reversed(tasks):
                if not task.done():
                    task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001 - it is meant
                    _close_coroutine(task.get_coro())
        finally:
            events._set_running_loop(outer)  # noqa: SLF001 - as in run_until_quiet
        self._ready.clear()


def _close_coroutine(coro: Any) -> None:
    for _ in range(_CLOSE_ROUNDS):
        try:
            coro.close()
        except KeyboardInterrupt:
            raise
        except RuntimeError:  # "coroutine ignored GeneratorExit": a finally that awaits; once more
            continue
        except BaseException:  # noqa: BLE001 - the flow is being thrown away, its last words too
            return
        return


def _drop_generator(_generator: Any) -> None:
    """Finalise nothing."""


def _from_as_completed() -> bool:
    """Whether ``create_task`` was called by ``asyncio.as_completed``, which iterates a set of coroutines."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - the caller of create_task
    if frame is None or frame.f_code.co_name not in {"_ensure_future", "ensure_future"}:
        return False
    for _ in range(4):
        frame = frame.f_back
        if frame is None:
            return False
        name = frame.f_code.co_qualname.replace("_", "").lower()
        if "ascompleted" in name and frame.f_globals.get("__name__") == "asyncio.tasks":
            return True
    return False


def _refused(what: str) -> Any:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise NotDeterministicError(what)

    return refuse


for _name in [
    "add_reader",
    "add_signal_handler",
    "add_writer",
    "call_soon_threadsafe",
    "connect_accepted_socket",
    "connect_read_pipe",
    "connect_write_pipe",
    "create_connection",
    "create_datagram_endpoint",
    "create_server",
    "create_unix_connection",
    "create_unix_server",
    "getaddrinfo",
    "getnameinfo",
    "remove_reader",
    "remove_signal_handler",
    "remove_writer",
    "run_forever",
    "run_in_executor",
    "run_until_complete",
    "sendfile",
    "set_default_executor",
    "set_exception_handler",
    "set_task_factory",
    "sock_accept",
    "sock_connect",
    "sock_recv",
    "sock_recv_into",
    "sock_recvfrom",
    "sock_recvfrom_into",
    "sock_sendall",
    "sock_sendfile",
    "sock_sendto",
    "start_tls",
    "stop",
    "subprocess_exec",
    "subprocess_shell",
]:
    setattr(FlowLoop, _name, _refused(f"loop.{_name}"))
