import asyncio
import threading
import time
import uuid

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from loom.errors import NodeFencedError
from loom.stores.kafka.deadline import Deadline
from loom.stores.kafka.membership import Membership, MembershipSettings
from loom.testing.proxy import Api

SESSION_MS = 6_000


class Told:
    """What a membership says, kept."""

    def __init__(self, name="n"):
        self.name = name
        self.held = {}
        self.log = []
        self.values = []
        self.fatal = []
        self.changed = threading.Condition()
        self.member = None
        self.position = {}

    def _note(self, *what):
        with self.changed:
            self.log.append(what)
            self.changed.notify_all()

    def assigned(self, committed):
        self.held |= committed
        for partition in committed:
            self.member.resume(partition)
        self._note("assigned", dict(committed))

    def revoked(self, partitions, deadline):
        for partition in partitions:
            self.held.pop(partition, None)
        self._note("revoked", list(partitions))
        return {p: self.position[p] for p in partitions if p in self.position}

    def lost(self, partitions):
        for partition in partitions:
            self.held.pop(partition, None)
        self._note("lost", list(partitions))

    def received(self, message):
        self.position[message.partition()] = message.offset() + 1
        self.values.append((message.partition(), message.value()))
        self._note("received")

    def positions(self):
        return {p: o for p, o in self.position.items() if p in self.held}

    def idle(self):
        pass

    def wait(self, condition, timeout_s=90):
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self), timeout_s), (self.name, self.log)


@pytest.fixture
def topic(kafka_bootstrap):
    name = f"member{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": kafka_bootstrap})
    admin.create_topics([NewTopic(name, 4, 1)])[name].result(15)
    yield name
    admin.delete_topics([name])[name].result(15)


class Hesitant(Told):
    """One that reads nothing until the test says so; ``rounds`` counts what passes meanwhile."""

    rounds = 0

    def assigned(self, committed):
        self.held |= committed
        self._note("assigned", dict(committed))

    def idle(self):
        self.rounds += 1
        self._note("idle")


def begin(bootstrap, topic, node, kind=Told, **bounds):
    """A member that ticks until ``still`` is set."""
    told = kind(node)
    given = {"session_timeout_ms": SESSION_MS, "max_poll_interval_ms": SESSION_MS, "loop_bound_ms": 1_000}
    settings = MembershipSettings(bootstrap, topic, f"{topic}.owners", node, **(given | bounds))
    told.member = Membership(settings, told, told.fatal.append)
    told.still = threading.Event()

    def tick():
        while not told.still.wait(0.1):
            told.member.tick()

    def resume_ticks():
        told.still.clear()
        threading.Thread(target=tick, daemon=True).start()

    told.resume_ticks = resume_ticks
    resume_ticks()
    told.member.start()
    return told


def end(told):
    told.member.tick()
    assert told.member.stop(Deadline.after(20_000))
    told.still.set()


@pytest.fixture
def join(kafka_bootstrap, topic):
    members = []

    def start(node, **bounds):
        members.append(begin(kafka_bootstrap, topic, node, **bounds))
        return members[-1]

    yield start
    for told in members:
        end(told)


def test_two_members_share_and_a_clean_stop_hands_over_at_once(join):
    one, two = join("one"), join("two")
    one.wait(lambda _: len(one.held) == 2, 20)
    two.wait(lambda _: len(two.held) == 2, 20)
    assert set(one.held) | set(two.held) == set(range(4))
    began = time.monotonic()
    assert one.member.stop(Deadline.after(10_000))
    two.wait(lambda t: len(t.held) == 4)
    assert time.monotonic() - began < SESSION_MS / 1000 / 2


def test_a_blocked_loop_loses_its_partitions_and_gets_some_back(join):
    one = join("one")
    one.wait(lambda t: len(t.held) == 4)
    two = join("two")
    two.wait(lambda _: len(two.held) == 2)
    one.still.set()
    two.wait(lambda t: len(t.held) == 4, 90)
    one.wait(lambda t: not t.held)
    assert not one.member.confirm(next(iter(two.held)))
    one.resume_ticks()
    one.wait(lambda t: len(t.held) == 2 and all(map(t.member.confirm, list(t.held))))
    assert not one.fatal


