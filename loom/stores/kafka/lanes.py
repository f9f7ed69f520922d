"""Transactional producers of one writer: its lanes (kafka.md, "Conditional append").

A lane is one transactional id. After a commit the broker still writes markers, and the same id's next transaction backs
off; two ids used in turn wait less. But two lanes are not one fence by themselves: the rule of :class:`Lanes` was
model-checked (``two_lane_model.py`` in the project's tools), and every way around it that was tried lost an append.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import KafkaException, Producer

from loom.stores.kafka.client import LOOKS, ClientLog, Fault, classify, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from loom.stores.kafka.deadline import Deadline

MAX_LANES: Final = 2
_LEAST_S: Final = 0.001
_SLICE_S: Final = 0.5


class LaneFault(Exception):  # noqa: N818 - what a lane tells its writer; never raised at a caller
    """A transactional call failed. ``fault`` says what is to be done, ``code`` is the client's name for it."""

    def __init__(self, doing: str, fault: Fault, code: str) -> None:
        self.doing, self.fault, self.code = doing, fault, code
        super().__init__(f"{doing}: {code}")


def _no_wait() -> None:
    """Nothing to do between two calls."""


class Lane:
    """One transactional producer, from its initialisation to its first fault; then it is closed and not used again.

    Not thread-safe: its writer's thread makes every call. ``produce`` is the client's own, for the hot path.
    """

    def __init__(self, config: Mapping[str, Any], topic: str, number: int = 0) -> None:
        """Make the client; ``topic`` is any that it will write to, ``number`` its own among its writer's lanes."""
        self.name, self._topic, self.number = str(config["transactional.id"]), topic, number
        self._run, self._begun = secrets.token_hex(5), 0
        self.log = ClientLog(self.name)
        self._producer: Producer | None = Producer(dict(config), logger=self.log.logger)
        self.produce: Callable[..., None] = self._producer.produce

    def initialise(self, deadline: Deadline, wait: Callable[[], None]) -> None:
        """Fence every older producer of this transactional id, and settle its open transaction.

        ``wait`` is called now and then; it may raise to stop.

        Raises:
            LaneFault: it cannot be done, or not before ``deadline`` (then the fault is REPEAT).
        """
        for _ in range(LOOKS):
            with contextlib.suppress(KafkaException):
                self._client.list_topics(self._topic, timeout=_SLICE_S)
        self._repeat(
            "initialise",
            lambda client, left_s: client.init_transactions(min(left_s, _SLICE_S)),
            deadline,
            wait,
        )
        self._client.poll(0)
        self.log.ready = True

    def begin(self) -> None:
        """Begin a transaction; local, it tells nobody."""
        try:
            self._client.begin_transaction()
        except KafkaException as error:
            raise LaneFault("begin", classify(error), name_of(error)) from None

    def next_id(self) -> str:
        """Return a name for the next transaction that no other has."""
        self._begun += 1
        return f"{self._run}.{self._begun}"

    def commit(self, deadline: Deadline) -> None:
        """Commit. Returns only if the broker said that it is done.

        Raises:
            LaneFault: whatever its fault, the transaction may be committed: what was written is unknown.
        """
        self._repeat("commit", Producer.commit_transaction, deadline)

    def flush(self, deadline: Deadline) -> None:
        """Wait until the brokers have what was produced; what they have not by ``deadline`` shows at the commit."""
        self._client.flush(deadline.left_s)

    def abort(self, deadline: Deadline) -> None:
        """Abort the open transaction.

        Raises:
            LaneFault: it may still be open.
        """
        self._repeat("abort", Producer.abort_transaction, deadline)

    def disturbance(self) -> str | None:
        """What the client's log says that makes it untrustworthy, None while all is well (the poison rule)."""
        self._client.poll(0)
        return self.log.disturbance

    def close(self) -> None:
        """Let the producer go, with whatever it holds; idempotent, does not wait for its threads."""
        if self._producer is None:
            return
        box = [self._producer]
        self._producer = None
        del self.produce
        threading.Thread(target=_bury, args=(box,), name=f"bury-{self.name}", daemon=True).start()

    @property
    def _client(self) -> Producer:
        if self._producer is None:
            raise LaneFault("use", Fault.FATAL, "closed")
        return self._producer

    def _repeat(
        self,
        doing: str,
        call: Callable[[Producer, float], object],
        deadline: Deadline,
        wait: Callable[[], None] = _no_wait,
    ) -> None:
        """Make a call, and the same again while the client asks for it and there is time.

        Nothing here is bound to the client: by its traceback a fault that is kept would keep it, and its threads.
        """
        while True:
            wait()
            try:
                call(self._client, max(deadline.left_s, _LEAST_S))
            except KafkaException as error:
                fault = classify(error)
                if fault is not Fault.REPEAT or deadline.passed:
                    raise LaneFault(doing, fault, name_of(error)) from None
            else:
                return


def _bury(box: list[Producer]) -> None:
    """Drop the last reference to a producer: its destructor joins the client's threads, which may take a while."""
    with contextlib.suppress(KafkaException):
        box[0].purge(in_queue=True, in_flight=True, blocking=False)
    box.clear()


class Lanes:
    """The lanes of one tenure.

    The rule: a tenure is all lanes. It initialises lane 0, then lane 1; only then the partition is read to its end. Its
    first transaction is on lane 0, and lane 1 waits until lane 0 has *committed* in this tenure (an abort may never
    reach the broker). A fault on either lane ends the tenure on both.
    """

    def __init__(self, make: Callable[[int], Lane], count: int) -> None:
        """Make nothing yet; ``make`` gives the lane of a number."""
        if not 1 <= count <= MAX_LANES:
            raise ValueError(f"lanes={count}: the rule was checked for 1 and {MAX_LANES}")
        self._make, self._count = make, count
        self._lanes: list[Lane] = []
        self._last = -1
        self._anchored = False

    def open(self, deadline: Deadline, wait: Callable[[], None]) -> None:
        """Make and initialise every lane, in order; ``wait`` as in ``Lane.initialise``.

        Raises:
            LaneFault: the tenure cannot begin; close and try again.
        """
        for number in range(self._count):
            lane = self._make(number)
            self._lanes.append(lane)
            lane.initialise(deadline, wait)

    def next(self) -> Lane:
        """The lane of the next transaction."""
        self._last = (self._last + 1) % self._count if self._anchored else 0
        return self._lanes[self._last]

    def committed(self) -> None:
        """The transaction on the lane that ``next`` gave last has committed."""
        self._anchored = True

    def disturbance(self) -> str | None:
        """As ``Lane.disturbance``, of any lane."""
        return next((found for lane in self._lanes if (found := lane.disturbance()) is not None), None)

    def close(self) -> None:
        """Let every lane go; idempotent."""
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.close()
