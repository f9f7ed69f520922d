"""Runs the Faust app on a thread and event loop of its own, and watches that it lives.

Its heartbeats must not depend on user code, nor user code on it. A Faust app can die in silence: its consumer crashes,
its loop is blocked, a partition is no longer read (pitfalls.md). So liveness is progress: of the event loop, of fetches,
and of what was delivered. Whatever stands still too long ends the process with the reason, as a crash would; another
node, or a restart, carries on from the committed offsets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from typing import TYPE_CHECKING, Any, Final, cast

from loom.errors import DeadlineExceededError, LoomError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from loom.processors.app import WorkerApp
    from loom.processors.transport import CommittedConsumer

_log = logging.getLogger("loom.processors.host")

START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 15.0
STALL_S: Final = 90.0
"""Survives an outage of the brokers of 30 s, and an open transaction of the longest that brokers allow (60 s)."""

EXIT_STATUS: Final = 70
_TICK_S: Final = 0.2


def end_process(reason: str) -> None:
    """End this process at once, as a crash would: its consumers leave by session timeout, its writers are fenced."""
    _log.critical("the processors have died: %s", reason)
    sys.stderr.write(f"loom: the processors have died: {reason}\n")
    sys.stderr.flush()
    os._exit(EXIT_STATUS)


class Watch:
    """Says what stands still. Concerns are named; each is fed its state, or None while it has nothing to do."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._seen: dict[str, tuple[Hashable, float]] = {}

    def look(self, states: Mapping[str, Hashable | None], now: float) -> str | None:
        """Take every concern's state at ``now`` (seconds, monotonic); return the first that has not moved too long."""
        busy = {name: state for name, state in states.items() if state is not None}
        self._seen = {name: seen for name, seen in self._seen.items() if name in busy}
        for name, state in busy.items():
            seen = self._seen.get(name)
            if seen is None or seen[0] != state:
                self._seen[name] = (state, now)
            elif now - seen[1] > self._stall_s:
                return f"{name} has stood still for {now - seen[1]:.0f} s"
        return None


class AppHost:
    """The thread of one Faust app."""

    def __init__(
        self,
        build: Callable[[], WorkerApp],
        *,
        on_death: Callable[[str], None] = end_process,
        start_timeout_s: float = START_TIMEOUT_S,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        stall_s: float = STALL_S,
    ) -> None:
        """Prepare; ``build`` is called on the app's own loop. ``on_death`` is called once, on a thread of its own."""
        self._build, self._on_death = build, on_death
        self._start_timeout_s, self._stop_timeout_s, self._stall_s = start_timeout_s, stop_timeout_s, stall_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = threading.Event()
        self._dead = threading.Lock()
        self._ready: Future[WorkerApp] = Future()
        self._thread = threading.Thread(target=self._run, name="loom-processors", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="loom-processors-watch", daemon=True)

    def start(self) -> WorkerApp:
        """Start, and return the app once its agents have their partitions.

        Raises:
            LoomError: it could not be built. DeadlineExceededError: not ready in time.
        """
        self._thread.start()
        try:
            app = self._ready.result(self._start_timeout_s)
        except NoAnswer:
            self.stop()
            what = "the start of the processors (Faust)"
            raise DeadlineExceededError(what, round(self._start_timeout_s * 1000)) from None
        self._watcher.start()
        return app

    def stop(self) -> bool:
        """Stop within a bound; False if the thread had not ended by then (it is a daemon). Idempotent."""
        self._stopping.set()
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(lambda: None)
        if self._thread.is_alive():
            self._thread.join(self._stop_timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        reason = "it stopped by itself"
        try:
            asyncio.run(self._main())
        except LoomError as error:
            reason = str(error)
            self._fail(error)
        except BaseException as error:  # noqa: BLE001 - whatever ends this thread, it must not end unseen
            reason = f"{type(error).__name__} on its event loop"
            self._fail(error)
        self._die(reason)

    def _fail(self, error: BaseException) -> None:
        if not self._ready.done():
            self._stopping.set()
            self._ready.set_exception(error)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        app = self._build()
        try:
            starting = asyncio.ensure_future(app.start())
            while not (starting.done() or self._stopping.is_set()):
                await asyncio.wait([starting], timeout=_TICK_S)
            if not starting.done():  # the start is given up
                starting.cancel()
                return
            await starting
            self._ready.set_result(app)
            while not (self._stopping.is_set() or app.should_stop):
                await app.sleep(_TICK_S)
        finally:
            await self._end(app)
        if app.crash_reason is not None:
            raise app.crash_reason

    async def _end(self, app: WorkerApp) -> None:
        try:
            async with asyncio.timeout(self._stop_timeout_s * 0.8):
                await app.settle()
                await app.stop()
        except TimeoutError:
            _log.warning("the processors did not stop in time; their session will time out")

    def _watch(self) -> None:
        watch, interval = Watch(self._stall_s), self._stall_s / 10
        while not self._stopping.wait(interval):
            loop = self._loop
            if loop is None or loop.is_closed():
                return
            try:
                app = self._ready.result(0)
                sample = asyncio.run_coroutine_threadsafe(_sample(app), loop)
                states = sample.result(self._stall_s)
            except NoAnswer:
                self._die(f"their event loop did not answer for {self._stall_s:.0f} s")
                return
            except Exception as error:  # noqa: BLE001 - the loop ends meanwhile, or Faust has moved what is looked at
                states = {f"the watch itself ({type(error).__name__})": True}
            stalled = watch.look(states, time.monotonic())
            if stalled is not None:
                self._die(stalled)
                return

    def _die(self, reason: str) -> None:
        if not self._stopping.is_set() and self._dead.acquire(blocking=False):
            self._on_death(reason)


async def _sample(app: WorkerApp) -> dict[str, Hashable | None]:
    """What must move: fetches of every partition, deliveries that wait, a rebalance."""
    consumer = cast("CommittedConsumer", app.consumer)
    waiting = consumer.waiting()
    states: dict[str, Hashable | None] = {"a rebalance": app.rebalancing_count if app.rebalancing else None}
    for tp in consumer.assignment():
        oldest = waiting.get((tp.topic, tp.partition))
        states[f"delivery of {tp.topic}/{tp.partition}"] = (
            None if oldest is None else (oldest, app.delivery.attempts)
        )
        states[f"reading of {tp.topic}/{tp.partition}"] = (
            None if oldest is not None else _fetched(consumer, tp)
        )
    return states


def _fetched(consumer: CommittedConsumer, tp: Any) -> Hashable | None:
    """When the broker last answered a fetch of the partition; it answers even if there is nothing new."""
    client = consumer._thread._consumer  # noqa: SLF001 - Faust's own watch looks there too
    subscription = getattr(client, "_subscription", None)
    state = getattr(getattr(subscription, "subscription", None), "assignment", None)
    if state is None:
        return None
    return ("fetched", getattr(state.state_value(tp), "timestamp", None))
