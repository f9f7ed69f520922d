"""Logs as the writer leaves them, and what the fold of them must be."""

from __future__ import annotations

import random

from loom.kernel.state import ExecutionState, fold
from loom.processors.fold_partition import FoldSettings
from loom.schemas.codec import Codec
from loom.schemas.envelope import Envelope, Kind
from loom.schemas.records import ExecutionSummary
from loom.topics.partitioner import partition_of

CODEC = Codec()
_ARM_FIELD = {"inbox": "topic", "gate": "gate", "child": "childId", "timer": "wakeAt"}


def settings(bench, name="n1", **more):
    return FoldSettings(bench.bootstrap, bench.catalogue, name, interval_ms=20, **more)


def record(envelope, *, fence=None):
    """Key, value and headers of an event, as ``loom.stores.kafka.records`` makes them."""
    headers = [
        ("type", envelope.type.encode()),
        ("sequence", str(envelope.sequence).encode()),
        ("id", envelope.id.encode()),
        ("batch", b"0/1"),
        ("timestamp", str(envelope.timestamp).encode()),
    ]
    if "node" in envelope.metadata:
        headers += [("fence", b"1"), ("node", envelope.metadata["node"].encode())]
    if "seal" in envelope.metadata:
        headers.append(("sealed", b"1"))
    return f"{envelope.stream_id}/{envelope.sequence}".encode(), CODEC.encode_envelope(envelope), headers


def oracle(envelopes):
    """The summary that the kernel's own fold gives."""
    state = ExecutionState()
    finished_at = None
    node, sealed = None, False
    for envelope in envelopes:
        fold(state, envelope)
        if state.finished and finished_at is None:
            finished_at = envelope.timestamp
        node = envelope.metadata.get("node", node)
        sealed = sealed or "seal" in envelope.metadata
    waits = tuple(
        f"{arm['kind']}:{arm[_ARM_FIELD[arm['kind']]]}"
        for wait in state.waits
        for arm in wait.get("arms", ())
    )
    actor = (state.principal or {}).get("actor")
    return ExecutionSummary(
        state.execution_id,
        state.chain_id,
        state.workflow,
        state.status,
        state.head,
        state.started_at,
        state.timestamp,
        finished_at,
        actor if isinstance(actor, str) else None,
        (state.parent or {}).get("executionId"),
        state.successor,
        node,
        waits,
        state.steps,
        sealed,
        (state.error or {}).get("type"),
    )


