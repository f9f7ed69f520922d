"""Every error of loom, in one tree.

::

    LoomError
    ├── ConfigError                       exit 2: a setting is wrong
    ├── InvalidIdError                    exit 2: an id no stream may carry
    ├── InvalidInputError                 exit 2: a payload that is not JSON, or does not fit the flow's model
    ├── UnknownFlowError                  exit 1
    ├── ExecutionNotFoundError            exit 1
    ├── ExecutionAlreadyExistsError       exit 1
    ├── ExecutionFinishedError            exit 1: the verb needs a live execution
    ├── ExecutionNotFinishedError         exit 1: the verb needs one that has ended
    ├── GateNotOpenError                  exit 1: retry once the flow waits at the gate
    ├── ExecutionDeniedError              exit 1
    │   └── SealedStreamUnreadableError   (indistinguishable to a caller, system.md 2.4)
    ├── InboxError
    │   ├── InboxMessageRefusedError      exit 1
    │   ├── InboxFullError                exit 1, retryable
    │   ├── InboxDiscardRefusedError      exit 1
    │   └── InboxQuarantineRefusedError   exit 1
    ├── SealedPayloadUnreadableError      terminal on this node
    │   └── QuarantineHeldError
    ├── PayloadShreddedError / KeyUnavailableError
    ├── SubjectNotFoundError, ShredIncompleteError (retryable)
    ├── StoreError
    │   ├── StorageWriteError             not written; retryable where it says so
    │   │   └── StoreClosedError          the store is not open; not retryable
    │   ├── NodeFencedError               exit 2: another process has this node's id
    │   ├── OutcomeUnknownError           written or not: read again by event id
    │   ├── WrongHeadError                another append was first
    │   ├── ErasureLostRaceError          an erasure's record found no place; retryable
    │   ├── StaleFenceError               another driver took the execution
    │   ├── DecodeError                   bytes that are no record of ours
    │   ├── SchemaUnreadableError, SchemaRefusedError, RegistryError   exit 2
    │   ├── StreamBrokenError             a gap or torn batch that stands
    │   ├── UnreachableError              exit 3: broker or Redis
    │   ├── StoreRefusedError             a server answers, and refuses
    │   ├── TopicsError                   exit 2: topics missing or of another shape
    │   └── snapshot, sharding and lease errors
    ├── ServiceMissingError               exit 3: a broker or Redis to start is not installed
    ├── ServiceFailedError                exit 3: a broker or Redis started here does not come up
    └── flow errors: FlowFailedError, FlowCancelledError, FlowDivergedError, StepFailedError, ...

Typed fields build each message; no message holds a payload byte. ``exit_status`` is what the command line ends with.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

UNKNOWN_OWNER_REASON: Final = "the execution's owner is unknown to this policy"
"""The one wording of a denial for an unknown owner; sealed refusals carry it word for word (system.md 2.4)."""


class LoomError(Exception):
    """Base of every error that loom raises at a caller."""

    exit_status: ClassVar[int] = 1
    retryable: ClassVar[bool] = False


class ConfigError(LoomError):
    """A setting has a value that cannot work."""

    exit_status = 2

    def __init__(self, setting: str, problem: str, remedy: str, source: str = "") -> None:
        self.setting, self.problem, self.remedy, self.source = setting, problem, remedy, source
        where = f" (from {source})" if source else ""
        super().__init__(f"{setting}{where}: {problem}; {remedy}")


class InvalidIdError(LoomError):
    """An id that no stream may carry."""

    exit_status = 2

    def __init__(self, given: str, remedy: str) -> None:
        self.given, self.remedy = given, remedy
        super().__init__(f"the id {given[:64]!r} cannot be used: {remedy}")


class InvalidInputError(LoomError):
    """A payload that is no JSON, is too large or too deep, or does not fit the model it is meant for."""

    exit_status = 2

    def __init__(self, what: str, problem: str, remedy: str) -> None:
        self.what, self.problem, self.remedy = what, problem, remedy
        super().__init__(f"{what}: {problem}; {remedy}")


class UnknownFlowError(LoomError):
    """No flow of that name is registered on this node."""

    def __init__(self, workflow: str, known: tuple[str, ...] = ()) -> None:
        self.workflow, self.known = workflow, known
        listed = ", ".join(sorted(known)[:8]) or "none"
        super().__init__(
            f"no flow named {workflow[:64]!r} is registered (known: {listed}); "
            "check the name, or the modules given with --flows"
        )


class ExecutionNotFoundError(LoomError):
    """There is no execution of that id."""

    def __init__(self, execution_id: str) -> None:
        self.execution_id = execution_id
        super().__init__(f"execution {execution_id!r} does not exist; check the id and the topic prefix")


class ExecutionAlreadyExistsError(LoomError):
    """The chosen execution id is taken, or was taken once and deleted."""

    def __init__(self, execution_id: str) -> None:
        self.execution_id = execution_id
        super().__init__(
            f"execution id {execution_id!r} is taken; choose another, or leave it out to have one made"
        )


class ExecutionFinishedError(LoomError):
    """The verb needs an execution that still runs."""

    def __init__(self, op: str, execution_id: str, status: str) -> None:
        self.op, self.execution_id, self.status = op, execution_id, status
        super().__init__(f"cannot {op} execution {execution_id!r}: it is {status}; start a new one")


class ExecutionNotFinishedError(LoomError):
    """The verb removes what has ended, and this has not."""

    def __init__(self, op: str, execution_id: str, status: str) -> None:
        self.op, self.execution_id, self.status = op, execution_id, status
        super().__init__(
            f"cannot {op} execution {execution_id!r}: it is {status}; wait for its end, or `loom cancel` it first"
        )


class GateNotOpenError(LoomError):
    """The execution does not wait at that gate now."""

    retryable = True

    def __init__(self, execution_id: str, gate: str) -> None:
        self.execution_id, self.gate = execution_id, gate
        super().__init__(
            f"execution {execution_id!r} does not wait at gate {gate[:64]!r} now; "
            f"see what it waits for with `loom show {execution_id}`, then try again"
        )


class ExecutionDeniedError(LoomError):
    """The caller may not do this to that execution."""

    def __init__(self, op: str, execution_id: str, reason: str) -> None:
        self.op, self.execution_id, self.reason = op, execution_id, reason
        super().__init__(f"{op} of execution {execution_id!r} is denied: {reason}")

    def __reduce__(self) -> tuple[type[ExecutionDeniedError], tuple[str, str, str]]:
        """Pickle and copy as the ordinary denial, whichever it is (clauses.md, point 1)."""
        return ExecutionDeniedError, (self.op, self.execution_id, self.reason)


class SealedStreamUnreadableError(ExecutionDeniedError):
    """This node cannot open the execution's log; to the caller it is the ordinary denial (system.md 2.4)."""


