"""Messages that are delivered as they are sent (docs/adr/0038), beside what is sealed and what is held."""

from __future__ import annotations

from contextlib import asynccontextmanager

from mixed import SECRET, Trouble
from test_quarantine import CHAIN, Chain, hold, kinds, listens

from loom.ids import inbox_stream
from loom.schemas.envelope import Kind
from loom.testing.runtime import until, until_parked


@asynccontextmanager
async def refusing(chain):
    """A node without keys that drives the chain, and has met a sealed message at the head of ``t``."""
    await chain.started()
    await chain.send("t", "sealed", "m1")
    trouble = Trouble()
    async with chain.node("raw", owns=True, trouble=trouble) as node:
        await until(lambda: trouble.errors, "a refusal")
        yield node


async def test_it_rests_sealed_in_inbox_and_log(handed_over):
    chain = Chain()
    async with chain.node("capable", owns=True) as node:
        handle = await node.start(listens, None, execution_id=CHAIN, subject="s")
        for n in range(3):
            await until_parked(node, CHAIN)
            await node.send(CHAIN, "t", f"{SECRET}{n}")
        assert await handle.result(5) == [f"{SECRET}{n}" for n in range(3)]
    assert handed_over == [True, True, True]
    for stream_id in (CHAIN, inbox_stream(CHAIN, "t")):
        at_rest = chain.stream(stream_id)
        assert SECRET not in str([e.data for e in at_rest])
    messages = [e for e in chain.stream(inbox_stream(CHAIN, "t")) if e.type == Kind.INBOX_MESSAGE]
    assert all("INBOX_MESSAGE.payload" in e.metadata["seal"]["covers"] for e in messages)
    assert len(messages) == 3


async def test_a_sealed_head_holds_every_topic_for_what_is_sent_here_too(handed_over):
    chain = Chain()
    async with refusing(chain) as node:
        await node.send(CHAIN, "u", "open")
        await until(lambda: len(handed_over) or CHAIN not in node._engine.runs)
        assert True not in handed_over
        assert [e.data["payload"] for e in chain.stream(inbox_stream(CHAIN, "u"))] == ["open"]
        assert kinds(chain)[-1] == Kind.EXECUTION_SUSPENDED
    async with chain.node("capable", owns=True) as capable:
        await until(lambda: kinds(chain).count(Kind.MESSAGE_CONSUMED) == 2, "both deliveries")
        await until_parked(capable, CHAIN)
        await capable.send(CHAIN, "u", "last")
        assert await capable.handle(CHAIN, listens).result(5) == ["sealed", "open", "last"]


async def test_beside_a_held_topic_messages_go_by_themselves(handed_over):
    chain = Chain()
    async with refusing(chain) as node:
        await hold(node)
        await chain.send("u", "first", "m2", sealed=False)
        await until(lambda: Kind.MESSAGE_CONSUMED in kinds(chain), "the delivery of the other topic")
        await until_parked(node, CHAIN)
        await node.send(CHAIN, "u", "second")
        assert handed_over == [False]
        await until(lambda: kinds(chain).count(Kind.MESSAGE_CONSUMED) == 2, "the second delivery")


async def test_the_key_of_an_execution_that_ends_on_a_message_is_let_go(handed_over):
    chain = Chain()
    async with chain.node("capable", owns=True) as node:
        handle = await node.start(listens, None, execution_id=CHAIN)
        keys = node.stores.events._ring._held
        for n in range(3):
            await until_parked(node, CHAIN)
            assert (CHAIN in keys) == (n > 0)
            await node.send(CHAIN, "t", n)
        await handle.result(5)
        assert CHAIN not in keys
    assert handed_over == [True, True, True]
