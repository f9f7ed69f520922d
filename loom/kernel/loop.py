"""The event loop of one flow run: deterministic, stepped by the kernel, without I/O.

A flow's tasks run here, on the thread of whatever loop steps it; ``asyncio.gather``, ``TaskGroup``, ``wait``,
``wait_for``, ``timeout``, locks and queues work as usual. Timers (``asyncio.sleep`` among them) become durable ones,
asked of the machine. Everything that would reach outside is refused (system.md 0, "Flow context").
"""

from __future__ import annotations

import asyncio
import sys
from asyncio import events
from typing import TYPE_CHECKING, Any, Final, Protocol

from loom.errors import FlowStuckError, NotDeterministicError
from loom.kernel.refusals import RefusingLoop
from loom.kernel.tasks import (
    AS_COMPLETED,
    WAIT_FOR,
    FlowFuture,
    FlowHandle,
    FlowTask,
    FlowTimer,
    Scope,
    started_by,
)

if TYPE_CHECKING:
    import contextvars
    from collections.abc import Callable, Coroutine

MAX_CALLBACKS: Final = 100_000
"""Callbacks that one step of a flow may run before it counts as spinning."""

MAX_COMPLAINTS: Final = 16

_ROOT_SCOPE: Final = "0"
_CALLBACK_SCOPE: Final = "c"
_CLOSE_ROUNDS: Final = 8
_FIRST_SWEEP: Final = 64


class TimerPort(Protocol):
    """What the loop asks of its machine: a durable timer for each ``call_at``."""

    def timer_asked(self, timer: FlowTimer) -> None:
        """Make a durable timer; when it fires, the machine hands ``timer`` to ``FlowLoop.fire``."""
        ...

    def timer_dropped(self, timer: FlowTimer) -> None:
        """The flow no longer wants the timer, or it has fired."""
        ...


class _NoTimers:
    """Stands in when a run is over."""

    def timer_asked(self, timer: FlowTimer) -> None:
        raise RuntimeError(f"the run of this flow is over: no timer at {timer.when()}")

    def timer_dropped(self, timer: FlowTimer) -> None:
        del timer


_NO_TIMERS: Final = _NoTimers()


