"""What rests sealed, what is stamped, and what each node reads of it (system.md 2)."""

import json

import pytest
from benches import SealedBench, fact, sent, started, step

from loom.errors import ConfigError, InvalidInputError
from loom.ids import inbox_stream, quarantine_stream
from loom.schemas.envelope import EVENT_SCHEMA, Kind, NewEvent
from loom.stores.contracts import NO_EVENTS, Observation, Outgoing, StreamAppend
from loom.stores.sealing.cipher import seal_value
from loom.stores.sealing.encrypting import EncryptingEventStore
from loom.stores.sealing.keyring import FIRST_CHARGE

SECRET = "planted-plaintext-7Q"


@pytest.fixture
async def bench():
    bench = SealedBench()
    yield bench
    await bench.close()


async def _at_rest(bench, stream_id):
    return await bench.raw().read(stream_id)


# -- the marker ----------------------------------------------------------------------------------------------------


async def test_a_sealed_event_is_marked_in_its_own_append(bench):
    store, log = await bench.open(), bench.chain()
    await store.append(started(log, data_in={"card": SECRET}, identity={"tenant": SECRET, "roles": ["a"]}))
    (stored,) = await _at_rest(bench, log)
    assert stored.metadata["seal"] == {
        "v": 1,
        "cipher": "loom/aes-256-gcm",
        "covers": ["EXECUTION_STARTED.input", "EXECUTION_STARTED.principal.identity.*"],
    }
    assert set(stored.data["input"]) == {"__loomEnc", "kid", "iv", "ct"}
    assert stored.data["input"]["__loomEnc"] == "loom/aes-256-gcm"
    assert set(stored.data["principal"]["identity"]) == {"tenant", "roles"}
    assert stored.data["principal"]["actor"] == "alice"
    (read,) = await store.read(log)
    assert read.data["input"] == {"card": SECRET}
    assert read.data["principal"]["identity"] == {"tenant": SECRET, "roles": ["a"]}
    assert read.metadata == stored.metadata


async def test_only_what_was_sealed_is_marked(bench):
    store, log = await bench.open(), bench.chain()
    await store.append(started(log))  # its input is null: nothing stands there
    await store.append(step(log, 0, "x"))
    await store.append(fact(log, 1, Kind.EXECUTION_SUSPENDED, waits=[]))
    await store.append(fact(log, 2, Kind.STEP_COMPLETED, siteId="0:1"))
    covers = [e.metadata.get("seal", {}).get("covers") for e in await _at_rest(bench, log)]
    assert covers == [None, ["STEP_COMPLETED.output"], None, None]


async def test_the_marker_holds_no_key_and_no_subject(bench):
    store, log = await bench.open(), bench.chain()
    await store.append(started(log, subject="pseudonym-1", data_in=1))
    (stored,) = await _at_rest(bench, log)
    key_id = (await bench.keys.get("pseudonym-1")).current.id
    assert key_id == stored.data["input"]["kid"]
    assert "pseudonym-1" not in json.dumps(stored.metadata)
    assert key_id not in json.dumps(stored.metadata)


async def test_by_default_the_kernels_own_kinds_are_sealed():
    bench = SealedBench({})
    store, log = await bench.open(), bench.chain()
    assert store.sealing_capability().covers == (
        "EXECUTION_STARTED.principal.identity.*",
        "INBOX_MESSAGE.payload",
        "MESSAGE_CONSUMED.payload",
        "OUTCOME_RECORDED.recordedBy",
    )
    await store.append(started(log, data_in="open", identity={"tenant": SECRET}))
    await store.append(fact(log, 0, Kind.OUTCOME_RECORDED, outcome="kept", recordedBy={"actor": SECRET}))
    await store.append(
        fact(log, 1, Kind.MESSAGE_CONSUMED, topic="t", inboxSeq=0, messageId="k", payload=SECRET)
    )
    await store.append(sent(inbox_stream(log, "t"), "m", SECRET))
    assert SECRET.encode() not in bench.resting()
    assert b"kept" in bench.resting()
    assert [e.data.get("payload") for e in await store.read(log)][2] == SECRET
    await bench.close()


