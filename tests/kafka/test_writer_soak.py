"""Many faults at random, seeded: no acknowledged append is lost, none is doubled, no stream has a gap."""

from __future__ import annotations

import asyncio
import os
import random

import pytest
from writers import append, event, streams, until

from loom.errors import NotOwnerError, OutcomeUnknownError, StorageWriteError
from loom.stores.contracts import StreamAppend
from loom.stores.kafka.writer import WriterState
from loom.stores.ops import AppendOps
from loom.testing.proxy import Api, Side

SEED = int(os.environ.get("LOOM_SEED", "20260101"))
APIS = (
    Api.PRODUCE,
    Api.END_TXN,
    Api.ADD_PARTITIONS_TO_TXN,
    Api.INIT_PRODUCER_ID,
    Api.FETCH,
    Api.LIST_OFFSETS,
)
IDLE_S = 0.01
CALM_EVERY = 20
"""Faults between two calms, in which everything must get on."""


class Load:
    """Callers that append to streams of their own, and believe only what they were told."""

    def __init__(self, current, callers, draw):
        self.current, self.draw = current, draw
        self.acknowledged = {f"s{n}": 0 for n in range(callers)}
        self.failures = {}
        self.stopping = False

    async def call(self, stream_id):
        """Append batch after batch; one whose outcome is unknown, or that was not written, is repeated unchanged."""
        while not self.stopping:
            first, count = self.acknowledged[stream_id], self.draw.randint(1, 4)
            while True:
                try:
                    (placed,) = await self.current().write(append(stream_id, first, count), seconds=20)
                except (OutcomeUnknownError, StorageWriteError, NotOwnerError) as error:
                    name = type(error).__name__
                    self.failures[name] = self.failures.get(name, 0) + 1
                    await asyncio.sleep(IDLE_S)
                else:
                    break
            assert (placed.first, placed.head) == (first, first + count - 1)
            self.acknowledged[stream_id] = first + count

    async def messages(self, inbox):
        """Send messages whose ids are their only identity, each until it is acknowledged."""
        number = 0
        while not self.stopping:
            op = AppendOps((StreamAppend(inbox, (event(f"m{number}", "INBOX_MESSAGE"),)),))
            try:
                await self.current().write(op, seconds=20)
            except (OutcomeUnknownError, StorageWriteError, NotOwnerError):
                await asyncio.sleep(IDLE_S)
            else:
                number += 1
                self.acknowledged[inbox] = number

    async def progress(self, more, seconds=60):
        """Wait until every caller has been acknowledged ``more`` times again."""
        wanted = {stream: count + more for stream, count in self.acknowledged.items()}
        await until(lambda: all(self.acknowledged[s] >= n for s, n in wanted.items()), seconds)


def hurt_once(proxy, draw):
    """One fault of a random kind; returns what undoes it, if it has to be undone."""
    api, side = draw.choice(APIS), draw.choice(list(Side))
    kind = draw.choice(["cut", "drop", "delay", "hold", "hang_up", "disconnect"])
    if kind == "disconnect":
        proxy.disconnect()
        return lambda: None
    if kind == "hang_up":
        return proxy.hold(api, hang_up=True).release
    if kind == "hold":
        return proxy.hold(api, side=side).release
    if kind == "delay":
        proxy.delay(api, draw.randint(1, 2_500), side=side)
    else:
        getattr(proxy, kind)(api, side=side, times=draw.randint(1, 2))
    return lambda: None


async def storm(hurt, proxy, faults, lanes, seed):
    draw = random.Random(seed)
    hurt.settings |= {"transaction_timeout_ms": 1_500, "commit_deadline_ms": 800}
    writers = []

    def add():
        name = f"n{len(writers)}"
        # the group's opinion: the newest is the owner
        writers.append(hurt.make(name, lanes=lanes, confirm=lambda: writers[-1].settings.node == name))

    add()
    writers[0].serving()
    load = Load(lambda: writers[-1], 8, draw)

    async def replace():
        """A partition whose writer gave up is given to another node."""
        while not load.stopping:
            if writers[-1].state is WriterState.STOPPED:
                add()
            await asyncio.sleep(IDLE_S)

    keeper = asyncio.create_task(replace())
    inbox = "__loom_inbox__:s0:ship"
    load.acknowledged[inbox] = 0
    callers = [asyncio.create_task(load.call(f"s{n}")) for n in range(8)]
    callers.append(asyncio.create_task(load.messages(inbox)))
    undo = []
    for number in range(faults):
        undo.append(hurt_once(proxy, draw))
        await asyncio.sleep(draw.uniform(0.0, 0.8))
        if draw.random() < 0.7 and undo:  # what was held goes on in the middle of whatever came later
            undo.pop(draw.randrange(len(undo)))()
        if draw.random() < 0.08:  # another node takes over while the old one is in the middle of something
            add()
        if number % CALM_EVERY == CALM_EVERY - 1:
            proxy.clear()
            undo.clear()
            await load.progress(1)
        assert not any(task.done() for task in callers), [task for task in callers if task.done()]
    for release in undo:
        release()
    proxy.clear()
    await load.progress(2)
    load.stopping = True
    await asyncio.gather(*callers, keeper)
    logs, inboxes = streams(hurt.direct, hurt.prefix), streams(hurt.direct, hurt.prefix, "inbox")
    expected = {s: [f"e:{n}" for n in range(count)] for s, count in load.acknowledged.items() if s != inbox}
    assert logs == expected
    assert inboxes == {inbox: [f"m{n}" for n in range(load.acknowledged[inbox])]}
    tenures = sum(w.tenure for w in writers)
    print(  # noqa: T201 - what a soak has to say
        f"seed {seed}: {faults} faults, {tenures} tenures of {len(writers)} writers, {load.acknowledged}, {load.failures}"
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize("lanes", [1, 2])
async def test_twenty_faults_at_random(hurt, proxy, lanes):
    await storm(hurt, proxy, 20, lanes, SEED)


@pytest.mark.soak
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("lanes", [1, 2])
async def test_five_hundred_faults_at_random(hurt, proxy, lanes):
    await storm(hurt, proxy, 500, lanes, SEED)