SealedStreamUnreadableError.__name__ = ExecutionDeniedError.__name__
SealedStreamUnreadableError.__qualname__ = ExecutionDeniedError.__qualname__


class InboxError(LoomError):
    """A message cannot enter, or leave, an inbox."""


class InboxMessageRefusedError(InboxError):
    """A payload that ``send`` does not take: too large, unreadable, or dressed as a sealed or erased one."""

    def __init__(self, execution_id: str, topic: str, reason: str, remedy: str) -> None:
        self.execution_id, self.topic, self.reason, self.remedy = execution_id, topic, reason, remedy
        super().__init__(f"message to {execution_id!r} on topic {topic[:64]!r} refused: {reason}; {remedy}")


class InboxFullError(InboxError):
    """The backlog of the topic is at its cap."""

    retryable = True

    def __init__(self, execution_id: str, topic: str, backlog: int, cap: int) -> None:
        self.execution_id, self.topic, self.backlog, self.cap = execution_id, topic, backlog, cap
        super().__init__(
            f"inbox of {execution_id!r} has {backlog} waiting messages on topic {topic[:64]!r} (cap {cap}); "
            "send again once the flow has caught up, or raise inbox_max_backlog"
        )


class InboxDiscardRefusedError(InboxError):
    """A discard that cannot be done now."""

    def __init__(self, execution_id: str, topic: str, reason: str) -> None:
        self.execution_id, self.topic, self.reason = execution_id, topic, reason
        super().__init__(f"discard on {execution_id!r}, topic {topic[:64]!r}, refused: {reason}")


