"""What the quarantine topic keeps: copies and tombstones counted record by record, and the segment files searched.

Workers on a real broker: one that cannot open what is sent, later one that can (system.md 4.4 and 4.7).
"""

import asyncio
import base64
import uuid
from collections import Counter

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from fleet_support import stubborn

from loom import Principal
from loom.errors import ServiceMissingError
from loom.ids import dedupe_key, inbox_stream, quarantine_stream
from loom.kernel.quarantine import anchor_event, copy_event
from loom.kernel.state import to_json
from loom.schemas.codec import Codec
from loom.schemas.records import OperatorSignal
from loom.stores.contracts import StreamAppend
from loom.testing import services

pytestmark = pytest.mark.timeout(240)
OPS = Principal("ops")
KEK = base64.b64encode(b"k" * 32).decode()
KEYS = {"LOOM_SEALING__KEYS": "redis", "LOOM_SEALING__KEK": "env:FLEET_KEK", "FLEET_KEK": KEK}
LAG_MS = "1000"
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
def fleet(cleaning_broker, make_fleet, monkeypatch):
    """A fleet whose quarantine topic is compacted after a second, and lies uncompressed, so that it can be searched."""
    monkeypatch.setenv("FLEET_KEK", KEK)
    made = make_fleet(cleaning_broker.bootstrap, f"t{uuid.uuid4().hex[:12]}.")
    made.env["LOOM_KAFKA__COMPRESSION_TYPE"] = "none"
    made.topic = made.env["LOOM_TOPIC_PREFIX"] + "quarantine"
    made.folder_of = lambda partition: cleaning_broker.folder / "data" / f"{made.topic}-{partition}"
    quick = {
        "max.compaction.lag.ms": LAG_MS,
        "min.compaction.lag.ms": "0",
        "segment.ms": LAG_MS,
        "delete.retention.ms": "600000",  # tombstones stay to be counted
        "min.cleanable.dirty.ratio": "0.01",
    }
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in quick.items()
    ]
    admin = AdminClient({"bootstrap.servers": cleaning_broker.bootstrap, "log_level": 0})
    resource = ConfigResource(ResourceType.TOPIC, made.topic, incremental_configs=entries)
    for changed in admin.incremental_alter_configs([resource]).values():
        changed.result(20)
    return made


def records(fleet, name):
    """Every committed record of a topic, from its beginning: ``(partition, key, value)``."""
    topic = fleet.env["LOOM_TOPIC_PREFIX"] + name
    consumer = Consumer(
        {
            "bootstrap.servers": fleet.env["LOOM_BOOTSTRAP"],
            "group.id": "unused",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "log_level": 0,
        }
    )
    count = int(fleet.env["LOOM_PARTITIONS"])
    consumer.assign([TopicPartition(topic, number, 0) for number in range(count)])
    found, ended = [], set()
    while len(ended) < count:
        message = consumer.poll(20)
        assert message is not None, "the topic could not be read to its end"
        if message.error() is not None:
            ended.add(message.partition())
        else:
            found.append((message.partition(), (message.key() or b"").decode(), message.value()))
    consumer.close()
    return found


def tally(fleet, chain_id):
    """Copies and tombstones of a chain in the order in which they stand, and which copies no tombstone has ended."""
    prefix = quarantine_stream(chain_id) + "/"
    copies, tombstones, live = Counter(), Counter(), set()
    for _, key, value in records(fleet, "quarantine"):
        if not key.startswith(prefix) or key == prefix + "0":
            continue
        (tombstones if value is None else copies)[key] += 1
        (live.discard if value is None else live.add)(key)
    return copies, tombstones, live


async def until(holds, what, patience_s=PATIENCE_S):
    async with asyncio.timeout(patience_s):
        while not await asyncio.to_thread(holds):
            await asyncio.sleep(0.2)
    return what


class Letters:
    """One execution of ``letters``, from outside."""

    def __init__(self, capable, raw):
        self.capable, self.raw, self.id, self.handle = capable, raw, "", None

    async def begin(self, execution_id=None):
        self.handle = await stubborn(lambda: self.capable.start("letters", 0, execution_id=execution_id))
        self.id = self.handle.execution_id
        while await stubborn(self.handle.status) != "suspended":
            await asyncio.sleep(0.05)
        return self

    async def send(self, *names, topic="t"):
        for name in names:
            await stubborn(lambda name=name: self.capable.send(self.id, topic, name, message_id=name))

    async def hold(self, name):
        return await self.raw.quarantine_inbox(self.id, "t", message_id=name, principal=OPS)

    async def stored(self):
        """The value of the one copy that is kept, as its record has it."""
        (found,) = [e for e in await self.raw.stores.events.read(quarantine_stream(self.id)) if e.sequence]
        return found.data["payload"]


