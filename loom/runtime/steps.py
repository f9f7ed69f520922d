"""The steps of one run: effects at work, their retries and timeouts (system.md 0, "Flow context").

A step starts only while the run may act: its journal has not failed, what it must wait for is durable, the node's
evidence of life stands. A result that comes after its step was given up is dropped.
"""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from loom.errors import (
    ExecutionDeniedError,
    InvalidInputError,
    PayloadShreddedError,
    SealedPayloadUnreadableError,
    TerminalError,
)
from loom.kernel.machine import MAX_ERROR_CHARS
from loom.kernel.values import dump_json
from loom.runtime.sizes import json_size
from loom.schemas.envelope import Json, Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from loom.kernel.commands import RunStep
    from loom.kernel.retry import RetryPolicy
    from loom.runtime.alarms import Alarm
    from loom.runtime.run import Run

HOPELESS: Final = (TerminalError, ExecutionDeniedError, SealedPayloadUnreadableError, PayloadShreddedError)
"""Errors of a step that no further attempt on this node can cure."""


class _Attempt:
    __slots__ = ("alarm", "step", "task")

    def __init__(self, step: RunStep) -> None:
        self.step = step
        self.task: asyncio.Future[Any] | None = None
        self.alarm: Alarm | None = None

    def give_up(self) -> None:
        """Stop what can be stopped; a thread runs on, and nobody listens."""
        if self.alarm is not None:
            self.alarm.cancel()
        if self.task is not None:
            self.task.cancel()