class InboxQuarantineRefusedError(InboxError):
    """A quarantine, a release or a fork beside holds that cannot be done now.

    ``reason`` is ``not-parked``, ``contended`` (both retryable), ``invalid``, ``not-sealed``, or
    ``checkpoint-unreadable-log-compacted``.
    """

    REMEDIES: ClassVar[dict[str, str]] = {
        "not-parked": "try again once it waits",
        "contended": "others keep writing; try again",
        "invalid": "look at what is held with `loom inbox ID`",
        "not-sealed": "this node can open it: let it be delivered, or use `loom discard`",
        "checkpoint-unreadable-log-compacted": "run the verb on a node that can open its checkpoint",
    }

    def __init__(
        self, execution_id: str, topic: str, reason: str, detail: str = "", verb: str = "quarantine"
    ) -> None:
        self.execution_id, self.topic, self.reason = execution_id, topic, reason
        self.detail, self.verb = detail, verb
        why = f"{reason}: {detail}" if detail else reason
        remedy = self.REMEDIES.get(reason, "")
        super().__init__(f"{verb} on {execution_id!r}, topic {topic[:64]!r}, refused ({why}); {remedy}")

    @property
    def transient(self) -> bool:
        """Whether the same call may succeed later."""
        return self.reason in {"not-parked", "contended"}


class SealedPayloadUnreadableError(LoomError):
    """A message that this node cannot open; it waits for one that can (system.md 1)."""

    def __init__(
        self,
        execution_id: str,
        message_id: str,
        topic: str,
        unverifiable: bool = False,
        *,
        recorded: bool = False,
    ) -> None:
        self.execution_id, self.message_id, self.topic = execution_id, message_id, topic
        self.unverifiable, self.recorded = unverifiable, recorded
        what = (
            "cannot be checked for sealed content"
            if unverifiable
            else "is sealed and cannot be opened on this node"
        )
        super().__init__(
            f"message {message_id[:64]!r} on topic {topic[:64]!r} of execution {execution_id!r} {what}; "
            "it waits for a node that holds the key"
        )


class QuarantineHeldError(SealedPayloadUnreadableError):
    """Nothing can be delivered but what a quarantine holds (system.md 4.3).

    ``awaits`` is ``node`` (one that can open the message) or ``operator`` (this node could, and may not by itself).
    """

    def __init__(
        self, execution_id: str, message_id: str, topic: str, inbox_seq: int = -1, awaits: str = "node"
    ) -> None:
        super().__init__(execution_id, message_id, topic)
        self.inbox_seq, self.awaits = inbox_seq, awaits
        what = "a capable node" if awaits == "node" else "an operator's release"
        held = f"topic {topic[:64]!r} of execution {execution_id!r} is held at message {message_id[:64]!r}"
        self.args = (f"{held}, awaiting {what}",)


