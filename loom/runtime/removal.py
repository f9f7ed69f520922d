"""Removing what has ended: the history of one execution (purge), or all of a chain (delete). See docs/adr/0036.

Intent first: who and why is durable in the log before anything goes, and the log that says it goes last. So a removal that a
crash broke off is told by the log, and finished by a repeat from any node.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from loom.errors import (
    ExecutionNotFinishedError,
    ExecutionNotFoundError,
    PayloadShreddedError,
)
from loom.ids import inbox_stream, quarantine_stream
from loom.runtime import facts
from loom.runtime.control import append_control
from loom.schemas.envelope import TERMINAL_KINDS, Kind, NewEvent
from loom.stores.contracts import NO_EVENTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from loom.runtime.access import Gatekeeper, Principal
    from loom.runtime.engine import Engine
    from loom.runtime.verbs import Verbs
    from loom.schemas.envelope import Json
    from loom.stores.sealing.shred import SubjectRecords
    from loom.stores.sealing.survey import LogView

SLICE: Final = 500
"""Events deleted in one transaction: a log may be longer than what one takes."""

MAX_RACES: Final = 16
MAX_LINKS: Final = 10_000
"""Executions of a chain that a removal follows."""

HISTORY: Final = "history"
CHAIN: Final = "chain"


@dataclass(frozen=True, slots=True)
class RemovalReport:
    """What a removal did, or (``dry_run``) would do: ``events`` of ``streams`` go, of these ``executions``."""

    chain_id: str
    executions: tuple[str, ...]
    streams: tuple[str, ...] = ()
    events: int = 0
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class _Cut:
    """Events of a stream that go: those below ``before``, or all of it (None), sequence 0 among them."""

    stream_id: str
    first: int
    head: int
    before: int | None = None

    @property
    def events(self) -> int:
        """How many."""
        if self.before is None:
            return self.head - self.first + 2
        return max(0, self.before - self.first)


class Removal:
    """See :class:`loom.runtime.removal_client.RemovalVerbs` for what each means to a caller."""

    def __init__(self, engine: Engine, gate: Gatekeeper, verbs: Verbs, subjects: SubjectRecords) -> None:
        self._engine, self._gate, self._verbs, self._subjects = engine, gate, verbs, subjects

    async def purge(
        self, execution_id: str, *, reason: str | None, principal: Principal | None, dry_run: bool
    ) -> RemovalReport:
        """Remove the history of a finished execution; the last of its chain takes inbox and quarantine along."""
        facts.check_reason(reason)
        await self._judged("purge", execution_id, principal)
        view = await self._ended("purge", execution_id)
        info = await self._engine.events.info(execution_id)
        if info is None:
            raise ExecutionNotFoundError(execution_id)
        cuts = [_Cut(execution_id, info.first, info.head, max(info.first, view.closing))]
        if view.successor is None:
            cuts += await self._beside(view.chain_id)
        report = _report(view.chain_id, (execution_id,), cuts, dry_run=dry_run)
        if report.events and not dry_run:
            if view.purged < view.closing - 1:
                through: dict[str, Json] = {"scope": HISTORY, "through": view.closing - 1}
                await self._note(execution_id, through, reason, principal)
            await self._cut(cuts)
            await self._drop_snapshot(execution_id)
        return report

    async def delete(
        self, execution_id: str, *, reason: str | None, principal: Principal | None, dry_run: bool
    ) -> RemovalReport:
        """Remove the whole chain of a finished execution. Its ids are never used again."""
        facts.check_reason(reason)
        chain_id = await self._judged("delete", execution_id, principal)
        views = await self._links("delete", chain_id)
        cuts = await self._all_of(chain_id, views)
        report = _report(chain_id, [view.execution_id for view in views], cuts, dry_run=dry_run)
        if not dry_run:
            if not views[0].deleting:
                await self._note(chain_id, {"scope": CHAIN}, reason, principal)
            await self._delete(report.executions, cuts)
        return report

    async def expire(self, chain_id: str, last_id: str, ended_before: int) -> RemovalReport | None:
        """Remove a chain whose last execution ended before an instant (ms), for the node's own retention; None where it did not.

        Nothing of it is opened, so that it goes from nodes without its keys, too. The setting says who and why. The last
        execution goes last: it is what ``states`` names, should this be broken off.
        """
        last = await self._subjects.look(last_id)
        if last is None or last.chain_id != chain_id or not last.ended or last.successor is not None:
            return None
        if last.ended_at is None or last.ended_at >= ended_before:
            return None
        before = [view for view in await self._walk(chain_id) if view.execution_id != last_id]
        cuts = await self._all_of(chain_id, [last, *before])
        report = _report(chain_id, [*(view.execution_id for view in before), last_id], cuts, dry_run=False)
        await self._delete(report.executions, cuts)
        return report

    # -- looking -------------------------------------------------------------------------------------------------

    async def _judged(self, op: str, execution_id: str, principal: Principal | None) -> str:
        """The chain of an execution that the caller may remove; an erased one is judged by what is left of its owner."""
        try:
            first = await self._verbs.judged(op, execution_id, principal)
        except PayloadShreddedError:
            view = await self._subjects.look(execution_id)
            if view is None:
                raise
            first = view.started
            await self._gate.judge(op, execution_id, first, principal)
        return str(first.data.get("chainId") or execution_id)

    async def _ended(self, op: Literal["purge", "delete"], execution_id: str) -> LogView:
        """A finished execution that opens here, or was erased.

        Raises:
            ExecutionNotFinishedError, ExecutionNotFoundError. SealedStreamUnreadableError: it does not open here.
        """
        view = await self._subjects.look(execution_id)
        if view is None:
            raise ExecutionNotFoundError(execution_id)
        if view.closed is not None and not view.erased:
            await self._verbs.readable(execution_id)
        info = await self._engine.events.info(
            execution_id
        )  # it tells the end also of a log that is half removed
        if info is None or info.status not in TERMINAL_KINDS:
            waits = info is not None and info.status == Kind.EXECUTION_SUSPENDED
            raise ExecutionNotFinishedError(op, execution_id, "suspended" if waits else "running")
        return view

    async def _walk(self, chain_id: str) -> list[LogView]:
        """The executions of a chain that are left, in order."""
        links: list[LogView] = []
        at: str | None = chain_id
        while at is not None and len(links) < MAX_LINKS:
            view = await self._subjects.look(at)
            if view is None:  # a removal before this one came so far
                break
            links.append(view)
            at = view.successor
        if links and at is None:
            return links
        return [*links[:-1], _over(links[-1])] if links and len(links) < MAX_LINKS else []

    async def _links(self, op: Literal["purge", "delete"], chain_id: str) -> list[LogView]:
        """As ``_walk``; every one of them has ended, and opens here."""
        links = await self._walk(chain_id)
        if not links:
            raise ExecutionNotFoundError(chain_id)
        for view in links:
            await self._ended(op, view.execution_id)
        return links

    async def _beside(self, chain_id: str) -> list[_Cut]:
        """Inbox and quarantine streams of a chain, whole."""
        events = self._engine.events
        listing = getattr(events, "list_inboxes", None)
        names = [inbox_stream(chain_id)] if listing is None else await listing(chain_id)
        cuts = []
        for stream_id in (quarantine_stream(chain_id), *names):
            info = await events.info(stream_id)
            if info is not None and info.head > NO_EVENTS:
                cuts.append(_Cut(stream_id, info.first, info.head))
        return cuts

    async def _all_of(self, chain_id: str, links: Sequence[LogView]) -> list[_Cut]:
        """Everything of a chain in the order in which it goes: what stands beside its logs, then these from behind."""
        cuts = await self._beside(chain_id)
        for view in reversed(links):
            info = await self._engine.events.info(view.execution_id)
            if info is not None:
                cuts.append(_Cut(view.execution_id, info.first, info.head))
        return cuts

    # -- writing -------------------------------------------------------------------------------------------------

    async def _note(
        self, execution_id: str, data: dict[str, Json], reason: str | None, principal: Principal | None
    ) -> None:
        """Say in the log who removes what, and why."""
        engine = self._engine
        assert principal is not None, "the gatekeeper lets nobody else pass"
        known: dict[str, Json] = {**data, "operator": {"actor": principal.actor}}
        if reason is not None:
            known["reason"] = reason
        event = NewEvent(engine.event_id(), Kind.EXECUTION_PURGED, known, facts.stamp(principal.actor))
        engine.signals.warn(f"{data['scope']} is removed by {principal.actor!r}", execution_id)
        await append_control(engine, execution_id, event, races=MAX_RACES)

    async def _delete(self, executions: Iterable[str], cuts: Sequence[_Cut]) -> None:
        for execution_id in executions:
            await self._drop_snapshot(execution_id)
            if self._engine.wakes is not None:
                await self._engine.wakes.clear(execution_id)
        await self._cut(cuts)
        for execution_id in executions:
            self._engine.erased(execution_id)

    async def _cut(self, cuts: Sequence[_Cut]) -> None:
        engine = self._engine
        for cut in cuts:
            # What goes whole keeps its tail till last, which says how it ended, and that it goes.
            end = max(cut.first, cut.head + 1 - SLICE) if cut.before is None else cut.before
            for before in range(cut.first + SLICE, end + SLICE, SLICE):
                at = min(before, end)
                await engine.patiently(
                    lambda cut=cut, at=at: engine.events.truncate(cut.stream_id, at),  # type: ignore[misc]
                    cut.stream_id,
                )
            if cut.before is None:
                await engine.patiently(
                    lambda cut=cut: engine.events.delete(cut.stream_id),  # type: ignore[misc]
                    cut.stream_id,
                )

    async def _drop_snapshot(self, execution_id: str) -> None:
        snapshots = self._engine.snapshots
        if snapshots is not None:
            await self._engine.patiently(lambda: snapshots.delete(execution_id), execution_id)


def _over(view: LogView) -> LogView:
    """The last link that is left of a chain whose later ones are gone."""
    return replace(view, successor=None)


def _report(
    chain_id: str, executions: Sequence[str], cuts: Sequence[_Cut], *, dry_run: bool
) -> RemovalReport:
    going = [cut for cut in cuts if cut.events]
    return RemovalReport(
        chain_id,
        tuple(executions),
        tuple(cut.stream_id for cut in going),
        sum(cut.events for cut in going),
        dry_run,
    )
