"""Every method that an event store may have is forwarded, overridden or refused by every wrapper, by name."""

import inspect

import pytest
from benches import SealedBench

from loom.stores.contracts import OPTIONAL_EVENT_STORE_METHODS, EventStore, OwningEventStore
from loom.stores.guarded import GuardedEventStore, GuardedOwningEventStore
from loom.stores.kafka.event_store import KafkaEventStore
from loom.stores.memory.event_store import MemoryEventStore
from loom.stores.sealing.encrypting import EncryptingEventStore, EncryptingOwningEventStore
from loom.stores.sharded import ShardedEventStore

FORWARD, OVERRIDE, REFUSE = "forward", "override", "refuse"

SEALED_ALIKE = {
    "append": OVERRIDE,
    "append_many": OVERRIDE,
    "read": OVERRIDE,
    "read_last": OVERRIDE,
    "subscribe": OVERRIDE,
    "observe": FORWARD,
    "info": FORWARD,
    "acquire_fence": FORWARD,
    "acquire_fence_if": FORWARD,
    "truncate": FORWARD,
    "delete": FORWARD,
    "copy_prefix": FORWARD,
    "close": FORWARD,
    "sealing_capability": OVERRIDE,
    "read_at_rest": OVERRIDE,
    "read_redacted": OVERRIDE,
    "survey": OVERRIDE,
    "find_subject": FORWARD,
    "subscribe_loud": OVERRIDE,
    "notify": FORWARD,
    "mint_id": FORWARD,
    "health": FORWARD,
    "scan_open_logs": FORWARD,
    "list_inboxes": FORWARD,
    "write": REFUSE,
    "snapshot": REFUSE,
    "open": REFUSE,
    "assign": REFUSE,
}
OWNING = {
    "listen": OVERRIDE,
    "shard_of": FORWARD,
    "owned": FORWARD,
    "mint_shard": FORWARD,
    "open_logs": FORWARD,
    "inbox_streams": FORWARD,
}
SHARDED = dict.fromkeys(SEALED_ALIKE, OVERRIDE) | {
    "write": REFUSE,
    "snapshot": REFUSE,
    "open": REFUSE,
    "assign": REFUSE,
    "mint_id": REFUSE,
    "health": REFUSE,
    "scan_open_logs": REFUSE,
}
GUARDED = SEALED_ALIKE | {
    "sealing_capability": FORWARD,
    "read_at_rest": REFUSE,
    "read_redacted": REFUSE,
    "survey": REFUSE,
    "find_subject": REFUSE,
    "subscribe_loud": REFUSE,
}
TABLE = {
    GuardedEventStore: GUARDED | dict.fromkeys(OWNING, REFUSE),
    GuardedOwningEventStore: GUARDED | OWNING,
    EncryptingEventStore: SEALED_ALIKE | dict.fromkeys(OWNING, REFUSE),
    EncryptingOwningEventStore: SEALED_ALIKE | OWNING,
    ShardedEventStore: SHARDED | dict.fromkeys(OWNING, REFUSE),
}
INWARD = {"committed", "gained", "lost", "notified", "followed", "fatal"}
"""What a store's own parts call on it."""


def _methods(kind):
    return {n for n, m in inspect.getmembers(kind, callable) if not n.startswith("_")} - INWARD


ALL = _methods(EventStore) | _methods(OwningEventStore) | set(OPTIONAL_EVENT_STORE_METHODS)


class Everything:
    """An inner store that has whatever it is asked for."""

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **options: name


def _made(wrapper, inner):
    if wrapper is ShardedEventStore:
        return wrapper([inner])
    return wrapper(inner, SealedBench().keys) if issubclass(wrapper, EncryptingEventStore) else wrapper(inner)


@pytest.mark.parametrize("wrapper", TABLE)
def test_every_method_is_declared(wrapper):
    known = ALL | _methods(MemoryEventStore) | _methods(KafkaEventStore)
    assert known - set(TABLE[wrapper]) == set()
    assert set(TABLE[wrapper]) - known == set()


@pytest.mark.parametrize("wrapper", TABLE)
def test_the_declarations_are_true(wrapper):
    made = _made(wrapper, Everything())
    assert set(wrapper.REFUSED) <= {name for name, how in TABLE[wrapper].items() if how == REFUSE}
    for name, how in TABLE[wrapper].items():
        assert hasattr(made, name) == (how != REFUSE), (name, how)
    with pytest.raises(AttributeError):
        made.something_new  # noqa: B018


@pytest.mark.parametrize("wrapper", TABLE)
def test_a_wrapper_has_no_optional_method_that_its_store_lacks(wrapper):
    inner = MemoryEventStore(SealedBench().log)
    made = _made(wrapper, inner)
    optional = {n for n in OPTIONAL_EVENT_STORE_METHODS if hasattr(made, n)}
    sealing = {"sealing_capability", "read_at_rest", "read_redacted", "survey", "subscribe_loud"}
    beside = set() if issubclass(wrapper, GuardedEventStore) else {"find_subject"}
    assert optional == (sealing if issubclass(wrapper, EncryptingEventStore) else set()) | beside | {
        "list_inboxes"
    }
