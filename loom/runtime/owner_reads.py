"""How the quarantine verbs read an owner's log: strictly, and past sealed deliveries only where that is refused.

The one place of the runtime that uses the view at rest (system.md 4.9; seed, S5b; a test pins its callers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from loom.errors import (
    ExecutionNotFoundError,
    InboxQuarantineRefusedError,
    PayloadShreddedError,
    SealedStreamUnreadableError,
)
from loom.kernel.state import ExecutionState, fold
from loom.kernel.transient import make_transient
from loom.stores.at_rest import checkpoint_sequence

if TYPE_CHECKING:
    from loom.runtime.engine import Engine
    from loom.schemas.envelope import Envelope
    from loom.stores.contracts import Observation

PAGE: Final = 1_000
COMPACTED: Final = "checkpoint-unreadable-log-compacted"


@dataclass(frozen=True, slots=True)
class Owner:
    """The execution that a chain is at: as observed, and folded up to there. ``state`` is lean."""

    observation: Observation
    state: ExecutionState


class OwnerReads:
    """Reads for ``quarantine_inbox`` and ``release_inbox``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def current(self, execution_id: str) -> str:
        """The execution that a chain is at now.

        Raises:
            as ``load``.
        """
        driving = self._engine.driving
        try:
            return await driving.current(execution_id)
        except SealedStreamUnreadableError:
            pass
        current = execution_id
        while True:
            owner = await self._past_payloads(current)
            if owner.state.status != "continued" or owner.state.successor is None:
                return current
            current = owner.state.successor

    async def load(self, execution_id: str) -> Owner:
        """An execution folded from its whole log.

        Raises:
            ExecutionNotFoundError: there is none. PayloadShreddedError: its subject was erased.
            SealedStreamUnreadableError: something else than a delivered payload is sealed and cannot be opened here.
            InboxQuarantineRefusedError: a prefix of the log lives only in a checkpoint that cannot be opened here.
        """
        engine = self._engine
        try:
            loaded = await engine.patiently(lambda: engine.driving.load(execution_id), execution_id)
        except SealedStreamUnreadableError:
            pass
        else:
            if loaded is None:
                raise ExecutionNotFoundError(execution_id)
            return Owner(loaded.observation, loaded.state)
        return await self._past_payloads(execution_id)

    async def read(self, execution_id: str, from_sequence: int, limit: int) -> list[Envelope]:
        """Events of an owner's log, past sealed deliveries where need be; raises as ``load``."""
        engine = self._engine
        try:
            return await engine.patiently(
                lambda: engine.events.read(execution_id, from_sequence, limit), execution_id
            )
        except SealedStreamUnreadableError:
            pass
        return await engine.patiently(
            lambda: engine.events.quarantine_view().read(execution_id, from_sequence, limit), execution_id
        )

    async def _past_payloads(self, execution_id: str) -> Owner:
        engine = self._engine
        view = engine.events.quarantine_view()
        seen = await engine.patiently(lambda: engine.events.observe(execution_id), execution_id)
        if seen.head < 0:
            raise ExecutionNotFoundError(execution_id)
        state, expected = ExecutionState(answers=None), 0
        while expected <= seen.head:
            page = await engine.patiently(
                lambda start=expected: view.read(execution_id, start, PAGE),  # type: ignore[misc]
                execution_id,
            )
            for envelope in page:
                if envelope.sequence != expected:
                    raise _compacted(execution_id)
                if expected <= seen.head:
                    fold(state, envelope)
                    expected += 1
            if not page:
                raise _compacted(execution_id)
        await self._assert_complete(execution_id, seen.head)
        if state.subject is not None and state.subject in state.shredded:
            raise PayloadShreddedError(state.subject)
        return Owner(seen, make_transient(state))

    async def _assert_complete(self, execution_id: str, head: int) -> None:
        """A log trimmed to its first event looks like a fresh one: its checkpoint tells them apart."""
        tip = await checkpoint_sequence(self._engine.snapshots, execution_id)
        if head < (1 if tip is None else tip):
            raise _compacted(execution_id)


def _compacted(execution_id: str) -> InboxQuarantineRefusedError:
    return InboxQuarantineRefusedError(execution_id, "", COMPACTED)
