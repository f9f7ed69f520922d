"""Records of events as the runs that an index is built from, without decoding a value (kafka.md, "Topics").

The one that is done for every event of a takeover, so it does no more than it must.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from loom.stores.contracts import NO_EVENTS
from loom.stores.event_run import Beside, EventRun
from loom.stores.kafka.records import TICK_KEY, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_TICK: Final = TICK_KEY.encode()
_ORDER: Final = ("type", "sequence", "id", "batch", "timestamp")
"""Headers that every event has, as they are written; what follows them not every one has."""
_WORDS: Final = 1024
_word: Final = lru_cache(_WORDS)(bytes.decode)
"""Text that many events share: kept once."""


class EventHead(NamedTuple):
    """What the headers of an event say; ``batch`` is its position in its append, and the size of that."""

    kind: str
    sequence: int
    id: str
    batch: tuple[int, int]
    timestamp: int
    beside: Beside | None = None


def runs_of(  # noqa: C901 - one loop: a call for each event would be a tenth of a takeover
    messages: Iterable[Any], *, gone: Callable[[Any], None], lost: Callable[[Any], EventHead | None]
) -> Iterator[EventRun]:
    """Gather records of one topic, in log order, to runs.

    ``gone`` is told of each tombstone; ``lost`` is asked for the head of a record whose headers are not an event's (None:
    it is none). What is none is passed over, and so is what has a key without a sequence.
    """
    run, prefix, follows = EventRun("", 0), b"", NO_EVENTS
    ids, kinds, batches, values = run.ids, run.kinds, run.batches, run.values
    for message in messages:
        key, value = message.key() or b"", message.value()
        if value is None:
            if key != _TICK:  # the mark in its transaction says what is gone
                gone(message)
            continue
        headers = message.headers()
        try:
            (a, a_kind), (b, a_sequence), (c, an_id), (d, a_batch), (e, a_time), *rest = headers
            if (a, b, c, d, e) != _ORDER:
                raise ValueError  # noqa: TRY301 - as where there are fewer
            kind, sequence, event_id = _word(a_kind), int(a_sequence), an_id.decode()
            batch, timestamp, beside = _batch(a_batch), int(a_time), _beside(rest) if rest else None
        except (ValueError, TypeError, AttributeError):
            head = head_of(headers) or lost(message)
            if head is None:
                continue
            kind, sequence, event_id, batch, timestamp, beside = head
        if sequence != follows or not key.startswith(prefix):
            if ids:
                yield run
            slash = key.rfind(b"/")
            prefix = key[: slash + 1] if slash > 0 and sequence >= 0 else b""
            run = EventRun(text_of(prefix[:-1]), sequence)
            ids, kinds, batches, values = run.ids, run.kinds, run.batches, run.values
        if not prefix:
            follows = NO_EVENTS
            continue
        ids.append(event_id)
        kinds.append(kind)
        batches.append(batch)
        values.append(value)
        run.timestamp, follows = timestamp, sequence + 1
        if beside is not None:
            run.note(beside)
    if ids:
        yield run


def head_of(headers: Any) -> EventHead | None:
    """Read the headers of an event by their names, in whatever order they are; None: they are not an event's."""
    try:
        named = dict(headers or ())
        return EventHead(
            _word(named.pop("type")),
            int(named.pop("sequence")),
            named.pop("id").decode(),
            _batch(named.pop("batch")),
            int(named.pop("timestamp")),
            _beside(named.items()) if named else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


@lru_cache(_WORDS)
def _batch(batch: bytes) -> tuple[int, int]:
    position, _, size = batch.partition(b"/")
    return int(position), int(size)


def _beside(headers: Iterable[tuple[str, Any]]) -> Beside:
    fence, node, sealed = None, None, False
    consumed: tuple[tuple[str, int], ...] = ()
    for name, value in headers:
        if name == "fence":
            fence = int(value)
        elif name == "node":
            node = _word(value)
        elif name == "consumed":
            consumed = _positions(value.decode())
        elif name == "sealed":
            sealed = True
    return Beside(fence, node, consumed, sealed)


def _positions(text: str) -> tuple[tuple[str, int], ...]:
    pairs = (entry.rpartition("/") for entry in text.split(","))
    return tuple((stream, int(at)) for stream, _, at in pairs)
