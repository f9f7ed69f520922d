"""What every EventStore does (``loom.stores.contracts.EventStore``): subclass it and give the fixture ``bench``.

The suite asks nothing of a backend but the contract, and stays below a hundred writes a test, so that it also runs on
real brokers.
"""

from loom.testing.conformance.event_store.appending import AppendConformance
from loom.testing.conformance.event_store.inbox import InboxConformance
from loom.testing.conformance.event_store.owning import OwningBench, OwningEventStoreConformance
from loom.testing.conformance.event_store.reading import ReadingConformance
from loom.testing.conformance.event_store.removal import RemovalConformance
from loom.testing.conformance.event_store.several import SeveralStreamsConformance
from loom.testing.conformance.event_store.subscription import SubscriptionConformance
from loom.testing.conformance.event_store.support import EventBench

__all__ = ["EventBench", "EventStoreConformance", "OwningBench", "OwningEventStoreConformance"]


class EventStoreConformance(
    ReadingConformance,
    AppendConformance,
    SeveralStreamsConformance,
    InboxConformance,
    RemovalConformance,
    SubscriptionConformance,
):
    """The whole suite."""
