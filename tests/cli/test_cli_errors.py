"""Bad input: each has its typed error, its exit status, and a sentence that says what to do."""

import sys

import pytest

from loom.testing.services import free_port

ORDER = '{"card": "tok-1", "items": [{"sku": "lamp", "price": 4200}]}'
MISSING = "01J00000000000000000000000"
"""To a caller without an identity, a missing id is denied like any other (system.md 0, "Access")."""


@pytest.fixture
def fleet(loom, worker):
    return loom


@pytest.mark.parametrize(
    ("arguments", "status", "error"),
    [
        (["start", "no-such-flow", "--input", "{}"], 1, "UnknownFlowError"),
        (["start", "order", "--input", "{not json"], 2, "InvalidInputError"),
        (["start", "order", "--input", '{"a": NaN}'], 2, "InvalidInputError"),
        (["start", "order", "--input", "[" * 100_000], 2, "InvalidInputError"),
        (["start", "order", "--input", ORDER, "--id", "__loom_inbox__x"], 2, "InvalidIdError"),
        (["start", "order", "--input", ORDER, "--id", "a:b"], 2, "InvalidIdError"),
        (["show", MISSING], 1, "ExecutionDeniedError"),
        (["send", MISSING, "ship", "{}"], 1, "ExecutionDeniedError"),
        (["resume", MISSING, "gate", "{}"], 1, "ExecutionDeniedError"),
        (["cancel", MISSING], 1, "ExecutionDeniedError"),
        (["recover", MISSING], 1, "ExecutionDeniedError"),
    ],
)
def test_bad_input_is_refused(fleet, arguments, status, error):
    got, said = fleet.error(*arguments)
    assert (got, said["error"]) == (status, error), said
    assert len(said["message"]) < 500
    assert said["message"].count(";") >= 1 or ":" in said["message"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--flows", "no.such.module"],
        ["--flows", "json"],
        ["--flows", "examples.orders", "--roles", "cook"],
    ],
)
def test_a_worker_that_cannot_work_says_why(loom, arguments):
    done = loom("worker", *arguments)
    assert done.status == 2
    assert done.err.startswith("loom: --")
    assert done.err.count("\n") == 1


def test_a_payload_over_the_limit_is_refused_by_start_and_send(fleet):
    big = '"' + "x" * 600_000 + '"'
    status, said = fleet.error("start", "order", "--input", big)
    assert (status, said["error"]) == (2, "InvalidInputError")
    started = fleet.json("start", "order", "--input", ORDER)
    status, said = fleet.error("send", started["execution_id"], "ship", '"' + "x" * 70_000 + '"')
    assert (status, said["error"]) == (1, "InboxMessageRefusedError")
    assert "xxx" not in said["message"]


def test_a_payload_that_does_not_fit_the_model_is_refused_before_it_is_sent(fleet, monkeypatch):
    monkeypatch.setenv("LOOM_FLOWS", "examples.orders")
    status, said = fleet.error("start", "order", "--input", '{"card": "secret-card", "items": []}')
    assert (status, said["error"]) == (2, "InvalidInputError")
    assert "secret-card" not in said["message"]


def test_a_payload_that_does_not_fit_fails_the_execution_where_the_client_knows_no_flow(fleet):
    status, said = fleet.error("start", "order", "--input", '{"card": 1}', "--wait", "30")
    assert (status, said["error"]) == (1, "FlowFailedError")
    assert said["error_type"] == "InvalidInputError"


def test_a_taken_id_is_refused(fleet):
    fleet.json("start", "order", "--input", ORDER, "--id", "taken-1")
    status, said = fleet.error("start", "order", "--input", ORDER, "--id", "taken-1")
    assert (status, said["error"]) == (1, "ExecutionAlreadyExistsError")
    assert "taken-1" in said["message"]


def test_an_unknown_prefix_and_missing_topics_say_how_to_make_them(loom):
    loom.env(LOOM_TOPIC_PREFIX="nobody-made-these.")
    status, said = loom.error("start", "order", "--input", ORDER)
    assert (status, said["error"]) == (2, "TopicsError")
    assert "loom topics apply" in said["message"]
    assert "nobody-made-these." in said["message"]


def test_another_number_of_partitions_is_refused(fleet):
    fleet.env(LOOM_PARTITIONS="3")
    status, said = fleet.error("start", "order", "--input", ORDER)
    assert (status, said["error"]) == (2, "TopicsError")
    assert "partitions" in said["message"]


def test_an_unreachable_broker_is_named_with_its_setting(loom):
    address = f"127.0.0.1:{free_port()}"
    loom.env(LOOM_BOOTSTRAP=address)
    status, said = loom.error("start", "order", "--input", ORDER)
    assert (status, said["error"]) == (3, "UnreachableError")
    assert address in said["message"]
    assert "bootstrap" in said["message"]


def test_an_unreachable_redis_is_named_with_its_setting_and_without_its_password(fleet):
    address = f"127.0.0.1:{free_port()}"
    fleet.env(LOOM_REDIS_URL=f"redis://:hunter2@{address}/0")
    status, said = fleet.error("start", "order", "--input", ORDER)
    assert (status, said["error"]) == (3, "UnreachableError")
    assert address in said["message"]
    assert "redis_url" in said["message"]
    assert "hunter2" not in said["message"]


def test_a_wrong_setting_is_one_line_that_names_it(loom):
    loom.env(LOOM_PARTITIONS="many")
    done = loom("list")
    assert done.status == 2
    assert done.err.count("\n") == 1
    assert "partitions" in done.err
    assert "LOOM_PARTITIONS" in done.err


def test_usage_errors_end_with_2(loom):
    assert loom("start").status == 2
    assert loom("no-such-command").status == 2


def test_every_command_has_help_with_an_example(loom):
    from loom.cli.main import app

    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    groups = [["topics", "plan"], ["wakes", "list"], ["wakes", "rebuild"]]
    for command in [[name] for name in names] + groups:
        done = loom(*command, "--help")
        assert done.status == 0
        assert "Example: loom " in done.out, command


def test_what_a_client_meets_on_its_way_is_told_to_who_waits_but_never_a_sealed_refusal(monkeypatch, capsys):
    from loom.cli.common import _trouble
    from loom.errors import UnreachableError
    from loom.kernel.readable import sealed_refusal
    from loom.operator import SealedDetail

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _trouble(sealed_refusal("show", "x", SealedDetail("key-unavailable", 0, ())), "x")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _trouble(UnreachableError("Redis", "localhost:1", "redis_url"), "x")
    told = capsys.readouterr()
    assert "localhost:1" in told.err
    assert told.out == ""
