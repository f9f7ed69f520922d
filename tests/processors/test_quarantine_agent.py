"""The quarantine agent on its own: which chains are looked at, how often, and what operators are told."""

import asyncio
from dataclasses import dataclass, field

import pytest
from kafka_bench import until

from loom.errors import NotOwnerError
from loom.ids import quarantine_stream
from loom.processors.quarantine import HeldTopics
from loom.runtime.kept_copies import KeptCopies

HELD = {
    "topic": "t",
    "message_id": "m1",
    "inbox_seq": 4,
    "held_since": 5,
    "awaits": "a capable node",
    "state": "held",
}
BEHIND = HELD | {"message_id": "m2", "inbox_seq": 5, "awaits": "the one before it"}
QUICK = {"first_look_s": 0.001, "longest_s": 0.002}


@dataclass
class Message:
    key: bytes
    value: bytes | None = b"copy"
    partition: int = 0
    topic: str = "p.quarantine"
    offset: int = 0
    headers: tuple = ()


@dataclass
class World:
    """A bridge that answers as it is told, and what the agent wrote."""

    answers: dict = field(default_factory=dict)
    faults: list = field(default_factory=list)
    asked: list = field(default_factory=list)
    signals: list = field(default_factory=list)
    reports: list = field(default_factory=list)
    stored: dict = field(default_factory=dict)
    gate: asyncio.Event | None = None

    async def look_after(self, chain_id):
        self.asked.append(chain_id)
        if self.gate is not None:
            await self.gate.wait()
        if self.faults:
            raise self.faults.pop(0)
        return self.answers.get(chain_id, KeptCopies(chain_id, chain_id, 0))

    async def tell(self, signal):
        if self.faults:
            raise self.faults.pop(0)
        self.signals.append(signal)

    async def chains_of(self, partition):
        return self.stored.get(partition, [])


@pytest.fixture
async def agent():
    made = []

    def make(world, **more):
        made.append(
            HeldTopics(
                world,
                world.tell,
                world.chains_of,
                node="n1",
                now=lambda: 7,
                report=lambda source, error: world.reports.append((source.partition, type(error).__name__)),
                **QUICK | more,
            )
        )
        made[-1].assigned({0, 1})
        return made[-1]

    yield make
    for held in made:
        await held.close()


async def take(agent, chain, sequence=1, **more):
    acknowledged = []
    key = f"{quarantine_stream(chain)}/{sequence}".encode()
    await agent.take(Message(key, **more), lambda: acknowledged.append(1))
    assert acknowledged == [1]


def kept(chain, *rows, copies=None, **more):
    return KeptCopies(chain, f"{chain}-head", len(rows) if copies is None else copies, rows, **more)


async def test_a_copy_brings_a_look_until_nothing_is_kept(agent):
    world = World(answers={"c": kept("c", HELD, BEHIND)})
    held = agent(world)
    await take(held, "c")
    await until(lambda: len(world.asked) > 2, "more looks")
    assert [row["message_id"] for row in held.rows()] == ["m1", "m2"]
    del world.answers["c"]
    await until(lambda: not held._chains, "the chain to leave the table")
    asked = len(world.asked)
    await asyncio.sleep(0.02)
    assert (len(world.asked), held.rows()) == (asked, [])


async def test_anchors_foreign_keys_and_tombstones_of_strangers_bring_none(agent):
    world = World()
    held = agent(world)
    await take(held, "c", sequence=0)
    await take(held, "c", value=None)
    for key in (b"", b"nothing", b"executions/1", b"__loom_quarantine__:c/x"):
        await held.take(Message(key), lambda: None)
    await take(held, "d")
    await until(lambda: world.asked, "the one look")
    assert set(world.asked) == {"d"}


async def test_what_is_awaited_is_told_the_first_time_and_then_every_16th(agent):
    world = World(answers={"c": kept("c", HELD, BEHIND)})
    await take(agent(world), "c")
    await until(lambda: len(world.asked) > 17, "looks")
    first, second = world.signals[:2]
    assert (first.code, first.execution_id, first.count, first.timestamp, first.node) == (
        "held-awaiting",
        "c-head",
        1,
        7,
        "n1",
    )
    assert first.text == "topic 't' is held, awaiting a capable node"
    assert first.details == {
        "chainId": "c",
        "copies": 2,
        "topic": "t",
        "messageId": "m1",
        "inboxSeq": 4,
        "heldSince": 5,
        "awaits": "a capable node",
    }
    assert second.count == 17
    # What was let go and is held again is told at once.
    told = len(world.signals)
    world.answers["c"] = kept("c", BEHIND | {"awaits": "delivery"})
    asked = len(world.asked)
    await until(lambda: len(world.asked) > asked + 1, "a look at what is about to be delivered")
    world.answers["c"] = kept("c", HELD)
    await until(lambda: len(world.signals) > told, "the signal")
    assert world.signals[told].count == 1


async def test_a_log_that_cannot_be_opened_is_told_without_what_it_holds(agent):
    world = World(answers={"c": KeptCopies("c", "c", 3, closed=True)})
    await take(agent(world), "c")
    await until(lambda: world.signals, "the signal")
    assert world.signals[0].details == {"chainId": "c", "copies": 3, "awaits": "a capable node"}
    assert "cannot be opened" in world.signals[0].text


async def test_a_look_that_fails_is_made_again_and_reported_the_first_time(agent):
    world = World(
        answers={"c": kept("c", HELD)},
        faults=[NotOwnerError(0), NotOwnerError(0), OSError(), NotOwnerError(0)],
    )
    await take(agent(world), "c")
    await until(lambda: world.signals, "the look that succeeds, and its signal")
    assert world.reports == [(0, "NotOwnerError")]


async def test_a_signal_that_was_not_written_is_written_by_the_next_look(agent):
    world = World(answers={"c": kept("c", HELD)})
    tell, refused = world.tell, []

    async def first_fails(signal):
        if not refused:
            refused.append(signal)
            raise OSError
        await tell(signal)

    world.tell = first_fails
    await take(agent(world), "c")
    await until(lambda: world.signals, "the signal")
    assert world.signals[0].count == refused[0].count == 1


async def test_what_stands_in_the_topic_at_a_start_is_looked_at_and_what_went_elsewhere_no_longer(agent):
    world = World(stored={0: ["a"], 1: ["b"]}, answers={"a": kept("a", HELD), "b": kept("b", HELD)})
    held = agent(world)
    await until(lambda: {"a", "b"} <= set(world.asked), "looks at both")
    held.assigned({1})
    await until(lambda: set(held._chains) == {"b"}, "a to leave")
    held.assigned(set())
    assert held.rows() == []


async def test_a_record_that_comes_during_a_look_brings_another(agent):
    world = World(gate=asyncio.Event())
    held = agent(world)
    await take(held, "c")
    await until(lambda: world.asked, "the look")
    await take(held, "c", sequence=2)
    world.gate.set()
    await until(lambda: len(world.asked) == 2, "another look")
    await until(lambda: not held._chains, "the end")


async def test_the_table_has_a_limit(agent):
    world = World(answers={c: kept(c, HELD) for c in "abc"})
    held = agent(world, max_chains=2)
    for chain in "abc":
        await take(held, chain)
    assert set(held._chains) == {"a", "b"}
