"""Calls made as one: answers go to who asked, errors to all who shared the call, and none waits for ever."""

import asyncio

import pytest

from loom.errors import UnreachableError
from loom.stores.gathered import Gathered


class Far:
    """Answers twice of what it is asked, once the test lets it."""

    def __init__(self):
        self.calls = []
        self.open = asyncio.Event()
        self.fails = set()

    async def __call__(self, asked):
        self.calls.append(list(asked))
        await self.open.wait()
        if self.fails & set(asked):
            raise UnreachableError("Redis", "nowhere", "redis_url")
        return [2 * one for one in asked]


async def test_what_comes_during_a_call_goes_with_the_next():
    far = Far()
    gathered = Gathered(far)
    first = asyncio.create_task(gathered.ask(1))
    while not far.calls:
        await asyncio.sleep(0)
    others = [asyncio.create_task(gathered.ask(number)) for number in (2, 3, 4)]
    await asyncio.sleep(0)
    far.open.set()
    assert await asyncio.gather(first, *others) == [2, 4, 6, 8]
    assert far.calls == [[1], [2, 3, 4]]


async def test_a_call_carries_no_more_than_its_bound():
    far = Far()
    far.open.set()
    gathered = Gathered(far, most=3)
    assert await asyncio.gather(*(gathered.ask(number) for number in range(8))) == [0, 2, 4, 6, 8, 10, 12, 14]
    assert [len(call) for call in far.calls] == [3, 3, 2]


async def test_an_error_is_told_to_those_who_shared_the_call_alone():
    far = Far()
    far.open.set()
    far.fails = {1}
    gathered = Gathered(far, most=2)
    told = await asyncio.gather(*(gathered.ask(number) for number in range(4)), return_exceptions=True)
    assert [type(one) for one in told] == [UnreachableError, UnreachableError, int, int]
    assert await gathered.ask(5) == 10


async def test_who_stops_waiting_takes_nobody_along():
    far = Far()
    gathered = Gathered(far)
    one, two = asyncio.create_task(gathered.ask(1)), asyncio.create_task(gathered.ask(2))
    await asyncio.sleep(0)
    one.cancel()
    far.open.set()
    assert await two == 4
    with pytest.raises(asyncio.CancelledError):
        await one


def test_a_loop_that_ended_leaves_nothing_behind():
    far = Far()
    gathered = Gathered(far)

    async def asks():
        task = asyncio.create_task(gathered.ask(1))
        await asyncio.sleep(0)
        task.cancel()

    async def asks_again():
        gathered._call.open = asyncio.Event()
        gathered._call.open.set()
        return await gathered.ask(2)

    asyncio.run(asks())
    assert asyncio.run(asks_again()) == 4
    assert far.calls[-1] == [2]
