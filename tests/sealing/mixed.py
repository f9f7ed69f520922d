"""Nodes of five kinds on one log: which can open it, and which cannot."""

from __future__ import annotations

import pytest

from loom import (
    ExecutionDeniedError,
    Principal,
    flow,
)
from loom.kernel.state import ExecutionState
from loom.schemas.envelope import EVENT_SCHEMA, Kind, NewEvent
from loom.stores.contracts import NO_EVENTS, StreamAppend
from loom.stores.keys.memory import KeyTable, MemoryKeyStore
from loom.stores.sealing.encrypting import EncryptingEventStore
from loom.testing.runtime import MemoryFleet, until_parked

SECRET = "planted-plaintext-7Q"
SENSITIVE = {
    Kind.EXECUTION_STARTED: ("input",),
    Kind.STEP_COMPLETED: ("output",),
    Kind.EXECUTION_COMPLETED: ("output",),
}
ALICE = Principal("alice", {"tenant": SECRET})
OPERATOR = Principal("olga")
SHARDS = 4


async def add(a, b):
    return a + b


@flow("two-halves")
async def two_halves(ctx, start):
    first = await ctx.run(add, start, "-1")
    word = await ctx.receive("go")
    seen.append(word)
    second = await ctx.run(add, first, word)
    answer = await ctx.gate("approve")
    return second + answer


seen: list = []


class Trouble:
    def __init__(self):
        self.errors, self.storage, self.denied = [], [], []

    @property
    def options(self):
        return {
            "on_error": lambda error, about: self.errors.append((error, about)),
            "on_storage_error": lambda error, about: self.storage.append((error, about)),
            "on_execution_denied": lambda request, reason: self.denied.append((request, reason)),
        }


class Fleet:
    """Nodes of four kinds on one log. ``owns`` says whether a node writes the shards, and so drives."""

    def __init__(self):
        self.fleet = MemoryFleet(partitions=SHARDS, ttl_ms=600)
        self.keys = KeyTable()

    def node(self, kind, *, owns=False, trouble=None, operators=("olga",), **options):
        inner = self.fleet.store(None if owns else ())
        events = self.stored(kind, inner)
        settings = {"access": {"operators": operators}}
        more = trouble.options if trouble is not None else {}
        name = kind.replace(" ", "-")
        return self.fleet.runtime(name, [two_halves], events=events, settings=settings, **more, **options)

    def stored(self, kind, inner):
        if kind == "raw":
            return inner
        keys = {"capable": self.keys, "poorer": self.keys}.get(kind, KeyTable())
        if kind == "other keys":
            keys = self.other
        return EncryptingEventStore.over(inner, MemoryKeyStore(keys), {} if kind == "poorer" else SENSITIVE)

    async def prepare(self, subject):
        """Keys of another making for the same subject."""
        self.other = KeyTable()
        await MemoryKeyStore(self.other).ensure(subject)

    def resting(self, *streams):
        index = self.fleet.log.index
        return {
            s: [raw for _, raw in index._events[s].values()]
            for s in index._events
            if not streams or s in streams
        }


KINDS = ["raw", "poorer", "no keys", "other keys"]


async def start(mixed, execution_id="sealed", principal=ALICE, subject="s"):
    async with mixed.node("capable", owns=True) as capable:
        await capable.start(
            two_halves, SECRET, execution_id=execution_id, subject=subject, principal=principal
        )
        await until_parked(capable, execution_id)
    await mixed.prepare(subject)


def verbs(runtime, execution_id, principal):
    async def follow():
        return [e async for e in runtime.follow(execution_id, principal=principal)]

    return {
        "send": lambda: runtime.send(execution_id, "go", 1, principal=principal),
        "resume": lambda: runtime.resume(execution_id, "approve", 1, principal=principal),
        "cancel": lambda: runtime.cancel(execution_id, principal=principal),
        "load_state": lambda: runtime.load_state(execution_id, principal=principal),
        "query": lambda: runtime.query(execution_id, principal=principal),
        "status": lambda: runtime.status(execution_id, principal=principal),
        "history": lambda: runtime.history(execution_id, principal=principal),
        "follow": follow,
        "parked_at_sequence": lambda: runtime.parked_at_sequence(execution_id, principal=principal),
        "follow_to_head": lambda: runtime.follow_to_head(execution_id, principal=principal),
        "inbox": lambda: runtime.inbox(execution_id, principal=principal),
        "fork": lambda: runtime.fork(execution_id, principal=principal),
        "record_outcome": lambda: runtime.record_outcome(execution_id, 1, principal=principal),
        "acquire_fence": lambda: runtime.acquire_fence(execution_id, principal=principal),
        "notify": lambda: runtime.notify_inbox(execution_id, principal=principal),
        "expire": lambda: runtime.expire_inbox(execution_id, "go", older_than_ms=1, principal=principal),
        "recover": lambda: runtime.recover(execution_id, principal=principal),
        "recover_abandoned": lambda: runtime.recover_abandoned(execution_id, principal=principal),
        "resume_as": lambda: runtime.resume_as(execution_id, two_halves, principal=principal),
        "restore": lambda: runtime.restore_from_state(execution_id, ExecutionState(), principal=principal),
        "discard": lambda: runtime.discard_inbox(execution_id, "go", principal=principal),
        "quarantine": lambda: runtime.quarantine_inbox(execution_id, "go", principal=principal),
        "release": lambda: runtime.release_inbox(execution_id, "go", "m", principal=principal),
        "drop": lambda: runtime.release_inbox(
            execution_id, "go", "m", disposition="discard", principal=principal
        ),
        "purge": lambda: runtime.purge_history(execution_id, principal=principal),
        "delete": lambda: runtime.delete_chain(execution_id, principal=principal),
    }


OPERATORS_OWN = {"discard", "quarantine", "release", "drop", "purge", "delete"}
"""What operators alone may do, owners included among those who may not."""


def subject_verbs(runtime, subject, principal):
    return {
        "erase": lambda: runtime.erase_subject(subject, principal=principal),
        "erase, tried": lambda: runtime.erase_subject(subject, dry_run=True, principal=principal),
        "shred": lambda: runtime.shred_subject(subject, principal=principal),
        "export": lambda: runtime.export_subject(subject, principal=principal),
    }


async def denied(call):
    with pytest.raises(ExecutionDeniedError) as caught:
        await call()
    return caught.value


async def ownerless(mixed, execution_id="ownerless"):
    """An execution that exists and whose owner nobody knows."""
    data = {"workflow": "two-halves", "input": 1, "chainId": execution_id}
    first = NewEvent("o0", Kind.EXECUTION_STARTED, data, {"schema": EVENT_SCHEMA, "node": "n:1"})
    park = NewEvent(
        "o1", Kind.EXECUTION_SUSPENDED, {"waits": [{"siteId": "0:1", "arms": []}]}, {"schema": EVENT_SCHEMA}
    )
    await mixed.fleet.store(()).append(
        StreamAppend(execution_id, (first, park), expected_head=NO_EVENTS, fence=1)
    )
