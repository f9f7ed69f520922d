"""What compaction leaves: nothing of what was deleted, all of the rest (kafka.md, "Topics").

The horizon is the lag plus the time of a tick and a round of the cleaner, here about four seconds, by default a day.
"""

from __future__ import annotations

import secrets
import uuid

import pytest
from test_writer_takeover import put
from writers import Writers, append, create_log, event, foreign_producer, until, visible

from loom.errors import ServiceMissingError
from loom.stores.contracts import StreamAppend
from loom.stores.ops import AppendOps, Truncate
from loom.testing import services

pytestmark = pytest.mark.timeout(240)
LAG_MS = 1_000
INBOX = "__loom_inbox__:s:ship"
PATIENCE_S = 90


@pytest.fixture(scope="module")
def cleaning_broker(kafka_version):
    """A broker whose cleaner looks five times a second."""
    try:
        broker = services.kafka(kafka_version, embedded=False, properties={"log.cleaner.backoff.ms": "200"})
    except ServiceMissingError as missing:
        pytest.skip(str(missing))
    with broker:
        services.warm_up(broker.bootstrap)
        yield broker


@pytest.fixture
def cleaned(cleaning_broker, tmp_path):
    """Makes writers of a log that is compacted after a second; ``holds(topic, text)`` searches its files."""
    prefix = f"t{uuid.uuid4().hex[:12]}."
    create_log(
        cleaning_broker.bootstrap,
        prefix,
        max_compaction_lag_ms=LAG_MS,
        min_compaction_lag_ms=0,
        segment_ms=LAG_MS,
        min_cleanable_dirty_ratio="0.01",
    )
    # what lies compressed could not be searched
    plain = {"kafka": {"compression.type": "none"}, "compaction_lag_ms": LAG_MS}
    made = Writers(cleaning_broker.bootstrap, prefix, tmp_path, **plain)

    def holds(topic, text):
        folder = cleaning_broker.folder / "data" / f"{prefix}{topic}-0"
        return any(text.encode() in file.read_bytes() for file in list(folder.glob("*.log")) if file.exists())

    made.holds = holds
    yield made
    made.close()


def message(number, text):
    return AppendOps((StreamAppend(INBOX, (event(f"m{number}", "INBOX_MESSAGE", payload=text),)),))


async def test_what_was_deleted_leaves_the_disk_of_a_partition_that_went_quiet(cleaned):
    first, secret = cleaned.make("n1").serving(), secrets.token_hex(20)
    for number in range(3):
        await first.write(message(number, secret if number else "kept"))
    assert cleaned.holds("inbox", secret)
    await first.write(Truncate(INBOX, 3))
    await until(lambda: not cleaned.holds("inbox", secret), PATIENCE_S)
    first.stop(10_000)

    # now only the mark knows what was there
    second = cleaned.make("n2").serving()
    (placed,) = await second.write(message(3, "later"))
    assert placed.first == 3
    assert second.ids(INBOX) == ["m0", "m3"]


async def test_compacting_twice_leaves_the_same_visible_set(cleaned):
    writer = cleaned.make("n1").serving()
    await writer.write(append("kept", 0, 3))
    aborted = foreign_producer(cleaned.bootstrap, "foreign-" + cleaned.prefix)
    aborted.begin_transaction()
    put(aborted, writer, "kept", 3, event_id="aborted")
    aborted.flush(10)
    aborted.abort_transaction(10)
    await writer.write(append("kept", 3, 2))

    def seen():
        records = visible(cleaned.bootstrap, cleaned.prefix + "executions")
        return [(key, headers["id"].decode()) for _, key, _, headers in records if key.startswith("kept/")]

    before = seen()
    assert before == [(f"kept/{n}", f"e:{n}") for n in range(5)]
    for turn in range(2):  # what is deleted shows when a round is over
        secret = secrets.token_hex(20)
        events = (event("g:0"), event("g:1", note=secret))
        await writer.write(AppendOps((StreamAppend(f"gone-{turn}", events, expected_head=-1),)))
        assert cleaned.holds("executions", secret)
        await writer.write(Truncate(f"gone-{turn}", 2))
        await until(lambda text=secret: not cleaned.holds("executions", text), PATIENCE_S)
        assert seen() == before
    assert cleaned.make("n2").serving().ids("kept") == [f"e:{n}" for n in range(5)]
