"""Bugs that the simulation is to find, each a rule taken away (docs/simulation.md has what finds them)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import loom.kernel.inbox
import loom.kernel.machine
import loom.runtime.evidence
import loom.stores.guarded
import loom.stores.rules
import loom.stores.sealing.sealer
from loom.kernel.evidence import Evidence
from loom.runtime.driving import Driving
from loom.runtime.lease_keeper import LeaseKeeper
from loom.runtime.listener import Listener
from loom.runtime.presence import PresenceKeeper
from loom.runtime.run import Run
from loom.runtime.sending import Sending
from loom.runtime.steps import Steps
from loom.stores.memory.wake_store import WakeTable


@dataclass(frozen=True)
class Bug:
    """A rule taken away, and the first seed that found it; None: `make soak` looks for it."""

    plant: Callable
    seed: int | None


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


def answered_too_soon(patch):
    """Whoever sends a message to a flow that rests for it is answered before it is durable."""

    async def handed_over(self, chain_id, append):
        run = self._engine.chains.get(chain_id)
        return run is not None and run.waiting.hand_over(append)

    patch.setattr(Sending, "_handed_over", handed_over)


def a_wake_is_asked_for_once(patch):
    async def notify(self, chain_id):
        self._engine.driving.wake(await self._engine.driving.head_of(chain_id))

    patch.setattr(Listener, "_notify_chain", notify)


def lost_rows_are_not_looked_for(patch):
    async def leave(self, row):
        if self._engine.wakes is not None:
            await self._engine.schedule([row])

    patch.setattr(Driving, "_leave_row", leave)


def no_guard_on_delivery(patch):
    """Whatever a message holds is delivered."""
    for module in (loom.kernel.inbox, loom.kernel.machine):
        patch.setattr(module, "assert_deliverable", lambda *_, **__: None)


def no_judge_of_markers(patch):
    """A log is read whatever its markers say."""
    patch.setattr(loom.stores.guarded, "assert_stream_readable", lambda *_, **__: None)
    patch.setattr(loom.stores.guarded, "unreadable", lambda *_, **__: None)


def requests_leave_unsealed(patch):
    """Outgoing requests leave as they are."""

    async def outgoing(_self, outgoing, _named):
        return outgoing

    patch.setattr(loom.stores.sealing.sealer.Sealer, "_outgoing", outgoing)


def no_refusal_row(patch):
    """A refusal leaves nothing behind."""
    plain = Driving.leave_inbox_row

    def leave(self, execution_id, kind="inbox"):
        if kind != "refusal":
            plain(self, execution_id, kind)

    patch.setattr(Driving, "leave_inbox_row", leave)


BUGS = {
    "no veto": Bug(no_veto, 9),
    "no gate": Bug(no_gate, 42),
    "no margin": Bug(no_margin, 52),
    "unconditional takeover": Bug(unconditional_takeover, 11),
    "last writer wins": Bug(last_writer_wins, 17),
    "no fence": Bug(no_fence, 833),
    "effects before the wake": Bug(effects_before_the_wake, 97),
    "answered too soon": Bug(answered_too_soon, 1),
    "a wake is asked for once": Bug(a_wake_is_asked_for_once, 162),
    "lost rows are not looked for": Bug(lost_rows_are_not_looked_for, None),
    "no guard on delivery": Bug(no_guard_on_delivery, 86),
    "no judge of markers": Bug(no_judge_of_markers, 0),
    "requests leave unsealed": Bug(requests_leave_unsealed, 0),
    "no refusal row": Bug(no_refusal_row, 4),
}
