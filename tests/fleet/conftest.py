"""A fleet of worker processes on the session's broker and a Redis of its own, which may be killed."""

import json
import os
import sys
import uuid
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from fleet_support import show_workers

from loom import Client, Config
from loom.cli.main import main
from loom.testing.services import OwnedProcess

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TTL_MS = 2000


class Fleet:
    """Workers by name, a client, and what the world outside saw."""

    def __init__(self, env, folder):
        self.env, self.folder, self.workers, self.begun = env, folder, {}, {}

    def start_worker(self, name, *, flows="fleet_flows", env=None):
        worker = self.workers.get(name)
        if worker is None:
            worker = self.workers[name] = OwnedProcess(name, self.folder / name)
        self.begun[name] = self.begun.get(name, 0) + 1
        worker.spawn(
            [str(Path(sys.executable).with_name("loom")), "worker", "--flows", flows],
            env=self.env | (env or {}) | {"LOOM_NODE_ID": name},
        )

    def is_up(self, name):
        """Whether the worker that was started last has said that it runs."""
        return self.workers[name].log_path.read_text().count(f"loom: node {name} runs") == self.begun[name]

    def kill(self, name):
        self.workers[name].kill()

    def client(self, **settings):
        names = {key[5:].lower(): value for key, value in self.env.items() if key.startswith("LOOM_")}
        nested = {"leases": {"ttl_ms": TTL_MS}}
        names = {key: value for key, value in names.items() if "__" not in key}
        return Client(Config(**names, **nested, **settings, node_id=f"client-{uuid.uuid4().hex[:6]}"))

    def effects(self):
        """Tokens by (execution, effect)."""
        seen = defaultdict(list)
        path = Path(self.env["FLEET_LEDGER"])
        for line in path.read_text().splitlines() if path.exists() else ():
            noted = json.loads(line)
            seen[noted["execution"], noted["name"]].append(noted["token"])
        return seen

    def ledger(self):
        """Lines of the ledger, in order."""
        path = Path(self.env["FLEET_LEDGER"])
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def tails(self):
        return "\n".join(f"--- {name}\n{worker.log_tail()}" for name, worker in self.workers.items())


@contextmanager
def fleet_on(bootstrap, prefix, redis, folder):
    """A fleet on topics that are made for it; its workers end with it."""
    env = {
        "LOOM_BOOTSTRAP": bootstrap,
        "LOOM_REDIS_URL": redis.url,
        "LOOM_TOPIC_PREFIX": prefix,
        "LOOM_PARTITIONS": "4",
        "LOOM_DATA_DIR": str(folder / "cache"),
        "LOOM_LEASES__TTL_MS": str(TTL_MS),
        "LOOM_RECOVERY_INTERVAL_MS": "500",
        "FLEET_LEDGER": str(folder / "ledger.jsonl"),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)]),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        assert main(["topics", "apply"]) == 0
    made = Fleet(env, folder)
    try:
        yield made
    finally:
        for worker in made.workers.values():
            worker.stop()


FLEETS = pytest.StashKey[list[Fleet]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A test of a fleet that fails shows what its workers said last: their folders go with the test."""
    report = yield
    for made in item.stash.get(FLEETS, ()):
        show_workers(report, made)
    return report


@pytest.fixture
def fleet(request, kafka_bootstrap, topic_prefix, private_redis, tmp_path):
    with fleet_on(kafka_bootstrap, topic_prefix, private_redis, tmp_path) as made:
        request.node.stash[FLEETS] = [made]
        yield made


@pytest.fixture
def make_fleet(request, private_redis, tmp_path):
    """Makes a fleet on a broker of the test's own."""
    fleets = request.node.stash[FLEETS] = []
    with ExitStack() as stack:

        def make(bootstrap, prefix):
            fleets.append(stack.enter_context(fleet_on(bootstrap, prefix, private_redis, tmp_path)))
            return fleets[-1]

        yield make
