"""Errors and log lines of the Kafka client: each has one meaning, and none reaches a caller as it is."""

from __future__ import annotations

import logging

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer

from loom.errors import BrokerError, StoreError, TopicsError, UnreachableError
from loom.stores.kafka.client import (
    ClientLog,
    Fault,
    admin_config,
    classify,
    name_of,
    producer_config,
    reader_config,
    store_error,
)
from loom.stores.kafka.membership import Membership
from loom.stores.kafka.settings import KafkaSettings
from loom.stores.kafka.writer import WriterSettings

CODES = sorted(name for name in dir(KafkaError) if name.isupper() and name.strip("_").isidentifier())


def raised(name, **flags):
    return KafkaException(KafkaError(getattr(KafkaError, name), "the broker's own words: secret", **flags))


@pytest.mark.parametrize("name", CODES)
def test_every_error_of_the_client_becomes_one_of_ours_and_quotes_nothing(name):
    error = store_error(raised(name), "read the log", "broker:9092")
    assert isinstance(error, StoreError)
    assert "secret" not in str(error)
    assert name.strip("_") in str(error)


@pytest.mark.parametrize("name", CODES)
def test_what_asks_for_nothing_is_fatal(name):
    expected = {
        **dict.fromkeys(
            [
                "_FENCED",
                "PRODUCER_FENCED",
                "INVALID_PRODUCER_EPOCH",
                "INVALID_PRODUCER_ID_MAPPING",
                "INVALID_TXN_STATE",
            ],
            Fault.FENCED,
        ),
        **dict.fromkeys(["_QUEUE_FULL", "MSG_SIZE_TOO_LARGE"], Fault.REFUSED),
    }
    assert classify(raised(name)) is expected.get(name, Fault.FATAL)


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ({"retriable": True}, Fault.REPEAT),
        ({"txn_requires_abort": True}, Fault.ABORT),
        ({"fatal": True}, Fault.FATAL),
        ({"fatal": True, "retriable": True}, Fault.FATAL),
        ({"txn_requires_abort": True, "retriable": True}, Fault.ABORT),
    ],
)
def test_flags_say_what_to_do(flags, fault):
    assert classify(raised("_TIMED_OUT", **flags)) is fault
    assert classify(raised("_FENCED", **flags)) is Fault.FENCED


@pytest.mark.parametrize(
    ("error", "fault"),
    [(BufferError("full"), Fault.REFUSED), (TypeError("x"), Fault.FATAL), (KafkaException(), Fault.FATAL)],
)
def test_other_exceptions_have_a_meaning_too(error, fault):
    assert classify(error) is fault
    assert name_of(error) == type(error).__name__
    assert isinstance(store_error(error, "write", "broker:9092"), BrokerError)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_TRANSPORT", UnreachableError),
        ("_ALL_BROKERS_DOWN", UnreachableError),
        ("SASL_AUTHENTICATION_FAILED", UnreachableError),
        ("UNKNOWN_TOPIC_OR_PART", TopicsError),
        ("TOPIC_AUTHORIZATION_FAILED", TopicsError),
        ("CLUSTER_AUTHORIZATION_FAILED", BrokerError),
        ("UNKNOWN", BrokerError),
    ],
)
def test_kinds_lead_to_exit_statuses(name, kind):
    error = store_error(raised(name), "read the log", "broker:9092")
    assert type(error) is kind


# -- the log -----------------------------------------------------------------------------------------------------


def said(*lines, ready=True):
    log = ClientLog("test")
    log.ready = ready
    for line in lines:
        log.logger.log(logging.INFO, line)
    return log.disturbance


@pytest.mark.parametrize(
    "line",
    [
        "FAIL [rdkafka#producer-1] [thrd:broker:9092/1]: broker:9092/1: Disconnected (after 15ms in state UP)",
        "REQTMOUT [rdkafka#producer-1] [thrd:TxnCoordinator]: TxnCoordinator/1: Timed out EndTxnRequest in flight",
        "TXNERR [rdkafka#producer-1] [thrd:main]: Current transaction failed in state BeginCommit",
        "GETPID [rdkafka#producer-1] [thrd:main]: Failed to acquire transactional PID: retrying",
        "SOMETHING new that nobody knows",
    ],
)
def test_what_is_not_known_to_be_harmless_is_a_disturbance(line):
    assert said(line) == line.split(" ", 1)[0]


