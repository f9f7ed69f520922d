"""The agent on ``quarantine``: which topics are held, freeing what nothing needs, telling operators (kafka.md "Processors").

The topic says which chains keep copies; only their logs say why, so every chain is looked at: soon after a record of it, then
ever more rarely for as long as it keeps any. Nothing is decided here, and a look may be repeated.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from loom.errors import LoomError
from loom.ids import routing_id, stream_kind
from loom.processors.delivery import Record, Source
from loom.schemas.records import OperatorSignal
from loom.stores.kafka.records import text_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from loom.runtime.kept_copies import KeptCopies
    from loom.stores.contracts import Clock

_log = logging.getLogger("loom.processors.quarantine")

FIRST_LOOK_S: Final = 2.0
"""After a record: whoever wrote it is about to do the rest by itself."""

LONGEST_S: Final = 60.0
REPORT_EVERY: Final = 16
"""What stays held is told the first time and then every 16th (system.md 4; seed, D9)."""

AT_ONCE: Final = 8
MAX_CHAINS: Final = 50_000
"""Chains in the table; one more is not looked at by this node until others have left and its partition is read again."""

HELD: Final = "held-awaiting"
"""Code of the signal: a topic is held, and nothing on this node will deliver what it is held at."""


class QuarantineBridge(Protocol):
    """What the agent asks of the runtime."""

    async def look_after(self, chain_id: str) -> KeptCopies:
        """Free the copies of a chain that nothing needs, and tell what stays.

        Raises:
            LoomError: not done; call again.
        """
        ...


Tell = Callable[[OperatorSignal], Awaitable[None]]
"""Writes a signal; returns once it is there, raises whatever its client raises if it may not be."""

ChainsOf = Callable[[int], Awaitable[list[str]]]
"""Reads which chains keep copies in a partition of the topic."""

Report = Callable[[Source, Exception], None]


@dataclass(slots=True)
class _Chain:
    partition: int
    pause_s: float
    timer: asyncio.TimerHandle | None = None
    looking: bool = False
    again: bool = False
    """A record came during a look, which may have missed what it tells of."""
    awaited: int = 0
    """Looks, one after another, that found something awaited."""
    failures: int = 0
    kept: KeptCopies | None = None


class HeldTopics:
    """The chains that keep copies in the partitions assigned to this process, and a look at each now and then.

    Of the event loop that first calls it. ``rows`` is the table of held topics as of the last looks.
    """

    def __init__(
        self,
        bridge: QuarantineBridge,
        tell: Tell,
        chains_of: ChainsOf,
        *,
        node: str,
        now: Clock,
        report: Report | None = None,
        first_look_s: float = FIRST_LOOK_S,
        longest_s: float = LONGEST_S,
        max_chains: int = MAX_CHAINS,
    ) -> None:
        """Prepare; ``report`` hears of errors, the first of a chain and then every 16th (default: the log)."""
        self._bridge, self._tell, self._chains_of = bridge, tell, chains_of
        self._node, self._now, self._report = node, now, report or _to_log
        self._first_look_s, self._longest_s, self._max_chains = first_look_s, longest_s, max_chains
        self._chains: dict[str, _Chain] = {}
        self._partitions: set[int] = set()
        self._room = asyncio.Semaphore(AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def take(self, record: Record, acknowledge: Callable[[], object]) -> None:
        """Take a record of ``quarantine``. It is acknowledged at once: which chains there are is read anew at a start."""
        stream, _, sequence = text_of(record.key).rpartition("/")
        if stream_kind(stream) == "quarantine" and sequence.isdecimal() and sequence != "0":
            chain_id = routing_id(stream)
            if record.value is not None or chain_id in self._chains:
                self._note(chain_id, record.partition)
        acknowledge()

    def assigned(self, partitions: set[int]) -> None:
        """Look after these partitions, and no others: read what chains are in those that are new."""
        for chain_id in [c for c, chain in self._chains.items() if chain.partition not in partitions]:
            self._forget(chain_id)
        new, self._partitions = partitions - self._partitions, set(partitions)
        for partition in sorted(new):
            self._spawn(self._read(partition))

    def rows(self) -> list[dict[str, Any]]:
        """What is held, as of the last look at each chain: rows of ``Client.inbox``, with ``execution_id``."""
        return [
            {"execution_id": chain.kept.execution_id, **row}
            for chain in self._chains.values()
            if chain.kept is not None
            for row in chain.kept.held
        ]

    async def close(self) -> None:
        """Look no more; idempotent."""
        self._closed = True
        for chain_id in list(self._chains):
            self._forget(chain_id)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- looking -------------------------------------------------------------------------------------------------

    async def _read(self, partition: int) -> None:
        pause_s, tries = self._first_look_s, 0
        while partition in self._partitions:
            try:
                found = await self._chains_of(partition)
            except Exception as error:  # noqa: BLE001 - whatever the client raises, the partition is read again
                if tries % REPORT_EVERY == 0:
                    self._report(Source("quarantine", partition, 0), error)
            else:
                if partition in self._partitions:
                    self._note_all(found, partition)
                return
            tries += 1
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, self._longest_s)

    def _note_all(self, chains: Iterable[str], partition: int) -> None:
        for chain_id in chains:
            self._note(chain_id, partition)

    def _note(self, chain_id: str, partition: int) -> None:
        """Look at a chain soon; what was waited for so far is waited for no longer."""
        if self._closed:
            return
        chain = self._chains.get(chain_id)
        if chain is None:
            if len(self._chains) >= self._max_chains:
                _log.warning("%d chains keep copies; no more are looked at here", self._max_chains)
                return
            chain = self._chains[chain_id] = _Chain(partition, self._first_look_s)
        chain.again, chain.pause_s = chain.looking, self._first_look_s
        if not chain.looking:
            self._later(chain_id, chain, self._first_look_s)

    def _later(self, chain_id: str, chain: _Chain, delay_s: float) -> None:
        if chain.timer is not None:
            chain.timer.cancel()
        loop = asyncio.get_running_loop()
        chain.timer = loop.call_later(delay_s, self._begin, chain_id, chain)

    def _begin(self, chain_id: str, chain: _Chain) -> None:
        chain.timer, chain.looking = None, True
        self._spawn(self._look(chain_id, chain))

    async def _look(self, chain_id: str, chain: _Chain) -> None:
        about = Source("quarantine", chain.partition, 0)
        try:
            async with self._room:
                if self._chains.get(chain_id) is not chain:
                    return
                chain.kept = await self._bridge.look_after(chain_id)
                await self._told(chain, chain.kept)
            chain.failures = 0
        except Exception as error:  # noqa: BLE001 - one chain's fault must not stop the look at others
            if chain.failures % REPORT_EVERY == 0:
                self._report(about, error)
            chain.failures += 1
        finally:
            chain.looking = False
        if self._closed or self._chains.get(chain_id) is not chain:
            return
        if chain.again:
            chain.again = False
            self._later(chain_id, chain, self._first_look_s)
        elif chain.failures == 0 and chain.kept is not None and chain.kept.copies == 0:
            self._forget(chain_id)
        else:
            chain.pause_s = min(chain.pause_s * 2, self._longest_s)
            self._later(chain_id, chain, chain.pause_s)

    async def _told(self, chain: _Chain, kept: KeptCopies) -> None:
        """Tell what is awaited. A signal that could not be written is written by the next look."""
        awaiting: list[dict[str, Any]] = list(kept.awaiting)
        if kept.closed:
            awaiting = [{"awaits": "a capable node"}]
        if not awaiting:
            chain.awaited = 0
            return
        if chain.awaited % REPORT_EVERY == 0:
            for row in awaiting:
                await self._tell(self._signal(kept, row, chain.awaited + 1))
        chain.awaited += 1

    def _signal(self, kept: KeptCopies, row: dict[str, Any], count: int) -> OperatorSignal:
        named = {
            "topic": "topic",
            "messageId": "message_id",
            "inboxSeq": "inbox_seq",
            "heldSince": "held_since",
            "awaits": "awaits",
        }
        details = {name: row[field] for name, field in named.items() if row.get(field) is not None}
        what = (
            f"topic {row['topic']!r} is held"
            if "topic" in row
            else "copies are kept, the log cannot be opened"
        )
        return OperatorSignal(
            HELD,
            "warning",
            self._now(),
            self._node,
            kept.execution_id,
            f"{what}, awaiting {row['awaits']}",
            count,
            {"chainId": kept.chain_id, "copies": kept.copies, **details},
        )

    def _forget(self, chain_id: str) -> None:
        chain = self._chains.pop(chain_id)
        if chain.timer is not None:
            chain.timer.cancel()

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _to_log(source: Source, error: Exception) -> None:
    said = str(error) if isinstance(error, LoomError) else "unexpected"
    _log.warning(
        "a look at copies of %s/%d: %s: %s", source.topic, source.partition, type(error).__name__, said
    )
