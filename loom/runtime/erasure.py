"""Erasing a subject, and giving out what is recorded of one (system.md 0, "Erasure"; the seed's D7, rounds 4 to 6).

``SubjectRecords`` does it on the log; here it is judged who may, what goes with the key is ended and dropped, and it is told.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from loom.errors import (
    ExecutionDeniedError,
    ExecutionFinishedError,
    KeyUnavailableError,
    SubjectNotFoundError,
)
from loom.kernel.readable import sealed_refusal
from loom.operator import SealedDetail
from loom.runtime import endings, facts
from loom.schemas.envelope import Kind, NewEvent

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from loom.runtime.access import Gatekeeper, Principal
    from loom.runtime.engine import Engine
    from loom.stores.sealing.shred import ExportedStream, Force, SubjectRecords
    from loom.stores.sealing.survey import LogView

CANCELLED_BECAUSE: Final = "its subject was erased"
MAX_RACES: Final = 16
MAX_CHAIN: Final = 10_000
"""Successors that a cancellation follows."""


@dataclass(frozen=True, slots=True)
class ErasureReport:
    """What an erasure did, or (``dry_run``) would do.

    ``executions`` are all that belong to the subject; ``tombstoned`` and ``cancelled`` those whose log got the tombstone, and
    which were ended, by this call. ``key`` says what became of the key: ``destroyed``, ``gone before``, or ``nothing was
    sealed`` (then nothing was written).
    """

    subject: str
    executions: tuple[str, ...]
    tombstoned: tuple[str, ...] = ()
    cancelled: tuple[str, ...] = ()
    key: str = ""
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class SubjectExport:
    """Everything that is recorded of a subject, opened. A stream that was erased is redacted, and says so."""

    subject: str
    executions: tuple[str, ...]
    streams: tuple[ExportedStream, ...]


class Erasure:
    """See :class:`loom.runtime.client.Client` for what each means to a caller."""

    def __init__(self, engine: Engine, gate: Gatekeeper, subjects: SubjectRecords) -> None:
        self._engine, self._gate, self._subjects = engine, gate, subjects

    async def erase(
        self,
        subject: str,
        *,
        force: Force | None,
        reason: str | None,
        dry_run: bool,
        principal: Principal | None,
        ends: bool = True,
    ) -> ErasureReport:
        """Shred the subject; unless ``ends`` is False, also end what of it still runs, and drop folded states."""
        views = await self._judged("erase", subject, principal)
        names = _names(views)
        try:
            if dry_run:
                await self._subjects.assert_erasable(subject, views, force=force)
                open_ = tuple(view.execution_id for view in views if not view.ended)
                lacking = tuple(view.execution_id for view in views if not view.erased)
                return ErasureReport(subject, names, lacking, open_ if ends else (), dry_run=True)
            by = None if principal is None else principal.actor
            done = await self._subjects.shred(subject, force=force, by=by, reason=reason)
        except KeyUnavailableError as closed:
            self._rethrow("erase", closed, principal)
            detail = SealedDetail("key-unavailable", closed.sequence, closed.covers)
        else:
            self._forget(view.execution_id for view in done.logs)
            if not ends or done.key.value == "nothing was sealed":
                return ErasureReport(subject, _names(done.logs), done.written, (), done.key.value)
            cancelled = await self._end_all(done.logs, by)
            await self._subjects.drop_snapshots(done.logs)
            return ErasureReport(subject, _names(done.logs), done.written, cancelled, done.key.value)
        raise sealed_refusal("erase", subject, detail)

    async def export(
        self, subject: str, *, force: Force | None, principal: Principal | None
    ) -> SubjectExport:
        """Everything that is recorded of a subject."""
        views = await self._judged("export", subject, principal)
        try:
            return SubjectExport(subject, _names(views), await self._subjects.export(subject, force=force))
        except KeyUnavailableError as closed:
            self._rethrow("export", closed, principal)
            detail = SealedDetail("key-unavailable", closed.sequence, closed.covers)
        raise sealed_refusal("export", subject, detail)

    async def cancel(self, execution_id: str, reason: str | None, principal: Principal | None) -> bool:
        """Cancel an execution whose subject was erased, without opening its log; False where it was not erased.

        No child and no parent is told: they have its subject, and are erased with it.

        Raises:
            ExecutionDeniedError: as for any other, by what is left of its owner. ExecutionFinishedError: it has ended.
        """
        view = await self._subjects.look(execution_id)
        if view is None or not view.erased:
            return False
        await self._gate.judge("cancel", execution_id, view.started, principal)
        for _ in range(MAX_CHAIN):
            if view is None or view.successor is None:
                break
            view = await self._subjects.look(view.successor)
        by = None if principal is None else principal.actor
        if view is None or view.ended or not await self._end(view, reason, by):
            raise ExecutionFinishedError("cancel", execution_id, "erased, and has ended")
        return True

    # -- parts ---------------------------------------------------------------------------------------------------

    async def _judged(self, op: str, subject: str, principal: Principal | None) -> tuple[LogView, ...]:
        views = await self._subjects.survey(subject)
        denied: ExecutionDeniedError | None = None
        try:
            await self._gate.judge_subject(op, subject, [view.started for view in views], principal)
        except ExecutionDeniedError as error:
            denied = error.with_traceback(None)
        if denied is not None:
            del views  # nothing that was read stays in the frames of a denial
            raise denied
        if not views:
            raise SubjectNotFoundError(subject)
        return views

    def _rethrow(self, op: str, closed: KeyUnavailableError, principal: Principal | None) -> None:
        """To who may know, the reason as it is; others get the denial."""
        if self._gate.trusts(op, principal):
            raise closed

    async def _end_all(self, views: Sequence[LogView], by: str | None) -> tuple[str, ...]:
        return tuple(
            [
                view.execution_id
                for view in views
                if not view.ended and await self._end(view, CANCELLED_BECAUSE, by)
            ]
        )

    async def _end(self, view: LogView, reason: str | None, by: str | None) -> bool:
        engine = self._engine
        event = NewEvent(
            engine.event_id(), Kind.EXECUTION_CANCELLED, endings.cancelled_data(reason, by), facts.stamp(by)
        )
        for _ in range(MAX_RACES):
            now = await self._subjects.look(view.execution_id)
            if now is None or now.ended:
                return False
            if await engine.patiently(lambda: self._subjects.end(view, event), view.execution_id):
                if engine.wakes is not None:
                    await engine.wakes.clear(view.execution_id)
                return True
        return False

    def _forget(self, execution_ids: Iterable[str]) -> None:
        for execution_id in execution_ids:
            self._engine.erased(execution_id)


def _names(views: Sequence[LogView]) -> tuple[str, ...]:
    return tuple(view.execution_id for view in views)
