"""Random histories: whatever operators, senders and nodes do, no message is lost, doubled or seen out of order."""

from __future__ import annotations

import asyncio
import random

import pytest
from mixed import OPERATOR
from test_quarantine import CHAIN, Chain

from loom import LoomError, flow, receive
from loom.ids import dedupe_key, inbox_stream
from loom.kernel.state import ExecutionState, fold
from loom.schemas.envelope import Kind
from loom.testing.runtime import crash, until

SEEDS = range(10)
STEPS = 40
TOPICS = ("t", "u")


@flow("collects")
async def collects(ctx):
    """Takes messages of both topics until it is told to end."""
    seen = []
    while True:
        got = await ctx.select(receive("t"), receive("u"), receive("end"))
        if got.topic == "end":
            return seen
        seen.append([got.topic, got.value])


class History:
    """One random course of events on one chain."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.chain = Chain(collects)
        self.owner = None
        self.sent = dict.fromkeys(TOPICS, 0)
        self.done = []

    async def run(self, steps):
        await self.chain.started(flow=collects)
        async with (
            self.chain.node("raw", quarantine_max=1024) as raw,
            self.chain.node("capable", inbox_auto_release=False) as capable,
        ):
            self.clients = {"raw": raw, "capable": capable}
            await self.own()
            for _ in range(steps):
                await self.step()
            await self.leave()
            return await self.end()

    async def own(self):
        kind = self.random.choice(["raw", "raw", "capable"])
        self.owner = self.chain.node(kind, owns=True, inbox_auto_release=self.random.random() < 0.8)
        await self.owner.open()

    async def leave(self):
        if self.random.random() < 0.3:
            await crash(self.owner)
        else:
            await self.owner.close()

    async def step(self):
        op = self.random.choices(
            [self.send, self.repeat, self.hold, self.release, self.drop, self.discard, self.expire, self.move, self.rest],
            [8, 2, 6, 3, 2, 2, 1, 1, 2],
        )[0]  # fmt: skip
        try:
            await op()
        except LoomError as refused:
            self.done.append((op.__name__, type(refused).__name__))
        else:
            self.done.append((op.__name__, "done"))
        for _ in range(self.random.randrange(4)):
            await asyncio.sleep(0)

    def client(self):
        return self.clients[self.random.choice(["raw", "capable"])]

    def topic(self):
        return self.random.choice(TOPICS)

    async def send(self):
        topic = self.topic()
        self.sent[topic] += 1
        payload = f"{topic}{self.sent[topic]}"
        kind = self.random.choice(["capable", "raw"])
        await self.clients[kind].send(CHAIN, topic, payload, message_id=payload)

    async def repeat(self):
        """The same message once more, on its own topic or on another."""
        topic = self.topic()
        message_id = f"{topic}{self.random.randint(1, max(1, self.sent[topic]))}"
        await self.client().send(CHAIN, self.topic(), message_id, message_id=message_id)

    async def hold(self):
        await self.clients["raw"].quarantine_inbox(CHAIN, self.topic(), reason="r", principal=OPERATOR)

    async def release(self):
        await self.let_go("deliver", self.clients["capable"])

    async def drop(self):
        await self.let_go("discard", self.client())

    async def let_go(self, disposition, client):
        topic = self.topic()
        state = self.state()
        for entry in state.quarantined.get(topic, [])[:1]:
            await client.release_inbox(
                CHAIN, topic, entry["key"], disposition=disposition, principal=OPERATOR
            )

    async def discard(self):
        await self.client().discard_inbox(CHAIN, self.topic(), principal=OPERATOR)

    async def expire(self):
        await self.client().expire_inbox(CHAIN, self.topic(), older_than_ms=5)

    async def move(self):
        await self.leave()
        await self.own()

    async def rest(self):
        await asyncio.sleep(0.003)

    def state(self):
        state = ExecutionState()
        for envelope in self.chain.log():
            fold(state, envelope)
        return state

    async def end(self):
        """A capable node takes whatever is left, and the flow ends."""
        async with self.chain.node("capable", owns=True) as node:
            await until(self.drained, "every message to be disposed of", 20)
            await node.send(CHAIN, "end", None, message_id="end")
            seen = await node.handle(CHAIN, collects).result(20)
            await until(lambda: not self.chain.copies(), "the copies to be freed")
        return seen

    def drained(self):
        state = self.state()
        heads = {topic: len(self.positions(topic)) - 1 for topic in TOPICS}
        return not state.quarantined and all(state.cursors.get(t, -1) >= head for t, head in heads.items())

    def positions(self, topic):
        """Every message that ever stood in a topic's stream, trimmed or not."""
        row = self.chain.mixed.fleet.log.index.row(inbox_stream(CHAIN, topic))
        return range(0 if row is None else row.head + 1)


def fates(log):
    """What became of each place of each topic, by the log alone."""
    fate, keys = {}, {}
    for event in log:
        data = event.data
        if event.type == Kind.INBOX_QUARANTINED:
            keys[data["topic"], data["inboxSeq"]] = data["key"]
            fate.setdefault((data["topic"], data["inboxSeq"]), []).append("held")
        elif event.type == Kind.INBOX_RELEASED and data["disposition"] == "discard":
            held = next(
                place
                for place, told in fate.items()
                if place[0] == data["topic"] and told == ["held"] and keys[place] == data["key"]
            )
            fate[held].append("dropped")
        elif event.type == Kind.MESSAGE_CONSUMED:
            told = data.get("reason") or "consumed"
            fate.setdefault((data["topic"], data["inboxSeq"]), []).append(told)
    return fate


FATES = (
    ["consumed"],
    ["duplicate"],
    ["discarded"],
    ["expired"],
    ["held", "consumed"],
    ["held", "dropped"],
    ["held", "duplicate"],
)


async def check(seed, steps=STEPS):
    history = History(seed)
    seen = await history.run(steps)
    log = history.chain.log()
    fate = fates(log)
    for topic in TOPICS:
        for place in history.positions(topic):
            assert fate.get((topic, place)) in FATES, (topic, place, fate.get((topic, place)))
    taken = [e for e in log if e.type == Kind.MESSAGE_CONSUMED and not e.data.get("reason")]
    for topic in TOPICS:
        places = [e.data["inboxSeq"] for e in taken if e.data["topic"] == topic]
        assert places == sorted(places), "out of the order sent"
    identities = [e.data["messageId"] for e in taken]
    assert len(identities) == len(set(identities)), "seen twice"
    shown = [dedupe_key(None, value) for _, value in seen]
    assert shown == [e.data["messageId"] for e in taken if e.data["topic"] != "end"]
    assert history.state().quarantined == {}
    return history


@pytest.mark.parametrize("seed", SEEDS)
async def test_no_message_is_lost_doubled_or_out_of_order(seed):
    await check(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1_000, 1_300))
async def test_no_message_is_lost_doubled_or_out_of_order_in_many_histories(seed):
    await check(seed, 120)
