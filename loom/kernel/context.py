"""What a flow sees of the world: its context."""

from __future__ import annotations

import datetime as dt
import functools
import json
from asyncio import CancelledError, sleep
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, overload

from loom.ids import check_execution_id
from loom.kernel.arms import (
    ChildHandle,
    SelectArm,
    Selected,
    TimerArm,
    as_ms,
    checked_name,
    gate,
    receive,
    select,
    user_topic,
)
from loom.kernel.commands import (
    ContinueAsNew,
    PublishRecord,
    RunStep,
    SendMessage,
    StartChild,
)
from loom.kernel.flow import FlowDefinition
from loom.kernel.guard import check_ingest
from loom.kernel.retry import RetryPolicy
from loom.kernel.values import copy_json, dump_json, load_json, output_model

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from loom.kernel.info import RunInfo
    from loom.kernel.machine import FlowMachine

T = TypeVar("T")
M = TypeVar("M")

HISTORY_HINT: Final = 10_000
"""History length from which ``ctx.should_continue_as_new`` is true: the same on every node, for ever."""

_DEFAULT_RETRY: Final = RetryPolicy()


class ContinueSignal(BaseException):
    """Ends a flow that continues as new; derives from BaseException: never catch it."""


class Context:
    """A flow's way to the world. Every call is a site in the log; awaiting anything else is refused."""

    __slots__ = ("_machine",)

    def __init__(self, machine: FlowMachine) -> None:
        self._machine = machine

    # Who and when ---------------------------------------------------------------------------------------------------

    @property
    def info(self) -> RunInfo:
        """Everything known of this run."""
        return self._machine.info

    @property
    def execution_id(self) -> str:
        """Id of this execution."""
        return self._machine.info.execution_id

    @property
    def chain_id(self) -> str:
        """Id of the chain: that of its first execution."""
        return self._machine.info.chain_id

    @property
    def workflow(self) -> str:
        """Name of this flow."""
        return self._machine.info.workflow

    @property
    def logical_time(self) -> dt.datetime:
        """Time of the last event that entered (UTC); costs nothing in the log."""
        return dt.datetime.fromtimestamp(self._machine.logical_ms / 1000, dt.UTC)

    @property
    def is_replaying(self) -> bool:
        """Whether history is being replayed. For logging only: a flow must not decide by it."""
        return self._machine.is_replaying

    @property
    def history_length(self) -> int:
        """Results and decisions in the log so far."""
        return self._machine.history_length

    @property
    def should_continue_as_new(self) -> bool:
        """Hint that the history has grown long (system.md 8.11); nothing is ever killed for it."""
        return self._machine.history_length >= HISTORY_HINT

    # Decisions ------------------------------------------------------------------------------------------------------

    def now(self) -> dt.datetime:
        """The time now (UTC), recorded."""
        ms: int = self._machine.decide("now", self._machine.sources.now_ms)
        return dt.datetime.fromtimestamp(ms / 1000, dt.UTC)

    def random(self) -> float:
        """A random number in [0, 1), recorded."""
        drawn: float = self._machine.decide("random", self._machine.sources.random)
        return drawn

    def uuid(self) -> str:
        """A fresh id, recorded."""
        drawn: str = self._machine.decide("uuid", self._machine.sources.uuid)
        return drawn

    def patched(self, patch_id: str) -> bool:
        """Whether to take the new way of changed code.

        True in executions that had not passed this point when the change was deployed (and for good in their logs),
        False in those that had; one answer per id and execution.
        """
        return self._machine.patched(checked_name("patch", patch_id))

    # Steps ----------------------------------------------------------------------------------------------------------

    @overload
    async def run(
        self,
        fn: Callable[..., Awaitable[T]],
        *args: Any,
        retry: RetryPolicy | None = ...,
        timeout: float | dt.timedelta | None = ...,  # noqa: ASYNC109 - of each attempt, kept by the driver
        name: str | None = ...,
        **kwargs: Any,
    ) -> T: ...

    @overload
    async def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        retry: RetryPolicy | None = ...,
        timeout: float | dt.timedelta | None = ...,  # noqa: ASYNC109 - of each attempt, kept by the driver
        name: str | None = ...,
        **kwargs: Any,
    ) -> T: ...

    async def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        retry: RetryPolicy | None = None,
        timeout: float | dt.timedelta | None = None,  # noqa: ASYNC109 - of each attempt, kept by the driver
        name: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a step: an effect, sync or async, at least once; its result is journaled and then always the same.

        The result comes back as JSON, validated into the function's return annotation where that is a model.
        ``timeout`` is seconds per attempt. ``name`` (the function's by default) stands in the log.

        Raises:
            StepFailedError: it failed for good, by its retry policy.
            InvalidInputError: the recorded result does not fit the return annotation.
        """
        machine = self._machine
        site = machine.next_site()
        step = name or _step_name(fn)
        model = output_model(fn)
        timeout_ms = None if timeout is None else as_ms(timeout)
        future = machine.ask(RunStep(site, step, fn, args, kwargs, retry or _DEFAULT_RETRY, timeout_ms))
        try:
            output = await future
        except CancelledError:
            machine.abandon(site)
            raise
        return copy_json(output) if model is None else load_json(output, model, f"result of step {step!r}")

    # Waits ----------------------------------------------------------------------------------------------------------

    @overload
    async def receive(self, topic: str) -> Any: ...

    @overload
    async def receive(self, topic: str, model: type[M]) -> M: ...

    async def receive(self, topic: str, model: Any = None) -> Any:
        """Wait for the next message on a topic and return its payload.

        Raises:
            InvalidInputError: the payload does not fit ``model``; the message is consumed all the same.
        """
        return (await select(self._machine, (receive(topic, model),))).value

    async def select(self, *arms: SelectArm) -> Selected:
        """Wait for the first arm that can be answered, in the order given: receive, timer, gate, child."""
        return await select(self._machine, arms)

    async def sleep(
        self,
        delay: float | dt.timedelta = 0,
        *,
        days: float = 0,
        hours: float = 0,
        minutes: float = 0,
        seconds: float = 0,
        milliseconds: float = 0,
    ) -> None:
        """Sleep durably: seconds, or a sum of units. Nothing to wait for only yields to the flow's other tasks."""
        units = dt.timedelta(
            days=days, hours=hours, minutes=minutes, seconds=seconds, milliseconds=milliseconds
        )
        delay_ms = as_ms(delay) + as_ms(units)
        if delay_ms <= 0:
            await sleep(0)
        else:
            await select(self._machine, (TimerArm(delay_ms),))

    @overload
    async def gate(self, name: str) -> Any: ...

    @overload
    async def gate(self, name: str, model: type[M]) -> M: ...

    async def gate(self, name: str, model: Any = None) -> Any:
        """Wait for a human's answer at a gate (given by ``resume``)."""
        return (await select(self._machine, (gate(name, model),))).value

    # Other executions and the estate --------------------------------------------------------------------------------

    @overload
    async def start_child(
        self,
        flow: FlowDefinition[..., T],
        input: Any = ...,
        *,
        execution_id: str | None = ...,
        cancel_with_parent: bool = ...,
    ) -> ChildHandle[T]: ...

    @overload
    async def start_child(
        self,
        flow: str,
        input: Any = ...,
        *,
        execution_id: str | None = ...,
        cancel_with_parent: bool = ...,
    ) -> ChildHandle[Any]: ...

    async def start_child(
        self,
        flow: FlowDefinition[..., Any] | str,
        input: Any = None,  # noqa: A002 - the word of the field
        *,
        execution_id: str | None = None,
        cancel_with_parent: bool = True,
    ) -> ChildHandle[Any]:
        """Start a child execution and return its handle once the start is in the log.

        Raises:
            InvalidInputError: the input does not fit the child's flow. InvalidIdError: no id to choose.
            StepFailedError: the child could not be started (its id is taken).
        """
        if execution_id is not None:
            check_execution_id(execution_id)
        if isinstance(flow, FlowDefinition):
            workflow, data, model = flow.name, flow.accept_input(input), flow.output_model
        else:
            workflow, data, model = flow, dump_json(input, f"input of child {flow!r}"), None
        site = self._machine.next_site()
        command = StartChild(site, workflow, data, execution_id, cancel_with_parent)
        child_id = await self._effect(site, command)
        return ChildHandle(self._machine, child_id, workflow, model)

    def child(self, execution_id: str, flow: FlowDefinition[..., T] | str) -> ChildHandle[T]:
        """A handle on a child that this chain has started already, say before it continued as new; asks for nothing."""
        definition = flow if isinstance(flow, FlowDefinition) else None
        name = flow if isinstance(flow, str) else flow.name
        model = None if definition is None else definition.output_model
        return ChildHandle(self._machine, check_execution_id(execution_id), name, model)

    async def send(
        self, execution_id: str, topic: str, payload: Any, *, message_id: str | None = None
    ) -> str:
        """Send a message to another execution; return its message id once it is in the log.

        Without a ``message_id`` one is derived from this execution and this call, so it is sent once whatever crashes.

        Raises:
            InvalidInputError: the payload has no JSON form, or the topic is reserved. InvalidIdError: no such id can be.
            InboxMessageRefusedError: the payload is dressed as a sealed or erased one (system.md 1.8).
            StepFailedError: it could not be sent for good.
        """
        check_execution_id(execution_id)
        user_topic(topic)
        data = dump_json(payload, f"message for topic {topic!r}")
        check_ingest(execution_id, topic, data)
        site = self._machine.next_site()
        given = message_id or f"{self.execution_id}/{site}"
        sent: str = await self._effect(site, SendMessage(site, execution_id, topic, data, given))
        return sent

    async def publish(
        self, topic: str, key: str | None, value: Any, *, headers: Mapping[str, str | bytes] | None = None
    ) -> None:
        """Write a record to a topic of the allow-list, in the transaction that journals it (system.md 8.4).

        ``value`` is bytes as they are, else JSON in UTF-8.

        Raises:
            StepFailedError: the topic does not take it.
        """
        what = f"record for topic {topic!r}"
        data = (
            bytes(value)
            if isinstance(value, bytes | bytearray)
            else json.dumps(dump_json(value, what), ensure_ascii=False, separators=(",", ":")).encode()
        )
        pairs = tuple((k, v if isinstance(v, bytes) else v.encode()) for k, v in (headers or {}).items())
        site = self._machine.next_site()
        await self._effect(site, PublishRecord(site, checked_name("topic", topic), key, data, pairs))

    def continue_as_new(
        self,
        input: Any = None,  # noqa: A002 - the word of the field
        flow: FlowDefinition[..., Any] | str | None = None,
    ) -> NoReturn:
        """End this execution and start its successor, with a fresh log, in the same chain and with the same inbox.

        Ends the flow at once: it raises a signal that derives from BaseException.

        Raises:
            InvalidInputError: the input does not fit the flow.
        """
        machine = self._machine
        machine.check_inside()
        target = machine.flow if flow is None else flow
        if isinstance(target, FlowDefinition):
            workflow, data = target.name, target.accept_input(input)
        else:
            workflow, data = target, dump_json(input, f"input of flow {target!r}")
        machine.end(ContinueAsNew(workflow, data))
        raise ContinueSignal("the flow continues as new: never catch this")

    async def _effect(self, site: str, command: StartChild | SendMessage | PublishRecord) -> Any:
        future = self._machine.ask(command)
        try:
            return await future
        except CancelledError:
            self._machine.abandon(site)
            raise


def _step_name(fn: Callable[..., Any]) -> str:
    target = fn.func if isinstance(fn, functools.partial) else fn
    return getattr(target, "__name__", None) or type(target).__name__
