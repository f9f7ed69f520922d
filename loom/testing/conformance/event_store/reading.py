"""What was appended is read as it was."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

from loom.errors import InvalidInputError
from loom.ids import inbox_stream
from loom.schemas.envelope import EVENT_SCHEMA, Kind, NewEvent
from loom.stores.contracts import NO_EVENTS, Observation, StreamAppend
from loom.testing.conformance.event_store.support import (
    SEAL,
    EventBench,
    LogSuite,
    event,
    refused,
    sequences,
    started,
    steps,
)

if TYPE_CHECKING:
    from loom.schemas.envelope import Json

_HARD_VALUES: Final[list[Json]] = [
    None,
    True,
    0,
    -1,
    2**53 + 1,
    -(2**63),
    10**30,
    0.1,
    -0.0,
    1e308,
    5e-324,
    "",
    "\u0000\u001f\u007f\u2028\u2029",
    "ä\U0001f600",
    '"\\/\b',
    [],
    {},
    {"": {"": []}},
    {"__loomEnc": 1, "$shredded": {"subject": "s"}},
    [[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]],
]


def _some_json(chance: random.Random, depth: int) -> Json:
    kind = chance.randrange(8 if depth else 6)
    if kind < 2:
        return "".join(
            chr(chance.choice((chance.randrange(0xD800), chance.randrange(0xE000, 0x110000))))
            for _ in range(5)
        )
    if kind < 6:
        return chance.choice(
            (None, True, False, chance.randrange(-(2**70), 2**70), chance.uniform(-1e9, 1e9))
        )
    children = [_some_json(chance, depth - 1) for _ in range(chance.randrange(4))]
    return children if kind == 6 else {str(n): child for n, child in enumerate(children)}


def _shape(value: Json) -> object:
    """Types as well as values: 1, 1.0 and True are equal in Python."""
    if isinstance(value, list):
        return [_shape(v) for v in value]
    if isinstance(value, dict):
        return {key: _shape(v) for key, v in value.items()}
    return type(value), repr(value)


class ReadingConformance(LogSuite):
    """What was appended is read as it was."""

    async def test_events_are_numbered_from_0_without_gaps(self, bench: EventBench) -> None:
        store, stream_id = await bench.open(), bench.chain()
        first = await store.append(started(stream_id))
        more = await store.append(steps(stream_id, 0, 3, fence=1))
        assert (first.stream_id, first.first, first.head, first.repeated) == (stream_id, 0, 0, False)
        assert (more.first, more.head, more.repeated) == (1, 3, False)
        events = await (await bench.open()).read(stream_id)
        assert [e.sequence for e in events] == [0, 1, 2, 3]
        assert [e.id for e in events] == [f"{stream_id}#{n}" for n in range(4)]
        assert [e.data.get("output") for e in events] == [None, 1, 2, 3]
        assert {e.stream_id for e in events} == {stream_id}
        assert [e.type for e in events] == [Kind.EXECUTION_STARTED, *[Kind.STEP_COMPLETED] * 3]

    async def test_timestamps_never_fall(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench)
        for head in range(5):
            await store.append(steps(stream_id, head))
        events = await store.read(stream_id)
        times = [e.timestamp for e in events]
        assert times == sorted(times)
        assert times[0] > 0

    async def test_metadata_comes_back(self, bench: EventBench) -> None:
        store, stream_id = await bench.open(), bench.chain()
        stamps: list[dict[str, Json]] = [
            {"schema": EVENT_SCHEMA, "seal": SEAL},
            {"schema": EVENT_SCHEMA, "quarantine": {"topic": "tö/p:ic", "inboxSeq": 2**40}, "seal": SEAL},
            {"schema": EVENT_SCHEMA, "node": "n:1", "actor": "alice", "other": {"deep": [1, None, "ä"]}},
            {},
        ]
        events = tuple(
            NewEvent(f"m{n}", Kind.DECISION_RECORDED, {"n": n}, stamp) for n, stamp in enumerate(stamps)
        )
        await store.append(StreamAppend(stream_id, events, expected_head=NO_EVENTS))
        assert [e.metadata for e in await store.read(stream_id)] == stamps

    async def test_any_json_comes_back(self, bench: EventBench) -> None:
        store, stream_id = await bench.open(), bench.chain()
        values = [*_HARD_VALUES, *(_some_json(random.Random(seed), 4) for seed in range(30))]  # noqa: S311 - test data
        events = tuple(event(f"v{n}", value=value) for n, value in enumerate(values))
        await store.append(StreamAppend(stream_id, events, expected_head=NO_EVENTS))
        found = [e.data["value"] for e in await store.read(stream_id)]
        assert found == values
        assert [_shape(value) for value in found] == [_shape(value) for value in values]

    async def test_what_is_no_json_is_refused(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench)
        deep: Json = None
        for _ in range(100_000):
            deep = [deep]
        for value in (float("nan"), float("inf"), object(), "\ud800", deep):
            bad = StreamAppend(stream_id, (event("bad", value=value),), expected_head=0)
            await refused(store.append(bad), InvalidInputError)
        assert await sequences(store, stream_id) == [0]

    async def test_readers_cannot_change_the_log(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench)
        (read,) = await store.read(stream_id)
        read.data["workflow"] = "changed"
        read.metadata.clear()
        (again,) = await store.read(stream_id)
        assert again.data["workflow"] == "w"
        assert again.metadata["schema"] == EVENT_SCHEMA

    async def test_a_page_starts_and_ends_where_it_was_asked(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench, 6)
        assert [e.sequence for e in await store.read(stream_id, 2)] == [2, 3, 4, 5]
        assert [e.sequence for e in await store.read(stream_id, 2, 2)] == [2, 3]
        assert [e.sequence for e in await store.read(stream_id, 0, 1)] == [0]
        assert [e.sequence for e in await store.read(stream_id, 5, 100)] == [5]
        assert await store.read(stream_id, 6) == []
        assert await store.read(stream_id, 0, 0) == []

    async def test_a_stream_that_never_was(self, bench: EventBench) -> None:
        store, stream_id = await bench.open(), bench.chain()
        assert await store.read(stream_id) == []
        assert await store.read_last(stream_id) is None
        assert await store.info(stream_id) is None
        assert await store.observe(stream_id) == Observation(NO_EVENTS, 0, None)
        await store.truncate(stream_id, 5)
        assert await store.info(stream_id) is None

    async def test_info_tells_where_a_log_stands(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench)
        info = await store.info(stream_id)
        assert info is not None
        assert (info.stream_id, info.head, info.first, info.fence) == (stream_id, 0, 1, 1)
        assert (info.anchor, info.status, info.node) == (f"{stream_id}#0", Kind.EXECUTION_STARTED, "n:1")
        parked = event("park", Kind.EXECUTION_SUSPENDED, metadata={"node": "n:2"}, waits=[])
        await store.append(StreamAppend(stream_id, (parked,), expected_head=0, fence=1))
        denied = event("denied", Kind.EXECUTION_DENIED, metadata={"node": "n:3"}, op="send")
        await store.append(StreamAppend(stream_id, (denied,), expected_head=1))
        info = await store.info(stream_id)
        assert info is not None
        assert (info.head, info.status, info.node) == (2, Kind.EXECUTION_SUSPENDED, "n:2")
        last = await store.read_last(stream_id)
        assert last is not None
        assert last.id == "denied"

    async def test_records_after_the_end_leave_the_end(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench)
        end = event("end", Kind.EXECUTION_COMPLETED, output=1)
        await store.append(StreamAppend(stream_id, (end,), expected_head=0, fence=1))
        late = (event("outcome", Kind.OUTCOME_RECORDED, outcome=1), event("shred", Kind.PAYLOAD_SHREDDED))
        await store.append(StreamAppend(stream_id, late, expected_head=1))
        info = await store.info(stream_id)
        assert info is not None
        assert (info.head, info.status) == (3, Kind.EXECUTION_COMPLETED)

    async def test_the_streams_of_a_subject_are_found(self, bench: EventBench) -> None:
        store, mine = await bench.open(), bench.chain()
        find: Any = getattr(store, "find_subject", None)
        if find is None:
            return  # a guarded store refuses it by name
        subject, heir, gone, other = f"s-{mine}", bench.chain(), bench.chain(), bench.elsewhere()
        for stream_id, chain_id in ((mine, mine), (heir, mine), (gone, gone)):
            data: dict[str, Json] = {"workflow": "w", "input": None, "chainId": chain_id, "subject": subject}
            first = event(f"{stream_id}#0", Kind.EXECUTION_STARTED, **data)
            await store.append(StreamAppend(stream_id, (first,), expected_head=NO_EVENTS, fence=1))
        await store.append(started(other))
        for chain_id in (mine, other):
            message = event(f"m-{chain_id}", Kind.INBOX_MESSAGE, topic="t", payload=1, messageId="m")
            await store.append(StreamAppend(inbox_stream(chain_id, "t"), (message,)))
        await store.delete(gone)
        assert sorted(await find(subject)) == sorted([mine, heir, inbox_stream(mine, "t")])
        assert sorted(await find(other)) == sorted([other, inbox_stream(other, "t")])
        assert await find("nobody") == []