class History:
    """One execution's log, grown event by event in an order that a runtime could write."""

    def __init__(self, execution_id, rng):
        self.id, self._rng, self.events, self.ended = execution_id, rng, [], False
        self._parked = False
        start = {"workflow": rng.choice(["order", "ship"]), "chainId": execution_id, "input": {"x": 1}}
        start["principal"] = rng.choice([{"actor": "alice"}, {"actor": {"__loomEnc": "c"}}, None])
        if rng.random() < 0.3:
            start["parent"] = {"executionId": "parent", "chainId": "p", "siteId": "0:1"}
        self._add(Kind.EXECUTION_STARTED, start)

    def grow(self):
        """Add one event."""
        rng = self._rng
        if self.ended:
            self._add(Kind.OUTCOME_RECORDED, {"outcome": "ok"})
        elif self._parked:
            self._parked = rng.random() < 0.3
            if self._parked:
                self._add(
                    Kind.MESSAGE_CONSUMED, {"topic": "t", "inboxSeq": 1, "reason": "expired", "siteId": "0:1"}
                )
            elif rng.random() < 0.5:
                self._add(
                    Kind.MESSAGE_CONSUMED, {"topic": "t", "inboxSeq": 2, "siteId": "0:1", "payload": "secret"}
                )
            else:
                self._add(Kind.EXECUTION_RESUMED, {"siteId": "0:1", "arm": 0, "kind": "timer"})
        else:
            kind, data = rng.choice(self._running())
            self._add(kind, data)

    def _running(self):
        arms = [
            {"kind": "inbox", "topic": "ship"},
            {"kind": "timer", "wakeAt": 5},
            {"kind": "gate", "gate": "g"},
        ]
        return [
            (Kind.STEP_COMPLETED, {"siteId": "0:0", "name": "s", "output": "secret", "attempt": 1}),
            (Kind.STEP_COMPLETED, {"siteId": "0:1", "name": "s", "output": "secret", "attempt": 1}),
            (
                Kind.STEP_FAILED,
                {"siteId": "0:2", "error": {"type": "E", "message": "secret"}, "final": False},
            ),
            (Kind.STEP_FAILED, {"siteId": "0:2", "error": {"type": "E", "message": "secret"}, "final": True}),
            (Kind.DECISION_RECORDED, {"siteId": "0:3", "kind": "now", "value": 1}),
            (Kind.EXECUTION_SUSPENDED, {"waits": [{"siteId": "0:1", "arms": arms}]}),
            (Kind.EXECUTION_SUSPENDED, {"waits": [{"siteId": "0:1", "arms": arms[:1]}]}),
            (Kind.MESSAGE_CONSUMED, {"topic": "t", "inboxSeq": 3, "siteId": "0:4", "payload": "secret"}),
            (Kind.EXECUTION_RECOVERED, {"reason": "r", "evidence": "e"}),
            ("SOMETHING_NEW", {"a": 1}),
            (Kind.EXECUTION_COMPLETED, {"output": "secret"}),
            (Kind.EXECUTION_FAILED, {"error": {"type": "ValueError", "message": "secret"}}),
            (Kind.EXECUTION_CANCELLED, {"reason": "secret"}),
            (Kind.EXECUTION_CONTINUED, {"successorId": "next", "workflow": "order"}),
        ]

    def _add(self, kind, data):
        sequence = len(self.events)
        metadata = {"schema": "1.25.0"}
        if kind != Kind.OUTCOME_RECORDED:
            metadata["node"] = f"n{self._rng.randrange(3)}:i"
        if self._rng.random() < 0.02:
            metadata["seal"] = {"v": 1, "cipher": "c", "covers": [f"{kind}.x"]}
        data = {key: value for key, value in data.items() if value is not None}
        self.events.append(
            Envelope(f"{self.id}-{sequence}", self.id, sequence, kind, 1_000 + sequence, data, metadata)
        )
        self._parked = self._parked or kind == Kind.EXECUTION_SUSPENDED
        self.ended = self.ended or (kind.startswith("EXECUTION_") and kind.rsplit("_", 1)[1] in _ENDS)


_ENDS = {"COMPLETED", "FAILED", "CANCELLED", "CONTINUED"}


def histories(seed, executions, events):
    """Histories, and the order in which their events stand in the log."""
    rng = random.Random(seed)
    grown, log = [History(f"e{seed}x{number}", rng) for number in range(executions)], []
    for history in grown:
        log += history.events
    for _ in range(events):
        history = rng.choice(grown)
        history.grow()
        log.append(history.events[-1])
    return grown, log


def write(bench, log, *, transactional_id="writer", abort_every=7, per_transaction=20):
    """Write events as a writer would: in transactions, some of which are aborted and written again."""
    producer = bench.producer(transactional_id)
    topic, partitions = bench.catalogue.executions, bench.catalogue.partitions
    for number, start in enumerate(range(0, len(log), per_transaction)):
        batch = log[start : start + per_transaction]
        attempts = [False, True] if number % abort_every == 0 else [True]
        for commit in attempts:
            producer.begin_transaction()
            for envelope in batch:
                key, value, headers = record(envelope)
                if not commit:
                    headers = [
                        (name, b"EXECUTION_FAILED" if name == "type" else text) for name, text in headers
                    ]
                producer.produce(
                    topic, value, key, partition_of(envelope.stream_id, partitions), headers=headers
                )
            if commit:
                producer.commit_transaction(30)
            else:
                producer.flush(30)
                producer.abort_transaction(30)


def published(bench):
    """What ``states`` says of every execution, and every record of it."""
    last, heads = {}, {}
    for message in bench.read_all(bench.catalogue.states):
        name = message.key().decode()
        if message.value() is None:
            last.pop(name, None)
            continue
        summary = CODEC.decode(message.value(), ExecutionSummary)
        assert message.partition() == partition_of(name, bench.catalogue.partitions)
        assert summary.head > heads.get(name, -1), "a lower head replaced a higher"
        assert b"secret" not in message.value()
        last[name] = heads[name] = summary
        heads[name] = summary.head
    return last
