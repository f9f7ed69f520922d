"""A planted plaintext is searched for wherever bytes rest: segment files, Redis, caches, logs; before an erasure and after.

Compression is off, so that a word that rests is found as it is; a word that is not sealed proves that the search finds.
"""

import asyncio
import base64
import json
from pathlib import Path

import pytest
from fleet_support import stubborn

from loom import PayloadShreddedError
from loom.schemas.envelope import Kind

SECRET = "planted-plaintext-8W"
SUBJECT = "clear-subject-8W"
SENSITIVE = {"EXECUTION_STARTED": ["input"], "STEP_COMPLETED": ["output"], "EXECUTION_COMPLETED": ["output"]}


@pytest.fixture
def kafka_bootstrap(private_kafka):
    """A broker whose files this test may read."""
    return private_kafka.bootstrap


def files_with(word, *folders):
    """Files under the folders that hold the word."""
    found = []
    for folder in folders:
        for path in sorted(p for p in Path(folder).rglob("*") if p.is_file()):
            if word.encode() in path.read_bytes():
                found.append(path.name)
    return found


@pytest.mark.timeout(400)
async def test_no_planted_plaintext_rests_anywhere_and_nothing_opens_after_the_erasure(
    fleet, private_kafka, private_redis, tmp_path, monkeypatch
):
    kek = base64.b64encode(b"k" * 32).decode()
    monkeypatch.setenv("FLEET_KEK", kek)
    sealing = {"keys": "redis", "kek": "env:FLEET_KEK", "sensitive": SENSITIVE}
    fleet.start_worker(
        "north",
        flows="mixed_flows",
        env={
            "FLEET_KEK": kek,
            "LOOM_SEALING__KEYS": "redis",
            "LOOM_SEALING__KEK": "env:FLEET_KEK",
            "LOOM_SEALING__SENSITIVE": json.dumps(SENSITIVE),
            "LOOM_KAFKA__COMPRESSION_TYPE": "none",
            "FLEET_LEDGER": "/dev/null",  # the outside world is no part of loom
        },
    )
    places = (private_kafka.folder, private_redis.folder, fleet.folder)
    async with fleet.client(sealing=sealing, kafka={"compression.type": "none"}) as client:
        done = await stubborn(
            lambda: client.start("sealed-busy", SECRET, execution_id="done", subject=SUBJECT)
        )
        for at, word in enumerate(("a", "b")):
            await stubborn(
                lambda at=at, word=word: client.send("done", "go", SECRET + word, message_id=f"m{at}")
            )
        assert await done.result(timeout=120) == f"{SECRET}+{SECRET}a+{SECRET}b"
        await stubborn(lambda: client.start("sealed-busy", SECRET, execution_id="waits", subject=SUBJECT))
        await stubborn(lambda: client.send("waits", "elsewhere", SECRET, message_id="m"))
        async with asyncio.timeout(60):
            while await client.parked_at_sequence("waits") is None:
                await asyncio.sleep(0.05)
        assert files_with(SUBJECT, private_kafka.folder), "the search finds what is in the clear"
        assert files_with(SECRET, *places) == []
        report = await stubborn(lambda: client.erase_subject(SUBJECT))
        assert sorted(report.tombstoned) == ["done", "waits"]
        assert report.cancelled == ("waits",)
        for execution_id in ("done", "waits"):
            with pytest.raises(PayloadShreddedError):
                await client.load_state(execution_id)
        export = await client.export_subject(SUBJECT)
        assert SECRET not in repr(export)
        assert all(stream.erased for stream in export.streams)
        ends = {s.stream_id: s.events[-1].type for s in export.streams if s.stream_id in {"done", "waits"}}
        assert ends == {"done": Kind.PAYLOAD_SHREDDED, "waits": Kind.EXECUTION_CANCELLED}
        assert files_with(SECRET, *places) == []
    assert SECRET not in fleet.tails()