class FlowLoop(RefusingLoop):
    """Event loop of one flow run. ``now_ms`` is its logical time, set by the machine."""

    def __init__(self, timers: TimerPort, now_ms: int) -> None:
        self.now_ms = now_ms
        self.complaints: list[str] | None = None
        self._timers: TimerPort = timers
        self._ready: list[FlowHandle] = []
        self._tasks: list[FlowTask] = []
        self._sweep_at = _FIRST_SWEEP
        self._order = 0
        self._callbacks: Scope | None = None
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
        outer_task = None if outer is None else asyncio.current_task(outer)
        hooks = sys.get_asyncgen_hooks()
        if outer is not None and outer_task is not None:
            asyncio.tasks._leave_task(outer, outer_task)  # noqa: SLF001 - likewise
        events._set_running_loop(self)  # noqa: SLF001 - likewise
        # An async generator that a flow leaves unfinished is dropped: not finalised at an instant of the collector's
        # choice, and certainly not on the outer loop.
        sys.set_asyncgen_hooks(firstiter=None, finalizer=_drop_generator)
        self._running = True
        try:
            self._drain()
        finally:
            self._running = False
            sys.set_asyncgen_hooks(*hooks)
            events._set_running_loop(outer)  # noqa: SLF001 - likewise
            if outer is not None and outer_task is not None:
                asyncio.tasks._enter_task(outer, outer_task)  # noqa: SLF001 - likewise

    def _drain(self) -> None:
        budget = MAX_CALLBACKS
        while self._ready:
            batch, self._ready = self._ready, []
            budget -= len(batch)
            if budget < 0:
                raise FlowStuckError(MAX_CALLBACKS)
            for handle in batch:
                callback = handle.callback
                if callback is None:
                    continue
                try:
                    handle.context.run(callback, *handle.args)
                except KeyboardInterrupt:
                    raise
                except SystemExit:
                    continue  # its task holds it: a flow must not end the process that runs it
                except BaseException as error:  # noqa: BLE001 - as in any event loop, reported and passed over
                    self.call_exception_handler(
                        {"message": "a callback of the flow failed", "exception": error}
                    )

    def fire(self, timer: FlowTimer) -> None:
        """Put a timer's callback among those ready."""
        self._ready.append(timer.ready)

    @property
    def scope(self) -> Scope:
        """The scope of the task that runs now; of plain callbacks, ``c``, where none does."""
        task = asyncio.current_task(self)
        if type(task) is FlowTask:
            return task.scope
        if self._callbacks is None:
            self._callbacks = Scope(_CALLBACK_SCOPE)
        return self._callbacks

    def close(self) -> None:
        """Close every unfinished task, children before parents, with bounded effort; idempotent."""
        if self._closed:
            return
        if len(self._tasks) > 1:
            self._report_unseen()
        self._closed = True
        self._timers = _NO_TIMERS
        self._ready = []
        tasks, self._tasks = self._tasks, []
        if any(not task.done() for task in tasks):
            self._close_tasks(tasks)
        self._ready = []

    def _report_unseen(self) -> None:
        for task in self._tasks:
            if task.done() and task._log_traceback:  # noqa: SLF001 - what its end would report
                task._log_traceback = False  # noqa: SLF001 - likewise
                self.call_exception_handler(
                    {"message": "an error of a task was never looked at", "exception": task.exception()}
                )

    def _close_tasks(self, tasks: list[FlowTask]) -> None:
        outer = events._get_running_loop()  # noqa: SLF001 - as in run_until_quiet
        events._set_running_loop(self)  # noqa: SLF001 - as in run_until_quiet
        try:
            for task in reversed(tasks):
                if not task.done():
                    task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001 - it is meant
                    _close_coroutine(task.get_coro())
        finally:
            events._set_running_loop(outer)  # noqa: SLF001 - as in run_until_quiet

    # What asyncio asks of a loop --------------------------------------------------------------------------------

    def call_soon(  # type: ignore[override]  # the base ties arguments to the callback by type; asyncio is the caller
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> FlowHandle:
        """Run a callback in this step, after those already ready."""
        handle = FlowHandle(callback, args, context)
        self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]  # as call_soon
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> FlowTimer:
        """Run a callback when a durable timer fires, ``delay`` seconds of logical time from now."""
        return self.call_at(self.now_ms / 1000 + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]  # as call_soon
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> FlowTimer:
        """Run a callback when a durable timer fires, at ``when`` seconds of logical time."""
        timer = FlowTimer(when, FlowHandle(callback, args, context), self)
        if when * 1000 <= self.now_ms:
            self.fire(timer)
        else:
            self._timers.timer_asked(timer)
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Tell the machine that a timer is given up; asyncio calls this once, before or after it fired."""
        if isinstance(handle, FlowTimer):
            handle.ready.cancel()
            if handle.site_id:
                self._timers.timer_dropped(handle)

    def time(self) -> float:
        """Logical time in seconds since the epoch: that of the last event that entered."""
        return self.now_ms / 1000

    def create_future(self) -> FlowFuture:
        """Make a future that hashes by its order of creation."""
        self._order += 1
        return FlowFuture(self, self._order)

    def create_task(
        self, coro: Any, *, name: object = None, context: contextvars.Context | None = None, **_options: Any
    ) -> FlowTask:
        """Start a task in a scope of its own, named after its parent's.

        Raises:
            NotDeterministicError: ``asyncio.as_completed`` over coroutines: it starts them in an order of chance.
        """
        if self._closed:
            coro.close()
            raise RuntimeError("the run of this flow is over")
        by = started_by()
        if by == AS_COMPLETED:
            coro.close()
            raise NotDeterministicError("asyncio.as_completed over coroutines (give it tasks)")
        # Who waits in wait_for asks for nothing meanwhile, so the task inside may count in its scope.
        scope = self.scope if by == WAIT_FOR else Scope(self.scope.next_child())
        task = self._new_task(coro, scope, context)
        if name is not None:
            task.set_name(name)
        return task

    def _new_task(self, coro: Any, scope: Scope, context: contextvars.Context | None) -> FlowTask:
        self._order += 1
        task = FlowTask(coro, self, scope, self._order, context)
        tasks = self._tasks
        tasks.append(task)
        if len(tasks) > self._sweep_at:
            self._tasks = tasks = [t for t in tasks if not t.done()]
            self._sweep_at = max(_FIRST_SWEEP, 2 * len(tasks))
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
        """There is one, ``call_exception_handler``, and no other."""

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """As ``call_exception_handler``."""
        self.call_exception_handler(context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep what asyncio would log, as message and type of error, the last 16: the driver may report it."""
        if self._closed:
            return
        error = context.get("exception")
        kind = "" if error is None else f": {type(error).__name__}"
        if self.complaints is None:
            self.complaints = []
        self.complaints.append(f"{context.get('message', 'error')}{kind}")
        del self.complaints[:-MAX_COMPLAINTS]


def _close_coroutine(coro: Any) -> None:
    for _ in range(_CLOSE_ROUNDS):
        try:
            coro.close()
        except KeyboardInterrupt:
            raise
        except RuntimeError:  # "coroutine ignored GeneratorExit": a finally that awaits; once more
            continue
        except BaseException:  # noqa: BLE001 - the run is thrown away, and its last words with it
            return
        else:
            return


def _drop_generator(_generator: Any) -> None:
    """Finalise nothing."""
