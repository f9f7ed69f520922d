"""The verbs on all that belongs to a subject, and the look at how the fleet seals, as callers see them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loom.runtime.checkup import findings
from loom.runtime.sealed import refused_as

if TYPE_CHECKING:
    from loom.config import Config
    from loom.runtime.access import Gatekeeper, Principal
    from loom.runtime.erasure import Erasure, ErasureReport, SubjectExport
    from loom.runtime.factory import Stores
    from loom.runtime.signals import Signals
    from loom.stores.contracts import Clock
    from loom.stores.findings import Finding
    from loom.stores.sealing.shred import Force


class SubjectVerbs:
    """What a client and a node can do about a subject (docs/sealing.md, "Erasure")."""

    _gate: Gatekeeper
    _signals: Signals
    _erasure: Erasure
    _clock: Clock
    config: Config

    @property
    def stores(self) -> Stores:
        """The stores under the verbs."""
        raise NotImplementedError

    async def findings(self) -> list[Finding]:
        """What is wrong with sealing and with evidence of life, as this client sees the fleet (``loom doctor``).

        Raises:
            StoreError: a store cannot be read now.
        """
        return await findings(self.config, self.stores, self._clock)

    @refused_as("erase")
    async def shred_subject(
        self,
        subject: str,
        *,
        force: Force | None = None,
        reason: str | None = None,
        principal: Principal | None = None,
    ) -> ErasureReport:
        """Destroy a subject's key, and say so in the log of each of its executions: intent, destruction, tombstone.

        What was sealed for the subject opens nowhere any more. Safe to repeat after a crash at any point, from any node:
        one that lacks the key, or has another, writes nothing without proof of the destruction beside the durable intent.
        ``force="key-destroyed-elsewhere"`` asserts what no proof here says. For operators, and for who owns all of them.

        Raises:
            SubjectNotFoundError: no execution is of it. ExecutionDeniedError: the caller may not.
            KeyUnavailableError: the key is not here, and nothing proves that it was destroyed; nothing was written.
            ShredIncompleteError, ErasureLostRaceError: repeat it.
        """
        return await self._erasure.erase(
            subject, force=force, reason=reason, dry_run=False, principal=principal, ends=False
        )

    @refused_as("erase")
    async def erase_subject(
        self,
        subject: str,
        *,
        force: Force | None = None,
        reason: str | None = None,
        dry_run: bool = False,
        principal: Principal | None = None,
    ) -> ErasureReport:
        """Shred a subject, cancel what of it still runs, and drop its folded states. ``dry_run`` names what it concerns.

        Raises:
            as ``shred_subject``.
        """
        return await self._erasure.erase(
            subject, force=force, reason=reason, dry_run=dry_run, principal=principal
        )

    @refused_as("export")
    async def export_subject(
        self, subject: str, *, force: Force | None = None, principal: Principal | None = None
    ) -> SubjectExport:
        """Everything that is recorded of a subject, opened; what was erased is redacted and said to be.

        Raises:
            KeyUnavailableError: something does not open here, and is not proven to be erased. Others as ``shred_subject``.
        """
        return await self._erasure.export(subject, force=force, principal=principal)
