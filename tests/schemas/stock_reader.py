"""A consumer as anyone would write it: ``stock_reader.py BOOTSTRAP TOPIC SCHEMA_FILE COUNT`` prints records as JSON."""

import json
import sys
from io import BytesIO
from pathlib import Path

import fastavro
from confluent_kafka import Consumer, TopicPartition

sys.modules["loom"] = None  # whatever imports loom here fails

bootstrap, topic, schema_file, count = sys.argv[1:]
schema = fastavro.parse_schema(json.loads(Path(schema_file).read_text(encoding="utf-8")))
consumer = Consumer(
    {"bootstrap.servers": bootstrap, "group.id": "stock", "isolation.level": "read_committed"}
)
consumer.assign([TopicPartition(topic, 0, 0)])
left = int(count)
while left:
    message = consumer.poll(20)
    if message is None or message.error():
        sys.exit(f"no record: {message and message.error()}")
    value = message.value()
    start = 10 if value[:2] == b"\xc3\x01" else 5
    record = fastavro.schemaless_reader(BytesIO(value[start:]), schema)
    record["data"] = record["data"].decode()
    record["timestamp"] = round(record["timestamp"].timestamp() * 1000)
    record["metadata"] = record["metadata"] and record["metadata"].decode()
    print(json.dumps(record))  # noqa: T201 - its output is its result
    left -= 1
consumer.close()
