"""A sealed log in memory, for one or several nodes, and what rests of it."""

from __future__ import annotations

from loom.ids import ulid
from loom.schemas.envelope import EVENT_SCHEMA, Kind, NewEvent
from loom.stores.contracts import NO_EVENTS, StreamAppend
from loom.stores.keys.memory import KeyTable, MemoryKeyStore
from loom.stores.memory.event_store import MemoryEventStore
from loom.stores.memory.log import MAX_EVENT_BYTES, MemoryLog
from loom.stores.sealing.encrypting import EncryptingEventStore
from loom.topics.partitioner import mint

ALL = {
    Kind.EXECUTION_STARTED: ("input",),
    Kind.STEP_COMPLETED: ("output", "value"),
    Kind.EXECUTION_COMPLETED: ("output",),
}
"""Paths beside the default that cover what a flow is given, what its steps return, and what it returns."""


class SealedBench:
    """One log in memory; ``open`` gives nodes that share their keys."""

    too_large = MAX_EVENT_BYTES

    def __init__(self, sensitive=ALL, *, shards=8):
        self.now = 1_000
        self.log = MemoryLog(self.tick, shards=shards)
        self.table = KeyTable()
        self.keys = MemoryKeyStore(self.table)
        self.sensitive = sensitive
        self.handles = []

    def tick(self):
        self.now += 1
        return self.now

    async def open(self):
        return self.node()

    async def own(self, origin):
        return self.node(origin=origin)

    def node(self, *, keys=None, sensitive=None, origin=None, **options):
        inner = MemoryEventStore(self.log, origin=origin)
        store = EncryptingEventStore.over(
            inner,
            keys if keys is not None else MemoryKeyStore(self.table),
            self.sensitive if sensitive is None else sensitive,
            **options,
        )
        self.handles.append(store)
        return store

    def raw(self):
        """A node that knows nothing of sealing."""
        self.handles.append(MemoryEventStore(self.log))
        return self.handles[-1]

    def chain(self):
        return mint(3, self.log.shards, ulid)

    def elsewhere(self):
        return mint(4, self.log.shards, ulid)

    def resting(self):
        """Every byte of every event at rest."""
        return b"".join(raw for events in self.log.index._events.values() for _, raw in events.values())

    async def close(self):
        for handle in self.handles:
            await handle.close()


def started(stream_id, *, subject=None, chain=None, data_in=None, identity=None, event_id=None, parent=None):
    data = {"workflow": "w", "input": data_in, "chainId": chain or stream_id}
    if subject is not None:
        data["subject"] = subject
    if identity is not None:
        data["principal"] = {"actor": "alice", "identity": identity}
    if parent is not None:
        data["parent"] = parent
    first = NewEvent(event_id or f"{stream_id}#0", Kind.EXECUTION_STARTED, data, {"schema": EVENT_SCHEMA})
    return StreamAppend(stream_id, (first,), expected_head=NO_EVENTS, fence=1)


def step(stream_id, head, output, kind=Kind.STEP_COMPLETED, **options):
    event = NewEvent(
        f"{stream_id}#{head + 1}", kind, {"siteId": "0:0", "output": output}, {"schema": EVENT_SCHEMA}
    )
    return StreamAppend(stream_id, (event,), expected_head=head, **options)


def sent(stream_id, message_id, payload, **options):
    data = {"topic": "t", "payload": payload, "messageId": message_id}
    return StreamAppend(
        stream_id, (NewEvent(message_id, Kind.INBOX_MESSAGE, data, {"schema": EVENT_SCHEMA}),), **options
    )


def fact(stream_id, head, type_, /, **data):
    event = NewEvent(f"{stream_id}#{head + 1}", type_, data, {"schema": EVENT_SCHEMA})
    return StreamAppend(stream_id, (event,), expected_head=head)
