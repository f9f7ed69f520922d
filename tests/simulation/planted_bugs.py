"""Bugs that the simulation is to find, each a rule taken away (docs/simulation.md has what finds them)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import loom.runtime.evidence
import loom.stores.rules
from loom.kernel.evidence import Evidence
from loom.runtime.driving import Driving
from loom.runtime.lease_keeper import LeaseKeeper
from loom.runtime.listener import Listener
from loom.runtime.presence import PresenceKeeper
from loom.runtime.run import Run
from loom.runtime.steps import Steps
from loom.stores.memory.wake_store import WakeTable


@dataclass(frozen=True)
class Bug:
    """``found`` says whether the simulation finds it."""

    plant: Callable
    found: bool = True


def no_veto(patch):
    patch.setattr(loom.runtime.evidence, "judge", lambda *_, **__: (Evidence.EXPIRED, "planted"))


def no_gate(patch):
    patch.setattr(Run, "may_append", lambda _run: True)


def no_margin(patch):
    def late(kind, attribute, ttl):
        plain = kind.__init__

        def init(self, *args, **options):
            plain(self, *args, **options)
            setattr(self, attribute, getattr(self, ttl) / 1000 * 1.3)

        patch.setattr(kind, "__init__", init)

    late(LeaseKeeper, "lasts_s", "ttl_ms")
    late(PresenceKeeper, "_lasts_s", "_ttl_ms")


def unconditional_takeover(patch):
    """Whatever was observed, EXECUTION_RECOVERED and the fence are taken as the stream stands."""
    plain = Driving.recover

    async def recover(self, loaded, *args, **options):
        append, acquire = self._engine.events.append, self._engine.events.acquire_fence_if

        async def blindly(request, **more):
            seen = await self._engine.events.observe(request.stream_id)
            return await append(replace(request, observation=seen), **more)

        async def fence(stream_id, _observation, owner):
            return await self._engine.events.acquire_fence(stream_id, owner)

        self._engine.events.append, self._engine.events.acquire_fence_if = blindly, fence
        try:
            return await plain(self, loaded, *args, **options)
        finally:
            self._engine.events.append, self._engine.events.acquire_fence_if = append, acquire

    patch.setattr(Driving, "recover", recover)


def last_writer_wins(patch):
    """The upsert of a wake row keeps neither kind, nor head, nor holds."""

    def upsert(self, row):
        from loom.stores.memory.wake_store import _Slot

        self.slots[row.execution_id, row.wake_at] = _Slot(row)

    patch.setattr(WakeTable, "upsert", upsert)


def no_fence(patch):
    """The store takes appends under any token."""
    plain = loom.stores.rules._refusal

    def refusal(draft, append):
        row = draft.row(append.stream_id)
        held = append.fence if row is None or append.fence is None else row.fence
        return plain(draft, replace(append, fence=held))

    patch.setattr(loom.stores.rules, "_refusal", refusal)


def effects_before_the_wake(patch):
    patch.setattr(Steps, "hold_until", lambda _steps, _position: None)


def a_wake_is_asked_for_once(patch):
    async def notify(self, chain_id):
        self._engine.driving.wake(await self._engine.driving.head_of(chain_id))

    patch.setattr(Listener, "_notify_chain", notify)


def lost_rows_are_not_looked_for(patch):
    patch.setattr(Driving, "leave_inbox_row", lambda _driving, _execution_id: None)


BUGS = {
    "no veto": Bug(no_veto),
    "no gate": Bug(no_gate),
    "no margin": Bug(no_margin),
    "unconditional takeover": Bug(unconditional_takeover),
    "last writer wins": Bug(last_writer_wins, found=False),
    "no fence": Bug(no_fence, found=False),
    "effects before the wake": Bug(effects_before_the_wake),
    "a wake is asked for once": Bug(a_wake_is_asked_for_once, found=False),
    "lost rows are not looked for": Bug(lost_rows_are_not_looked_for, found=False),
}
