"""What every test can ask for: a broker and a Redis shared by the session, names of its own on both, and private ones.

``LOOM_BOOTSTRAP`` and ``LOOM_REDIS_URL`` name parts that run already; what they do not name is started here and ended
with the session (loom.testing.services). A test on a shared part must keep to its ``topic_prefix`` or ``redis_prefix``;
a test that stops, pauses or reconfigures a part takes a private one.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import uuid
from contextlib import ExitStack

import pytest
import redis as redis_client
from confluent_kafka.admin import AdminClient
from hypothesis import HealthCheck, settings

from loom.errors import ServiceMissingError
from loom.runtime.waiting import Waiting
from loom.testing import services

_KAFKA_FIXTURES = frozenset(
    {"kafka_version", "kafka_bootstrap", "topic_prefix", "private_kafka", "start_kafka"}
)
_REDIS_FIXTURES = frozenset({"redis_url", "redis_prefix", "private_redis", "start_redis"})
_THREAD_GRACE_S = 5.0
_NOTES = "notes"
_notes = pytest.StashKey[list[str]]()


# -- the command line --------------------------------------------------------------------------------------------


def pytest_addoption(parser):
    parser.addoption("--soak", action="store_true", help="also run the long tests (mark soak)")
    parser.addoption(
        "--kafka", default=services.KAFKA_VERSION, help="version of Apache Kafka for every broker"
    )


# A busy machine makes inputs slowly; that says nothing about the code.
settings.register_profile("loom", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("loom")


def pytest_configure(config):
    config.stash[_notes] = []
    if os.environ.get(
        "PYTHONDONTWRITEBYTECODE"
    ):  # else each process that a test starts compiles everything anew
        cache = tempfile.TemporaryDirectory(prefix="loom-pycache-", ignore_cleanup_errors=True)
        config.add_cleanup(cache.cleanup)
        os.environ |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": cache.name}


def pytest_collection_modifyitems(config, items):
    """Mark what uses a real part by the fixtures it asks for, and leave out soak tests unless they are wanted.

    What uses one and fails is run once more, and both are reported (``R``): a machine that stands still for seconds fails
    a session timeout of a broker, which says nothing of the code. What fails twice is red.
    """
    for item in items:
        names = set(item.fixturenames)
        if names & _KAFKA_FIXTURES:
            item.add_marker("kafka")
        if names & _REDIS_FIXTURES:
            item.add_marker("redis")
        if names & (_KAFKA_FIXTURES | _REDIS_FIXTURES):
            item.add_marker(pytest.mark.flaky(reruns=1))
    if config.getoption("--soak") or "soak" in (config.getoption("-m") or ""):
        return
    long = [item for item in items if item.get_closest_marker("soak")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("soak")]


def pytest_sessionfinish(session):
    """Where this is one process of several: let the one that reports have the notes."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_NOTES] = session.config.stash[_notes]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """A process has ended; one that died has left no output."""
    node.config.stash[_notes] += getattr(node, "workeroutput", {}).get(_NOTES, [])


def pytest_terminal_summary(terminalreporter, config):
    for note in config.stash[_notes]:
        terminalreporter.write_line(note)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    item.stash[_threads] = set(threading.enumerate())
    return (yield)


_threads = pytest.StashKey[set[threading.Thread]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """A test whose work goes on after it has ended is a test that failed: no new thread may be left."""
    result = yield
    new = [
        t
        for t in threading.enumerate()
        # an event loop joins the threads of its executor when it is closed, which may be after the module
        if t not in item.stash[_threads] and not t.daemon and not t.name.startswith("asyncio_")
    ]
    for thread in new:
        thread.join(_THREAD_GRACE_S)
    left = sorted(t.name for t in new if t.is_alive())
    if left:
        pytest.fail(f"threads left running: {', '.join(left)}", pytrace=False)
    return result


# -- shared by the session ---------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def kafka_version(pytestconfig):
    """The version of Apache Kafka that is tested on; for every broker that a fixture starts."""
    return pytestconfig.getoption("--kafka")


@pytest.fixture(scope="session")
def kafka_bootstrap(pytestconfig, kafka_version):
    """``host:port`` of the session's broker, warmed up. Never stop it; use ``private_kafka`` for that."""
    with services.find_or_start(need_redis=False, kafka_version=kafka_version) as found:
        pytestconfig.stash[_notes] += found.notes
        services.warm_up(found.bootstrap)
        yield found.bootstrap


@pytest.fixture(scope="session")
def redis_url(pytestconfig):
    """The session's Redis. Never flush or stop it; use ``private_redis`` for that."""
    with services.find_or_start(need_kafka=False) as found:
        pytestconfig.stash[_notes] += found.notes
        yield found.redis_url


@pytest.fixture
def topic_prefix(kafka_bootstrap):
    """A topic prefix of this test's own; its topics are deleted when the test has ended."""
    prefix = f"t{uuid.uuid4().hex[:12]}."
    yield prefix
    admin = AdminClient({"bootstrap.servers": kafka_bootstrap, "log_level": 0})
    mine = [name for name in admin.list_topics(timeout=15).topics if name.startswith(prefix)]
    if mine:
        for deleted in admin.delete_topics(mine, request_timeout=15).values():
            deleted.result(15)


@pytest.fixture
def redis_prefix(redis_url):
    """A key prefix of this test's own; its keys are deleted when the test has ended."""
    prefix = f"t{uuid.uuid4().hex[:12]}"
    yield prefix
    with contextlib.closing(redis_client.Redis.from_url(redis_url)) as client:
        keys = list(client.scan_iter(match=f"*{prefix}*", count=1_000))
        if keys:
            client.delete(*keys)


# -- private to one test -----------------------------------------------------------------------------------------


@pytest.fixture
def start_kafka(kafka_version):
    """Start brokers of this test's own: takes what ``services.kafka`` takes; Apache Kafka unless told otherwise."""
    with ExitStack() as started:

        def start(version=kafka_version, *args, **kwargs):
            kwargs.setdefault("embedded", False)
            try:
                return started.enter_context(services.kafka(version, *args, **kwargs))
            except ServiceMissingError as missing:
                pytest.skip(str(missing))

        yield start


@pytest.fixture
def private_kafka(start_kafka):
    """A broker (``services.KafkaService``) that this test may stop, pause, kill and restart."""
    return start_kafka()


@pytest.fixture
def start_redis():
    """Start Redis servers of this test's own: takes what ``services.redis`` takes."""
    with ExitStack() as started:
        yield lambda *args, **kwargs: started.enter_context(services.redis(*args, **kwargs))


@pytest.fixture
def private_redis(start_redis):
    """A Redis (``services.RedisService``) with an append-only file that this test may stop, pause, kill, flush."""
    return start_redis(appendonly=True)


# -- what a node did -----------------------------------------------------------------------------------------------


@pytest.fixture
def handed_over(monkeypatch):
    """What came of each message that was sent to a run of this process."""
    answers = []
    plain = Waiting.hand_over

    def hand_over(waiting, append):
        answers.append(plain(waiting, append))
        return answers[-1]

    monkeypatch.setattr(Waiting, "hand_over", hand_over)
    return answers
