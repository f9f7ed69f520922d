"""The worker's Faust app on a real broker: at least once, off the user's loop, and never dead in silence."""

import asyncio
import threading
import time

import pytest
from kafka_bench import Bench, until, wait_until

from loom.config import Config
from loom.errors import ConfigError, DeadlineExceededError, NotOwnerError
from loom.ids import inbox_stream, quarantine_stream
from loom.processors.app import LoopBridge, build_app
from loom.processors.credentials import broker_credentials
from loom.processors.host import AppHost, Watch
from loom.runtime.kept_copies import KeptCopies
from loom.schemas.codec import Codec
from loom.schemas.records import CancelVerb, Command

CODEC = Codec()
TYPE = [("type", b"INBOX_MESSAGE")]


class Runtime:
    def __init__(self):
        self.asked, self.errors, self.hold = [], [], False

    async def notify(self, chain_id, stream, sequence):
        self.asked.append((chain_id, stream, sequence))
        await self._answer()

    async def command(self, command, source):
        self.asked.append((command, source))
        await self._answer()

    async def look_after(self, chain_id):
        self.asked.append(chain_id)
        await self._answer()
        return KeptCopies(chain_id, chain_id, 0)

    async def _answer(self):
        await until(lambda: not self.hold, "the end of a hold")
        if self.errors:
            raise self.errors.pop(0)


@pytest.fixture
def hosts():
    started = []

    def start(bench, runtime, **more):
        host = AppHost(lambda: build_app(bench.config, runtime), **more)
        started.append(host)
        host.app = host.start()
        return host

    yield start
    for host in started:
        assert host.stop()


def _message(bench, partition, chain, sequence, topic="t"):
    key = f"{inbox_stream(chain, topic)}/{sequence}"
    bench.send(bench.catalogue.inbox, partition, (key, b"value", TYPE))


def test_nothing_is_served_unless_asked_for(bench):
    app = build_app(bench.config, Runtime())
    assert not app.conf.web_enabled


def test_inbox_and_commands_reach_the_bridge_and_are_committed(bench, hosts):
    bench.make("inbox", "commands", "quarantine", "dead")
    runtime = Runtime()
    host = hosts(bench, runtime)
    _message(bench, 0, "c", 0)
    bench.send(bench.catalogue.commands, 1, (b"c", CODEC.encode(Command(CancelVerb("c"))), []))
    bench.send(bench.catalogue.commands, 1, (None, b"junk", []))
    wait_until(lambda: len(runtime.asked) == 2, "a message and a command")
    given, source = next(entry for entry in runtime.asked if len(entry) == 2)
    assert ("c", inbox_stream("c", "t"), 0) in runtime.asked
    assert given == Command(CancelVerb("c"), id=str(source))
    assert str(source) == f"{bench.catalogue.commands}/1/0"
    group = host.app.conf.id
    wait_until(lambda: bench.committed(group, bench.catalogue.inbox, 0) == 1, "commit of inbox")
    wait_until(lambda: bench.committed(group, bench.catalogue.commands, 1) == 2, "commit of commands")
    [dead] = bench.read_all(bench.catalogue.dead)
    headers = dict(dead.headers())
    assert dead.key().decode() == headers["source"].decode() == f"{bench.catalogue.commands}/1/1"
    assert dead.value() == b"junk"
    assert headers["error"] == b"DecodeError"


