"""Messages that are delivered as they are sent, on a real log (docs/adr/0038)."""

from __future__ import annotations

import asyncio

import pytest
from writers import visible

from loom import Client, Config, Runtime, flow
from loom.schemas.envelope import Kind
from loom.stores.kafka.records import FIRST
from loom.testing.runtime import until
from loom.topics.catalogue import Catalogue
from stores import make_log

EACH = 40


@flow("collects")
async def collects(ctx, count):
    return [await ctx.receive("go") for _ in range(count)]


@pytest.fixture
def config(kafka_bootstrap, topic_prefix, tmp_path):
    make_log(kafka_bootstrap, topic_prefix, 1)
    return Config(bootstrap=kafka_bootstrap, topic_prefix=topic_prefix, partitions=1, data_dir=tmp_path)


def transactions(config, topic):
    """By kind of event, the transaction that each began in, as the first record of a topic in it says."""
    found = {}
    for _, _, _, headers in visible(config.bootstrap, topic, 0):
        if FIRST in headers:
            kind = headers["type"].decode() if "type" in headers else "tick"
            found[kind] = headers[FIRST].decode().partition(";")[0]
    return found


async def test_both_are_in_one_transaction(config, handed_over):
    async with Runtime(config, flows=[collects]) as runtime:
        handle = await runtime.start(collects, 1)
        await until(lambda: runtime._engine.parked_runs, "the park", 60)
        await runtime.send(handle.execution_id, "go", "x")
        assert await handle.result(30) == ["x"]
    assert handed_over == [True]
    catalogue = Catalogue(config.topic_prefix, 1)
    log, inbox = transactions(config, catalogue.executions), transactions(config, catalogue.inbox)
    assert log[Kind.MESSAGE_CONSUMED] == inbox[Kind.INBOX_MESSAGE]


async def test_messages_of_two_processes_meet_at_a_flow_that_rests(config, handed_over):
    """Each is delivered once, those of one sender in order; what was handed over in vain, too."""
    mine = config.model_copy(update={"node_id": "client"})
    async with Runtime(config, flows=[collects]) as runtime, Client(mine) as client:
        handle = await runtime.start(collects, 2 * EACH)
        await until(lambda: runtime._engine.parked_runs, "the park", 60)

        async def send(sender, name):
            for n in range(EACH):
                await sender.send(handle.execution_id, "go", [name, n], message_id=f"{name}{n}")

        await asyncio.gather(send(runtime, "here"), send(client, "there"))
        seen = await handle.result(60)
        history = await runtime.history(handle.execution_id)
    assert [n for name, n in seen if name == "here"] == list(range(EACH))
    assert [n for name, n in seen if name == "there"] == list(range(EACH))
    consumed = [e.data["inboxSeq"] for e in history if e.type == Kind.MESSAGE_CONSUMED]
    assert consumed == list(range(2 * EACH))
    assert True in handed_over
