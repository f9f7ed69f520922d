"""Who is first to a held message: two workers, operators with and without keys, on a real broker (seed, D9, "Exactly
one node releases"). Each race has one outcome, and all that was written agrees with it."""

import asyncio
import random
from contextlib import AsyncExitStack

import pytest
from fleet_support import stubborn

from loom import InboxQuarantineRefusedError, LoomError, Principal
from loom.ids import dedupe_key, quarantine_stream
from loom.schemas.envelope import Kind

OPS = Principal("ops")
KEY = dedupe_key(None, "m1")
RACES = ("two nodes", "a node and a drop", "a release and a drop", "a hold and a delivery", "two holders")
AT_ONCE = 128
"""Races at one time, on two workers that live through all of them."""
LOOK_S = 0.1
"""Between two looks at what a race waits for: each costs the owner a transaction, and the racers share two cores."""


class Race:
    """One execution, raced for."""

    def __init__(self, capable, raw, what, rng):
        self.capable, self.raw, self.what, self.rng = capable, raw, what, rng
        self.id = ""

    async def go(self):
        await stubborn(lambda: self.capable[0].send(self.id, "go", None, message_id="go"))

    async def hold(self, raw=0):
        return await self.raw[raw].quarantine_inbox(self.id, "t", message_id="m1", principal=OPS)

    async def release(self, capable=0):
        return await self.capable[capable].release_inbox(self.id, "t", "m1", principal=OPS)

    async def drop(self):
        return await self.raw[0].release_inbox(self.id, "t", "m1", disposition="discard", principal=OPS)

    async def run(self):
        """Return what the racers were told, and what the flow saw."""
        first = self.capable[0]
        handle = await stubborn(lambda: first.start("letters", 0))
        self.id = handle.execution_id
        while await stubborn(handle.status) != "suspended":
            await asyncio.sleep(LOOK_S)
        await self.send("m1")
        if self.what not in {"a hold and a delivery", "two holders"}:
            assert (await self.hold()).held_at == 1
        racers = {
            "two nodes": [self.go, self.release, lambda: self.release(1)],
            "a node and a drop": [self.go, self.drop],
            "a release and a drop": [self.release, self.drop],
            "a hold and a delivery": [self.go, self.hold],
            "two holders": [self.hold, lambda: self.hold(1)],
        }[self.what]
        told = await asyncio.gather(*(self.late(racer) for racer in racers), return_exceptions=True)
        await self.go()
        await self.send("m2")
        await self.send("end")
        return told, await handle.result(timeout=60)

    async def late(self, racer):
        """Begin at random, so that either may be first: a worker has further to go than an operator's verb."""
        ahead = {"a node and a drop": self.go, "a hold and a delivery": self.hold}.get(self.what, racer)
        behind_s = 0.4 if self.what == "a hold and a delivery" else 0.08
        await asyncio.sleep(self.rng.uniform(0, 0.01 if racer == ahead else behind_s))
        return await racer()

    async def send(self, what):
        await stubborn(lambda: self.capable[0].send(self.id, "t", what, message_id=what))

    async def check(self):
        told, seen = await self.run()
        for answer in told:
            if isinstance(answer, BaseException):
                assert isinstance(answer, LoomError), answer
                assert not isinstance(answer, InboxQuarantineRefusedError) or answer.reason in {
                    "invalid",
                    "not-parked",
                    "contended",
                }
        log = await self.capable[0].history(self.id)
        taken = [e for e in log if e.type == Kind.MESSAGE_CONSUMED and e.data["messageId"] == KEY]
        let_go = [e for e in log if e.type == Kind.INBOX_RELEASED]
        held = [e for e in log if e.type == Kind.INBOX_QUARANTINED]
        assert seen in (["m1", "m2"], ["m2"])
        assert len(taken) == seen.count("m1")
        assert len(held) <= 1
        assert len(let_go) == len(held)
        dropped = [e for e in let_go if e.data["disposition"] == "discard"]
        assert len(dropped) == 2 - len(seen)
        if self.what.endswith("drop"):
            assert (told[1] is True) == bool(dropped)
        if self.what == "a hold and a delivery":
            assert isinstance(told[1], BaseException) is (not held)
        if self.what == "two holders":
            winners = [answer for answer in told if not isinstance(answer, BaseException)]
            assert [answer.changed for answer in winners].count(True) == 1
            assert {answer.held_at for answer in winners} == {1}
        async with asyncio.timeout(30):
            while any(e.sequence for e in await self.raw[0].stores.events.read(quarantine_stream(self.id))):
                await asyncio.sleep(LOOK_S)
        return ("seen" if len(seen) == 2 else "dropped", bool(held))


@pytest.mark.parametrize("rounds", [4, pytest.param(1_000, marks=pytest.mark.soak)])
async def test_each_race_for_a_held_message_has_one_outcome(fleet, rounds, monkeypatch):
    monkeypatch.setenv("FLEET_KEK", "A" * 43 + "=")
    sealing = {
        "LOOM_SEALING__KEYS": "redis",
        "LOOM_SEALING__KEK": "env:FLEET_KEK",
        "FLEET_KEK": "A" * 43 + "=",
    }
    for name in ("north", "south"):
        fleet.start_worker(name, env=sealing)
    keys = {"keys": "redis", "kek": "env:FLEET_KEK"}
    access = {"operators": ("ops",)}
    outcomes = {what: [] for what in RACES}
    async with AsyncExitStack() as stack:
        capable = [
            await stack.enter_async_context(fleet.client(sealing=keys, access=access)) for _ in range(2)
        ]
        raw = [await stack.enter_async_context(fleet.client(access=access)) for _ in range(2)]
        async with asyncio.timeout(60):
            while not (fleet.is_up("north") and fleet.is_up("south")):
                await asyncio.sleep(0.05)
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(what, number):
            async with slots:
                try:
                    outcomes[what].append(
                        await Race(capable, raw, what, random.Random(f"{what} {number}")).check()
                    )
                except BaseException as error:
                    error.add_note(f"race {what!r}, round {number}\n{fleet.tails()[-3000:]}")
                    raise

        await asyncio.gather(*(one(what, number) for what in RACES for number in range(rounds)))
    assert all(len(told) == rounds for told in outcomes.values())
