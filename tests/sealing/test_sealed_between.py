"""A log whose marker stands neither on its first event nor on its last: verbs refuse it all the same (system.md 2.3)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loom import ExecutionDeniedError, flow
from loom.ids import inbox_stream
from loom.schemas.codec import Codec
from loom.schemas.envelope import Envelope, Kind
from loom.stores.event_run import EventRun
from loom.stores.index import StreamIndex
from loom.stores.index_file import dump_row, load_row
from loom.stores.kafka import wire
from loom.stores.kafka.records import Records
from loom.stores.kafka.runs import head_of
from loom.stores.keys.memory import KeyTable, MemoryKeyStore
from loom.stores.ops import PutEvent
from loom.stores.rows import merge_rows, new_row
from loom.stores.sealing.encrypting import EncryptingEventStore
from loom.testing.runtime import MemoryFleet, until_parked
from loom.topics.catalogue import Catalogue


async def secret():
    return "between"


@flow("sealed-between")
async def sealed_between(ctx):
    await ctx.run(secret)
    return await ctx.receive("go")


async def test_send_and_status_judge_what_lies_between():
    fleet, keys = MemoryFleet(), MemoryKeyStore(KeyTable())
    covers = {Kind.STEP_COMPLETED: ("output",)}
    capable = fleet.runtime(
        "capable",
        [sealed_between],
        events=EncryptingEventStore.over(fleet.store(), keys, covers),
    )
    async with capable, fleet.client() as stranger:
        handle = await capable.start(sealed_between)
        await until_parked(capable, handle.execution_id)
        log = fleet.log.index.events(handle.execution_id, 0, 10)
        assert ["seal" in e.metadata for e in log] == [False, True, False]
        for verb in (
            lambda: stranger.send(handle.execution_id, "go", 1),
            lambda: stranger.status(handle.execution_id),
        ):
            with pytest.raises(ExecutionDeniedError):
                await verb()
        assert inbox_stream(handle.execution_id, "go") not in fleet.log.index.rows()
        await capable.send(handle.execution_id, "go", 1)
        assert await handle.result(5) == 1
        assert await capable.status(handle.execution_id) == "completed"


async def test_an_open_log_is_not_read_for_it():
    fleet = MemoryFleet()
    async with fleet.runtime("node", [sealed_between]) as node, fleet.client() as client:
        handle = await node.start(sealed_between)
        await until_parked(node, handle.execution_id)
        info = await client._engine.events.info(handle.execution_id)
        assert info.sealed is False
        await client.send(handle.execution_id, "go", 1)
        assert await handle.result(5) == 1


# -- what says so ------------------------------------------------------------------------------------------------


def sealed_row():
    row = new_row("x")
    row.put(0, "e0", Kind.EXECUTION_STARTED, 1, fence=1, node="n")
    assert not row.sealed
    row.put(1, "e1", Kind.STEP_COMPLETED, 2, fence=1, node="n", sealed=True)
    row.put(2, "e2", Kind.EXECUTION_SUSPENDED, 3, fence=1, node="n")
    return row


def test_a_row_keeps_it_wherever_it_goes():
    row = sealed_row()
    assert row.sealed
    assert row.copy() == row
    assert load_row(dump_row(row)) == row
    assert wire.info_of(wire.stream_info(row.info("x"))).sealed
    plain = new_row("x")
    assert merge_rows(row, plain).sealed
    assert merge_rows(sealed_row(), replace(row, sealed=False)).sealed


def test_an_event_says_it_in_a_header():
    metadata = {"seal": {"v": 1, "cipher": "aes-256-gcm", "covers": ["STEP_COMPLETED.output"]}}
    records = Records(Codec(), Catalogue("t.", 1), 0, "n", lambda: 1)
    for given, said in ((metadata, True), ({}, False)):
        envelope = Envelope("e1", "x", 1, Kind.STEP_COMPLETED, 2, {"output": 1}, given)
        (record,) = records.of([PutEvent(envelope, 0, 1, 1)])
        head = head_of([(name, str(value).encode()) for name, value in record.headers])
        assert (head.beside is not None and head.beside.sealed) is said


@pytest.mark.parametrize("marked", [False, True], ids=["from events", "from a mark and events"])
def test_an_index_built_from_the_log_knows_it(tmp_path, marked):
    events = []
    codec = Codec()
    index = StreamIndex(tmp_path / "index", codec.encode_envelope, codec.decode_envelope)
    for sequence, sealed in enumerate([False, True, False]):
        kind = [Kind.EXECUTION_STARTED, Kind.STEP_COMPLETED, Kind.EXECUTION_SUSPENDED][sequence]
        events.append(EventRun("x", sequence, [f"e{sequence}"], [kind], [(0, 1)], [b""], 1, sealed=sealed))
    mark = sealed_row()
    mark.sealed = False  # a mark does not tell
    if marked:
        index.load_mark("x", mark)
    for run in events:
        index.load_run(run)
    assert index.info("x").sealed
    index.close()
