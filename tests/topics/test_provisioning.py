"""Plan, apply and check on a real broker: every kind of drift is named, mended as shown, and nothing else is touched."""

import socket
import threading
import time

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from loom.errors import BrokerError, ConfigError, TopicsError, UnreachableError
from loom.topics import provisioning
from loom.topics.catalogue import Catalogue
from loom.topics.cluster import Cluster, TopicState
from loom.topics.plan import AddPartitions, ChangeSetting, CreateTopic


@pytest.fixture
def cluster(kafka_bootstrap):
    return Cluster(kafka_bootstrap)


@pytest.fixture
def admin(kafka_bootstrap):
    return AdminClient({"bootstrap.servers": kafka_bootstrap})


@pytest.fixture
def catalogue(topic_prefix):
    return Catalogue(topic_prefix, 3)


@pytest.fixture
def applied(cluster, catalogue):
    provisioning.apply(cluster, provisioning.plan(cluster, catalogue))
    return catalogue


@pytest.fixture
def make(admin, cluster):
    """Create a topic as somebody else would, and wait until everybody is told of it."""

    def make_topic(name, partitions):
        admin.create_topics([NewTopic(name, partitions, 1)])[name].result(10)
        cluster.wait_for({name: partitions})

    return make_topic


@pytest.fixture
def set_topic(admin, cluster):
    """Change settings as somebody else would, and wait until everybody is told of them."""

    def set_settings(name, **settings):
        wanted = {setting.replace("_", "."): value for setting, value in settings.items()}
        set_op = AlterConfigOpType.SET
        entries = [
            ConfigEntry(setting, value, incremental_operation=set_op) for setting, value in wanted.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries)
        admin.incremental_alter_configs([resource])[resource].result(10)
        cluster.wait_until(
            lambda: wanted.items() <= settings_of(admin, name).items(), "settings did not arrive"
        )

    return set_settings


def settings_of(admin, name):
    resource = ConfigResource(ResourceType.TOPIC, name)
    return {k: v.value for k, v in admin.describe_configs([resource])[resource].result(10).items()}


def test_an_empty_cluster_gets_the_catalogue_and_then_has_nothing_to_change(cluster, catalogue, admin):
    wanted = provisioning.plan(cluster, catalogue)
    assert [c.topic.name for c in wanted.changes] == [t.name for t in catalogue.topics()]
    assert cluster.describe([t.name for t in catalogue.topics()]) == {}
    done = []
    provisioning.apply(cluster, wanted, done=done.append)
    assert done == list(wanted.changes)
    assert provisioning.plan(cluster, catalogue).is_empty
    assert provisioning.check(cluster, catalogue) == ()
    for topic in catalogue.topics():
        found = settings_of(admin, topic.name)
        assert {name: found[name] for name in topic.settings} == dict(topic.settings)
    known = admin.list_topics(timeout=10).topics
    assert {len(known[t.name].partitions) for t in catalogue.topics()} == {3}


def test_applying_the_same_plan_again_changes_nothing(cluster, applied, catalogue):
    first = provisioning.Plan(catalogue.prefix, tuple(CreateTopic(topic) for topic in catalogue.topics()))
    before = cluster.describe([t.name for t in catalogue.topics()])
    provisioning.apply(cluster, first)
    assert cluster.describe([t.name for t in catalogue.topics()]) == before


def test_drift_is_named_setting_by_setting_and_only_that_is_mended(cluster, applied, admin, set_topic):
    executions, replies = applied.executions, applied.replies
    set_topic(executions, cleanup_policy="delete", segment_bytes="1048576", flush_messages="7")
    set_topic(replies, retention_ms="1000")
    wanted = provisioning.plan(cluster, applied)
    assert wanted.changes == (
        ChangeSetting(executions, "cleanup.policy", "delete", "compact"),
        ChangeSetting(executions, "segment.bytes", "1048576", str(256 * 2**20)),
        ChangeSetting(replies, "retention.ms", "1000", "3600000"),
    )
    assert "set retention.ms of topic" in str(wanted.changes[2])
    before = {t.name: settings_of(admin, t.name) for t in applied.topics()}
    provisioning.apply(cluster, wanted)
    after = {t.name: settings_of(admin, t.name) for t in applied.topics()}
    changed = {(name, k) for name in after for k in after[name] if after[name][k] != before[name][k]}
    assert changed == {(c.name, c.setting) for c in wanted.changes}
    assert after[executions]["flush.messages"] == "7", "a setting the catalogue does not speak of stays"
    assert provisioning.plan(cluster, applied).is_empty


def test_check_refuses_vital_drift_and_lives_with_the_rest(cluster, applied, set_topic):
    set_topic(applied.replies, retention_ms="1000")
    assert provisioning.check(cluster, applied) == (
        f"set retention.ms of topic {applied.replies} to 3600000 (it is 1000)",
    )
    set_topic(applied.inbox, cleanup_policy="delete")
    with pytest.raises(
        TopicsError, match=f"{applied.inbox}: cleanup.policy is delete, not compact; run `loom topics apply`"
    ):
        provisioning.check(cluster, applied)


def test_missing_topics_are_all_named(cluster, catalogue, make):
    make(catalogue.executions, 3)
    with pytest.raises(TopicsError) as refused:
        provisioning.check(cluster, catalogue)
    for topic in catalogue.topics()[1:]:
        assert topic.name in str(refused.value)
    assert refused.value.exit_status == 2
    assert "loom topics apply" in str(refused.value)