async def test_a_disposal_stays_unmarked(bench):
    """Duplicates, expired and discarded messages carry no payload, so any node journals them alike."""
    store, log = await bench.open(), bench.chain()
    await store.append(started(log))
    consumed = fact(
        log, 0, Kind.MESSAGE_CONSUMED, topic="t", inboxSeq=0, messageId="k", payload=None, reason="duplicate"
    )
    await store.append(consumed)
    assert "seal" not in (await _at_rest(bench, log))[1].metadata


# -- at rest -------------------------------------------------------------------------------------------------------


async def test_no_planted_plaintext_rests_anywhere(bench):
    store, log = await bench.open(), bench.chain()
    other, parent = bench.chain(), bench.elsewhere()
    await store.append(
        started(log, subject="s", data_in={"deep": [{"x": SECRET}]}, identity={"a": {"b": SECRET}})
    )
    out = (
        Outgoing(
            "request", "r1", other, started(other, subject="s", data_in=SECRET, parent={"chainId": parent})
        ),
        Outgoing("request", "r2", parent, sent(inbox_stream(parent, "t"), "r2", {"output": SECRET})),
    )
    await store.append(step(log, 0, [SECRET], outgoing=out))
    await store.append_many(
        [
            step(log, 1, SECRET),
            sent(inbox_stream(log, "t"), "m", SECRET),
            sent(inbox_stream(log), "n", SECRET),
        ]
    )
    await store.append(fact(log, 2, Kind.EXECUTION_COMPLETED, output={SECRET: 1}))
    assert len(await store.read(other)) == len(await store.read(inbox_stream(parent, "t"))) == 1
    resting = bench.resting()
    assert SECRET.encode() not in resting
    assert resting.count(b"__loomEnc") == 9
    for stream_id in (log, other, inbox_stream(log, "t"), inbox_stream(log), inbox_stream(parent, "t")):
        assert SECRET in repr(await store.read(stream_id))


async def test_what_needs_no_sealing_is_stored_byte_for_byte_as_without(bench):
    plain = SealedBench()
    log = bench.chain()
    for store, at in ((await bench.open(), bench), (plain.raw(), plain)):
        at.now = 5_000
        await store.append(started(log))
        await store.append(fact(log, 0, Kind.EXECUTION_SUSPENDED, waits=[{"siteId": "0:0", "arms": []}]))
        await store.append(
            fact(log, 1, Kind.EXECUTION_RESUMED, siteId="0:0", arm=0, kind="gate", answer=SECRET)
        )
        await store.append(fact(log, 2, Kind.STEP_FAILED, siteId="0:1", error={"type": "E", "message": "m"}))
    assert bench.resting() == plain.resting() != b""
    await plain.close()


async def test_a_request_is_sealed_for_its_receiver(bench):
    store, log, other = await bench.open(), bench.chain(), bench.elsewhere()
    await store.append(started(other, subject="theirs"))
    await store.append(started(log, subject="ours"))
    inbox = inbox_stream(other, "t")
    out = Outgoing("request", "r", other, sent(inbox, "m", SECRET))
    fresh = await bench.open()
    await fresh.append(step(log, 0, "x", outgoing=(out,)))
    (stored,) = await _at_rest(bench, inbox)
    assert stored.data["payload"]["kid"] == (await bench.keys.get("theirs")).current.id
    assert (await fresh.read(inbox))[0].data["payload"] == SECRET


async def test_a_child_and_its_parent_share_a_subject_without_a_look_at_the_parent(bench):
    store, parent, child = await bench.open(), bench.elsewhere(), bench.chain()
    await store.append(started(parent, subject="s"))
    reader = SealedBench.node(bench)
    asked = []
    inner = reader._inner
    read = inner.read

    async def counted(stream_id, *args):
        asked.append(stream_id)
        return await read(stream_id, *args)

    inner.read = counted
    await reader.append(started(child, subject="s", parent={"executionId": parent, "chainId": parent}))
    inbox = inbox_stream(parent, "end")
    await reader.append(
        step(child, 0, 1, outgoing=(Outgoing("request", "e", parent, sent(inbox, "e", SECRET)),))
    )
    assert asked == []
    assert (await store.read(inbox))[0].data["payload"] == SECRET


async def test_a_successor_and_the_inbox_are_sealed_for_the_chains_subject(bench):
    store, first, second = await bench.open(), bench.chain(), bench.chain()
    await store.append(started(first, subject="s"))
    await store.append(started(second, subject="s", chain=first, data_in=SECRET))
    await store.append(sent(inbox_stream(first, "t"), "m", SECRET))
    key_id = (await bench.keys.get("s")).current.id
    assert (await _at_rest(bench, second))[0].data["input"]["kid"] == key_id
    assert (await _at_rest(bench, inbox_stream(first, "t")))[0].data["payload"]["kid"] == key_id


