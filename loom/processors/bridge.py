"""From delivery to the runtime: a message wakes its chain, a command becomes a verb judged like any caller's.

Both may come twice (agents are at-least-once), and both may come on a node that does not write the partition.
"""

from __future__ import annotations

import hashlib
from base64 import b32encode
from typing import TYPE_CHECKING, Any, Final, Protocol

from loom.errors import ExecutionAlreadyExistsError, ExecutionFinishedError
from loom.runtime import Principal
from loom.schemas.records import CancelVerb, Command, ResumeVerb, SendVerb, StartVerb

if TYPE_CHECKING:
    from loom.processors.delivery import Source
    from loom.runtime import Client
    from loom.runtime.kept_copies import KeptCopies

COMMAND_SENDER: Final = "loom.commands"
"""Sender of messages whose command names neither sender nor message id: their identity is the command's."""


class Forwarder(Protocol):
    """What a store of several nodes offers beside the contract: ask the owner to look at an execution."""

    async def notify(self, execution_id: str) -> None:
        """Ask the owner to look at the execution's inbox again."""
        ...


class RuntimeBridge:
    """``DeliveryBridge`` on a runtime; of the runtime's event loop."""

    def __init__(self, runtime: Client, forwarder: Forwarder) -> None:
        self._runtime, self._forwarder = runtime, forwarder

    async def notify(self, chain_id: str, stream: str, sequence: int) -> None:
        """Have the owner of the chain look at its inbox; here at once where that is this process."""
        del stream, sequence  # a pass takes whatever waits
        await self._forwarder.notify(chain_id)

    async def look_after(self, chain_id: str) -> KeptCopies:
        """Free copies that nothing needs, and tell what is held. Raises as :meth:`Client.look_after_copies`."""
        return await self._runtime.look_after_copies(chain_id)

    async def command(self, command: Command, source: Source) -> None:
        """Apply a command once.

        Raises:
            LoomError: as the verb says; what is not retryable ends on ``dead``.
        """
        identity = command.id or str(source)
        caller = Principal(command.actor, command.identity) if command.actor else Principal(COMMAND_SENDER)
        match command.verb:
            case StartVerb() as start:
                await self._start(start, identity, caller)
            case SendVerb() as send:
                await self._runtime.send(
                    send.execution_id,
                    send.topic,
                    send.payload,
                    message_id=send.message_id or identity,
                    sender=send.sender if send.message_id else send.sender or COMMAND_SENDER,
                    principal=caller,
                )
            case ResumeVerb() as resume:
                await self._runtime.resume(
                    resume.execution_id, resume.gate, resume.answer, request_id=identity, principal=caller
                )
            case CancelVerb() as cancel:
                await self._cancel(cancel, caller)

    async def _start(self, start: StartVerb, identity: str, caller: Principal) -> None:
        chosen = start.execution_id or derived_id(identity)
        try:
            await self._runtime.start(
                start.workflow, start.input, execution_id=chosen, subject=start.subject, principal=caller
            )
        except ExecutionAlreadyExistsError:
            if not await self._is_ours(chosen, start, caller):
                raise

    async def _is_ours(self, execution_id: str, start: StartVerb, caller: Principal) -> bool:
        """Whether what stands there is what this command asks for: then it was applied before."""
        first: dict[str, Any] = (await self._runtime.history(execution_id))[0].data
        principal = first.get("principal") or {}
        same_caller = principal.get("actor") == caller.actor
        return same_caller and first.get("workflow") == start.workflow and first.get("input") == start.input

    async def _cancel(self, cancel: CancelVerb, caller: Principal) -> None:
        try:
            await self._runtime.cancel(cancel.execution_id, cancel.reason, principal=caller)
        except ExecutionFinishedError as ended:
            if ended.status != "cancelled":
                raise


def derived_id(identity: str) -> str:
    """Execution id of a start command that chooses none: the same for the same command."""
    return "c" + b32encode(hashlib.sha256(identity.encode()).digest()).decode().rstrip("=")[:25].lower()