class PayloadShreddedError(LoomError):
    """The subject was erased: its key is destroyed."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        super().__init__(f"subject {subject!r} was erased; its sealed data is gone for good")


class KeyUnavailableError(LoomError):
    """The subject's key is not here; absent is not erased (system.md 2.6).

    Where a stored event needed it, ``stream_id``, ``sequence`` and ``covers`` say which; nothing of this reaches a caller.
    """

    code: ClassVar[str] = "key-unavailable"

    def __init__(
        self, subject: str, stream_id: str = "", sequence: int = -1, covers: tuple[str, ...] = ()
    ) -> None:
        self.subject, self.stream_id, self.sequence, self.covers = subject, stream_id, sequence, covers
        super().__init__(
            f"the key of subject {subject!r} is not available on this node; configure sealing.keys"
        )


class SubjectNotFoundError(LoomError):
    """No execution names that subject."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        super().__init__(
            f"no execution belongs to subject {subject[:64]!r}; check its name (by default a subject is the id of "
            "the first execution of a chain), and the topic prefix"
        )


class ShredIncompleteError(LoomError):
    """A subject's key is destroyed, and some of its logs do not say so yet."""

    retryable = True

    def __init__(self, subject: str, done: int, of: int) -> None:
        self.subject, self.done, self.of = subject, done, of
        super().__init__(
            f"the key of subject {subject[:64]!r} is destroyed, but {of - done} of {of} logs do not say so yet; "
            "erase it again: what is done already is not done twice"
        )


class StoreError(LoomError):
    """A store did not do what was asked."""


class StorageWriteError(StoreError):
    """The append was not written, and this is known."""

    retryable = True

    def __init__(self, stream_id: str, problem: str) -> None:
        self.stream_id, self.problem = stream_id, problem
        super().__init__(f"append to {stream_id!r} was not written: {problem}; it is safe to try again")


class PayloadTooLargeError(StorageWriteError):
    """An event or batch that no transaction of the log can take."""

    retryable = False

    def __init__(self, stream_id: str, size: int, limit: int) -> None:
        super().__init__(stream_id, f"{size} bytes exceed the limit of {limit}")
        self.size, self.limit = size, limit
        self.args = (
            (
                f"append to {stream_id!r} was not written: {size} bytes exceed the limit of {limit}; "
                "keep large values outside and pass a reference"
            ),
        )


class StoreClosedError(StorageWriteError):
    """The store was closed, or never opened; nothing was read or written."""

    retryable = False

    def __init__(self, stream_id: str) -> None:
        super().__init__(stream_id, "the store is not open")
        self.args = (
            f"{stream_id!r} was neither read nor written: the store is not open; open one and use it",
        )


class OutcomeUnknownError(StoreError):
    """The append may or may not have been written; read the stream and look for the event ids."""

    retryable = True

    def __init__(self, stream_id: str, problem: str) -> None:
        self.stream_id, self.problem = stream_id, problem
        super().__init__(
            f"whether the append to {stream_id!r} was written is not known ({problem}); "
            "repeat it unchanged: the same event ids are appended once"
        )


class ErasureLostRaceError(StoreError):
    """A record of an erasure found no place in a log that others append to all the time."""

    retryable = True

    def __init__(self, execution_id: str, tries: int) -> None:
        self.execution_id, self.tries = execution_id, tries
        super().__init__(
            f"a record of the erasure found no place in the log of {execution_id!r} in {tries} tries: others append "
            "all the time; erase it again, or cancel the execution first"
        )


class WrongHeadError(StoreError):
    """Another append came first; fold again from the head that stands now."""

    retryable = True

    def __init__(self, stream_id: str, expected: int, head: int) -> None:
        self.stream_id, self.expected, self.head = stream_id, expected, head
        super().__init__(
            f"stream {stream_id!r} ends at {head}, not at {expected}: another append came first; read it again"
        )


class StaleFenceError(StoreError):
    """Another driver holds a newer fence on the execution; this one stops."""

    def __init__(self, stream_id: str, token: int, current: int) -> None:
        self.stream_id, self.token, self.current = stream_id, token, current
        super().__init__(
            f"fence {token} on {stream_id!r} is stale (now {current}): another driver took over; this run stops"
        )


class DecodeError(StoreError):
    """Bytes that are no record of this log."""

    def __init__(self, what: str, problem: str) -> None:
        self.what, self.problem = what, problem
        super().__init__(f"{what} cannot be read: {problem}; check that its writer uses loom's schemas")


