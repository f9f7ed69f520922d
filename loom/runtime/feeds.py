"""What one run knows of its chain's inbox: per topic, the messages read and not yet disposed of.

The process that owns the chain's shard hears every message that becomes durable, so a feed that has read up to the
stream's head stays whole by listening. Elsewhere a feed is whole only until it is asked again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from loom.errors import LoomError
from loom.ids import inbox_stream
from loom.kernel.inbox import InboxMessage, message_of
from loom.stores.contracts import NO_EVENTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from loom.runtime.run import Run
    from loom.schemas.envelope import Envelope

MAX_UNREAD: Final = 256
"""Messages of one topic kept in memory; what lies behind them is read when they are gone."""

_UNKNOWN: Final = 1 << 62
"""Head of a stream that this process does not hear about: read until nothing comes."""


class _Feed:
    __slots__ = ("disposed", "head", "next", "stream_id")

    def __init__(self, stream_id: str, next_sequence: int, head: int) -> None:
        self.stream_id = stream_id
        self.next = next_sequence
        self.head = head
        self.disposed = 0


class Feeds:
    """The inbox of a run's chain. ``unread`` holds messages by topic, in order."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._feeds: dict[str, _Feed] = {}
        self.unread: dict[str, list[InboxMessage]] = {}
        self._reading = False

    @property
    def reading(self) -> bool:
        """Whether an inbox is being read just now."""
        return self._reading

    def ready(self, topics: Iterable[str]) -> bool:
        """Whether the next message of each topic, or that there is none, is known; if not, it is being read."""
        missing = [topic for topic in topics if not self._known(topic)]
        if missing and not self._reading:
            self._reading = True
            self._run.engine.spawn(self._read(self._run, missing), self._run.id)
        return not missing

    def seed(self, topic: str, messages: list[InboxMessage]) -> None:
        """Take messages that were read just now, from the cursor on."""
        feed = self._open(topic)
        self.unread[topic].extend(messages)
        if messages:
            feed.next = messages[-1].sequence + 1
        if feed.head == _UNKNOWN and len(messages) < MAX_UNREAD:
            feed.head = feed.next - 1

    def arrived(self, topic: str, envelopes: Iterable[Envelope]) -> bool:
        """Messages became durable; whether the run looks at that topic."""
        feed = self._feeds.get(topic)
        if feed is None:
            return False
        unread = self.unread[topic]
        for envelope in envelopes:
            feed.head = envelope.sequence if feed.head == _UNKNOWN else max(feed.head, envelope.sequence)
            if envelope.sequence == feed.next and len(unread) < MAX_UNREAD and not self._reading:
                unread.append(message_of(envelope))
                feed.next += 1
        return True

    def place_of_next(self, topic: str) -> int | None:
        """Sequence that the next message of a topic will have, as far as this process knows; None where more stands."""
        feed, run = self._feeds[topic], self._run
        stands = run.engine.inbox_heads(run.chain_id).get(feed.stream_id, NO_EVENTS)
        return feed.next if feed.next == stands + 1 else None

    def taken(self, message: InboxMessage) -> None:
        """The next message of its topic is delivered as it is sent: it is never read."""
        feed = self._feeds[message.topic]
        feed.next = message.sequence + 1
        feed.head = max(feed.head, message.sequence)

    def disposed(self, message: InboxMessage) -> int | None:
        """A message was disposed of; return where its stream may be trimmed, where that is worth the while."""
        unread = self.unread[message.topic]
        passed = 0
        while passed < len(unread) and unread[passed].sequence <= message.sequence:
            passed += 1
        del unread[:passed]
        feed = self._feeds[message.topic]
        feed.disposed += 1
        if feed.disposed >= self._run.engine.config.inbox_trim_every:
            feed.disposed = 0
            return message.sequence + 1
        return None

    def doubt(self) -> None:
        """Read again before the next park stands: this process may not have heard of every message."""
        owned = self._run.engine.owns(self._run.chain_id)
        heads = self._run.engine.inbox_heads(self._run.chain_id) if owned else {}
        for feed in self._feeds.values():
            feed.head = max(feed.head, heads.get(feed.stream_id, -1)) if owned else _UNKNOWN

    def forget(self) -> None:
        """Know nothing any more: what is looked at next is read again. What is being read now is looked at once it is."""
        if not self._reading:
            self._feeds.clear()
            self.unread.clear()

    def detach(self) -> None:
        """Forget the run: it is gone."""
        del self._run

    def _known(self, topic: str) -> bool:
        feed = self._feeds.get(topic) or self._open(topic)
        return bool(self.unread[topic]) or feed.next > feed.head

    def _open(self, topic: str) -> _Feed:
        run = self._run
        stream_id = inbox_stream(run.chain_id, topic)
        owned = run.engine.owns(run.chain_id)
        head = run.engine.inbox_heads(run.chain_id).get(stream_id, -1) if owned else _UNKNOWN
        feed = self._feeds[topic] = _Feed(stream_id, run.state.cursors.get(topic, -1) + 1, head)
        self.unread[topic] = []
        return feed

    async def _read(self, run: Run, topics: list[str]) -> None:
        events, engine = run.engine.events, run.engine
        try:
            for topic in topics:
                feed = self._feeds[topic]
                found = await events.read(feed.stream_id, feed.next, MAX_UNREAD)
                self.unread[topic].extend(message_of(e) for e in found if e.sequence >= feed.next)
                if found:
                    feed.next = found[-1].sequence + 1
                if len(found) < MAX_UNREAD:  # nothing is left behind these, or what was is trimmed
                    feed.head = feed.next - 1 if feed.head == _UNKNOWN else feed.head
                    feed.next = max(feed.next, feed.head + 1) if not found else feed.next
        except LoomError as error:
            self._reading = False
            engine.signals.repeated_storage_error(error, run.id)
            engine.later(engine.retry_ms, run.look)
            return
        self._reading = False
        run.look()
