"""Conditions, repeats, fences and sizes of an append to one stream."""

from __future__ import annotations

import asyncio

from loom.errors import (
    ExecutionNotFoundError,
    InvalidInputError,
    PayloadTooLargeError,
    StaleFenceError,
    WrongHeadError,
)
from loom.schemas.envelope import Kind
from loom.stores.contracts import NO_EVENTS, Appended, Observation, StreamAppend
from loom.testing.conformance.event_store.support import (
    EventBench,
    LogSuite,
    attempt,
    event,
    refused,
    sequences,
    started,
    steps,
)


class AppendConformance(LogSuite):
    """Conditions, repeats and fences."""

    async def test_another_head_is_refused_and_named(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench, 3)
        for expected in (NO_EVENTS, 0, 1, 3, 99):
            stray = StreamAppend(stream_id, (event("stray"),), expected_head=expected)
            error = await refused(store.append(stray), WrongHeadError)
            assert (error.expected, error.head) == (expected, 2)
        assert await sequences(store, stream_id) == [0, 1, 2]

    async def test_a_stream_that_never_was_has_no_head(self, bench: EventBench) -> None:
        store, stream_id = await bench.open(), bench.chain()
        error = await refused(store.append(steps(stream_id, 4)), WrongHeadError)
        assert error.head == NO_EVENTS

    async def test_one_of_two_racing_handles_wins_each_round(self, bench: EventBench) -> None:
        ours, stream_id = await self.log(bench)
        theirs = await bench.open()
        for head in range(25):
            offers = [StreamAppend(stream_id, (event(f"{who}{head}"),), expected_head=head) for who in "ab"]
            results = await asyncio.gather(attempt(ours.append(offers[0])), attempt(theirs.append(offers[1])))
            won = [r for r in results if isinstance(r, Appended)]
            assert len(won) == 1
            assert (won[0].first, won[0].head) == (head + 1, head + 1)
            assert {type(r) for r in results} == {Appended, WrongHeadError}
        assert await sequences(ours, stream_id) == list(range(26))

    async def test_many_offers_for_one_place(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench)
        offers = [
            StreamAppend(stream_id, (event(f"x{n}"), event(f"y{n}")), expected_head=0) for n in range(20)
        ]
        results = await asyncio.gather(*(attempt(store.append(offer)) for offer in offers))
        winner = [n for n, result in enumerate(results) if isinstance(result, Appended)]
        assert len(winner) == 1
        assert [e.id for e in await store.read(stream_id, 1)] == [f"x{winner[0]}", f"y{winner[0]}"]

    async def test_an_append_without_events_is_refused(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench)
        await refused(store.append(StreamAppend(stream_id, (), expected_head=0)), InvalidInputError)

    # -- repeats ------------------------------------------------------------------------------------------------

    async def test_a_repeat_is_success_and_adds_nothing(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench)
        other = await bench.open()
        offer = steps(stream_id, 0, 2, fence=1)
        first = await store.append(offer)
        await store.append(steps(stream_id, 2))
        again = await other.append(offer)
        assert (again.first, again.head, again.repeated) == (first.first, first.head, True)
        start = await other.append(started(stream_id))
        assert (start.first, start.head, start.repeated) == (0, 0, True)
        assert await sequences(store, stream_id) == [0, 1, 2, 3]

    async def test_repeats_at_the_same_time_are_one_append(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench)
        handles = [store, await bench.open()]
        offer = steps(stream_id, 0, 2)
        results = await asyncio.gather(*(handles[n % 2].append(offer) for n in range(8)))
        assert {(r.first, r.head) for r in results} == {(1, 2)}
        assert sum(not r.repeated for r in results) == 1
        assert await sequences(store, stream_id) == [0, 1, 2]

    async def test_a_repeat_succeeds_under_a_newer_fence(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench)
        offer = steps(stream_id, 0, fence=1)
        await store.append(offer)
        await store.acquire_fence(stream_id, "n:2")
        assert (await store.append(offer)).repeated
        await refused(store.append(steps(stream_id, 1, fence=1)), StaleFenceError)

    async def test_the_same_ids_in_part_are_no_repeat(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench, 3)
        longer = StreamAppend(stream_id, (event(f"{stream_id}#1"), event("else")), expected_head=0)
        await refused(store.append(longer), WrongHeadError)
        beyond = steps(stream_id, 0, 3)
        await refused(store.append(beyond), WrongHeadError)
        shifted = StreamAppend(stream_id, (event(f"{stream_id}#2"),), expected_head=0)
        await refused(store.append(shifted), WrongHeadError)
        assert (await store.append(steps(stream_id, 0, 1))).repeated

    # -- fences -------------------------------------------------------------------------------------------------

    async def test_the_append_of_sequence_0_may_bring_the_first_fence(self, bench: EventBench) -> None:
        store, fenced = await self.log(bench)
        assert await store.observe(fenced) == Observation(0, 1, f"{fenced}#0")
        plain = bench.chain()
        await store.append(started(plain, fence=None))
        assert await store.observe(plain) == Observation(0, 0, f"{plain}#0")
        await refused(store.append(started(bench.chain(), fence=2)), StaleFenceError)

    async def test_an_older_fence_is_stale(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench)
        token = await store.acquire_fence(stream_id, "n:2")
        assert token == 2
        error = await refused(store.append(steps(stream_id, 0, fence=1)), StaleFenceError)
        assert (error.token, error.current) == (1, 2)
        assert (await store.append(steps(stream_id, 0, fence=2))).head == 1
        assert await (await bench.open()).acquire_fence(stream_id, "n:3") == 3
        await refused(store.append(steps(stream_id, 1, fence=2)), StaleFenceError)

    async def test_a_fence_that_was_never_given_out_is_refused(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench)
        await refused(store.append(steps(stream_id, 0, fence=7)), StaleFenceError)
        assert (await store.observe(stream_id)).fence == 1

    async def test_an_append_without_a_fence_leaves_it_alone(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench)
        await store.append(steps(stream_id, 0))
        assert (await store.observe(stream_id)).fence == 1
        assert (await store.append(steps(stream_id, 1, fence=1))).head == 2

    async def test_fences_taken_at_once_all_differ(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench)
        handles = [store, await bench.open()]
        tokens = await asyncio.gather(*(handles[n % 2].acquire_fence(stream_id, f"n:{n}") for n in range(8)))
        assert sorted(tokens) == list(range(2, 10))
        assert (await store.observe(stream_id)).fence == 9

    async def test_no_fence_where_nothing_is(self, bench: EventBench) -> None:
        store, stream_id = await bench.open(), bench.chain()
        await refused(store.acquire_fence(stream_id, "n:1"), ExecutionNotFoundError)
        nothing = Observation(NO_EVENTS, 0, None)
        await refused(store.acquire_fence_if(stream_id, nothing, "n:1"), ExecutionNotFoundError)
        assert await store.info(stream_id) is None

    # -- observations -------------------------------------------------------------------------------------------

    async def test_a_fence_is_taken_only_as_observed(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench)
        seen = await store.observe(stream_id)
        await store.append(steps(stream_id, 0))
        await refused(store.acquire_fence_if(stream_id, seen, "n:2"), WrongHeadError)
        seen = await store.observe(stream_id)
        assert await store.acquire_fence_if(stream_id, seen, "n:2") == 2
        await refused(store.acquire_fence_if(stream_id, seen, "n:3"), WrongHeadError)
        strange = Observation(seen.head, 2, "another anchor")
        await refused(store.acquire_fence_if(stream_id, strange, "n:3"), WrongHeadError)

    async def test_one_of_two_takers_gets_the_fence(self, bench: EventBench) -> None:
        ours, stream_id = await self.log(bench)
        theirs = await bench.open()
        for _ in range(10):
            seen = await ours.observe(stream_id)
            takers = (
                ours.acquire_fence_if(stream_id, seen, "n:2"),
                theirs.acquire_fence_if(stream_id, seen, "n:3"),
            )
            results = await asyncio.gather(*takers, return_exceptions=True)
            assert sorted(type(r).__name__ for r in results) == ["WrongHeadError", "int"]

    async def test_the_taker_may_repeat_itself(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench)
        seen = await store.observe(stream_id)
        token = await store.acquire_fence_if(stream_id, seen, "n:2")
        assert await store.acquire_fence_if(stream_id, seen, "n:2") == token
        assert (await store.observe(stream_id)).fence == token

    async def test_an_append_only_as_observed(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench)
        seen = await store.observe(stream_id)
        claim = StreamAppend(stream_id, (event("claim", Kind.EXECUTION_RECOVERED),), observation=seen)
        assert (await store.append(claim)).head == 1
        assert (await store.append(claim)).repeated
        late = StreamAppend(stream_id, (event("late"),), observation=seen)
        await refused(store.append(late), WrongHeadError)
        seen = await store.observe(stream_id)
        await store.acquire_fence(stream_id, "n:2")
        await refused(
            store.append(StreamAppend(stream_id, (event("late"),), observation=seen)), WrongHeadError
        )
        assert (await store.append(claim)).repeated
        strange = Observation(1, 2, "another anchor")
        await refused(
            store.append(StreamAppend(stream_id, (event("late"),), observation=strange)), WrongHeadError
        )
        assert await sequences(store, stream_id) == [0, 1]

    # -- sizes --------------------------------------------------------------------------------------------------

    async def test_too_large_an_event_is_refused_and_harms_nothing(self, bench: EventBench) -> None:
        store, stream_id = await self.log(bench)
        huge = StreamAppend(
            stream_id, (event("a"), event("b", text="x" * bench.too_large), event("c")), expected_head=0
        )
        error = await refused(store.append(huge), PayloadTooLargeError)
        assert error.size > error.limit
        assert await sequences(store, stream_id) == [0]
        assert (await store.append(steps(stream_id, 0))).head == 1
