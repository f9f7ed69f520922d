"""The waits of one run: which is answered next, and when the run rests in memory or parks in its log.

Answers are tried in park order against what is known of inbox and clock (kernel ``next_delivery``). Where nothing can
be answered and no effect runs, the run parks: EXECUTION_SUSPENDED, behind the wake rows of its timers.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from loom.errors import LoomError, PayloadShreddedError, SealedPayloadUnreadableError
from loom.kernel.inbox import (
    Delivery,
    Disposal,
    InboxMessage,
    Plan,
    dump_waits,
    find_gate,
    message_of,
    next_delivery,
    topics_of,
    wakes_of,
)
from loom.runtime.feeds import Feeds
from loom.runtime.holds import Holds
from loom.runtime.phase import Phase
from loom.schemas.envelope import Envelope, Json, Kind
from loom.stores.contracts import StreamAppend, WakeRow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loom.kernel.commands import Wait
    from loom.kernel.inbox import Held
    from loom.runtime.alarms import Alarm
    from loom.runtime.run import Run

ELSEWHERE_POLL_MS: Final = 250
"""How often a live wait looks into an inbox that another process writes."""


class Waiting:
    """What a run waits for. ``rows`` are the instants of wake rows that it has written, or found in its log."""

    __slots__ = ("_alarm", "_feeds", "_holds", "_refused", "_run", "_sites", "parking", "rows")

    def __init__(self, run: Run) -> None:
        self._run = run
        self._feeds: Feeds | None = None
        self._holds: Holds | None = None
        self._sites: set[str] = set()
        self._alarm: Alarm | None = None
        self._refused = False
        self.rows: set[int] = set()
        self.parking = False
        """Whether wake rows are being written before a park."""

    @property
    def feeds(self) -> Feeds:
        """What is known of the chain's inbox."""
        if self._feeds is None:
            self._feeds = Feeds(self._run)
        return self._feeds

    @property
    def holds(self) -> Holds:
        """What is known of held messages."""
        if self._holds is None:
            self._holds = Holds(self._run)
        return self._holds

    @property
    def met_holds(self) -> bool:
        """Whether there are, or were, held messages: their copies are to be freed."""
        return self._holds is not None

    @property
    def held_up(self) -> bool:
        """Whether the last look passed over a held topic."""
        return self._holds is not None and bool(self._holds.skipped)

    @property
    def reading(self) -> bool:
        """Whether the inbox, or a copy of it, is being read just now."""
        if self._holds is not None and self._holds.reading:
            return True
        return self._feeds is not None and self._feeds.reading

    def asked(self, site_id: str) -> None:
        """The flow waits at this site."""
        self._sites.add(site_id)

    def dropped(self, site_id: str) -> None:
        """It no longer does: answered, or given up."""
        self._sites.discard(site_id)

    def doubt(self) -> None:
        """This process may not have heard of every message: before the next rest, look."""
        if self._feeds is not None:
            self._feeds.doubt()

    def quiet(self) -> None:
        """Give up the alarm."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def detach(self) -> None:
        """Forget the run: it is gone."""
        if self._feeds is not None:
            self._feeds.detach()
        if self._holds is not None:
            self._holds.detach()
        del self._run

    # Answers --------------------------------------------------------------------------------------------------------

    def settle(self) -> bool:
        """Answer the first wait that can be answered; False where nothing can, and the run rests or parks."""
        run = self._run
        if not self._sites:
            self._rest(())
            return False
        waits = run.machine.waiting
        if len(waits) != len(self._sites):
            self._sites = {wait.site_id for wait in waits}
        topics = topics_of(waits)
        held = self._known(topics)
        if held is None:
            return False
        try:
            plan = self._plan(waits, self._feeds.unread if self._feeds is not None else {}, held)
        except (SealedPayloadUnreadableError, PayloadShreddedError) as error:
            self._refuse(error, waits)
            return False
        if plan.delivery is None and not plan.disposals:
            if self._holds is not None:
                self._holds.passed(plan.skipped, parked=run.phase is Phase.PARKED)
            self._rest(waits)
            return False
        if run.phase is Phase.PARKED and not run.engine.may_wake(run):
            return False
        self._deliver(plan)
        return True

    def hand_over(self, append: StreamAppend) -> bool:
        """Answer the wait of a run that rests with a message that is sent now: both become durable together, or neither.

        False, with nothing done, where the message is not what it would be answered with next. Else the journal tells
        what came of it; no step starts before it is durable.
        """
        run, event = self._run, append.events[0]
        topic, waits = str(event.data["topic"]), run.machine.waiting
        topics = topics_of(waits)
        if (
            not run.evictable()
            or topic not in topics
            or run.state.quarantined
            or not self.feeds.ready(topics)
        ):
            return False
        place = self.feeds.place_of_next(topic)
        if place is None:
            return False
        sent = Envelope(
            event.id, append.stream_id, place, event.type, run.engine.now(), event.data, event.metadata
        )
        message, unread = message_of(sent), self.feeds.unread
        try:
            plan = self._plan(waits, {**unread, topic: [*unread[topic], message]}, {})
        except (SealedPayloadUnreadableError, PayloadShreddedError):
            return False  # of another message; the look that follows the append tells of it
        if plan.delivery is None or plan.delivery.message is not message or not run.engine.may_wake(run):
            return False
        self.feeds.taken(message)
        beside = StreamAppend(append.stream_id, append.events, expected_head=place - 1)
        run.do(partial(self._deliver, plan, (beside,)))
        return True

    def _plan(
        self, waits: tuple[Wait, ...], unread: Mapping[str, Sequence[InboxMessage]], held: Held
    ) -> Plan:
        run = self._run
        return next_delivery(
            run.state,
            waits,
            unread,
            now_ms=run.engine.now(),
            ttl_ms=run.engine.config.inbox_message_ttl_ms,
            erased=run.info.erased,
            held=held,
            auto_release=run.engine.config.inbox_auto_release,
        )

    def _known(self, topics: tuple[str, ...]) -> Held | None:
        """The copies that held topics start with, once all that is looked at is known; None while it is being read."""
        if topics and not self.feeds.ready(topics):
            return None
        return self.holds.ready(topics) if topics and self._run.state.quarantined else {}

    def _deliver(self, plan: Plan, companions: tuple[StreamAppend, ...] = ()) -> None:
        run = self._run
        for disposal in plan.disposals:
            passed = disposal.message
            self._release(disposal)
            consumed = () if disposal.was_held else ((passed.stream_id, passed.sequence),)
            run.record(Kind.MESSAGE_CONSUMED, disposal.data(), consumed=consumed)
            self._done_with(disposal)
        delivery = plan.delivery
        if delivery is None:
            return
        self._sites.discard(delivery.site_id)
        self._release(delivery)
        at = run.engine.now()
        parked = run.unpark()
        resumed = delivery.resumed_data() | {"at": at}
        message = delivery.message
        if message is None:
            envelope = run.record(Kind.EXECUTION_RESUMED, resumed)
        else:
            envelope = run.record(
                Kind.MESSAGE_CONSUMED,
                delivery.consumed_data() | {"at": at},
                consumed=() if delivery.was_held else ((message.stream_id, message.sequence),),
                companions=companions,
            )
            if parked:
                run.record(Kind.EXECUTION_RESUMED, resumed)
            self._done_with(delivery)
        if parked:
            run.steps.hold_until(run.journal.position)
        run.apply(envelope)

    def _release(self, disposed_of: Disposal | Delivery) -> None:
        """Journal the release that comes with what is disposed of, in one batch with it."""
        if disposed_of.release is not None:
            self._run.record(Kind.INBOX_RELEASED, disposed_of.release)

    def _done_with(self, disposed_of: Disposal | Delivery) -> None:
        if disposed_of.was_held:
            self.holds.freed()
        elif disposed_of.message is not None:
            self._trim(disposed_of.message)

    def answer_gate(self, gate: str, fact: dict[str, Json]) -> bool:
        """Answer the first wait at a gate; False where the flow does not wait there. Only called in ``perform``.

        ``fact`` is the answer and whose it is, as EXECUTION_RESUMED holds it.
        """
        run = self._run
        found = find_gate(run.machine.waiting, gate)
        if found is None:
            return False
        site_id, arm = found
        self._sites.discard(site_id)
        if run.unpark():
            run.steps.hold_until(run.journal.position + 1)
        run.enter(Kind.EXECUTION_RESUMED, {"siteId": site_id, "arm": arm, **fact})
        return True

    def _trim(self, message: InboxMessage) -> None:
        run = self._run
        before = self.feeds.disposed(message)
        if before is not None:
            run.journal.when_durable(lambda: run.engine.trim(message.stream_id, before))

    def _refuse(self, error: LoomError, waits: tuple[Wait, ...]) -> None:
        """A message that this node cannot open: nothing is appended for it; the flow parks, the row stays.

        While other branches still run it does not park yet, and is refused at each look; that is told once.
        """
        run = self._run
        runs = run.phase is Phase.RUNNING
        if not (runs and self._refused):
            run.engine.refused(run.id, error)
        self._refused = runs
        self.feeds.forget()  # next time it is read anew: the key may have come
        if self._holds is not None:
            self._holds.forget()
        if runs:
            self._rest(waits)

    # Rest and park --------------------------------------------------------------------------------------------------

    def _rest(self, waits: tuple[Wait, ...]) -> None:
        """Nothing can be answered now: wait for effects, or park."""
        run = self._run
        if run.phase is Phase.PARKED:
            run.engine.rests(run)
            return
        if run.phase is not Phase.RUNNING or self.parking:
            return
        if run.steps.busy or run.pending:
            if waits:
                self._watch(waits)
            return
        wakes = [at for at in wakes_of(waits) if at not in self.rows]
        if not wakes or run.engine.wakes is None:
            self._park(waits)
            return
        # An alarm that nobody knows of would be lost with this process: the row comes before the park.
        self.parking = True
        self._watch(waits)
        run.engine.spawn(self._schedule(run, wakes), run.id)

    async def _schedule(self, run: Run, wakes: list[int]) -> None:
        try:
            stored = await run.engine.schedule([WakeRow(run.id, at, "timer") for at in wakes])
        finally:
            self.parking = False
        if stored:
            self.rows.update(wakes)
            run.look()
        else:
            run.engine.later(run.engine.retry_ms, run.look)

    def _park(self, waits: tuple[Wait, ...]) -> None:
        run = self._run
        if run.machine.is_done:
            return
        if not waits:
            run.engine.signals.warn("the flow waits for nothing that can happen; cancel it", run.id)
        run.phase = Phase.PARKED
        self.quiet()
        run.record(Kind.EXECUTION_SUSPENDED, {"waits": dump_waits(waits)})
        run.journal.when_durable(self._parked)

    def _parked(self) -> None:
        """The park is durable: read the inbox again (system.md 0, lost wake-ups), then rest in memory or leave it."""
        run = self._run
        if run.phase is Phase.PARKED:
            self.doubt()
            if self._holds is not None:
                self._holds.freed()
            run.engine.parked(run)
            run.look()

    def _watch(self, waits: tuple[Wait, ...]) -> None:
        """While branches run: an alarm for the earliest timer, and a look into an inbox that is not ours."""
        run = self._run
        due = min(wakes_of(waits), default=None)
        if topics_of(waits) and not run.engine.owns(run.chain_id):
            poll = run.engine.now() + ELSEWHERE_POLL_MS
            due = poll if due is None else min(due, poll)
        if due is None or (self._alarm is not None and self._alarm.callback and self._alarm.due <= due):
            return
        self.quiet()
        self._alarm = run.engine.alarms.at(due, self._alarmed)

    def _alarmed(self) -> None:
        self._alarm = None
        if not self._run.engine.owns(self._run.chain_id):
            self.doubt()
        self._run.look()
