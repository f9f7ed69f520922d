"""How fast the fold service follows the log, alone: ``python benchmarks/fold.py [executions] [partitions]``.

Writes one-step executions (three events each, as the writer leaves them) into topics of its own on the broker of
LOOM_BOOTSTRAP, or on one started here; then times the service from its first takeover to no lag, beside a plain consumer
that only reads the same records. Both run in this process, the broker beside it.
"""

from __future__ import annotations

import sys
import time
import uuid

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from loom.processors.fold import FoldService
from loom.processors.fold_partition import FoldSettings
from loom.schemas.codec import Codec
from loom.schemas.envelope import Envelope, Kind
from loom.testing import services
from loom.topics.catalogue import Catalogue
from loom.topics.partitioner import mint, partition_of

CODEC = Codec()
PER_TRANSACTION = 1_000
WAIT_S = 300.0


def write(bootstrap, catalogue, executions):
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "transactional.id": catalogue.prefix + "bench",
            "compression.type": "lz4",
            "queue.buffering.max.messages": 500_000,
        }
    )
    producer.init_transactions(30)
    ids = [mint(number % catalogue.partitions, catalogue.partitions) for number in range(executions)]
    for start in range(0, executions, PER_TRANSACTION // 3):
        producer.begin_transaction()
        for execution_id in ids[start : start + PER_TRANSACTION // 3]:
            for envelope in events(execution_id):
                headers = [
                    ("type", envelope.type),
                    ("sequence", str(envelope.sequence)),
                    ("id", envelope.id),
                    ("batch", "0/1"),
                    ("timestamp", str(envelope.timestamp)),
                    ("fence", "1"),
                    ("node", "n1:01M8M0XX3FRWCJXT0ZGAT236G8"),
                ]
                producer.produce(
                    catalogue.executions,
                    CODEC.encode_envelope(envelope),
                    f"{execution_id}/{envelope.sequence}",
                    partition_of(execution_id, catalogue.partitions),
                    headers=headers,
                )
        producer.commit_transaction(30)


def events(execution_id):
    start = {
        "workflow": "order",
        "input": {"customer": "c-1", "lines": ["x" * 20] * 5},
        "chainId": execution_id,
        "subject": execution_id,
        "principal": {"actor": "alice", "identity": {"realm": "shop"}},
    }
    step = {"siteId": "0:0", "name": "charge", "output": {"receipt": "r" * 40}, "attempt": 1}
    kinds = (
        (Kind.EXECUTION_STARTED, start),
        (Kind.STEP_COMPLETED, step),
        (Kind.EXECUTION_COMPLETED, {"output": "done"}),
    )
    metadata = {"schema": "1.25.0", "node": "n1:01M8M0XX3FRWCJXT0ZGAT236G8", "actor": "alice"}
    for sequence, (kind, data) in enumerate(kinds):
        yield Envelope(
            f"{execution_id}-{sequence}", execution_id, sequence, kind, 1_700_000_000_000, data, metadata
        )


def read_plainly(bootstrap, catalogue, total):
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "unused",
            "isolation.level": "read_committed",
            "log_level": 0,
        }
    )
    consumer.assign([TopicPartition(catalogue.executions, p, 0) for p in range(catalogue.partitions)])
    seen, began = 0, time.perf_counter()
    while seen < total:
        seen += sum(message.error() is None for message in consumer.consume(20_000, 0.1))
    took = time.perf_counter() - began
    consumer.close()
    return took


def fold(bootstrap, catalogue, total):
    service = FoldService(FoldSettings(bootstrap, catalogue, "bench"))
    began = time.perf_counter()
    service.start()
    first = last = None
    while time.perf_counter() - began < WAIT_S:
        done = service.stats().events
        now = time.perf_counter()
        if done and first is None:
            first = (now, done)
        if done >= total:
            last = now
            break
        time.sleep(0.005)
    stats = service.stats()
    service.stop()
    return began, first, last, stats


def main():
    executions = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    partitions = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    with services.find_or_start(need_redis=False) as parts:
        print("; ".join(parts.notes))
        catalogue = Catalogue(f"bench{uuid.uuid4().hex[:8]}.", partitions)
        admin = AdminClient({"bootstrap.servers": parts.bootstrap})
        names = [catalogue.executions, catalogue.states]
        for made in admin.create_topics([NewTopic(name, partitions, 1) for name in names]).values():
            made.result(30)
        try:
            write(parts.bootstrap, catalogue, executions)
            total = executions * 3
            plain = read_plainly(parts.bootstrap, catalogue, total)
            began, first, last, stats = fold(parts.bootstrap, catalogue, total)
        finally:
            for gone in admin.delete_topics(names).values():
                gone.result(30)
    print(f"{total} events of {executions} executions in {partitions} partitions")
    print(f"plain consumer, reading only: {total / plain:,.0f} events/s")
    if last is None or first is None:
        print(f"not done within {WAIT_S:.0f} s: {stats}")
        return
    print(f"first batch folded after:     {first[0] - began:.2f} s (group, fence, restore)")
    print(f"fold service:                 {(total - first[1]) / max(last - first[0], 1e-9):,.0f} events/s")
    print(f"transactions: {stats.transactions}, summaries written: {stats.summaries}, faults: {stats.faults}")


if __name__ == "__main__":
    main()
