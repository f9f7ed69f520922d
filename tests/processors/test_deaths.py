"""What the delivery keeps when processes die: kill -9 under load, an outage of the brokers, the last words."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kafka_bench import Bench, wait_until

from loom.ids import inbox_stream
from loom.processors.app import build_app
from loom.processors.host import EXIT_STATUS, AppHost

_WORKER = """
import asyncio, sys
sys.path.insert(0, {here!r})
from kafka_bench import Bench
from loom.processors.app import build_app
from loom.processors.host import AppHost

class Runtime:
    async def notify(self, chain_id, stream, sequence):
        await asyncio.sleep(0.001)
        sys.stdout.write(chain_id + " " + str(sequence) + "\\n")
        sys.stdout.flush()

bench = Bench({bootstrap!r}, {prefix!r})
host = AppHost(lambda: build_app(bench.config, Runtime()))
host.start()
sys.stdin.read()
host.stop()
"""


class Process:
    """A worker's delivery in a process of its own; what it handed over stands in a file, line by line."""

    def __init__(self, bench, folder, number):
        self.path = folder / f"handed-{number}"
        source = _WORKER.format(
            here=str(Path(__file__).parent), bootstrap=bench.bootstrap, prefix=bench.catalogue.prefix
        )
        with self.path.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=out, stderr=subprocess.DEVNULL
            )

    def handed(self):
        lines = self.path.read_text().split("\n")[:-1]  # what follows the last line end was cut by the kill
        return [tuple(line.split()) for line in lines]

    def kill(self):
        self._process.kill()
        self._process.wait(10)
        self._process.stdin.close()


def _kills(bench, folder, kills, messages):
    bench.make("inbox", "commands", "quarantine", "dead")
    rng = random.Random(kills)
    producer, sent, processes = bench.producer(), set(), []

    def send(count):
        for _ in range(count):
            chain, sequence = f"c{rng.randrange(50)}", len(sent)
            key = f"{inbox_stream(chain, 't')}/{sequence}"
            producer.produce(
                bench.catalogue.inbox,
                b"v",
                key,
                partition=rng.randrange(2),
                headers=[("type", b"INBOX_MESSAGE")],
            )
            sent.add((chain, sequence))
        producer.flush(30)

    def reached():
        """Per chain the highest sequence handed over: a pass for it is a pass for all before it in its partition."""
        handed = {}
        for process in processes:
            for chain, sequence in process.handed():
                handed[chain] = max(handed.get(chain, -1), int(sequence))
        return handed

    try:
        for number in range(kills + 1):
            send(messages)
            before = sum(len(process.handed()) for process in processes)
            processes.append(Process(bench, folder, number))
            wait_until(
                lambda at=before: sum(len(process.handed()) for process in processes) > at,
                "a delivery by this process",
                timeout_s=60,
            )
            if number < kills:
                processes[-1].kill()
        highest = {chain: max(s for c, s in sent if c == chain) for chain, _ in sent}
        wait_until(lambda: reached() == highest, "the last message of every chain", timeout_s=60)
        group = bench.catalogue.group("delivery")
        for partition in range(2):
            end = bench.end(bench.catalogue.inbox, partition)
            wait_until(
                lambda p=partition, e=end: bench.committed(group, bench.catalogue.inbox, p) == e,
                "commits",
                timeout_s=60,
            )
    finally:
        for process in processes:
            process.kill()


def test_messages_outlive_two_kills(bench, tmp_path):
    _kills(bench, tmp_path, kills=2, messages=200)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_messages_outlive_twenty_kills(bench, tmp_path):
    _kills(bench, tmp_path, kills=20, messages=1_000)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_an_outage_of_thirty_seconds_is_survived(start_kafka):
    broker = start_kafka()
    bench = Bench(broker.bootstrap, "live.")
    bench.make("inbox", "commands", "quarantine", "dead")
    deaths, asked = [], []

    class Runtime:
        async def notify(self, chain_id, stream, sequence):
            asked.append(sequence)

    host = AppHost(lambda: build_app(bench.config, Runtime()), on_death=deaths.append)
    host.start()
    broker.kill()
    time.sleep(30)  # noqa: ASYNC251 - the length of the outage is the case
    broker.restart()
    key = f"{inbox_stream('c', 't')}/7"
    bench.send(bench.catalogue.inbox, 0, (key, b"v", [("type", b"INBOX_MESSAGE")]))
    wait_until(lambda: asked == [7] or deaths, "a message after the outage", timeout_s=120)
    assert deaths == []
    assert host.stop()


def test_the_last_words_name_the_reason():
    source = (
        "from loom.processors.host import end_process; end_process('reading of p.inbox/0 has stood still')"
    )
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, timeout=60, check=False)
    assert ended.returncode == EXIT_STATUS
    assert b"the processors have died: reading of p.inbox/0 has stood still" in ended.stderr
