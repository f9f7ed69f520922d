"""Faults between a writer and its broker, by a proxy (pitfalls.md, "Transactions"; kafka.md, "The poison rule")."""

from __future__ import annotations

import asyncio

import pytest
from writers import append, streams

from loom.testing.proxy import Api, Side

pytestmark = pytest.mark.timeout(120)
WRITER = "*-log-0.*"


@pytest.fixture(params=[1, 2], ids=["one-lane", "two-lanes"])
def lanes(request):
    return request.param


def log(hurt):
    return streams(hurt.direct, hurt.prefix)


async def test_an_end_held_past_the_deadline_and_let_go_in_a_later_transaction_ends_nothing_else(
    hurt, proxy, lanes
):
    writer = hurt.make("n1", lanes=lanes).serving()
    await writer.write(append("s", 0))
    held = proxy.hold(Api.END_TXN, WRITER)
    doubtful = writer.write(append("s", 1, 2))
    assert await asyncio.to_thread(held.caught.wait, 10)
    (done,) = await doubtful  # the commit deadline passed; a new tenure read the log and wrote it again
    assert writer.tenure == 2
    assert (done.first, done.head) == (1, 2)

    # a later transaction, open when the held request arrives: begun, its records sent, its own end not yet
    later_end = proxy.hold(Api.END_TXN, WRITER)
    later = writer.write(append("s", 3, 2))
    assert await asyncio.to_thread(later_end.caught.wait, 10)
    held.release()
    assert await asyncio.to_thread(held.passed.wait, 10)
    later_end.release()
    await later
    await writer.write(append("s", 5))

    assert log(hurt) == {"s": [f"e:{n}" for n in range(6)]}


@pytest.mark.parametrize("at", [Api.PRODUCE, Api.END_TXN])
async def test_a_client_that_resends_an_end_by_itself_poisons_the_tenure_though_the_commit_succeeds(
    hurt, proxy, lanes, at
):
    writer = hurt.make("n1", lanes=lanes).serving()
    await writer.write(append("s", 0))
    held = proxy.hold(Api.END_TXN, WRITER, hang_up=True)
    await writer.write(append("s", 1))  # resent over a new connection, and committed
    assert held.caught.is_set()

    open_transaction = proxy.hold(at, WRITER)
    later = writer.write(append("s", 2, 2))
    assert await asyncio.to_thread(open_transaction.caught.wait, 10)
    tenure = writer.tenure
    held.release()
    assert await asyncio.to_thread(held.passed.wait, 10)
    open_transaction.release()
    (placed,) = await later

    assert not placed.repeated, "the later transaction ended by its own decision"
    assert writer.tenure == tenure == 2, "a new tenure began before it, and none was needed after it"
    assert log(hurt) == {"s": [f"e:{n}" for n in range(4)]}


async def test_a_commit_whose_reply_is_lost_is_success_and_one_copy(hurt, proxy, lanes):
    writer = hurt.make("n1", lanes=lanes).serving()
    await writer.write(append("s", 0))
    lost = proxy.drop(Api.END_TXN, WRITER, Side.REPLY)
    (done,) = await writer.write(append("s", 1, 3))
    assert lost.caught.is_set()
    assert (done.first, done.head) == (1, 3)
    assert done.repeated, "it stood in the log, and was found there"
    (again,) = await writer.write(append("s", 1, 3))

    assert again.repeated
    assert log(hurt) == {"s": ["e:0", "e:1", "e:2", "e:3"]}


@pytest.mark.parametrize("side", list(Side))
@pytest.mark.parametrize("api", [Api.PRODUCE, Api.ADD_PARTITIONS_TO_TXN, Api.END_TXN, Api.INIT_PRODUCER_ID])
@pytest.mark.parametrize("act", ["cut", "drop", "delay"])
async def test_any_one_request_or_reply_hurt_costs_time_only(hurt, proxy, act, api, side):
    writer = hurt.make("n1").serving()
    await writer.write(append("s", 0))
    rule = {
        "cut": lambda: proxy.cut(api, WRITER, side),
        "drop": lambda: proxy.drop(api, WRITER, side),
        "delay": lambda: proxy.delay(api, 400, WRITER, side),
    }[act]()
    if api is Api.INIT_PRODUCER_ID:
        proxy.disconnect()  # the next transaction begins with a new tenure
    for number in range(1, 4):
        await writer.write(append("s", number))

    assert rule.caught.is_set()
    assert log(hurt) == {"s": ["e:0", "e:1", "e:2", "e:3"]}