def test_a_member_fenced_by_its_own_id_ends_with_the_reason(join):
    one = join("same")
    one.wait(lambda t: len(t.held) == 4)
    join("same").wait(lambda t: len(t.held) == 4)
    one.wait(lambda t: t.fatal and not t.held)
    assert isinstance(one.fatal[0], NodeFencedError)
    assert one.fatal[0].node == "same"


def test_positions_are_committed_and_the_next_member_begins_there(join, kafka_bootstrap, topic):
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    for number in range(20):
        producer.produce(topic, str(number), partition=number % 4)
    producer.flush(10)
    one = join("one")
    one.wait(lambda t: len(t.values) == 20)
    assert one.member.stop(Deadline.after(10_000))
    producer.produce(topic, "last", partition=2)
    producer.flush(10)
    two = join("two")
    two.wait(lambda t: t.values)
    assert two.values == [(2, b"last")]


def test_what_is_resumed_from_an_offset_is_read_from_there(join, kafka_bootstrap, topic):
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    for number in range(10):
        producer.produce(topic, str(number), partition=1)
    producer.flush(10)
    one = join("one")
    one.wait(lambda t: len(t.values) == 10)
    one.member.call(lambda: (one.member.pause(1), one.member.resume(1, 7)))
    one.wait(lambda t: len(t.values) == 13)
    assert [v for _, v in one.values[10:]] == [b"7", b"8", b"9"]


def test_nothing_is_read_of_a_partition_before_it_is_resumed(join, kafka_bootstrap, topic):
    """Its requests wait for the takeover; only then there is somebody who could apply them."""
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    for number in range(20):
        producer.produce(topic, str(number), partition=number % 4)
    producer.flush(10)
    one = join("one", kind=Hesitant)
    one.wait(lambda t: len(t.held) == 4)
    seen = one.rounds
    one.wait(lambda t: t.rounds > seen + 40)
    assert one.values == []
    one.member.call(lambda: one.member.resume(2))
    one.wait(lambda t: len(t.values) == 5)
    seen = one.rounds
    one.wait(lambda t: t.rounds > seen + 20)
    assert {partition for partition, _ in one.values} == {2}


async def test_confirm_and_rejoin(join):
    one = join("one")
    await asyncio.to_thread(one.wait, lambda t: len(t.held) == 4)
    assert one.member.confirm(0)
    assert not one.member.confirm(99)
    one.member.call(lambda: one.member.rejoin(0.5))
    await asyncio.to_thread(one.wait, lambda t: ("revoked", [0, 1, 2, 3]) in t.log)
    await asyncio.to_thread(one.wait, lambda t: len(t.held) == 4)


def test_without_an_answer_of_the_group_everything_is_given_up_in_a_session(proxied_broker, proxy):
    """The client need not notice: its heartbeats go through, and no callback of its own comes."""
    topic = f"member{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": proxied_broker.bootstrap})
    admin.create_topics([NewTopic(topic, 2, 1)])[topic].result(15)
    told = begin(f"127.0.0.1:{proxy.port}", topic, "one")
    try:
        told.wait(lambda t: len(t.held) == 2)
        assert told.member.confirm(0)
        unanswered = proxy.drop(Api.OFFSET_COMMIT, times=1_000)
        began = time.monotonic()
        told.wait(lambda t: not t.held)
        assert time.monotonic() - began < 3 * SESSION_MS / 1000
        assert unanswered.caught.is_set()
        assert not told.member.confirm(0)
        assert [what for what, *_ in told.log if what in ("revoked", "lost")] == ["lost"]
        proxy.clear()
        told.wait(lambda t: len(t.held) == 2)  # the group never took them away
    finally:
        proxy.clear()
        end(told)