class Steps:
    """Effects of one run. ``busy`` counts the steps asked for and not yet answered."""

    __slots__ = ("_attempts", "_gate", "_held", "_run")

    def __init__(self, run: Run) -> None:
        self._run = run
        self._attempts: dict[str, _Attempt] = {}
        self._held: list[str] = []
        self._gate = 0

    @property
    def busy(self) -> int:
        """Steps asked for and not yet answered."""
        return len(self._attempts)

    @property
    def working(self) -> bool:
        """Whether a step is at work now, or may start at once: not one that waits for its next attempt."""
        return any(a.task is not None or a.alarm is None for a in self._attempts.values())

    def hold_until(self, position: int) -> None:
        """Start nothing before the journal's events up to ``position`` are durable."""
        self._gate = position

    def ask(self, step: RunStep) -> None:
        """Run a step as soon as it may run."""
        self._attempts[step.site_id] = _Attempt(step)
        self._launch(step.site_id)

    def abandon(self, site_id: str) -> None:
        """The flow no longer wants it."""
        attempt = self._attempts.pop(site_id, None)
        if attempt is not None:
            attempt.give_up()

    def stop(self) -> None:
        """Give every step up."""
        attempts, self._attempts = self._attempts, {}
        self._held.clear()
        for attempt in attempts.values():
            attempt.give_up()

    def detach(self) -> None:
        """Forget the run: it is gone, and every step was given up."""
        del self._run

    def proceed(self) -> None:
        """Start what was held back, as far as it may start now."""
        if not self._held:
            return
        held, self._held = self._held, []
        for site_id in held:
            self._launch(site_id)

    def _launch(self, site_id: str) -> None:
        run = self._run
        attempt = self._attempts.get(site_id)
        if attempt is None:
            return
        if (
            not run.may_act()
            or not run.journal.reached(self._gate)
            or run.journal.behind >= run.engine.max_behind
        ):
            self._held.append(site_id)
            return
        step = attempt.step
        if step.not_before and step.not_before > run.engine.now():
            attempt.alarm = run.engine.alarms.at(step.not_before, partial(self._launch, site_id))
            return
        try:
            if _is_async(step.fn):
                task: asyncio.Future[Any] = run.loop.create_task(step.fn(*step.args, **step.kwargs))
            else:
                task = run.loop.create_task(run.engine.call_in_thread(step.fn, step.args, step.kwargs))
        except Exception as error:  # noqa: BLE001 - a call that cannot even be made has failed as any step does
            run.do(partial(self._failed, attempt, error))
            return
        attempt.task = task
        if step.timeout_ms is not None:
            attempt.alarm = run.engine.alarms.at(
                run.engine.now() + step.timeout_ms, partial(self._timed_out, attempt)
            )
        task.add_done_callback(partial(self._done, attempt))

    def _current(self, attempt: _Attempt) -> bool:
        return self._attempts.get(attempt.step.site_id) is attempt

    def _done(self, attempt: _Attempt, task: asyncio.Future[Any]) -> None:
        if not self._current(attempt):
            if not task.cancelled():
                task.exception()  # it was given up: whatever it says, nobody listens
            return
        if task.cancelled():
            self._run.do(partial(self._failed, attempt, asyncio.CancelledError()))
            return
        error = task.exception()
        if error is None:
            self._run.do(partial(self._completed, attempt, task.result()))
        else:
            self._run.do(partial(self._failed, attempt, error))

    def _timed_out(self, attempt: _Attempt) -> None:
        if self._current(attempt):
            self._run.do(
                partial(self._failed, attempt, TimeoutError(f"no result in {attempt.step.timeout_ms} ms"))
            )

    def _completed(self, attempt: _Attempt, result: Any) -> None:
        if not self._current(attempt):
            return
        step = attempt.step
        what = f"result of step {step.name!r}"
        try:
            output = dump_json(result, what)
        except InvalidInputError as error:
            self._failed(attempt, error)
            return
        weight, limit = json_size(output), self._run.engine.config.max_payload_bytes
        if weight > limit:
            problem = f"{weight} bytes exceed {limit}"
            self._failed(attempt, InvalidInputError(what, problem, "return a reference instead"))
            return
        self._settled(attempt)
        self._run.enter(
            Kind.STEP_COMPLETED,
            {"siteId": step.site_id, "name": step.name, "output": output, "attempt": step.attempt},
            weight=weight,
        )

    def _failed(self, attempt: _Attempt, error: BaseException) -> None:
        if not self._current(attempt):
            return
        attempt.give_up()
        step = attempt.step
        fact: dict[str, Json] = {
            "siteId": step.site_id,
            "name": step.name,
            "error": describe_error(error),
            "attempt": step.attempt,
            "final": is_final(step.retry, step.attempt, error),
        }
        if fact["final"]:
            self._settled(attempt)
            self._run.enter(Kind.STEP_FAILED, fact)
            return
        retry_at = self._run.engine.now() + step.retry.delay_ms(step.attempt)
        fact["retryAt"] = retry_at
        self._attempts[step.site_id] = _Attempt(replace(step, attempt=step.attempt + 1, not_before=retry_at))
        self._run.enter(Kind.STEP_FAILED, fact)
        self._launch(step.site_id)

    def _settled(self, attempt: _Attempt) -> None:
        if attempt.alarm is not None:
            attempt.alarm.cancel()
        del self._attempts[attempt.step.site_id]


def _is_async(fn: Callable[..., Any]) -> bool:
    code = getattr(fn, "__code__", None)
    return bool(code.co_flags & inspect.CO_COROUTINE) if code is not None else inspect.iscoroutinefunction(fn)


def is_final(retry: RetryPolicy, attempt: int, error: BaseException) -> bool:
    """Whether a failed attempt was the last."""
    if attempt >= retry.attempts or isinstance(error, (*HOPELESS, InvalidInputError)):
        return True
    return any(base.__name__ in retry.terminal for base in type(error).__mro__) if retry.terminal else False


def describe_error(error: BaseException) -> dict[str, Json]:
    """How a log keeps an error: class name and text, capped."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a user's __str__ may do anything
        text = ""
    return {
        "type": type(error).__name__,
        "message": text[:MAX_ERROR_CHARS].encode("utf-8", "replace").decode(),
    }
