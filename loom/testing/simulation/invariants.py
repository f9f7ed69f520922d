"""What must hold after every step of a simulation, whatever happens to nodes, network and clocks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from loom.ids import inbox_stream, stream_kind
from loom.kernel.guard import SEALED_KEY, SHREDDED_KEY
from loom.runtime.drivers import NEVER
from loom.schemas.envelope import TERMINAL_KINDS, Kind
from loom.stores.sealing.marker import SEAL
from loom.stores.wake_rules import KIND_RANK
from loom.testing.simulation.capabilities import PLANTED, covers_of

if TYPE_CHECKING:
    from loom.schemas.envelope import Envelope
    from loom.stores.contracts import Committed, WakeRow
    from loom.testing.simulation.fleet import Fleet
    from loom.testing.simulation.node import Node

NO_DRIVERS: Final = frozenset({Kind.EXECUTION_RECOVERED, Kind.EXECUTION_STARTED})


class Invariants:
    """Judges each commit, each effect and each acknowledgement as it happens; the end by ``at_rest``.

    ``lenient`` names nodes whose clocks may run away from the stores' by more than the margin: what the seed accepts of
    those (D11, 3, residual a) is not held against them.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._heads: dict[str, int] = {}
        self._answered: dict[str, set[str]] = {}
        self._cursors: dict[tuple[str, str], int] = {}
        self._consumed: dict[str, set[str]] = {}
        self._chains: dict[str, str] = {}
        self._ended: set[str] = set()
        self._covers: dict[str, set[tuple[str, ...]]] = {}
        self.effects: Counter[tuple[str, str, str]] = Counter()
        self.doubled = self.takeovers = 0

    # Each commit ------------------------------------------------------------------------------------------------------

    def committed(self, one: Committed) -> None:
        """Sequences without gaps; one end; each site answered once; only the entitled driver's events."""
        for envelope in one.envelopes:
            self._gapless(envelope)
            if stream_kind(one.stream_id) == "executions":
                self._in_log(envelope)

    def _gapless(self, envelope: Envelope) -> None:
        head = self._heads.get(envelope.stream_id, -1)
        if envelope.sequence != head + 1:
            self._fleet.violate(f"gap: {envelope.stream_id} goes from {head} to {envelope.sequence}")
        self._heads[envelope.stream_id] = envelope.sequence

    def _in_log(self, envelope: Envelope) -> None:
        stream_id, data = envelope.stream_id, envelope.data
        if envelope.sequence == 0:
            self._chains[stream_id] = str(data.get("chainId") or stream_id)
        self._entitled(envelope)
        self.takeovers += envelope.type == Kind.EXECUTION_RECOVERED
        if envelope.type in TERMINAL_KINDS:
            if stream_id in self._ended:
                self._fleet.violate(f"two ends: {stream_id} at {envelope.sequence}")
            self._ended.add(stream_id)
        elif stream_id in self._ended:
            self._fleet.violate(f"{envelope.type} after the end of {stream_id}")
        if envelope.type == Kind.MESSAGE_CONSUMED:
            self._one_message(envelope)
        site = data.get("siteId")
        beside = envelope.type == Kind.EXECUTION_RESUMED and data.get("kind") in {"inbox", "child"}
        if site is None or beside:
            return
        if envelope.type == Kind.STEP_FAILED and not data.get("final"):
            return
        answered = self._answered.setdefault(stream_id, set())
        if str(site) in answered:
            self._fleet.violate(f"site {site} of {stream_id} is answered twice, by {envelope.type}")
        answered.add(str(site))

    def _entitled(self, envelope: Envelope) -> None:
        """A driver's event is by whoever holds the fence: at most one entitled driver's append lands."""
        node = envelope.metadata.get("node")
        row = self._fleet.log.index.row(envelope.stream_id)
        if node is None or row is None or row.fence_owner is None or envelope.type in NO_DRIVERS:
            return
        owner, _, since = row.fence_owner.partition("/")
        if owner != node and since.partition("/")[0] != str(NEVER):
            self._fleet.violate(
                f"{envelope.type} of {envelope.stream_id} by {node}, but the fence is {owner}'s"
            )

    def _one_message(self, envelope: Envelope) -> None:
        data = envelope.data
        chain = self._chains.get(envelope.stream_id, envelope.stream_id)
        topic, place = str(data["topic"]), int(data["inboxSeq"])
        if place <= self._cursors.get((chain, topic), -1):
            self._fleet.violate(f"order: {chain} consumes {topic} {place} again or out of order")
        self._cursors[chain, topic] = place
        if data.get("reason"):
            return
        consumed = self._consumed.setdefault(chain, set())
        key = f"{topic} {data['messageId']}"
        if key in consumed:
            self._fleet.violate(f"a message is consumed twice: {chain} {key}")
        consumed.add(key)

    # What is sealed ---------------------------------------------------------------------------------------------------

    def rests(self, envelope: Envelope, kind: str | None) -> None:
        """At rest nothing sealed is legible, and on a marked log nobody writes who cannot open it (system.md 1.4, 2.7)."""
        stream_id = envelope.stream_id
        raw = self._fleet.log.index.encoded(stream_id, envelope.sequence, 1)
        if any(PLANTED.encode() in event for event in raw):
            self._fleet.violate(f"plaintext rests in {envelope.type} of {stream_id}")
        if stream_kind(stream_id) != "executions":
            return
        marker = envelope.metadata.get(SEAL)
        if marker is not None:
            self._covers.setdefault(stream_id, set()).add(covers_of(marker))
        if kind is not None and self.blind(stream_id, kind):
            self._fleet.violate(f"{envelope.type} of {stream_id} by a node ({kind}) that cannot open it")

    def fenced(self, stream_id: str, kind: str, node: str) -> None:
        """Nobody takes the fence of a log that it cannot open."""
        if self.blind(stream_id, kind):
            self._fleet.violate(f"the fence of {stream_id} is taken by {node} ({kind}), which cannot open it")

    def blind(self, stream_id: str, kind: str) -> bool:
        """Whether a log holds what nodes of this kind cannot open."""
        return any(self._fleet.capabilities.is_blind(kind, c) for c in self._covers.get(stream_id, ()))

    def handed(self, value: Any, node: Node) -> Any:
        """A flow was given something: no ciphertext, and nothing redacted; returns it."""
        shown = repr(value)
        if SEALED_KEY in shown or SHREDDED_KEY in shown:
            self._fleet.violate(f"a flow on {node.name} ({node.kind}) is handed what is sealed")
        return value

    # Wake rows --------------------------------------------------------------------------------------------------------

    def row_written(self, before: WakeRow | None, row: WakeRow, after: WakeRow) -> None:
        """A key keeps the strongest kind, the highest head and the most holds of what was written to it (system.md 5).

        Where it did not, a capable node would no longer see that a log waits for it.
        """
        for one in (before, row):
            if one is not None and any(
                held < written for held, written in zip(_merit(after), _merit(one), strict=True)
            ):
                self._fleet.violate(
                    f"the {one.kind} row of {row.execution_id} at {row.wake_at} became {after.kind}"
                )

    # Effects ----------------------------------------------------------------------------------------------------------

    def effect_began(self, node: Node, execution_id: str, step: str) -> None:
        """An effect starts only on the node that holds the fence, and once for each time that it was taken."""
        row = self._fleet.log.index.row(execution_id)
        incarnation = node.driver
        if row is None or incarnation is None:
            return
        self._fleet.world.note(f"effect {execution_id} {step} on {incarnation}")
        owner = (row.fence_owner or "").partition("/")[0]
        if row.fence_owner is not None and owner != incarnation and not row.finished:
            self._fleet.violate(
                f"double entry: effect {step!r} of {execution_id} starts on {incarnation}, taken over by {owner}"
            )
        self.effects[execution_id, step, incarnation] += 1
        total = sum(n for (e, s, _), n in self.effects.items() if e == execution_id and s == step)
        if total > max(1, row.fence):
            self._fleet.violate(f"effect {step!r} of {execution_id} ran {total} times in {row.fence} tenures")
        self.doubled += total > 1

    # Acknowledgements -------------------------------------------------------------------------------------------------

    def acknowledged_start(self, execution_id: str) -> None:
        """A start that was answered stands in the log."""
        if self._heads.get(execution_id, -1) < 0:
            self._fleet.violate(f"start of {execution_id} was answered and is not in the log")

    def acknowledged_send(self, execution_id: str, topic: str, event_id: str) -> None:
        """A message that was answered stands in the inbox, or was consumed from it."""
        index = self._fleet.log.index
        stream_id = inbox_stream(execution_id, topic)
        row = index.row(stream_id)
        waiting = [] if row is None else index.event_ids(stream_id, 0, row.head)
        consumed = self._consumed.get(execution_id, set())
        if event_id not in waiting and f"{topic} {event_id}" not in consumed:
            self._fleet.violate(f"message {event_id[:12]} to {execution_id} was answered and is nowhere")

    # The end ----------------------------------------------------------------------------------------------------------

    def open_executions(self) -> list[str]:
        """Executions without an end."""
        rows = self._fleet.log.index.rows()
        return sorted(i for i, row in rows.items() if row.kind == "executions" and not row.finished)

    def at_rest(self, expected: dict[str, Any]) -> None:
        """Everything has ended, and as it should."""
        left = self.open_executions()
        if left:
            self._fleet.violate(f"stuck though nothing is broken any more: {self._shown(left)}")
        for execution_id, wanted in expected.items():
            current = execution_id
            while True:
                last = self._fleet.opened_last(current)
                if last.type != Kind.EXECUTION_CONTINUED:
                    break
                current = str(last.data["successorId"])
            if last.type == Kind.EXECUTION_CANCELLED:
                continue
            if last.type != Kind.EXECUTION_COMPLETED or last.data["output"] != wanted:
                self._fleet.violate(f"{execution_id} ended with {last.type} {last.data}, not {wanted}")

    def _shown(self, left: list[str]) -> str:
        index = self._fleet.log.index
        shown = []
        for stream_id in left:
            row = index.row(stream_id)
            assert row is not None
            shown.append(f"{stream_id} at {row.head} {row.status}, fence {row.fence} of {row.fence_owner}")
        return "; ".join(shown)


def _merit(row: WakeRow) -> tuple[int, int, int]:
    return KIND_RANK[row.kind], row.head, row.holds
