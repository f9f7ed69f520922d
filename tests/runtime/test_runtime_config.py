"""Settings: where they come from, and what a wrong one says."""

from __future__ import annotations

import pytest

from loom import Config, ConfigError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    import os

    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("LOOM_")]:
        monkeypatch.delenv(name)
    return tmp_path


def test_defaults():
    config = Config()
    assert (config.storage, config.topic_prefix, config.partitions) == ("kafka", "loom.", 8)
    assert (config.leases.enabled, config.leases.acquire, config.leases.ttl_ms) == (True, "lazy", 30_000)
    assert config.presence_ms == 30_000
    assert config.node_id != Config().node_id


def test_arguments_win_over_variables_over_the_file_over_defaults(elsewhere, monkeypatch):
    (elsewhere / "loom.toml").write_text('partitions = 3\ntopic_prefix = "file."\nquarantine_max = 7\n')
    monkeypatch.setenv("LOOM_PARTITIONS", "4")
    monkeypatch.setenv("LOOM_TOPIC_PREFIX", "env.")
    config = Config(partitions=5)
    assert (config.partitions, config.topic_prefix, config.quarantine_max) == (5, "env.", 7)


def test_nesting_lists_and_properties(elsewhere, monkeypatch):
    monkeypatch.setenv("LOOM_LEASES__TTL_MS", "2000")
    monkeypatch.setenv("LOOM_ACCESS__OPERATORS", "ann,bob")
    monkeypatch.setenv("LOOM_PUBLISH_TOPICS", '["a", "b"]')
    monkeypatch.setenv("LOOM_KAFKA__SASL_USERNAME", "u")
    (elsewhere / "loom.toml").write_text('[kafka]\n"security.protocol" = "SSL"\nssl.ca.location = "ca.pem"\n')
    config = Config()
    assert config.leases.ttl_ms == config.presence_ms == 2000
    assert config.access.operators == ("ann", "bob")
    assert config.publish_topics == ("a", "b")
    assert config.kafka["sasl.username"] == "u"


def test_tables_of_the_file_become_properties(elsewhere):
    (elsewhere / "loom.toml").write_text('[kafka]\n"security.protocol" = "SSL"\nssl.ca.location = "ca.pem"\n')
    assert Config().kafka == {"security.protocol": "SSL", "ssl.ca.location": "ca.pem"}


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        ({"storage": "postgres"}, "storage"),
        ({"partitions": 0}, "partitions"),
        ({"partitions": "many"}, "partitions"),
        ({"node_id": "a b"}, "node_id"),
        ({"topic_prefix": "a/b"}, "topic_prefix"),
        ({"leases": {"acquire": "never"}}, "leases.acquire"),
        ({"leases": {"ttl_ms": 1}}, "leases.ttl_ms"),
        ({"sealing": {"keys": "vault"}}, "sealing.keys"),
        ({"sealing": {"kek": "c2VjcmV0"}}, "sealing.kek"),
        ({"quarantine_max": 5000}, "quarantine_max"),
        ({"no_such_setting": 1}, "no_such_setting"),
        ({"sealing": {"no_such": 1}}, "sealing.no_such"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_setting_and_the_source(given, setting):
    with pytest.raises(ConfigError) as caught:
        Config(**given)
    text = str(caught.value)
    assert text.startswith(f"{setting} (from argument): ")
    assert "\n" not in text
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    ("name", "value", "setting"),
    [
        ("LOOM_PARTITIONS", "x", "partitions"),
        ("LOOM_LEASES__TTL_MS", "1", "leases.ttl_ms"),
        ("LOOM_SEALING", "{nope", "sealing"),
        ("LOOM_KAFKA", "nope", "kafka"),
    ],
)
def test_a_wrong_variable_is_named(monkeypatch, name, value, setting):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=setting) as caught:
        Config()
    assert caught.value.source.startswith(name.split("__")[0])


def test_a_file_that_is_no_toml_and_a_wrong_value_in_it(elsewhere):
    (elsewhere / "loom.toml").write_text("partitions = [")
    with pytest.raises(ConfigError, match=r"loom\.toml"):
        Config()
    (elsewhere / "loom.toml").write_text('partitions = "x"')
    with pytest.raises(ConfigError, match=r"partitions \(from \./loom\.toml\)"):
        Config()


def test_secrets_never_print(monkeypatch):
    secret = "hunter2"
    monkeypatch.setenv("LOOM_KAFKA__SASL_PASSWORD", secret)
    config = Config(redis_url=f"redis://:{secret}@h", registry_url=f"http://u:{secret}@h")
    assert secret not in repr(config) + str(config)
    for given in ({"sealing": {"kek": secret}}, {"redis_url": {"x": secret}}, {"kafka": secret}):
        with pytest.raises(ConfigError) as caught:
            Config(**given)
        assert secret not in str(caught.value)


def test_a_config_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Config().partitions = 3
