"""What a node reads of a sealed log that it cannot open, or whose subject was erased (system.md 2.3, 2.6)."""

import pytest
from benches import SealedBench, fact, sent, started, step

from loom.errors import KeyUnavailableError, PayloadShreddedError
from loom.ids import inbox_stream
from loom.kernel.guard import Verdict, inspect_payload
from loom.schemas.envelope import EVENT_SCHEMA, Kind, NewEvent
from loom.stores.contracts import NO_EVENTS, StreamAppend
from loom.stores.keys.memory import MemoryKeyStore

SECRET = "planted-plaintext-7Q"


@pytest.fixture
async def bench():
    bench = SealedBench()
    yield bench
    await bench.close()


async def _at_rest(bench, stream_id):
    return await bench.raw().read(stream_id)


# -- nodes that cannot open ----------------------------------------------------------------------------------------


async def _sealed_log(bench, subject="s"):
    store, log = await bench.open(), bench.chain()
    await store.append(started(log, subject=subject, data_in={"x": SECRET}))
    await store.append(step(log, 0, SECRET))
    await store.append(sent(inbox_stream(log, "t"), "m", {"x": SECRET}))
    return store, log


async def test_without_the_key_a_log_is_unavailable_and_an_inbox_redacted(bench):
    _, log = await _sealed_log(bench)
    for keys in (MemoryKeyStore(), MemoryKeyStore(bench.table, MemoryKeyStore()._wrapper)):
        node = bench.node(keys=keys)
        for call in (node.read(log), node.read(log, 1), node.read_last(log)):
            with pytest.raises(KeyUnavailableError) as caught:
                await call
            assert caught.value.subject == "s"
            assert (caught.value.stream_id, caught.value.sequence) in {(log, 0), (log, 1)}
            assert caught.value.covers
            assert "__loomEnc" not in str(caught.value)
        (message,) = await node.read(inbox_stream(log, "t"))
        assert message.data == {"topic": "t", "messageId": "m", "payload": {"$shredded": True}}
        assert inspect_payload(message.data["payload"]) is Verdict.SHREDDED


async def test_with_another_key_a_log_is_unavailable(bench):
    _, log = await _sealed_log(bench)
    keys = MemoryKeyStore()
    await keys.ensure("s")
    node = bench.node(keys=keys)
    with pytest.raises(KeyUnavailableError):
        await node.read(log)
    assert (await node.read(inbox_stream(log, "t")))[0].data["payload"] == {"$shredded": True}


async def test_with_fewer_paths_a_log_stands_as_it_is_stored(bench):
    _, log = await _sealed_log(bench)
    node = bench.node(sensitive={})
    assert not all(node.sealing_capability().opens(e.metadata["seal"]) for e in await _at_rest(bench, log))
    assert await node.read(log) == await _at_rest(bench, log)
    assert (await node.read(inbox_stream(log, "t")))[0].data["payload"] == {"x": SECRET}


async def test_an_unmarked_event_is_judged_as_before(bench):
    """What a writer sealed that stamps no marker is opened by path and shape; what is no envelope of ours stands."""
    store, log = await bench.open(), bench.chain()
    await store.append(started(log, subject="s"))
    await store.append(step(log, 0, "old writer"))
    stored = (await _at_rest(bench, log))[1]
    unmarked = NewEvent("u", stored.type, stored.data, {"schema": EVENT_SCHEMA})
    foreign = NewEvent(
        "f", stored.type, {"output": {"__loomEnc": "another cipher"}}, {"schema": EVENT_SCHEMA}
    )
    await bench.raw().append(StreamAppend(log, (unmarked, foreign), expected_head=1))
    assert [e.data.get("output") for e in await store.read(log)][2:] == [
        "old writer",
        {"__loomEnc": "another cipher"},
    ]
    with pytest.raises(KeyUnavailableError):
        await bench.node(keys=MemoryKeyStore()).read(log, 2)


async def test_ciphertext_moved_to_another_subject_does_not_open(bench):
    store, log = await _sealed_log(bench)
    stored = (await _at_rest(bench, log))[1]
    other = bench.chain()
    await store.append(started(other, subject="another"))
    moved = NewEvent("moved", stored.type, stored.data, stored.metadata)
    await bench.raw().append(StreamAppend(other, (moved,), expected_head=0))
    with pytest.raises(KeyUnavailableError):
        await store.read(other)


