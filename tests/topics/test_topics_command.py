"""``loom topics`` from the outside: what it prints, for people and machines, and the errors it ends with."""

import json

import pytest
from typer.testing import CliRunner

from loom.cli.topics import app
from loom.errors import ConfigError, TopicsError, UnreachableError

RUN = CliRunner()


@pytest.fixture
def loom_topics(topic_prefix, kafka_bootstrap, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOOM_BOOTSTRAP", kafka_bootstrap)
    monkeypatch.setenv("LOOM_TOPIC_PREFIX", topic_prefix)
    monkeypatch.setenv("LOOM_PARTITIONS", "2")

    def run(*arguments):
        result = RUN.invoke(app, arguments)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0
        return result.output

    return run


def test_plan_apply_and_check_tell_one_story(loom_topics, topic_prefix):
    planned = json.loads(loom_topics("plan", "--json"))
    assert [c["topic"] for c in planned["changes"]][:2] == [
        f"{topic_prefix}executions",
        f"{topic_prefix}inbox",
    ]
    assert {c["partitions"] for c in planned["changes"]} == {2}
    with pytest.raises(TopicsError, match="no topics with the prefix"):
        loom_topics("check")
    assert json.loads(loom_topics("apply", "--dry-run", "--json"))["applied"] == 0
    shown = loom_topics("apply")
    assert f"done: create topic {topic_prefix}executions\n" in shown
    assert loom_topics("apply") == f"the topics of {topic_prefix} are as the catalogue says\n"
    assert "nothing to change" in loom_topics("plan")
    assert json.loads(loom_topics("check", "--json")) == {"prefix": topic_prefix, "fit": True, "remarks": []}
    assert "11 topics" in loom_topics("check")


def test_another_number_of_partitions_is_shown_as_refused(loom_topics, topic_prefix):
    loom_topics("apply")
    shown = loom_topics("plan", "--partitions", "1")
    assert "refused:" in shown
    assert "migrate" in shown
    with pytest.raises(TopicsError, match="2 partitions, not 1"):
        loom_topics("apply", "--partitions", "1")


def test_export_needs_no_cluster(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOOM_BOOTSTRAP", raising=False)
    shown = RUN.invoke(app, ["export", "--prefix", "x.", "--partitions", "3", "--cluster", "prod"])
    assert shown.exit_code == 0
    assert shown.output.count("kind: KafkaTopic") == 11
    assert "strimzi.io/cluster: prod" in shown.output
    as_json = json.loads(RUN.invoke(app, ["export", "--prefix", "x.", "--format", "json"]).output)
    assert as_json["transactional_ids"]["log"][3] == "x.log.3"
    assert len(as_json["topics"]) == 11


@pytest.mark.parametrize("command", ["plan", "apply", "check"])
def test_a_missing_bootstrap_is_named(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOOM_BOOTSTRAP", raising=False)
    with pytest.raises(ConfigError, match="bootstrap.*LOOM_BOOTSTRAP"):
        raise RUN.invoke(app, [command]).exception


def test_an_unreachable_registry_is_named_with_its_setting(loom_topics, monkeypatch):
    monkeypatch.setenv("LOOM_REGISTRY_URL", "http://user:hunter2@127.0.0.1:1")
    with pytest.raises(
        UnreachableError, match="schema registry at http://127.0.0.1:1.*registry_url"
    ) as refused:
        loom_topics("plan")
    assert "hunter2" not in str(refused.value)