async def test_after_a_cycle_no_copy_is_left_and_what_nobody_freed_is_freed_by_the_workers(fleet):
    access, keys = {"operators": ("ops",)}, {"keys": "redis", "kek": "env:FLEET_KEK"}
    fleet.start_worker("without-keys")
    async with fleet.client(sealing=keys, access=access) as capable, fleet.client(access=access) as raw:
        await until(lambda: fleet.is_up("without-keys"), "the worker")
        cycle, dropped, orphaned, plain = [await Letters(capable, raw).begin() for _ in range(4)]
        for letters in (cycle, dropped, orphaned):
            await letters.send("m1", "m2")
            await letters.send("go", topic="go")

        def searched(letters, text):
            """Whether a segment file of the chain's partition still holds the text."""
            partition = next(p for p, key, _ in records(fleet, "quarantine") if letters.id in key)
            files = [f for f in fleet.folder_of(partition).glob("*.log") if f.exists()]
            return any(text.encode() in f.read_bytes() for f in files)

        # One cycle over two holds, one that a verb ends, and a copy whose fact never came.
        await cycle.hold("m1")
        text = (await cycle.stored())["ct"]
        assert searched(cycle, text)
        await cycle.hold("m2")
        await dropped.hold("m1")
        await raw.release_inbox(dropped.id, "t", "m1", disposition="discard", principal=OPS)
        assert await until(lambda: not tally(fleet, dropped.id)[2], "the verb to have freed the copy")
        (original, *_) = await raw.stores.events.read(inbox_stream(orphaned.id, "t"), 0, 1)
        copy = copy_event(orphaned.id, dedupe_key(None, "m1"), "t", original)
        target = quarantine_stream(orphaned.id)
        await raw.stores.events.append(StreamAppend(target, (anchor_event(orphaned.id), copy)))
        assert (len(tally(fleet, orphaned.id)[0]), len(tally(fleet, cycle.id)[2])) == (1, 2)

        def signals():
            values = [value for _, _, value in records(fleet, "signals") if value is not None]
            return [Codec().decode(value, OperatorSignal, "signal") for value in values]

        await until(lambda: any(s.execution_id == cycle.id for s in signals()), "the signal")
        (told,) = [s for s in signals() if s.execution_id == cycle.id]
        assert (told.code, told.count, told.node) == ("held-awaiting", 1, "without-keys")
        assert (told.details["messageId"], told.details["awaits"]) == ("m1", "a capable node")

        fleet.start_worker("capable", env=KEYS)
        for letters in (cycle, dropped, orphaned):
            await letters.send("end")
        assert await cycle.handle.result(timeout=60) == ["m1", "m2"]
        assert await dropped.handle.result(timeout=60) == ["m2"]
        assert await orphaned.handle.result(timeout=60) == ["m1", "m2"]
        await plain.send("m1", "m2", "end")
        await plain.send("go", topic="go")
        assert await plain.handle.result(timeout=60) == ["m1", "m2"]
        for letters, count in ((cycle, 2), (dropped, 1), (orphaned, 1), (plain, 0)):
            await until(lambda letters=letters: not tally(fleet, letters.id)[2], "the copies to be freed")
            copies, tombstones, _ = tally(fleet, letters.id)
            assert len(tombstones) == count, "a tombstone for each copy"
            assert set(copies) <= set(tombstones)
            assert set(tombstones.values()) <= {1}
        shapes = [set(to_json(await capable.load_state(x.id))["variables"]) for x in (cycle, plain)]
        assert shapes[0] == shapes[1]

        # What tombstones ended leaves the disk once the cleaner has been: a later record rolls the segment.
        for _ in range(20):
            if not searched(cycle, text):
                break
            other = raw._engine.mint_beside(cycle.id)
            events = (anchor_event(other),)
            await raw.stores.events.append(StreamAppend(quarantine_stream(other), events))
            await asyncio.sleep(1.5)
        assert not searched(cycle, text), "the held payload is still in a segment file"