def test_chains_that_keep_copies_are_looked_at_also_those_from_before_the_start(bench, hosts):
    bench.make("inbox", "commands", "quarantine", "signals", "dead")
    bench.send(bench.catalogue.quarantine, 0, (f"{quarantine_stream('old')}/1", b"copy", TYPE))
    aborted = bench.producer("aborted")
    aborted.begin_transaction()
    aborted.produce(bench.catalogue.quarantine, b"copy", f"{quarantine_stream('never')}/1", partition=0)
    aborted.flush(10)
    aborted.abort_transaction(10)
    first = Runtime()
    host = hosts(bench, first)
    wait_until(lambda: "old" in first.asked, "a look at what is new to the group")
    wait_until(lambda: bench.committed(host.app.conf.id, bench.catalogue.quarantine, 0) == 1, "the commit")
    assert host.stop()
    second = Runtime()
    hosts(bench, second)
    wait_until(lambda: "old" in second.asked, "a look at what was acknowledged before")
    bench.send(bench.catalogue.quarantine, 1, (f"{quarantine_stream('new')}/1", b"copy", TYPE))
    wait_until(lambda: "new" in second.asked, "a look at what came since")
    assert "never" not in {*first.asked, *second.asked}


def test_what_was_not_answered_is_delivered_to_the_next_process(bench, hosts):
    bench.make("inbox", "commands", "quarantine", "dead")
    runtime = Runtime()
    runtime.hold = True
    first = hosts(bench, runtime)
    for sequence in range(3):
        _message(bench, 0, f"c{sequence}", sequence)
    wait_until(lambda: len(runtime.asked) == 3, "three notifications")
    assert first.stop()
    successor = Runtime()
    hosts(bench, successor)
    wait_until(lambda: len(successor.asked) == 3, "the same three again")
    assert sorted(successor.asked) == sorted(runtime.asked)


def test_an_owner_elsewhere_is_waited_for(bench, hosts):
    bench.make("inbox", "commands", "quarantine", "dead")
    runtime = Runtime()
    runtime.errors = [NotOwnerError(0), NotOwnerError(0)]
    host = hosts(bench, runtime)
    _message(bench, 0, "c", 0)
    wait_until(lambda: len(runtime.asked) == 3, "two refusals and an answer")
    wait_until(lambda: bench.committed(host.app.conf.id, bench.catalogue.inbox, 0) == 1, "the commit")


def test_two_processes_share_the_partitions(bench, hosts):
    bench.make("inbox", "commands", "quarantine", "dead")
    runtimes = [Runtime(), Runtime()]
    apps = [hosts(bench, runtime).app for runtime in runtimes]
    wait_until(lambda: all(app.consumer.assignment() for app in apps), "partitions on both")
    for number in range(20):
        _message(bench, number % 2, f"c{number}", number)
    seen = lambda: {chain for runtime in runtimes for chain, _, _ in runtime.asked}  # noqa: E731
    wait_until(lambda: len(seen()) == 20, "every message at one of them")


async def test_the_bridge_answers_on_its_own_loop(bench, hosts):
    bench.make("inbox", "commands", "quarantine", "dead")
    threads = []

    class HereRuntime(Runtime):
        async def notify(self, chain_id, stream, sequence):
            threads.append(threading.current_thread())
            await super().notify(chain_id, stream, sequence)

    runtime = HereRuntime()
    bridge = LoopBridge(runtime, asyncio.get_running_loop(), timeout_s=0.3)
    await asyncio.to_thread(hosts, bench, bridge)
    await asyncio.to_thread(_message, bench, 0, "c", 0)
    await until(lambda: runtime.asked, "a notification")
    assert threads == [threading.current_thread()]
    runtime.hold = True
    with pytest.raises(DeadlineExceededError):
        await bridge.notify("c", "s", 1)


# -- liveness ------------------------------------------------------------------------------------------------------


def test_a_start_without_a_broker_is_bounded():
    bench = Bench("127.0.0.1:1", "nowhere.")
    host = AppHost(lambda: build_app(bench.config, Runtime()), start_timeout_s=5, stop_timeout_s=5)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one depends on who notices first
        host.start()
    assert not isinstance(caught.value, AssertionError)
    assert host.stop()


def test_wrong_settings_are_told_at_start(monkeypatch):
    monkeypatch.delenv("LOOM_BOOTSTRAP", raising=False)
    bare = Config(topic_prefix="p.")
    with pytest.raises(ConfigError, match="bootstrap"):
        AppHost(lambda: build_app(bare, Runtime())).start()