async def test_a_changed_ciphertext_does_not_open(bench):
    store, log = await _sealed_log(bench)
    for change in ({"ct": "AAAA"}, {"iv": "AAAA"}, {"ct": "no base64!"}, {"kid": "none"}, {"extra": 1}):
        target = bench.chain()
        stored = (await _at_rest(bench, log))[0]
        data = {**stored.data, "chainId": target, "input": {**stored.data["input"], **change}}
        event = NewEvent("e", stored.type, data, stored.metadata)
        await bench.raw().append(StreamAppend(target, (event,), expected_head=NO_EVENTS))
        with pytest.raises(KeyUnavailableError):
            await store.read(target)


async def test_covers_of_another_kind_open_nothing(bench):
    store, log = await _sealed_log(bench)
    stored = (await _at_rest(bench, log))[1]
    event = NewEvent(
        "e", Kind.DECISION_RECORDED, stored.data, stored.metadata
    )  # its covers speak of STEP_COMPLETED
    await bench.raw().append(StreamAppend(log, (event,), expected_head=1))
    assert (await store.read(log, 2))[0].data == stored.data


# -- erased, or only absent ----------------------------------------------------------------------------------------


async def test_only_a_tombstone_makes_it_erased(bench):
    store, log = await _sealed_log(bench)
    await bench.keys.destroy("s")
    store.forget_keys("s")
    with pytest.raises(KeyUnavailableError):
        await store.read(log)
    await store.append(fact(log, 1, Kind.ERASURE_PENDING, subjectId="s"))
    await store.append(fact(log, 2, Kind.PAYLOAD_SHREDDED, subjectId="another"))
    with pytest.raises(KeyUnavailableError):
        await store.read(log)
    await store.append(fact(log, 3, Kind.PAYLOAD_SHREDDED, subjectId="s"))
    await store.append(fact(log, 4, Kind.EXECUTION_DENIED, op="resume"))
    with pytest.raises(PayloadShreddedError) as caught:
        await store.read(log)
    assert caught.value.subject == "s"
    assert [e.data for e in await store.read(log, 2)][1] == {"subjectId": "another"}
    redacted = await store.read_redacted(log)
    assert redacted[0].data["input"] == redacted[1].data["output"] == {"$shredded": True}


async def test_a_foreign_node_believes_the_tombstone_too(bench):
    store, log = await _sealed_log(bench)
    await store.append(fact(log, 1, Kind.PAYLOAD_SHREDDED, subjectId="s"))
    with pytest.raises(PayloadShreddedError):
        await bench.node(keys=MemoryKeyStore()).read(log)


async def test_nothing_is_sealed_for_an_erased_subject_any_more(bench):
    store, log = await _sealed_log(bench)
    await bench.keys.destroy("s")
    store.forget_keys("s")
    with pytest.raises(PayloadShreddedError):
        await store.append(step(log, 1, SECRET))
    with pytest.raises(PayloadShreddedError):
        await store.append(sent(inbox_stream(log, "t"), "n", SECRET))
    assert len(await _at_rest(bench, log)) == 2


async def test_an_erased_execution_can_still_be_ended(bench):
    bench.sensitive = {**bench.sensitive, Kind.EXECUTION_CANCELLED: ("reason",)}
    store, log = await _sealed_log(bench)
    await bench.keys.destroy("s")
    store.forget_keys("s")
    await store.append(fact(log, 1, Kind.EXECUTION_CANCELLED, reason=SECRET))
    await store.append(fact(log, 2, Kind.OUTCOME_RECORDED, outcome="o", recordedBy={"actor": SECRET}))
    late = await store.read(log, 2)
    assert late[0].data == {"reason": {"$shredded": True}}
    assert late[1].data == {"outcome": "o", "recordedBy": {"$shredded": True}}
    assert "seal" not in late[0].metadata
    assert SECRET.encode() not in bench.resting()


async def test_a_wrong_key_node_cannot_seal_beside_the_keys_it_lacks(bench):
    store, log = await _sealed_log(bench)
    stranger = bench.node(keys=MemoryKeyStore(bench.table, MemoryKeyStore()._wrapper))
    with pytest.raises(KeyUnavailableError):
        await stranger.append(step(log, 1, SECRET))
    assert len(bench.table.rows["s"].keys) == 1
