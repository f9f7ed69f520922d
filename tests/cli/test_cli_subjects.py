"""Erasure and export through the command line, on Kafka, with keys on Redis; and what a command line without keys says."""

import base64
import json
import sys
import uuid
from pathlib import Path

import pytest

from loom.cli.main import main
from loom.testing.services import OwnedProcess

SECRET = "planted-plaintext-9Z"
ORDER = json.dumps({"card": SECRET, "items": [{"sku": "lamp", "price": 4200}]})
SEALED = {"LOOM_SEALING__KEYS": "redis", "LOOM_SEALING__KEK": "env:CLI_KEK"}
SENSITIVE = {"EXECUTION_STARTED": ["input"], "STEP_COMPLETED": ["output"]}


@pytest.fixture(scope="module")
def sealed_env(fleet_env):
    return (
        fleet_env
        | SEALED
        | {
            "LOOM_TOPIC_PREFIX": f"cli{uuid.uuid4().hex[:10]}.",
            "LOOM_SEALING__SENSITIVE": json.dumps(SENSITIVE),
            "LOOM_ACCESS__OPERATORS": '["ops"]',
            "CLI_KEK": base64.b64encode(b"k" * 32).decode(),
        }
    )


@pytest.fixture(scope="module")
def sealed_worker(sealed_env, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sealed_env.items():
            patch.setenv(name, value)
        assert main(["topics", "apply"]) == 0
    process = OwnedProcess("worker", tmp_path_factory.mktemp("sealed"))
    process.spawn(
        [str(Path(sys.executable).with_name("loom")), "worker", "--flows", "examples.orders"],
        env=sealed_env | {"LOOM_NODE_ID": "sealed-worker"},
    )
    yield process
    process.stop()


@pytest.fixture
def sealed(loom, sealed_env, sealed_worker):
    loom.env(**sealed_env)
    return loom


def test_erase_and_export(sealed, tmp_path):
    order = sealed.json("start", "order", "--input", ORDER, "--subject", "c-1", "--as", "alice")[
        "execution_id"
    ]
    status, said = sealed.error("erase", "c-1", "--as", "mallory")
    assert (status, said["error"]) == (1, "ExecutionDeniedError")
    status, said = sealed.error("erase", "missing", "--as", "ops")
    assert (status, said["error"]) == (1, "SubjectNotFoundError")
    planned = sealed.json("erase", "c-1", "--dry-run", "--as", "ops")
    assert (planned["executions"], planned["dry_run"]) == ([order], True)
    assert order in sealed("erase", "c-1", "--dry-run", "--as", "ops").out
    assert SECRET in sealed("show", order, "--payloads", "--as", "alice", "--json").out
    file = tmp_path / "c-1.jsonl"
    assert sealed("export", "c-1", "--to", file, "--as", "ops").status == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert SECRET in json.dumps(rows[0])
    assert {row["erased"] for row in rows} == {False}
    done = sealed.json("erase", "c-1", "--reason", "asked for", "--as", "ops")
    assert (done["tombstoned"], done["cancelled"], done["key"]) == ([order], [order], "destroyed")
    status, said = sealed.error("show", order, "--as", "alice")
    assert (status, said["error"]) == (1, "PayloadShreddedError")
    after = sealed("export", "c-1", "--as", "ops")
    assert SECRET not in after.out
    assert '"erased": true' in after.out
    again = sealed("erase", "c-1", "--as", "ops")
    assert (again.status, "gone before" in again.out) == (0, True)


def test_the_doctor_sees_who_opens_what(sealed, monkeypatch):
    done = sealed("doctor", "--json")
    codes = {found["code"]: found["severity"] for found in json.loads(done.out)}
    assert codes["commands-rest-as-written"] == "info"
    assert not {"sealed-nobody-opens", "fleet-covers-differ", "topics-unfit"} & set(codes)
    worst = {"info": 0, "warning": 1, "error": 2}
    assert done.status == max(worst[severity] for severity in codes.values())
    assert "(commands-rest-as-written)" in " ".join(sealed("doctor").out.split())
    (row,) = (row for row in sealed.json("leases") if row["state"] == "live")
    assert "EXECUTION_STARTED.input" in row["opens"]
    monkeypatch.setenv("LOOM_TOPIC_PREFIX", "nobody.")
    assert sealed("doctor", "--json").status == 2