@pytest.mark.parametrize(
    "line",
    [
        "CONFWARN [rdkafka#producer-1] [thrd:app]: Configuration property x is deprecated",
        "FAIL [rdkafka#producer-1] [thrd:b:1/2]: b:1/2: Connect to ipv4#127.0.0.1:1 failed: Connection refused",
        "FAIL [rdkafka#producer-1] [thrd:b:1/2]: b:1/2: Failed to resolve 'b:1': Name or service not known",
    ],
)
def test_a_broker_that_was_never_reached_has_no_request_of_ours(line):
    assert said(line) is None


def test_asking_for_a_producer_id_again_is_harmless_until_it_is_there():
    line = "GETPID [rdkafka#producer-1] [thrd:main]: Failed to acquire transactional PID: retrying"
    assert said(line, ready=False) is None


def test_a_disturbance_stays_and_the_lines_kept_are_bounded():
    log = ClientLog("test")
    for number in range(1_000):
        log.logger.warning("FAIL %d", number)
    assert log.disturbance == "FAIL"
    assert len(log.lines) < 100


# -- settings ----------------------------------------------------------------------------------------------------


def test_the_poison_rule_is_in_the_settings_and_cannot_be_configured_away():
    mine = {
        "socket.timeout.ms": 60_000,
        "acks": "1",
        "enable.idempotence": False,
        "log_level": 0,
        "compression.type": "zstd",
    }
    config = producer_config(
        "b:1", mine, transactional_id="t", client_id="c", timeout_ms=10_000, max_record_bytes=1_000_000
    )
    assert config["socket.timeout.ms"] == config["transaction.timeout.ms"] == 10_000
    assert (config["acks"], config["enable.idempotence"], config["log_level"]) == ("all", True, 6)
    assert config["compression.type"] == "zstd"
    assert "message.timeout.ms" not in config
    Producer(config)  # the client takes them

    with pytest.raises(ValueError, match="sent twice"):
        WriterSettings("b:1", "p.", 1, "n", transaction_timeout_ms=5_000, commit_deadline_ms=5_000)


MINE = {"bootstrap.servers": "elsewhere:1", "socket.nagle.disable": False}


def test_no_client_waits_for_more_to_send():
    """A small request that waits for the answer to the one before it costs a transaction tens of milliseconds."""
    producer = producer_config(
        "b:1", MINE, transactional_id="t", client_id="c", timeout_ms=10_000, max_record_bytes=1_000_000
    )
    configs = [
        producer,
        admin_config("b:1", MINE, client_id="c", timeout_ms=10_000),
        reader_config("b:1", MINE, client_id="c"),
        group_properties(MINE),
    ]
    assert all(config["socket.nagle.disable"] is True for config in configs)
    assert all(config["bootstrap.servers"] == "b:1" for config in configs)
    assert producer["linger.ms"] == 0


def group_properties(kafka, **settings):
    given = KafkaSettings("b:1", "node-1", kafka=kafka, **settings).membership()
    return Membership(given, None, None)._properties()


def test_what_the_group_rests_on_cannot_be_configured_away():
    mine = {
        "enable.auto.commit": True,
        "auto.offset.reset": "latest",
        "partition.assignment.strategy": "range",
        "isolation.level": "read_uncommitted",
        "session.timeout.ms": 45_000,
    }
    config = group_properties(mine)
    assert config["group.instance.id"] == "node-1"
    assert config["partition.assignment.strategy"] == "cooperative-sticky"
    assert (config["enable.auto.commit"], config["auto.offset.reset"]) == (False, "earliest")
    assert config["isolation.level"] == "read_committed"
    assert 6_000 <= config["session.timeout.ms"] <= 10_000
    assert config["heartbeat.interval.ms"] * 3 < config["session.timeout.ms"]
    assert config["max.poll.interval.ms"] == 30_000
    Consumer(config).close()  # the client takes them


def test_readers_see_committed_records_only():
    config = reader_config("b:1", {"isolation.level": "read_uncommitted"}, client_id="c")
    assert config["isolation.level"] == "read_committed"
