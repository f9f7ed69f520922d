"""What people of the estate do: read the log with a stock Kafka client and a stock Avro library, and nothing of loom.

The reading runs in a process of its own in which importing loom fails, with the committed schema file beside it.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Producer
from golden import SCHEMAS, current_cases

from loom.schemas.codec import Codec
from loom.topics import provisioning
from loom.topics.catalogue import Catalogue
from loom.topics.cluster import Cluster

STOCK_READER = Path(__file__).parent / "stock_reader.py"


@pytest.mark.parametrize("registry_id", [None, 7], ids=["single-object", "confluent"])
def test_a_stock_consumer_reads_the_log(kafka_bootstrap, topic_prefix, registry_id):
    catalogue = Catalogue(topic_prefix, 1)
    cluster = Cluster(kafka_bootstrap)
    provisioning.apply(cluster, provisioning.plan(cluster, catalogue))
    codec = Codec(registered={"loom.Envelope": registry_id} if registry_id else None)
    written = [envelope for _, envelope in current_cases()]
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    for envelope in written:
        producer.produce(catalogue.executions, codec.encode_envelope(envelope), key=f"{envelope.stream_id}/{envelope.sequence}", partition=0)  # fmt: skip
    assert producer.flush(10) == 0

    done = subprocess.run(
        [sys.executable, "-I", STOCK_READER, kafka_bootstrap, catalogue.executions, SCHEMAS / "envelope.avsc", str(len(written))],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    read = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["id"] for r in read] == [e.id for e in written]
    for record, envelope in zip(read, written, strict=True):
        assert record["streamId"] == envelope.stream_id
        assert record["sequence"] == envelope.sequence
        assert record["type"] == envelope.type
        assert record["timestamp"] == envelope.timestamp
        assert json.loads(record["data"]) == envelope.data
        assert record["seal"] == envelope.metadata.get("seal")
        assert record["node"] == envelope.metadata.get("node")