def test_a_crash_is_told_with_its_reason(bench, hosts):
    bench.make("inbox", "commands", "quarantine", "dead")
    deaths = []
    host = hosts(bench, Runtime(), on_death=deaths.append)

    async def crash():
        await host.app.crash(RuntimeError("broken"))

    asyncio.run_coroutine_threadsafe(crash(), host._loop)
    wait_until(lambda: deaths, "the news of the crash")
    assert deaths == ["RuntimeError on its event loop"]


def test_a_blocked_loop_is_told(bench, hosts):
    bench.make("inbox", "commands", "quarantine", "dead")
    deaths, release = [], threading.Event()
    host = hosts(bench, Runtime(), on_death=deaths.append, stall_s=1.0)
    host._loop.call_soon_threadsafe(release.wait, 20)
    wait_until(lambda: deaths, "the news of the blocked loop")
    release.set()
    assert "event loop did not answer" in deaths[0]


def test_a_healthy_app_is_left_alone_and_a_dead_broker_is_told(start_kafka, hosts):
    broker = start_kafka()
    bench = Bench(broker.bootstrap, "live.")
    bench.make("inbox", "commands", "quarantine", "dead")
    deaths, runtime = [], Runtime()
    hosts(bench, runtime, on_death=deaths.append, stall_s=6.0)
    broker.pause()
    time.sleep(0)
    broker.resume()
    _message(bench, 0, "c", 0)
    wait_until(lambda: runtime.asked, "a message after a pause of the broker")
    assert deaths == []
    broker.pause()
    wait_until(lambda: deaths, "the news that nothing is read", timeout_s=40)
    broker.resume()
    assert "has stood still" in deaths[0]


def test_the_watch_names_what_stands_still():
    watch = Watch(10.0)
    assert watch.look({"a": 1, "b": None}, 0.0) is None
    assert watch.look({"a": 1, "b": 1}, 9.0) is None
    assert watch.look({"a": 2, "b": 1}, 11.0) is None
    assert watch.look({"a": 2, "b": 1}, 19.0) is None
    assert watch.look({"a": 2, "b": 1}, 19.5) == "b has stood still for 10 s"
    assert watch.look({"a": 2, "b": None}, 20.0) is None
    assert watch.look({"a": 2, "b": 1}, 20.5) is None


# -- credentials ---------------------------------------------------------------------------------------------------


def test_credentials_follow_librdkafkas_names():
    assert broker_credentials({"linger.ms": 5}) is None
    scram = broker_credentials(
        {
            "security.protocol": "sasl_plaintext",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": "u",
            "sasl.password": "hunter2",
        }
    )
    assert (scram.protocol.value, scram.mechanism.value, scram.username) == (
        "SASL_PLAINTEXT",
        "SCRAM-SHA-512",
        "u",
    )
    assert "hunter2" not in repr(scram)
    tls = broker_credentials({"security.protocol": "ssl", "enable.ssl.certificate.verification": "false"})
    assert tls.protocol.value == "SSL"
    both = broker_credentials({"security.protocol": "SASL_SSL", "sasl.mechanisms": "PLAIN"})
    assert both.protocol.value == "SASL_SSL"
    assert both.ssl_context.check_hostname


@pytest.mark.parametrize(
    "kafka",
    [
        {"security.protocol": "SASL_PLAINTEXT"},
        {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanisms": "OAUTHBEARER"},
        {"security.protocol": "kerberos"},
        {"ssl.crl.location": "/x"},
        {"sasl.oauthbearer.config": "x"},
        {"security.protocol": "SSL", "ssl.ca.location": "/nowhere/ca.pem"},
        {"security.protocol": "SSL", "ssl.ca.pem": "no certificate"},
    ],
)
def test_credentials_that_cannot_be_carried_over_are_refused(kafka):
    with pytest.raises(ConfigError, match=r"kafka\."):
        broker_credentials(kafka)