def test_an_unknown_prefix_is_told_as_such(cluster):
    with pytest.raises(
        TopicsError, match="no topics with the prefix 'nobody-has-this.'.*correct topic_prefix"
    ):
        provisioning.check(cluster, Catalogue("nobody-has-this.", 3))


@pytest.mark.parametrize("count", [2, 5])
def test_another_number_of_partitions_under_records_is_refused_with_what_to_do(
    cluster, applied, kafka_bootstrap, count
):
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    producer.produce(applied.signals, b"x", partition=0)
    assert producer.flush(10) == 0
    other = Catalogue(applied.prefix, count)
    wanted = provisioning.plan(cluster, other)
    assert len(wanted.refusals) == 11
    assert not wanted.changes
    assert wanted.refusals[0].problem == f"3 partitions, not {count}"
    for refuses in (lambda: provisioning.apply(cluster, wanted), lambda: provisioning.check(cluster, other)):
        with pytest.raises(
            TopicsError,
            match=f"{applied.inbox}.*3 partitions, not {count}.*migrate: choose a new topic_prefix",
        ):
            refuses()
    assert provisioning.plan(cluster, applied).is_empty


def test_nothing_is_applied_while_a_refusal_stands(cluster, catalogue, make):
    make(catalogue.inbox, 7)
    wanted = provisioning.plan(cluster, catalogue)
    assert len(wanted.changes) == 11 - 1 + len([c for c in wanted.changes if isinstance(c, ChangeSetting)])
    with pytest.raises(TopicsError, match="7 partitions, not 3"):
        provisioning.apply(cluster, wanted)
    assert set(cluster.describe([t.name for t in catalogue.topics()])) == {catalogue.inbox}


def test_topics_without_a_record_get_the_partitions_they_lack(cluster, catalogue, make):
    make(catalogue.inbox, 1)
    wanted = provisioning.plan(cluster, catalogue)
    assert AddPartitions(catalogue.inbox, 1, 3) in wanted.changes
    with pytest.raises(TopicsError, match=f"{catalogue.inbox}: 1 partitions, not 3"):
        provisioning.check(cluster, catalogue)
    provisioning.apply(cluster, wanted)
    provisioning.apply(cluster, wanted)
    assert provisioning.plan(cluster, catalogue).is_empty


def test_a_topic_made_meanwhile_in_another_shape_is_refused(cluster, catalogue, make):
    wanted = provisioning.plan(cluster, catalogue)
    make(catalogue.executions, 3)
    with pytest.raises(TopicsError, match=f"{catalogue.executions} was changed by someone else meanwhile"):
        provisioning.apply(cluster, wanted)


def test_a_topic_made_meanwhile_as_planned_is_accepted(cluster, catalogue):
    wanted = provisioning.plan(cluster, catalogue)
    cluster.create(wanted.changes[0].topic)
    provisioning.apply(cluster, wanted)
    assert provisioning.plan(cluster, catalogue).is_empty


def test_too_few_replicas_are_remarked_and_never_made_to_block_writes(cluster, applied):
    class Three(Cluster):
        def brokers(self):
            return 3

    found = provisioning.plan(Three(cluster.bootstrap), applied)
    assert found.changes == ()
    assert {r.topic for r in found.remarks} == {t.name for t in applied.topics()}
    assert "1 of 3 replicas" in found.remarks[0].text


def test_a_broker_that_is_down_changes_nothing_in_what_is_wanted(cluster, catalogue):
    class OneOfThreeIsDown(Cluster):
        def brokers(self):
            return 2

        def describe(self, names):
            topics = catalogue.sized_for(3).topics()
            return {
                t.name: TopicState(t.name, t.partitions, 3, t.settings) for t in topics if t.name in names
            }

    assert provisioning.plan(OneOfThreeIsDown(cluster.bootstrap), catalogue).is_empty


def test_what_the_broker_refuses_is_told_with_its_code(cluster, catalogue):
    with pytest.raises(BrokerError, match="create topic.*INVALID_REPLICATION_FACTOR"):
        cluster.create(catalogue.sized_for(3).topics()[0])


def test_a_closed_port_is_unreachable_within_its_bound():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    begun = time.monotonic()
    with pytest.raises(UnreachableError, match=f"{address}.*bootstrap") as refused:
        provisioning.plan(Cluster(address, timeout_ms=1_000), Catalogue("x.", 3))
    assert time.monotonic() - begun < 3
    assert refused.value.exit_status == 3


def test_a_server_that_says_nothing_is_unreachable_within_its_bound():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        held = []
        threading.Thread(target=lambda: held.append(silent.accept()), daemon=True).start()
        begun = time.monotonic()
        with pytest.raises(UnreachableError):
            provisioning.check(
                Cluster(f"127.0.0.1:{silent.getsockname()[1]}", timeout_ms=1_000), Catalogue("x.", 3)
            )
        assert time.monotonic() - begun < 3
        for connection, _ in held:
            connection.close()


def test_a_wrong_property_is_named_without_its_value():
    with pytest.raises(ConfigError, match="kafka.security.protocol") as refused:
        Cluster("127.0.0.1:9", {"security.protocol": "hunter2"})
    assert "hunter2" not in str(refused.value)
    with pytest.raises(ConfigError, match="kafka.no.such"):
        Cluster("127.0.0.1:9", {"no.such": "hunter2"})
