"""The inbox verbs, as callers see them: a part of the client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loom.kernel.quarantine import DELIVER, DISCARD
from loom.runtime.held_view import held_everywhere
from loom.runtime.kept_copies import KeptCopies, look_after_copies
from loom.runtime.sealed import refused_as

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from loom.runtime.access import Gatekeeper, Principal
    from loom.runtime.engine import Engine
    from loom.runtime.inbox_verbs import InboxVerbs
    from loom.runtime.quarantine import HeldMessage, Quarantine
    from loom.runtime.signals import Signals


class InboxClient:
    """What an operator does about messages that wait. See :class:`loom.runtime.client.Client`."""

    _engine: Engine
    _gate: Gatekeeper
    _signals: Signals
    _inbox: InboxVerbs
    _quarantine: Quarantine

    @refused_as("query")
    async def inbox(self, execution_id: str, *, principal: Principal | None = None) -> list[dict[str, Any]]:
        """Messages that are held, then those that wait, in the inbox of an execution's chain, without their payloads.

        Rows have ``topic``, ``inbox_seq``, ``message_id``, ``sender``, ``age_ms`` and ``state`` (``waiting``, ``held``,
        ``released``, ``behind a hold``); held ones also ``held_since`` (ms), ``held_by``, ``reason`` and ``awaits``. A
        process that does not write the chain's shard sees the topics that the execution waits for, or has read from.
        """
        return await self._inbox.rows(execution_id, principal)

    def held(self, chains: Iterable[str] | None = None) -> AsyncIterator[dict[str, Any]]:
        """Held messages of these chains, else of the open executions served here: rows of ``inbox``, with ``execution_id``.

        For operators of the fleet: it is judged by nobody, and reads each of the logs. One that this node cannot open is a
        row whose ``state`` says so.

        Raises:
            ConfigError: no chains are given, and this process serves none.
        """
        return held_everywhere(self._engine, chains)

    async def look_after_copies(self, chain_id: str) -> KeptCopies:
        """Free the copies of held messages that a chain needs no more, and tell what is held. For the processors of a node.

        It is no caller's verb, so it is judged by nobody; it frees only what no fact can ever name (system.md 4.7).

        Raises:
            StoreError: the log cannot be read, or written, now.
        """
        return await look_after_copies(self._engine, chain_id)

    @refused_as("discard")
    async def discard_inbox(
        self,
        execution_id: str,
        topic: str,
        *,
        message_id: str | None = None,
        reason: str | None = None,
        principal: Principal | None = None,
    ) -> int:
        """Discard, unread, the next message of a topic of a parked execution; return how many were (0 or 1).

        ``message_id`` makes a repeat safe: another message at the head is refused. On a held topic it acts behind the
        hold; what is held is dropped by ``release_inbox``.

        Raises:
            ExecutionDeniedError: the caller is no operator. InboxDiscardRefusedError: not parked, contended, invalid.
        """
        return await self._inbox.discard(
            execution_id, topic, message_id=message_id, reason=reason, principal=principal
        )

    @refused_as("expire")
    async def expire_inbox(
        self,
        execution_id: str,
        topic: str,
        *,
        older_than_ms: int,
        reason: str | None = None,
        principal: Principal | None = None,
    ) -> int:
        """Pass over the messages at the head of a topic that have waited longer; return how many. Never what is held."""
        return await self._inbox.expire(
            execution_id, topic, older_than_ms=older_than_ms, reason=reason, principal=principal
        )

    @refused_as("quarantine")
    async def quarantine_inbox(
        self,
        execution_id: str,
        topic: str,
        *,
        message_id: str | None = None,
        reason: str | None = None,
        principal: Principal | None = None,
        dry_run: bool = False,
    ) -> HeldMessage:
        """Hold a topic of a parked execution at its head, which is sealed and cannot be opened on this node.

        Nothing later on the topic is delivered until a node that can open the message delivers it, or ``release_inbox``
        lets it go; other topics flow. ``message_id`` makes a repeat safe; without it, a repeat holds the next message.
        ``reason`` has at most 256 characters and is kept in the log, as is the principal's actor.

        Raises:
            ExecutionDeniedError: the caller is no operator; told before anything is read.
            InboxQuarantineRefusedError: ``not-parked``, ``contended``, ``invalid``, ``not-sealed``, or
                ``checkpoint-unreadable-log-compacted``; nothing was written.
            SealedPayloadUnreadableError: the message reads as redacted here: whether it is sealed cannot be told.
        """
        return await self._quarantine.hold(
            execution_id, topic, message_id=message_id, reason=reason, principal=principal, dry_run=dry_run
        )

    async def release_inbox(
        self,
        execution_id: str,
        topic: str,
        message_id: str,
        *,
        disposition: str = DELIVER,
        sender: str | None = None,
        reason: str | None = None,
        principal: Principal | None = None,
        dry_run: bool = False,
    ) -> bool:
        """Let the oldest held message of a topic go: to be delivered (the default), or to be dropped (``discard``).

        ``message_id`` is its raw id, or its key; ``sender`` tells two of one id apart. Returns False where this very
        release was made before. Delivering needs a node that can open the message; dropping does not, and is judged as
        ``discard``.

        Raises:
            ExecutionDeniedError: the caller is no operator; told before anything is read.
            InboxQuarantineRefusedError: as ``quarantine_inbox``. A release older than 4,096 events is ``invalid``, too.
            SealedPayloadUnreadableError: it is to be delivered, and this node cannot open it.
        """
        verb = self._drop_held if disposition == DISCARD else self._release_held
        return await verb(
            execution_id,
            topic,
            message_id,
            disposition=disposition,
            sender=sender,
            reason=reason,
            principal=principal,
            dry_run=dry_run,
        )

    @refused_as("release")
    async def _release_held(self, execution_id: str, topic: str, message_id: str, **options: Any) -> bool:
        return await self._quarantine.release(execution_id, topic, message_id, **options)

    @refused_as("discard")
    async def _drop_held(self, execution_id: str, topic: str, message_id: str, **options: Any) -> bool:
        return await self._quarantine.release(execution_id, topic, message_id, **options)