async def test_a_message_that_came_before_the_start_still_opens(bench):
    store, log = await bench.open(), bench.chain()
    inbox = inbox_stream(log, "t")
    await store.append(sent(inbox, "early", SECRET))
    await store.append(started(log, subject="s"))
    await store.append(sent(inbox, "late", SECRET))
    assert [e.data["payload"] for e in await (await bench.open()).read(inbox)] == [SECRET, SECRET]


async def test_a_refused_start_teaches_no_subject(bench):
    store, log = await bench.open(), bench.chain()
    await store.append(started(log, subject="theirs"))
    fresh = await bench.open()
    with pytest.raises(Exception, match="ends at 0"):
        await fresh.append(started(log, subject="mine", event_id="other"))
    await fresh.append(sent(inbox_stream(log, "t"), "m", SECRET))
    (stored,) = await _at_rest(bench, inbox_stream(log, "t"))
    assert stored.data["payload"]["kid"] == (await bench.keys.get("theirs")).current.id


async def test_a_repeat_is_told_by_its_ids_whatever_it_is_sealed_to(bench):
    store, log = await bench.open(), bench.chain()
    await store.append(started(log))
    assert not (await store.append(step(log, 0, SECRET))).repeated
    first = (await _at_rest(bench, log))[1].data
    assert (await (await bench.open()).append(step(log, 0, SECRET))).repeated
    assert (await _at_rest(bench, log))[1].data == first


async def test_nonces_never_repeat(bench):
    store, log = await bench.open(), bench.chain()
    await store.append(started(log))
    for head in range(50):
        await store.append(step(log, head, "same"))
    nonces = [e.data["output"]["iv"] for e in (await _at_rest(bench, log))[1:]]
    assert len(set(nonces)) == 50


async def test_a_process_charges_its_seals_ahead(bench):
    store, log = await bench.open(), bench.chain()
    await store.append(started(log, subject="s"))
    for head in range(20):
        await store.append(step(log, head, "x"))
    assert [key.uses for key in bench.table.rows["s"].keys] == [FIRST_CHARGE]


async def test_after_a_rotation_old_and_new_open(bench):
    store, log = await bench.open(), bench.chain()
    await store.append(started(log, subject="s"))
    await store.append(step(log, 0, "old"))
    await bench.keys.rotate("s")
    store.forget_keys("s")
    await store.append(step(log, 1, "new"))
    ids = [e.data["output"]["kid"] for e in (await _at_rest(bench, log))[1:]]
    assert len(set(ids)) == 2
    assert [e.data.get("output") for e in await (await bench.open()).read(log)] == [None, "old", "new"]


# -- nothing is sealed twice ---------------------------------------------------------------------------------------


async def test_the_copy_of_a_held_message_is_never_sealed_again(bench):
    store, log = await bench.open(), bench.chain()
    await store.append(started(log, subject="s"))
    await store.append(sent(inbox_stream(log, "t"), "m", {"x": SECRET}))
    (held,) = await store.read_at_rest(inbox_stream(log, "t"))
    stamp = {
        "quarantine": {"topic": "t", "inboxSeq": 0},
        "seal": held.metadata["seal"],
        "schema": EVENT_SCHEMA,
    }
    copy = NewEvent("quarantine:1", Kind.INBOX_MESSAGE, held.data, stamp)
    await store.append(StreamAppend(quarantine_stream(log), (copy,), expected_head=NO_EVENTS))
    (stored,) = await _at_rest(bench, quarantine_stream(log))
    assert (stored.data, stored.metadata["seal"]) == (held.data, held.metadata["seal"])
    (opened,) = await store.read(quarantine_stream(log))
    assert opened.data["payload"] == {"x": SECRET}


