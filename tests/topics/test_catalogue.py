"""The catalogue as data: what kafka.md says of names, settings, permissions and connections."""

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)

from loom.errors import ConfigError
from loom.ids import inbox_stream, quarantine_stream
from loom.schemas.table import packaged
from loom.topics.access import ROLES, acls, clients_of_node, connections_of_node
from loom.topics.catalogue import DAY_MS, DELETE_RETENTION_MS, TOPICS, Catalogue

CATALOGUE = Catalogue("x.", 6)
BY_NAME = {topic.name: topic for topic in CATALOGUE.topics()}


def test_names_follow_the_prefix():
    names = [getattr(CATALOGUE, kind.name) for kind in TOPICS]
    assert names == [f"x.{kind.name}" for kind in TOPICS] == list(BY_NAME)
    assert [kind.name for kind in TOPICS[:8]] == [kind.name for kind in TOPICS if kind.co_partitioned]
    assert {topic.partitions for topic in BY_NAME.values()} == {6}


def test_a_stream_stands_in_the_topic_of_its_kind():
    assert CATALOGUE.topic_of_stream("c1") == CATALOGUE.executions
    assert CATALOGUE.topic_of_stream(inbox_stream("c1", "ship")) == CATALOGUE.inbox
    assert CATALOGUE.topic_of_stream(quarantine_stream("c1")) == CATALOGUE.quarantine


def test_settings_are_those_the_log_rests_on():
    compacted = {"executions", "inbox", "quarantine", "snapshots", "marks", "states"}
    retention_ms = {
        "appends": 7 * DAY_MS,
        "commands": 7 * DAY_MS,
        "replies": DAY_MS // 24,
        "signals": 7 * DAY_MS,
    }
    for kind in TOPICS:
        settings = BY_NAME[f"x.{kind.name}"].settings
        assert settings["message.timestamp.type"] == "LogAppendTime"
        assert settings["unclean.leader.election.enable"] == "false"
        if kind.name in compacted:
            assert settings["cleanup.policy"] == "compact"
            assert int(settings["max.compaction.lag.ms"]) == DAY_MS
            assert int(settings["segment.ms"]) <= DAY_MS
            assert int(settings["delete.retention.ms"]) == DELETE_RETENTION_MS
            assert "retention.ms" not in settings
        else:
            assert settings["cleanup.policy"] == "delete"
            assert int(settings["retention.ms"]) == retention_ms.get(kind.name, 30 * DAY_MS)
            assert int(settings["segment.ms"]) < int(settings["retention.ms"])
    for events in ("executions", "inbox", "quarantine"):
        assert int(BY_NAME[f"x.{events}"].settings["min.compaction.lag.ms"]) == DAY_MS
        assert int(BY_NAME[f"x.{events}"].settings["segment.bytes"]) == 256 * 2**20


@pytest.mark.parametrize(
    ("brokers", "replicas", "in_sync"), [(1, 1, 1), (2, 2, 1), (3, 3, 2), (9, 3, 2), (0, 1, 1)]
)
def test_replicas_follow_the_size_of_the_cluster(brokers, replicas, in_sync):
    topic = CATALOGUE.sized_for(brokers).topics()[0]
    assert topic.replicas == replicas
    assert topic.settings["min.insync.replicas"] == str(in_sync)


@pytest.mark.parametrize(
    ("wrong", "setting"),
    [
        ({"prefix": ""}, "topic_prefix"),
        ({"prefix": "a/b"}, "topic_prefix"),
        ({"prefix": "ä."}, "topic_prefix"),
        ({"prefix": "x" * 101}, "topic_prefix"),
        ({"partitions": 0}, "partitions"),
        ({"partitions": 10_001}, "partitions"),
        ({"replicas": 0}, "replicas"),
    ],
)
def test_what_cannot_be_is_refused_by_its_setting(wrong, setting):
    with pytest.raises(ConfigError) as refused:
        Catalogue(**wrong)
    assert refused.value.setting == setting


def test_every_record_of_a_topic_has_a_schema_and_a_subject():
    subjects = CATALOGUE.subjects()
    assert subjects["x.executions-loom.Envelope"] == "loom.Envelope"
    assert set(subjects.values()) == set(packaged())
    assert all(subject == f"{subject.rsplit('-', 1)[0]}-{record}" for subject, record in subjects.items())


def test_transactional_ids_and_groups():
    assert CATALOGUE.log_transactional_id(3) == "x.log.3"
    assert CATALOGUE.log_transactional_id(3, 1) == "x.log.3.1"
    assert CATALOGUE.fold_transactional_id(3) == "x.fold.3"
    assert CATALOGUE.group("owners") == "x.owners"


def allowed(role, resource, name, operation):
    return any(
        acl.role == role
        and acl.resource == resource
        and operation in acl.operations
        and (name.startswith(acl.name) if acl.pattern == "prefix" else name == acl.name)
        for acl in acls(CATALOGUE)
    )


def test_only_nodes_write_what_the_kernel_stamps():
    for topic in BY_NAME:
        writers = {role for role in ROLES if allowed(role, "topic", topic, "Write")}
        assert writers == ({"node", "client"} if topic == CATALOGUE.commands else {"node"})


def test_roles_may_do_what_they_are_for_and_nothing_under_another_prefix():
    assert allowed("node", "transactionalId", CATALOGUE.log_transactional_id(5, 1), "Write")
    assert allowed("node", "transactionalId", CATALOGUE.fold_transactional_id(5), "Write")
    assert allowed("node", "group", CATALOGUE.group("owners"), "Read")
    assert allowed("client", "topic", CATALOGUE.states, "Read")
    assert not allowed("client", "topic", CATALOGUE.executions, "Read")
    assert allowed("auditor", "topic", CATALOGUE.executions, "Read")
    assert {acl.role for acl in acls(CATALOGUE)} == set(ROLES)
    assert all(acl.name.startswith("x.") for acl in acls(CATALOGUE))


def test_permissions_are_ones_that_kafka_has():
    resources = {
        "topic": ResourceType.TOPIC,
        "group": ResourceType.GROUP,
        "transactionalId": ResourceType.TRANSACTIONAL_ID,
    }
    patterns = {"literal": ResourcePatternType.LITERAL, "prefix": ResourcePatternType.PREFIXED}
    operations = {"".join(part.title() for part in op.name.split("_")): op for op in AclOperation}
    for acl in acls(CATALOGUE):
        for operation in acl.operations:
            AclBinding(
                resources[acl.resource],
                acl.name,
                patterns[acl.pattern],
                "User:loom",
                "*",
                operations[operation],
                AclPermissionType.ALLOW,
            )


def test_connections_grow_with_what_a_node_owns():
    few, many = connections_of_node(1, 3), connections_of_node(8, 3, lanes=2, folds=8)
    assert 0 < few < many
    assert sum(kind.count for kind in clients_of_node(8, lanes=2, folds=8)) * 4 == many
