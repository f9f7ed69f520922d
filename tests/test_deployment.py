"""Image, compose file and Helm chart: what they run exists, and what they set is taken."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
import typer
import yaml

from loom import Config
from loom.cli.main import app

ROOT = Path(__file__).parent.parent
COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text("utf-8"))
SERVICES = COMPOSE["services"]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text("utf-8")
CHART = ROOT / "helm" / "loom"


def parse(arguments):
    """Parse a command line of ``loom`` as it does itself, without running it."""
    command, rest = typer.main.get_command(app), list(arguments)
    context = click.Context(command, info_name="loom")
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, rest)
    return command.make_context(name, rest).params


def settings(monkeypatch, env):
    """The configuration that these variables give."""
    for name in [name for name in os.environ if name.startswith("LOOM_")]:
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return Config()


# -- compose -----------------------------------------------------------------------------------------------------


def test_the_services_wait_for_what_they_need():
    assert {"kafka", "redis", "topics", "worker"} <= SERVICES.keys()
    for name, service in SERVICES.items():
        for needed, how in service.get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                assert SERVICES[needed]["healthcheck"]["test"][0] == "CMD", f"{name} waits for {needed}"
            else:
                assert how["condition"] == "service_completed_successfully"
                assert "restart" not in SERVICES[needed]
    assert SERVICES["worker"]["depends_on"].keys() >= {"topics", "redis"}
    assert "noeviction" in SERVICES["redis"]["command"], "or Redis may drop what is evidence"


def test_what_is_kept_lies_on_named_volumes():
    mounts = [v.split(":") for service in SERVICES.values() for v in service.get("volumes", ())]
    named = {source for source, *_ in mounts if not source.startswith(".")}
    assert named == COMPOSE["volumes"].keys()
    for source, *_ in mounts:
        assert not source.startswith(".") or (ROOT / "docker" / source).is_dir()
    kafka = SERVICES["kafka"]
    assert f"kafka:{kafka['environment']['KAFKA_LOG_DIRS']}" in kafka["volumes"]
    cache = re.search(r"LOOM_DATA_DIR=(\S+)", DOCKERFILE)
    assert cache is not None
    assert f"worker:{cache.group(1)}" in SERVICES["worker"]["volumes"]


def test_its_commands_and_settings_are_ones_of_loom(monkeypatch):
    ours = {name: service for name, service in SERVICES.items() if "build" in service}
    assert ours.keys() == {"topics", "worker"}
    for service in ours.values():
        assert (ROOT / "docker" / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]).is_file()
        parse(service["command"])
        config = settings(monkeypatch, service["environment"])
        assert (
            config.bootstrap == SERVICES["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"].split("//")[1]
        )
    (module,) = parse(ours["worker"]["command"])["flows"]
    assert (ROOT / f"{module.replace('.', '/')}.py").is_file()


# -- image -------------------------------------------------------------------------------------------------------


def test_the_image_holds_a_package_that_runs(tmp_path):
    """The steps of the Dockerfile, in folders of our own; dependencies are those of this environment."""
    source, site = tmp_path / "src", tmp_path / "site"
    copies = [shlex.split(line)[1:] for line in DOCKERFILE.splitlines() if line.startswith("COPY ")]
    source.mkdir()
    for *files, target in [copy for copy in copies if not copy[0].startswith("--")]:
        for name in files:
            assert admitted(name), f".dockerignore keeps {name} out"
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, source / target)
    pip = [
        Path(sys.executable).with_name("uv"),
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
    ]
    run([*pip, "--python", sys.executable, "--target", site, source], cwd=tmp_path)

    env = {"PYTHONPATH": str(site), "PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    code = "import sys, loom; from loom.cli import main; print(loom.__file__); sys.exit(main(sys.argv[1:]))"
    for arguments in (["--help"], ["topics", "export"]):
        said = run([sys.executable, "-c", code, *arguments], cwd=tmp_path, env=env)
        assert said.startswith(str(site)), "it is the copy that runs"
    assert re.search(r'ENTRYPOINT \["loom"\]', DOCKERFILE)
    assert run([sys.executable, site / "bin" / "loom", "--help"], cwd=tmp_path, env=env).startswith(
        "Usage: loom"
    )


def admitted(name):
    patterns = (ROOT / ".dockerignore").read_text("utf-8").split()
    return patterns[0] == "*" and f"!{name.removeprefix('./')}" in patterns


def run(command, **options):
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=120, check=False, **options
    )
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-2_000:]
    return done.stdout


# -- chart -------------------------------------------------------------------------------------------------------

NEEDED = {"bootstrap": "k1:9092,k2:9092", "redisSecret": "redis", "flows": ["shop.flows"]}
FULL = NEEDED | {
    "flows": ["shop.flows", "shop.returns"],
    "roles": "drive,delivery",
    "replicas": 3,
    "topicPrefix": "shop.",
    "partitions": 24,
    "env": {"LOOM_LEASES__TTL_MS": 15_000, "LOOM_KAFKA": '{"security.protocol": "SASL_SSL"}'},
    "envSecrets": ["kafka-login", "keys"],
    "cache": {"size": "10Gi", "storageClass": "fast"},
    "image": {"repository": "registry.example/shop", "tag": "7"},
}


@pytest.fixture
def helm(tmp_path):
    found = shutil.which("helm") or shutil.which(str(Path.home() / "go" / "bin" / "helm"))
    if found is None:
        pytest.skip("helm is not on PATH")

    def call(verb, values):
        file = tmp_path / "values.yaml"
        file.write_text(yaml.safe_dump(values))
        given = ["shop", CHART] if verb == "template" else [CHART, "--strict"]
        command = [found, verb, *given, "--values", file]
        return subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, timeout=60, check=False
        )

    return call


def rendered(helm, values):
    done = helm("template", values)
    assert done.returncode == 0, done.stderr
    return {document["kind"]: document for document in yaml.safe_load_all(done.stdout)}


def container(document):
    (only,) = document["spec"]["template"]["spec"]["containers"]
    return only


@pytest.mark.parametrize("values", [NEEDED, FULL], ids=["needed", "full"])
def test_the_chart_runs_commands_and_settings_of_loom(helm, monkeypatch, values):
    linted = helm("lint", values)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    documents = rendered(helm, values)
    assert documents.keys() == {"StatefulSet", "Service", "Job"}

    worker, job = container(documents["StatefulSet"]), container(documents["Job"])
    assert parse(worker["args"])["flows"] == values["flows"]
    assert parse(worker["args"])["roles"] == values.get("roles", "all")
    parse(job["args"])
    for one in (worker, job):
        assert [source["secretRef"]["name"] for source in one.get("envFrom", ())] == values.get(
            "envSecrets", []
        )
        assert one.get("envFrom", "absent") is not None
        assert one["securityContext"]["allowPrivilegeEscalation"] is False
        assert all(isinstance(variable.get("value", ""), str) for variable in one["env"])
        config = settings(monkeypatch, {v["name"]: v["value"] for v in one["env"] if "value" in v})
        assert config.bootstrap == values["bootstrap"]
        assert config.partitions == values.get("partitions", 8)
    assert config.topic_prefix == values.get("topicPrefix", "loom.")
    assert config.leases.ttl_ms == (15_000 if values is FULL else 30_000)


def test_a_worker_keeps_its_id_and_its_cache(helm):
    documents = rendered(helm, FULL)
    spec = documents["StatefulSet"]["spec"]
    names = {variable["name"]: variable for variable in container(documents["StatefulSet"])["env"]}
    assert names["LOOM_NODE_ID"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    assert names["LOOM_REDIS_URL"]["valueFrom"]["secretKeyRef"]["name"] == "redis"
    (claim,) = spec["volumeClaimTemplates"]
    (mount,) = container(documents["StatefulSet"])["volumeMounts"]
    assert mount == {"name": claim["metadata"]["name"], "mountPath": "/var/lib/loom"}
    assert claim["spec"]["storageClassName"] == "fast"
    assert spec["serviceName"] == documents["Service"]["metadata"]["name"]
    # longer than a store takes to close, or a stop would be a kill
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > 2 * 15


def test_nothing_else_of_the_release_is_taken_for_a_worker(helm):
    documents = rendered(helm, NEEDED)
    labels = {
        kind: documents[kind]["spec"]["template"]["metadata"]["labels"] for kind in ("StatefulSet", "Job")
    }
    for selector in (
        documents["StatefulSet"]["spec"]["selector"]["matchLabels"],
        documents["Service"]["spec"]["selector"],
    ):
        assert selector.items() <= labels["StatefulSet"].items()
        assert not selector.items() <= labels["Job"].items()


@pytest.mark.parametrize("missing", NEEDED)
def test_what_the_chart_needs_is_named(helm, missing):
    done = helm("template", {name: value for name, value in NEEDED.items() if name != missing})
    assert done.returncode != 0
    assert f"{missing}: name" in done.stderr


def test_topics_may_be_left_to_others(helm):
    assert rendered(helm, NEEDED | {"applyTopics": False}).keys() == {"StatefulSet", "Service"}
