"""Faust's ``kafka://`` transport, reading committed data only (kafka.md "Processors", transport).

Three things of Faust 0.15 are changed, in a subclass each and nowhere else:

* its worker's consumer reads uncommitted data unless Faust's own exactly-once mode is on: here it is always made with
  isolation ``read_committed``;
* it fills holes in the offsets by guess, never the one right after offset 0, so that a partition whose first
  transaction holds one record is committed at 1 for ever while the list of acknowledged offsets grows; and the record
  after a hole counts as acknowledged: here a :class:`~loom.processors.ledger.Ledger` counts deliveries instead;
* credentials come from librdkafka's property names, as those of loom's other clients do.

:func:`check_faust` fails when an installed Faust or aiokafka has moved what is touched.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

import aiokafka
import faust
from faust.transport.consumer import Consumer as BaseConsumer
from faust.transport.drivers import aiokafka as driver
from faust.types.tuples import ack_lock

from loom.errors import ConfigError
from loom.processors.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

READ_COMMITTED: Final = "read_committed"
_FETCHER_READ_COMMITTED: Final = 1

_TESTED: Final = "0.15."
"""Versions of Faust that the subclasses were written against."""


class CommittedThread(driver.AIOKafkaConsumerThread):
    """The thread that owns the aiokafka consumer of a worker."""

    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        consumer._isolation_level = READ_COMMITTED  # noqa: SLF001 - Faust passes its own choice; see check_faust
        return consumer

    async def on_start(self) -> None:
        """Start the consumer, and do not believe that it reads committed data before its fetcher says so."""
        await super().on_start()
        fetcher = getattr(self._consumer, "_fetcher", None)
        if getattr(fetcher, "_isolation_level", None) != _FETCHER_READ_COMMITTED:
            raise _moved("aiokafka's fetcher does not take the isolation level")


class CommittedConsumer(driver.Consumer):
    """A consumer whose commits follow what was delivered and acknowledged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._ledgers: defaultdict[Any, Ledger] = defaultdict(Ledger)
        super().__init__(*args, **kwargs)

    def _new_consumer_thread(self) -> CommittedThread:
        return CommittedThread(self, loop=self.loop, beacon=self.beacon)

    async def getmany(self, timeout: float) -> AsyncIterator[tuple[Any, Any]]:  # noqa: ASYNC109 - Faust's signature
        """Yield records as Faust does, each noted as delivered first."""
        acks_enabled_for = self.app.topics.acks_enabled_for
        async for tp, message in super().getmany(timeout):
            last = self._read_offset[tp]
            if acks_enabled_for(tp.topic) and (last is None or message.offset >= last):
                self._note(tp, message.offset)
            yield tp, message

    def _note(self, tp: Any, offset: int) -> None:
        with ack_lock:
            # an acknowledgement that came before this delivery is of an earlier assignment
            if offset in self._acked_index[tp]:
                self._acked_index[tp].discard(offset)
                self._acked[tp].remove(offset)
            self._ledgers[tp].delivered(offset)

    def _new_offset(self, tp: Any) -> int | None:
        with ack_lock:
            index = self._acked_index[tp]
            settled = self._ledgers[tp].settle(index)
            if not settled:
                return None
            index.difference_update(settled)
            self._acked[tp][:] = index
            return settled[-1] + 1

    async def _add_gap(self, tp: Any, offset_from: int, offset_to: int) -> None:
        """Do nothing: the ledger has no use for holes."""

    async def on_partitions_revoked(self, revoked: Any) -> None:
        """Forget what was delivered of partitions that are another's now."""
        for tp in revoked:
            self._ledgers.pop(tp, None)
        await super().on_partitions_revoked(revoked)

    def waiting(self) -> dict[tuple[str, int], int]:
        """Return the oldest unsettled offset of each partition that has one, for the watch on progress."""
        ledgers = list(self._ledgers.items())
        return {
            (tp.topic, tp.partition): oldest
            for tp, ledger in ledgers
            if (oldest := ledger.oldest) is not None
        }

    def at_work(self) -> int:
        """Return how many delivered records are not settled."""
        return sum(len(ledger) for ledger in list(self._ledgers.values()))


