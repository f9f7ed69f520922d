"""The verbs that remove what has ended, as callers see them: a part of the client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loom.runtime.sealed import refused_as

if TYPE_CHECKING:
    from loom.runtime.access import Gatekeeper, Principal
    from loom.runtime.removal import Removal, RemovalReport
    from loom.runtime.signals import Signals


class RemovalVerbs:
    """What an operator does about executions that have ended. See :class:`loom.runtime.client.Client`."""

    _gate: Gatekeeper
    _signals: Signals
    _removal: Removal

    @refused_as("purge")
    async def purge_history(
        self,
        execution_id: str,
        *,
        reason: str | None = None,
        principal: Principal | None = None,
        dry_run: bool = False,
    ) -> RemovalReport:
        """Remove the history of a finished execution: what stands between its first event and its end.

        How it began, how it ended and what was erased of it stay, and so does its id. With the last execution of a chain
        go the chain's inbox and quarantine streams, held messages and all. Who and why is written into its log first. A
        repeat removes what a crash left, or nothing.

        Raises:
            ExecutionDeniedError: the caller is no operator; told before anything is read.
            ExecutionNotFinishedError: it has not ended; nothing was written.
        """
        return await self._removal.purge(execution_id, reason=reason, principal=principal, dry_run=dry_run)

    @refused_as("delete")
    async def delete_chain(
        self,
        execution_id: str,
        *,
        reason: str | None = None,
        principal: Principal | None = None,
        dry_run: bool = False,
    ) -> RemovalReport:
        """Remove all of a finished execution's chain: logs, inbox, quarantine, folded states. Its ids are never used again.

        Who and why is written into the chain's first log before anything goes, and that log goes last: a repeat finishes
        what a crash broke off.

        Raises:
            as ``purge_history``; ExecutionNotFinishedError also where a successor has not ended.
        """
        return await self._removal.delete(execution_id, reason=reason, principal=principal, dry_run=dry_run)

    async def expire_chain(self, chain_id: str, last_id: str, ended_before: int) -> RemovalReport | None:
        """Remove a chain whose last execution ended before an instant (ms); None where it did not. For a node's retention.

        It is no caller's verb, so it is judged by nobody. Nothing of the chain is opened.
        """
        return await self._removal.expire(chain_id, last_id, ended_before)