class SchemaUnreadableError(StoreError):
    """A schema that is no Avro schema of a record, or that nobody can give."""

    exit_status = 2

    def __init__(self, schema: str, problem: str) -> None:
        self.schema, self.problem = schema, problem
        super().__init__(
            f"schema {schema} cannot be read: {problem}; check registry_url, or run `loom topics apply`"
        )


class SchemaRefusedError(StoreError):
    """The registry does not take a schema: what is registered for the subject does not go with it."""

    exit_status = 2

    def __init__(self, subject: str, status: int) -> None:
        self.subject, self.status = subject, status
        super().__init__(
            f"the schema registry refused the schema of {subject!r} (status {status}): it does not go with what is "
            "registered there; choose another topic_prefix, or run the release that registered it"
        )


class RegistryError(StoreError):
    """The schema registry answers, but not as a Confluent-compatible one does."""

    exit_status = 2

    def __init__(self, doing: str, problem: str) -> None:
        self.doing, self.problem = doing, problem
        super().__init__(f"cannot {doing}: the schema registry answered with {problem}; check registry_url")


class StreamBrokenError(StoreError):
    """A gap or a torn batch that is still there after reading again."""

    def __init__(self, stream_id: str, sequence: int, problem: str) -> None:
        self.stream_id, self.sequence, self.problem = stream_id, sequence, problem
        super().__init__(
            f"stream {stream_id!r} is broken at sequence {sequence}: {problem}; "
            "the stream is stopped, run `loom audit verify`"
        )