async def test_a_copy_of_what_another_sealed_in_part_is_stored_as_it_was(bench):
    store, log = await bench.open(), bench.chain()
    await store.append(started(log, subject="s"))
    await bench.keys.ensure("s")
    part = seal_value((await bench.keys.get("s")).current, SECRET, b"n" * 12)
    marker = {"v": 1, "cipher": "loom/aes-256-gcm", "covers": ["INBOX_MESSAGE.payload.secret"]}
    data = {"topic": "t", "messageId": "m", "payload": {"secret": part, "open": 1}}
    stamps = {"quarantine": {"topic": "t", "inboxSeq": 0}, "seal": marker}
    copy = NewEvent("quarantine:1", Kind.INBOX_MESSAGE, data, stamps)
    await store.append(StreamAppend(quarantine_stream(log), (copy,), expected_head=NO_EVENTS))
    (stored,) = await _at_rest(bench, quarantine_stream(log))
    assert (stored.data, stored.metadata) == (data, stamps)
    assert (await store.read(quarantine_stream(log)))[0].data["payload"] == {"secret": SECRET, "open": 1}


async def test_what_a_user_dresses_as_sealed_is_sealed_like_anything(bench):
    store, log = await bench.open(), bench.chain()
    foreign = {"__loomEnc": "loom/aes-256-gcm", "kid": "k", "iv": "aa", "ct": SECRET}
    await store.append(started(log, data_in=foreign))
    assert SECRET.encode() not in bench.resting()
    assert (await store.read(log))[0].data["input"] == foreign


async def test_a_bare_value_beside_a_foreign_marker_is_refused(bench):
    store, log = await bench.open(), bench.chain()
    marker = {"v": 1, "cipher": "other", "covers": ["STEP_COMPLETED.output"]}
    event = NewEvent("e", Kind.STEP_COMPLETED, {"output": SECRET}, {"seal": marker})
    with pytest.raises(InvalidInputError):
        await store.append(StreamAppend(log, (event,), expected_head=NO_EVENTS))
    assert bench.resting() == b""


async def test_an_event_read_and_appended_again_is_sealed_again(bench):
    """A fork writes what it read: open values beside the marker of this cipher."""
    store, log, fork = await bench.open(), bench.chain(), bench.chain()
    await store.append(started(log, subject="s", data_in=SECRET))
    (first,) = await store.read(log)
    again = NewEvent(first.id, first.type, {**first.data, "chainId": fork}, first.metadata)
    await store.append(StreamAppend(fork, (again,), expected_head=NO_EVENTS))
    assert SECRET.encode() not in bench.resting()
    assert (await store.read(fork))[0].data["input"] == SECRET


# -- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("EXECUTION_STARTED", "subject"),
        ("EXECUTION_STARTED", "chainId"),
        ("EXECUTION_STARTED", "*"),
        ("EXECUTION_STARTED", "parent.chainId"),
        ("INBOX_MESSAGE", "topic"),
        ("MESSAGE_CONSUMED", "inboxSeq"),
        ("PAYLOAD_SHREDDED", "subjectId"),
        ("INBOX_QUARANTINED", "heldAt"),
        ("STEP_COMPLETED", ""),
        ("STEP_COMPLETED", "a..b"),
        ("STEP_COMPLETED", ".".join("x" * 40)),
        ("", "a"),
        ("A.B", "a"),
    ],
)
def test_paths_that_cannot_be_sealed_are_refused(bench, kind, path):
    with pytest.raises(ConfigError) as caught:
        bench.node(sensitive={kind: [path]})
    assert caught.value.setting == "sealing.sensitive"


async def test_paths_may_be_added_later(bench):
    store, log = bench.node(sensitive={}), bench.chain()
    capability = store.sealing_capability()
    assert not capability.opens({"v": 1, "cipher": "loom/aes-256-gcm", "covers": ["STEP_COMPLETED.output"]})
    store.register_sensitive(Kind.STEP_COMPLETED, ["output"])
    assert capability.opens({"v": 1, "cipher": "loom/aes-256-gcm", "covers": ["STEP_COMPLETED.output"]})
    await store.append(started(log))
    await store.append(step(log, 0, SECRET))
    assert SECRET.encode() not in bench.resting()


async def test_an_observed_append_is_sealed_too(bench):
    store, log = await bench.open(), bench.chain()
    await store.append(started(log))
    event = NewEvent("o", Kind.STEP_COMPLETED, {"output": SECRET})
    await store.append(StreamAppend(log, (event,), observation=Observation(0, 1, f"{log}#0")))
    assert SECRET.encode() not in bench.resting()


def test_without_shards_the_store_is_a_plain_one(bench):
    assert isinstance(bench.node(), EncryptingEventStore)
