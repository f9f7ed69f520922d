"""A fleet of one worker, shared by the tests of the command line."""

import contextlib
import json
import os
import sys
import threading
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from loom.cli.main import main
from loom.testing.services import OwnedProcess

ROOT = Path(__file__).parents[2]
READY_S = 60.0


class CommandLine:
    """Runs ``loom`` in this process, as its entry point does, and reads what it printed."""

    def __init__(self, monkeypatch, capsys):
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def env(self, **values):
        for name, value in values.items():
            self._monkeypatch.setenv(name, str(value))

    def unset(self, name):
        self._monkeypatch.delenv(name)

    def __call__(self, *arguments):
        self._capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        printed = self._capsys.readouterr()
        return SimpleNamespace(status=status, out=printed.out, err=printed.err)

    def json(self, *arguments):
        done = self(*arguments, "--json")
        assert done.status == 0, done.err
        return json.loads(done.out)

    def error(self, *arguments):
        """What a refused command says to a machine, with its exit status."""
        done = self(*arguments, "--json")
        assert done.out == ""
        assert "Traceback" not in done.err
        return done.status, json.loads(done.err)


@pytest.fixture(scope="module")
def fleet_env(kafka_bootstrap, redis_url, tmp_path_factory):
    """Environment of a prefix of its own."""
    folder = tmp_path_factory.mktemp("fleet")
    return {
        "LOOM_BOOTSTRAP": kafka_bootstrap,
        "LOOM_REDIS_URL": redis_url,
        "LOOM_TOPIC_PREFIX": f"cli{uuid.uuid4().hex[:10]}.",
        "LOOM_PARTITIONS": "2",
        "LOOM_DATA_DIR": str(folder / "cache"),
        "LOOM_LEASES__TTL_MS": "2000",
        "ORDERS_LEDGER": str(folder / "ledger.jsonl"),
        "ORDERS_COURIER_SECONDS": "0.2",
        "ORDERS_PACKING_SECONDS": "0",
        "PYTHONPATH": str(ROOT),
    }


@pytest.fixture
def loom(monkeypatch, capsys, tmp_path, fleet_env):
    """The command line on the fleet's topics."""
    monkeypatch.chdir(tmp_path)
    line = CommandLine(monkeypatch, capsys)
    line.env(**fleet_env)
    return line


@pytest.fixture(scope="module")
def worker(fleet_env, tmp_path_factory):
    """A worker process with the flow of examples/orders.py."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in fleet_env.items():
            patch.setenv(name, value)
        assert main(["topics", "apply"]) == 0
    with _running(fleet_env, tmp_path_factory.mktemp("worker")) as process:
        yield process


@pytest.fixture
def start_worker(tmp_path):
    """Start such a worker with the test's own environment, as it is then."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(_running(os.environ, tmp_path / "worker"))


@contextlib.contextmanager
def _running(env, folder):
    process = OwnedProcess("worker", folder)
    process.spawn(
        [str(Path(sys.executable).with_name("loom")), "worker", "--flows", "examples.orders"],
        env=dict(env) | {"LOOM_NODE_ID": "worker"},
    )
    try:
        _until(lambda: "runs order" in process.log_tail(), READY_S, process)
        yield process
    finally:
        process.stop()


def _until(condition, patience_s, process):
    pause = threading.Event()
    for _ in range(int(patience_s / 0.05)):
        if condition():
            return
        assert process.running, process.log_tail()
        pause.wait(0.05)
    pytest.fail(f"not in {patience_s} s: {process.log_tail()}")