class CommittedTransport(driver.Transport):
    """``kafka://`` with the consumer above."""

    Consumer = CommittedConsumer


class CommittedApp(faust.App):
    """A Faust app that consumes through :class:`CommittedTransport`."""

    def _new_transport(self) -> CommittedTransport:
        return CommittedTransport(self.conf.broker_consumer, self)

    def _create_directories(self) -> None:
        """Make none: nothing of ours rests in Faust's folders, and the working directory may be read-only."""


_TOUCHED: Final[tuple[tuple[Callable[..., Any], tuple[str, ...]], ...]] = (
    (driver.AIOKafkaConsumerThread._create_worker_consumer, ("self", "transport")),  # noqa: SLF001
    (driver.AIOKafkaConsumerThread.on_start, ("self",)),
    (driver.Consumer._new_consumer_thread, ("self",)),  # noqa: SLF001
    (BaseConsumer.getmany, ("self", "timeout")),
    (BaseConsumer._new_offset, ("self", "tp")),  # noqa: SLF001
    (BaseConsumer._add_gap, ("self", "tp", "offset_from", "offset_to")),  # noqa: SLF001
    (BaseConsumer.on_partitions_revoked, ("self", "revoked")),
    (faust.App._new_transport, ("self",)),  # noqa: SLF001
    (faust.App._create_directories, ("self",)),  # noqa: SLF001
)
"""What is overridden, with the parameters it must have."""

_USES: Final[tuple[tuple[Callable[..., Any], tuple[str, ...]], ...]] = (
    (driver.AIOKafkaConsumerThread._create_consumer, ("_create_worker_consumer",)),  # noqa: SLF001
    (driver.AIOKafkaConsumerThread.on_start, ("_create_consumer", "_consumer")),
    (BaseConsumer._filter_committable_offsets, ("_new_offset",)),  # noqa: SLF001
    (BaseConsumer._drain_messages, ("getmany", "_read_offset", "_add_gap")),  # noqa: SLF001
    (BaseConsumer.ack, ("ack_lock", "_acked_index", "_acked")),
    (aiokafka.AIOKafkaConsumer.start, ("_isolation_level", "_fetcher")),
)
"""Callers, with the names they must still go through for an override to matter."""


def check_faust() -> None:
    """Make sure that the installed Faust and aiokafka still have, and use, what the subclasses change.

    Raises:
        ConfigError: they do not; names what moved and the version to install.
    """
    if not str(faust.__version__).startswith(_TESTED):
        raise _moved(f"its version is {faust.__version__}")
    for function, parameters in _TOUCHED:
        if tuple(inspect.signature(function).parameters) != parameters:
            raise _moved(f"{function.__qualname__} takes other parameters")
    for function, names in _USES:
        missing = set(names) - _names(function)
        if missing:
            raise _moved(f"{function.__qualname__} no longer uses {', '.join(sorted(missing))}")
    if "isolation_level" not in inspect.signature(aiokafka.AIOKafkaConsumer.__init__).parameters:
        raise _moved("aiokafka's consumer takes no isolation level")


def _names(function: Callable[..., Any]) -> set[str]:
    """Names that a function's code refers to, its inner functions included."""
    code = inspect.unwrap(function).__code__
    found, todo = set(code.co_names), list(code.co_consts)
    while todo:
        inner = todo.pop()
        if inspect.iscode(inner):
            found.update(inner.co_names)
            todo.extend(inner.co_consts)
    return found


def _moved(what: str) -> ConfigError:
    return ConfigError(
        "faust-streaming",
        f"the installed version does not fit loom's transport: {what}",
        f"install faust-streaming {_TESTED}x",
    )
