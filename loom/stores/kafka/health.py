"""What is stuck in a partition: an open transaction that hides committed records from every reader behind it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import IsolationLevel, KafkaException

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future

    from loom.stores.kafka.reader import Ends

LOOKS: Final = 2
"""How often the offsets are looked at within the time after which one that does not move is stuck."""


@dataclass(frozen=True, slots=True)
class StuckOffset:
    """A topic of the partition that can be read to ``stable`` of ``end`` only, since ``age_ms``."""

    topic: str
    stable: int
    end: int
    age_ms: int


class StableWatch:
    """Looks at the stable offsets of a partition now and then, without ever waiting for an answer.

    One that has not moved for ``stuck_after_ms``, below an end, is stuck; no transaction of loom's is open that long.
    """

    def __init__(self, ends: Ends, topics: Sequence[str], stuck_after_ms: int) -> None:
        self._ends, self._topics, self._stuck_after_s = ends, tuple(topics), stuck_after_ms / 1000
        self._asked: list[Mapping[str, Future[Any]]] = []
        self._next = 0.0
        self._since: dict[str, tuple[int, float]] = {}
        self.stuck: tuple[StuckOffset, ...] = ()

    def look(self) -> None:
        """Take what was answered, or ask again if it is time. Cheap; called between transactions."""
        now = time.monotonic()
        if self._asked:
            if all(future.done() for answers in self._asked for future in answers.values()):
                self._take(now)
        elif now >= self._next:
            self._next = now + self._stuck_after_s / LOOKS
            self._asked = [
                self._ends.ask(self._topics, IsolationLevel.READ_COMMITTED),
                self._ends.ask(self._topics, IsolationLevel.READ_UNCOMMITTED),
            ]

    def _take(self, now: float) -> None:
        answers, self._asked = self._asked, []
        try:
            stable, end = ({t: int(f.result().offset) for t, f in found.items()} for found in answers)
        except KafkaException:
            return  # the brokers do not answer; whoever needs them says so
        if min(stable.values()) < 0 or min(end.values()) < 0:
            return  # nor here, though the client does not say so
        stuck = []
        for topic, offset in stable.items():
            before, since = self._since.get(topic, (-1, now))
            if offset != before or offset >= end[topic]:
                since = now
            self._since[topic] = (offset, since)
            if now - since >= self._stuck_after_s:
                stuck.append(StuckOffset(topic, offset, end[topic], int((now - since) * 1000)))
        self.stuck = tuple(stuck)