class IndexFileError(StoreError):
    """The local file behind an index cannot be used; the log itself is whole."""

    def __init__(self, path: str, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(
            f"index file {path} cannot be used: {problem}; make room there or remove it, it is built again from the log"
        )


class UnreachableError(StoreError):
    """A server that loom needs does not answer."""

    exit_status = 3
    retryable = True

    def __init__(self, server: str, address: str, setting: str, problem: str = "no answer") -> None:
        self.server, self.address, self.setting, self.problem = server, address, setting, problem
        super().__init__(
            f"{server} at {address} cannot be reached ({problem}); check that it runs, or correct {setting}"
        )


class StoreRefusedError(StoreError):
    """A server answers, and refuses what loom asks of it; nothing was written."""

    def __init__(self, server: str, address: str, problem: str, remedy: str) -> None:
        self.server, self.address, self.problem, self.remedy = server, address, problem, remedy
        super().__init__(f"{server} at {address} refused a request: {problem}; {remedy}")


class TopicsError(StoreError):
    """Topics of the catalogue are missing or have another shape."""

    exit_status = 2

    def __init__(self, problems: tuple[str, ...], remedy: str) -> None:
        self.problems, self.remedy = problems, remedy
        super().__init__("; ".join(problems[:8]) + f"; {remedy}")


class BrokerError(StoreError):
    """The broker, or its client, refused what was asked for a reason of its own."""

    def __init__(self, doing: str, code: str) -> None:
        self.doing, self.code = doing, code
        super().__init__(f"cannot {doing}: {code}; see the broker's log for this code, and run `loom doctor`")


class IncompleteReadError(StoreError):
    """A partition could not be read to its end: a transaction that is still open holds it back."""

    retryable = True

    def __init__(self, topic: str, partition: int, stable: int, end: int) -> None:
        self.topic, self.partition, self.stable, self.end = topic, partition, stable, end
        super().__init__(
            f"{topic!r} partition {partition} can be read to offset {stable} of {end} only: an open transaction holds "
            "back the rest; find its producer with `kafka-transactions.sh find-hanging`, or wait for its timeout"
        )


class PublishRefusedError(StoreError):
    """A record for a topic outside loom that cannot be written; the append it belongs to was not written either."""

    def __init__(self, topic: str, reason: str, remedy: str) -> None:
        self.topic, self.reason, self.remedy = topic, reason, remedy
        super().__init__(f"publishing to {topic[:128]!r} refused: {reason}; {remedy}")


class NotOwnerError(StoreError):
    """This node does not write that partition now; the request goes to the owner."""

    retryable = True

    def __init__(self, partition: int) -> None:
        self.partition = partition
        super().__init__(
            f"partition {partition} is not written by this node now; the request goes to its owner"
        )


class NodeFencedError(StoreError):
    """Another process joined with this node's id; two nodes of one name cannot both own partitions."""

    exit_status = 2

    def __init__(self, node: str) -> None:
        self.node = node
        super().__init__(
            f"another process runs with node id {node!r}, so this one stops; give each node its own node_id"
        )


class DeadlineExceededError(StoreError):
    """No answer within the deadline; nothing is known beyond that."""

    retryable = True

    def __init__(self, what: str, deadline_ms: int) -> None:
        self.what, self.deadline_ms = what, deadline_ms
        super().__init__(
            f"{what} was not answered within {deadline_ms} ms; check that a worker runs, then try again"
        )


class PlaintextCheckpointError(StoreError):
    """A checkpoint would rest in plaintext beside a sealed log (system.md 3.2)."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"checkpoint refused ({reason}): give an EncryptingSnapshotStore(seal_state=True) on the same keys, "
            "or set sealing.allow_plaintext_checkpoints"
        )


class SnapshotUndecryptableError(StoreError):
    """A sealed snapshot that does not belong where it stands."""

    def __init__(self, execution_id: str, sequence: int) -> None:
        self.execution_id, self.sequence = execution_id, sequence
        super().__init__(f"snapshot of {execution_id!r} at {sequence} cannot be opened; it is passed over")


class PlaintextSnapshotRefusedError(StoreError):
    """A plaintext snapshot under ``legacy_plaintext="refuse"``."""

    def __init__(self, execution_id: str) -> None:
        self.execution_id = execution_id
        super().__init__(
            f"plaintext snapshot of {execution_id!r} refused; set sealing.legacy_plaintext=load to take it"
        )


class ShardSealingMismatchError(StoreError):
    """Shards of one store seal differently (system.md 2.2): no answer for the whole would be true of each.

    ``shards`` has, by index, cipher and covers of each shard; cipher None: it seals nothing. Never key material.
    """

    exit_status = 2

    def __init__(self, shards: tuple[tuple[int, str | None, tuple[str, ...]], ...]) -> None:
        self.shards = shards
        details = "; ".join(
            f"shard {index}: " + (f"{cipher}, {len(covers)} paths" if cipher else "nothing")
            for index, cipher, covers in shards[:8]
        )
        super().__init__(f"shards disagree on sealing ({details}); configure them alike")


class LeaseError(StoreError):
    """A lease could not be used."""


class LeaseLostError(LeaseError):
    """The run's lease is lost; the run is superseded, not failed."""

    def __init__(self, execution_id: str, reason: str) -> None:
        self.execution_id, self.reason = execution_id, reason
        super().__init__(f"lease on {execution_id!r} lost ({reason}); another node carries on")


class LeaseHeldError(LeaseError):
    """Another live driver holds the lease."""

    retryable = True

    def __init__(self, execution_id: str) -> None:
        self.execution_id = execution_id
        super().__init__(f"execution {execution_id!r} is driven by another node")


class LeaseStoreTimeoutError(LeaseError):
    """The lease store did not answer in time."""

    retryable = True


class LeaseEvidenceError(LeaseError):
    """Evidence of life could not be read, so nothing is re-driven."""

    retryable = True


class RedriveExhaustedError(LeaseError):
    """An execution was recovered too often without progress."""

    def __init__(self, execution_id: str, attempts: int) -> None:
        self.execution_id, self.attempts = execution_id, attempts
        super().__init__(
            f"execution {execution_id!r} was re-driven {attempts} times; see `loom show`, then `loom recover`"
        )


class StartLeaseHeldError(LeaseError):
    """A fresh start found a live lease on its id."""

    retryable = True


class FlowError(LoomError):
    """Something about a flow's own course."""


class FlowFailedError(FlowError):
    """The flow ended with an error; type and message are those recorded in the log."""

    def __init__(self, execution_id: str, error_type: str, message: str) -> None:
        self.execution_id, self.error_type, self.error_message = execution_id, error_type, message
        super().__init__(f"execution {execution_id!r} failed: {error_type}: {message}")


class FlowCancelledError(FlowError):
    """The execution was cancelled."""

    def __init__(self, execution_id: str, reason: str | None = None) -> None:
        self.execution_id, self.reason = execution_id, reason
        super().__init__(f"execution {execution_id!r} was cancelled" + (f": {reason}" if reason else ""))


class FlowDivergedError(FlowError):
    """The flow's code no longer matches its log; nothing more is appended."""

    def __init__(self, execution_id: str, sequence: int, recorded: str, expected: str) -> None:
        self.execution_id, self.sequence, self.recorded, self.expected = (
            execution_id,
            sequence,
            recorded,
            expected,
        )
        super().__init__(
            f"execution {execution_id!r} left its log at sequence {sequence}: the log has {recorded}, the code asks for "
            f"{expected}; deploy the code that wrote it, or guard the change with ctx.patched"
        )


class NotDeterministicError(FlowError):
    """A flow awaited something outside its own loop."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"{what} inside a flow is not repeatable; do it in a step with ctx.run")


class FlowStuckError(FlowError):
    """A flow does not come to rest: it runs callbacks without waiting for anything."""

    def __init__(self, callbacks: int, execution_id: str = "") -> None:
        self.callbacks, self.execution_id = callbacks, execution_id
        whose = f" of execution {execution_id!r}" if execution_id else ""
        super().__init__(
            f"the flow{whose} ran {callbacks} callbacks without coming to rest; "
            "look for a loop that awaits nothing (asyncio.sleep(0) waits for nothing)"
        )


class StepFailedError(FlowError):
    """A step failed for good; type and message are those recorded."""

    def __init__(self, step: str, error_type: str, message: str) -> None:
        self.step, self.error_type, self.error_message = step, error_type, message
        super().__init__(f"step {step} failed: {error_type}: {message}")


class ChildFailedError(FlowError):
    """A child execution failed or was cancelled."""

    def __init__(self, child_id: str, status: str, error_type: str = "", message: str = "") -> None:
        self.child_id, self.status, self.error_type, self.error_message = (
            child_id,
            status,
            error_type,
            message,
        )
        tail = f": {error_type}: {message}" if error_type else ""
        super().__init__(f"child {child_id!r} {status}{tail}")


class TerminalError(FlowError):
    """Raise (or derive from) this in a step to say that retrying cannot help."""


class ServiceMissingError(LoomError):
    """Something that loom would start here (a broker, Redis) is not installed."""

    exit_status = 3

    def __init__(self, what: str, found: str, remedy: str) -> None:
        self.what, self.found, self.remedy = what, found, remedy
        super().__init__(f"{what} is missing: {found}; {remedy}")


class ServiceFailedError(LoomError):
    """A server started here did not come up; ``log`` is the end of its output."""

    exit_status = 3

    def __init__(self, service: str, problem: str, log: str) -> None:
        self.service, self.problem, self.log = service, problem, log
        super().__init__(f"{service}: {problem}" + (f"\n{log}" if log else ""))


class FlowSuspended(BaseException):
    """Signal inside a flow that it is parked or refused; derives from BaseException: never catch it."""


def public_fields(error: LoomError) -> dict[str, Any]:
    """Typed fields of an error, for ``--json`` output; never a payload."""
    return {
        k: v
        for k, v in vars(error).items()
        if not k.startswith("_") and isinstance(v, str | int | bool | tuple)
    }
