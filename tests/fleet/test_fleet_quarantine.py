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
CONTESTS = RACES[1:4]
"""Those with two ends, told apart by who won."""
AT_ONCE = 48
"""Races at one time, on two workers that live through all of them."""
LOOK_S = 0.1
"""Between two looks at what a race waits for: each costs the owner a transaction, and the racers share two cores."""


class Pace:
    """How far ahead the second racer of a kind begins, so that either may win however quick the machine is just now."""

    STEP_S, MOST_S = 0.02, 3.0

    def __init__(self):
        self.lead_s = 0.0

    def won(self, *, first):
        """The winner begins later next time."""
        self.lead_s += self.STEP_S if first else -self.STEP_S
        self.lead_s = max(-self.MOST_S, min(self.MOST_S, self.lead_s))

    def delay(self, place, rng):
        """How long a racer waits, and a little by chance."""
        lead_s = self.lead_s if place == 0 else -self.lead_s
        return max(0.0, lead_s) + rng.uniform(0, 0.05)


class Race:
    """One execution, raced for."""

    def __init__(self, capable, raw, what, rng, pace):
        self.capable, self.raw, self.what, self.rng, self.pace = capable, raw, what, rng, pace
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
        told = await asyncio.gather(
            *(self.late(n, racer) for n, racer in enumerate(racers)), return_exceptions=True
        )
        await self.go()
        await self.send("m2")
        await self.send("end")
        return told, await handle.result(timeout=120)

    async def late(self, place, racer):
        await asyncio.sleep(self.pace.delay(place, self.rng))
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
        if self.what in CONTESTS:
            self.pace.won(first=not held if self.what == "a hold and a delivery" else not dropped)
        return ("seen" if len(seen) == 2 else "dropped", bool(held))


@pytest.mark.parametrize(
    "rounds", [4, pytest.param(1_000, marks=[pytest.mark.soak, pytest.mark.timeout(3_600)])]
)
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
    outcomes, paces = {what: [] for what in RACES}, {what: Pace() for what in RACES}
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
                    rng = random.Random(f"{what} {number}")
                    outcomes[what].append(await Race(capable, raw, what, rng, paces[what]).check())
                except BaseException as error:
                    error.add_note(f"race {what!r}, round {number}\n{fleet.tails()[-3000:]}")
                    raise

        await asyncio.gather(*(one(what, number) for number in range(rounds) for what in RACES))
    assert all(len(told) == rounds for told in outcomes.values())
    if rounds > AT_ONCE:  # each of the two racers has won
        assert all(len(set(outcomes[what])) == 2 for what in CONTESTS)
