"""An answer that rests sealed in the log of a writer that did not stamp it: the replay is refused, and a capable node goes on
(the seed's D4, "Replay"; clauses.md: the latch is tested on unmarked logs, where no marker comes before it)."""

from __future__ import annotations

import pytest
from mixed import SECRET, Fleet, Trouble, seen, two_halves

from loom import SealedPayloadUnreadableError
from loom.ids import dedupe_key
from loom.schemas.codec import decode_envelope
from loom.schemas.envelope import EVENT_SCHEMA, Kind, NewEvent
from loom.stores.contracts import StreamAppend
from loom.testing.runtime import until, until_parked


@pytest.fixture
def mixed():
    seen.clear()
    return Fleet()


def log_of(mixed):
    return [decode_envelope(raw) for raw in mixed.resting("x")["x"]]


async def answered(mixed):
    """Parked in the clear; then a capable node journaled the answer sealed, without a word of it."""
    async with mixed.node("raw", owns=True) as plain:
        await plain.start(two_halves, "open", execution_id="x", subject="s")
        await until_parked(plain, "x")
    park = log_of(mixed)[-1]
    data = {
        "topic": "go",
        "messageId": dedupe_key(None, "m"),
        "inboxSeq": 0,
        "payload": SECRET,
        "siteId": park.data["waits"][0]["siteId"],
        "arm": 0,
    }
    event = NewEvent("c", Kind.MESSAGE_CONSUMED, data, {"schema": EVENT_SCHEMA})
    sealing = mixed.stored("capable", mixed.fleet.store(()))
    ((sealed,), _) = await sealing._sealer.seal([StreamAppend("x", (event,), expected_head=park.sequence)])
    unmarked = NewEvent("c", Kind.MESSAGE_CONSUMED, sealed.events[0].data, {"schema": EVENT_SCHEMA})
    woken = {"siteId": data["siteId"], "arm": 0, "kind": "inbox"}
    resumed = NewEvent("r", Kind.EXECUTION_RESUMED, woken, {"schema": EVENT_SCHEMA, "node": "gone:1"})
    await mixed.fleet.store(()).append(StreamAppend("x", (unmarked, resumed), expected_head=park.sequence))


async def test_the_replay_is_refused_and_a_capable_node_completes(mixed):
    await answered(mixed)
    before = mixed.resting("x")
    trouble = Trouble()
    async with mixed.node("raw", owns=True, trouble=trouble) as node:
        await until(lambda: any(about == "x" for _, about in trouble.errors), "a refusal")
        error = next(error for error, about in trouble.errors if about == "x")
        assert type(error) is SealedPayloadUnreadableError
        assert error.recorded
        assert SECRET not in repr(error)
        assert "x" not in node._engine.runs
        assert node._engine.backoff.refused("x")
        await until(lambda: ("x", 0) in mixed.fleet.wakes.slots, "the row")
        assert mixed.fleet.wakes.slots["x", 0].row.kind == "refusal"
        assert await node.status("x") == "running"
        assert mixed.resting("x") == before
        assert seen == []
        async with mixed.node("capable", owns=False) as capable:  # the owner stays what it is
            await until(lambda: seen == [SECRET], "the capable node", 20)
            await until(lambda: log_of(mixed)[-1].type == Kind.EXECUTION_SUSPENDED, "the park", 20)
            await capable.resume("x", "approve", "!")
            await until(lambda: log_of(mixed)[-1].type == Kind.EXECUTION_COMPLETED, "the end", 20)
            assert (await capable.load_state("x")).output == f"open-1{SECRET}!"
    assert Kind.EXECUTION_FAILED not in {e.type for e in log_of(mixed)}
