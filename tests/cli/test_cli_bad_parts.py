"""Parts that are not as they should be: topics, brokers, Redis, and records in a schema that nobody can read."""

import getpass
import json
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from loom.ids import ulid
from loom.schemas.codec import Codec
from loom.schemas.envelope import Envelope
from loom.testing.services import free_port
from loom.topics.catalogue import Catalogue
from loom.topics.partitioner import partition_of

WORKER = ("worker", "--flows", "examples.orders")
LOST_ID = 4_242


@pytest.fixture
def own(loom, fleet_env):
    """The command line on a prefix of its own, whose topics are made."""
    prefix = f"cli{uuid.uuid4().hex[:10]}."
    loom.env(LOOM_TOPIC_PREFIX=prefix, LOOM_DATA_DIR=f"{fleet_env['LOOM_DATA_DIR']}-{prefix}")
    assert loom("topics", "apply").status == 0
    loom.catalogue = Catalogue(prefix, int(fleet_env["LOOM_PARTITIONS"]))
    return loom


@pytest.mark.parametrize("command", [("send", "e1", "ship"), ("resume", "e1", "approve")])
@pytest.mark.parametrize("text", ["{not json", '{"a": NaN}', "[" * 100_000])
def test_a_message_that_is_no_json_is_refused_before_anybody_is_asked(loom, command, text):
    loom.env(LOOM_BOOTSTRAP=f"127.0.0.1:{free_port()}")
    status, said = loom.error(*command, text)
    assert (status, said["error"]) == (2, "InvalidInputError")
    assert "not json" not in said["message"]


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        ("marks", ("start", "order", "--input", "{}")),
        ("replies", ("show", "e1")),
        ("states", ("list",)),
        ("quarantine", ("held",)),
    ],
)
def test_a_topic_that_is_missing_is_named(own, kafka_bootstrap, missing, command):
    admin = AdminClient({"bootstrap.servers": kafka_bootstrap})
    missing = getattr(own.catalogue, missing)
    admin.delete_topics([missing])[missing].result(20)
    for arguments in (command, ("topics", "check")):
        status, said = own.error(*arguments)
        assert (status, said["error"]) == (2, "TopicsError"), said
        assert missing in said["message"]
        assert "loom topics apply" in said["message"]


NO_TOPICS = {"LOOM_TOPIC_PREFIX": "nobody-made-these."}, 2, ("nobody-made-these.", "loom topics apply")
OTHER_NUMBER = {"LOOM_PARTITIONS": "3"}, 2, ("partitions",)
NO_BROKER = {"LOOM_BOOTSTRAP": "127.0.0.1:{port}"}, 3, ("127.0.0.1:{port}", "bootstrap")
NO_REDIS = {"LOOM_REDIS_URL": "redis://:hunter2@127.0.0.1:{port}/0"}, 3, ("127.0.0.1:{port}", "redis_url")


@pytest.mark.parametrize(
    ("command", "wrong", "status", "names"),
    [(WORKER, *case) for case in (NO_TOPICS, OTHER_NUMBER, NO_BROKER, NO_REDIS)]
    + [(("list",), *case) for case in (NO_TOPICS, OTHER_NUMBER, NO_BROKER)],
)
def test_one_line_says_what_is_wrong(own, command, wrong, status, names):
    port = free_port()
    own.env(**{name: value.format(port=port) for name, value in wrong.items()})
    done = own(*command)
    assert done.status == status, done.err
    assert [name for name in names if name.format(port=port) not in done.err] == []
    assert "Traceback" not in done.err
    assert "hunter2" not in done.err
    assert done.err.count("\n") == 1


# -- a schema that cannot be read ----------------------------------------------------------------------------------------


def plant(own, bootstrap, raw):
    """An execution of the caller's whose second event is ``raw``; written past loom, as a fault of its own would."""
    execution_id, codec, catalogue = ulid(), Codec(), own.catalogue
    data = {
        "workflow": "order",
        "input": {},
        "chainId": execution_id,
        "subject": execution_id,
        "principal": {"actor": getpass.getuser()},
    }
    first = Envelope(f"{execution_id}#0", execution_id, 0, "EXECUTION_STARTED", 1, data, {"schema": "1.25.0"})
    producer = Producer({"bootstrap.servers": bootstrap})
    for sequence, (kind, value) in enumerate(
        [("EXECUTION_STARTED", codec.encode_envelope(first)), ("STEP_COMPLETED", raw)]
    ):
        headers = {
            "type": kind,
            "sequence": sequence,
            "id": f"{execution_id}#{sequence}",
            "batch": "0/1",
            "timestamp": 1,
        }
        producer.produce(
            catalogue.executions,
            value,
            f"{execution_id}/{sequence}",
            partition=partition_of(execution_id, catalogue.partitions),
            headers=[(name, str(text)) for name, text in headers.items()],
        )
    producer.flush(10)
    return execution_id


@pytest.fixture
def garbled_registry():
    """A registry that knows the id, and gives what is no schema."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            known = self.path.endswith(f"/{LOST_ID}")
            body = json.dumps({"schema": "no schema"} if known else {"error_code": 40403}).encode()
            self.send_response(200 if known else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 - the name that the server looks for

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(5)


def test_a_record_whose_schema_cannot_be_read_is_told_and_stops_nothing_else(
    own, start_worker, kafka_bootstrap, garbled_registry
):
    registered = b"\x00" + LOST_ID.to_bytes(4, "big") + b"secret"
    unregistered = b"\xc3\x01" + b"\x07" * 8 + b"secret"
    lost, unknown = (plant(own, kafka_bootstrap, raw) for raw in (registered, unregistered))
    start_worker()

    status, said = own.error("show", unknown)
    assert (status, said["error"]) == (1, "DecodeError"), said
    assert "07" * 8 in said["message"]
    status, said = own.error("show", lost)
    assert (status, said["error"]) == (1, "DecodeError"), said
    assert f"registry id {LOST_ID}" in said["message"]
    assert "registry_url is not set" in said["message"]
    own.env(LOOM_REGISTRY_URL=garbled_registry)
    status, said = own.error("show", lost)
    assert (status, said["error"]) == (2, "SchemaUnreadableError"), said
    assert "registry_url" in said["message"]
    assert "secret" not in said["message"]

    started = time.monotonic()
    own.json("start", "order", "--input", '{"card": "tok-1", "items": [{"sku": "lamp", "price": 4200}]}')
    assert time.monotonic() - started < 20
