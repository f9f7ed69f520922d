"""A driver without I/O: it keeps the machine's bargain and writes the log that a real one would write."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from loom.kernel import (
    Abandon,
    Command,
    Complete,
    ContinueAsNew,
    DecisionSources,
    Fail,
    FlowDefinition,
    FlowMachine,
    PublishRecord,
    RecordDecision,
    RunInfo,
    RunStep,
    SendMessage,
    StartChild,
    Wait,
)
from loom.schemas.envelope import Envelope, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

STARTED_AT = 1_700_000_000_000


def sources(seed: int = 0) -> DecisionSources:
    rng = random.Random(seed)
    counter = iter(range(1, 10**9))
    return DecisionSources(
        now_ms=lambda: STARTED_AT + next(counter),
        random=rng.random,
        uuid=lambda: f"id-{next(counter)}",
    )


def info(flow: FlowDefinition, value=None, execution_id: str = "e1", **more) -> RunInfo:
    return RunInfo(execution_id, more.pop("chain_id", execution_id), flow.name, value, STARTED_AT, **more)


def machine(flow: FlowDefinition, value=None, *, seed: int = 0, **more) -> FlowMachine:
    return FlowMachine(flow, info(flow, value, **more), sources(seed))


def event(sequence: int, kind: str, /, **data) -> Envelope:
    return Envelope(f"v{sequence}", "e1", sequence, kind, STARTED_AT + 10 * sequence, data)


def started(flow: FlowDefinition, value=None, **data) -> Envelope:
    return event(
        0, Kind.EXECUTION_STARTED, workflow=flow.name, input=value, chainId="e1", subject="e1", **data
    )


def step(sequence: int, site: str, name: str, output=None, **data) -> Envelope:
    return event(sequence, Kind.STEP_COMPLETED, siteId=site, name=name, output=output, attempt=1, **data)


def consumed(sequence: int, site: str, topic: str, payload=None, arm: int = 0, **data) -> Envelope:
    given = {"messageId": f"{sequence:064x}", "inboxSeq": sequence, **data}
    return event(sequence, Kind.MESSAGE_CONSUMED, siteId=site, topic=topic, payload=payload, arm=arm, **given)


def resumed(sequence: int, site: str, kind: str, arm: int = 0, **data) -> Envelope:
    return event(sequence, Kind.EXECUTION_RESUMED, siteId=site, kind=kind, arm=arm, **data)


def key(command: Command) -> tuple:
    """What must agree of a command between two runs (functions and futures aside)."""
    match command:
        case RunStep():
            return ("step", command.site_id, command.name, command.args, command.attempt, command.not_before)
        case Wait():
            arms = tuple((a.kind, a.topic, a.wake_at, a.gate, a.child_id) for a in command.arms)
            return ("wait", command.site_id, arms)
        case _:
            return (type(command).__name__, repr(command))


def keys(commands: Iterable[Command]) -> list[tuple]:
    return [key(c) for c in commands]


@dataclass
class Driver:
    """Drives one execution by chance (``rng``) or by hand; ``history`` is its log, ``pending`` what is outstanding."""

    flow: FlowDefinition
    value: object = None
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    seed: int = 0
    result: Callable[[Command, random.Random], object] = lambda _command, rng: rng.randrange(100)
    fail_rate: float = 0.0

    def __post_init__(self) -> None:
        self.machine = machine(self.flow, self.value, seed=self.seed)
        self.history: list[Envelope] = [started(self.flow, self.value)]
        self.pending: dict[str, Command] = {}
        self.end: Command | None = None
        self.clock = STARTED_AT
        self.emitted: list[tuple] = []
        self.snapshots: list[tuple[int, list[tuple]]] = []
        self._take(self.machine.start())

    def _append(self, kind: str, /, **data) -> Envelope:
        self.clock += 7
        sequence = len(self.history)
        envelope = Envelope(f"v{sequence}", "e1", sequence, kind, self.clock + 3, {**data, "at": self.clock})
        self.history.append(envelope)
        return envelope

    def _take(self, commands: list[Command]) -> None:
        for command in commands:
            self.emitted.append(key(command))
            match command:
                case Abandon(site_id):
                    assert self.pending.pop(site_id, None) is not None
                case RecordDecision(site_id, kind, value):
                    sequence = len(self.history)
                    data = {"siteId": site_id, "kind": kind, "value": value}
                    self.history.append(
                        Envelope(f"v{sequence}", "e1", sequence, Kind.DECISION_RECORDED, self.clock, data)
                    )
                case Complete() | Fail() | ContinueAsNew():
                    self.end = command
                    self.pending.clear()
                case _:
                    self.pending[command.site_id] = command
        outstanding = [key(c) for c in self.pending.values()]
        self.snapshots.append((len(self.history), outstanding + ([key(self.end)] if self.end else [])))

    def feed(self, kind: str, /, **data) -> None:
        self._take(self.machine.apply(self._append(kind, **data)))

    def answer(self, site: str, value=None, arm: int | None = None) -> None:
        """Answer one outstanding command."""
        command = self.pending.pop(site)
        match command:
            case RunStep(name=name):
                self.feed(Kind.STEP_COMPLETED, siteId=site, name=name, output=value, attempt=command.attempt)
            case Wait(arms=arms):
                index = 0 if arm is None else arm
                chosen = arms[index]
                if chosen.topic is not None:
                    self.feed(
                        Kind.MESSAGE_CONSUMED,
                        siteId=site,
                        arm=index,
                        topic=chosen.topic,
                        payload=value,
                        messageId=f"{len(self.history):064x}",
                        inboxSeq=len(self.history),
                    )
                else:
                    self.feed(Kind.EXECUTION_RESUMED, siteId=site, arm=index, kind=chosen.kind, answer=value)
            case StartChild(workflow=workflow):
                self.feed(
                    Kind.CHILD_STARTED,
                    siteId=site,
                    workflow=workflow,
                    childId=command.execution_id or f"c{site}",
                )
            case SendMessage(execution_id=target, topic=topic, message_id=message_id):
                self.feed(
                    Kind.MESSAGE_SENT, siteId=site, executionId=target, topic=topic, messageId=message_id
                )
            case PublishRecord(topic=topic):
                self.feed(Kind.RECORD_PUBLISHED, siteId=site, topic=topic)

    def fail(
        self, site: str, error_type: str = "Boom", message: str = "no", *, final: bool = True, **data
    ) -> None:
        command = self.pending[site]
        if final:
            del self.pending[site]
        else:
            attempt = getattr(command, "attempt", 1)
            self.pending[site] = replace(command, attempt=attempt + 1, not_before=data.get("retryAt", 0))
        self.feed(
            Kind.STEP_FAILED,
            siteId=site,
            name=getattr(command, "name", ""),
            error={"type": error_type, "message": message},
            attempt=getattr(command, "attempt", 1),
            final=final,
            **data,
        )

    def noise(self) -> None:
        """A record that no flow sees."""
        kind = self.rng.choice(
            [Kind.EXECUTION_DENIED, Kind.OUTCOME_RECORDED, "FUTURE_KIND", Kind.EXECUTION_SUSPENDED]
        )
        self._append(kind, waits=[], op="query", outcome=None)

    def run(self, max_events: int = 200) -> Driver:
        """Answer what is outstanding in an order of chance until the flow ends or stands still."""
        while self.end is None and self.pending and len(self.history) < max_events:
            if self.rng.random() < 0.1:
                self.noise()
            site = self.rng.choice(list(self.pending))
            command = self.pending[site]
            if isinstance(command, RunStep) and self.rng.random() < self.fail_rate:
                self.fail(site, final=self.rng.random() < 0.5, retryAt=self.clock + 100)
            elif isinstance(command, Wait):
                arm = self.rng.randrange(len(command.arms))
                self.answer(site, self._value(command, arm), arm)
            else:
                self.answer(site, self.result(command, self.rng))
        return self

    def _value(self, command: Wait, arm: int) -> object:
        if command.arms[arm].child_id is not None:
            return {"status": "completed", "output": self.rng.randrange(100)}
        return self.result(command, self.rng)


def replayed(
    flow: FlowDefinition, value, batches: Iterable[list[Envelope]], *, seed: int = 99
) -> tuple[list[tuple], FlowMachine]:
    """Replay a history given in batches into a fresh machine (other sources); return what is outstanding."""
    fresh = machine(flow, value, seed=seed)
    for batch in batches:
        assert fresh.replay(batch, more=True) == []
    return keys(fresh.replay([])), fresh
