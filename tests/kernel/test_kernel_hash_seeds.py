import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BATTERY = Path(__file__).with_name("kernel_battery.py")


def digest_of(seed):
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    done = subprocess.run(
        [sys.executable, str(BATTERY)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_twenty_processes_with_random_hash_seeds_give_the_same_commands():
    with ThreadPoolExecutor(4) as pool:
        digests = list(pool.map(digest_of, ["random"] * 16 + ["0", "1", "4242", "4294967295"]))
    assert len(digests[0]) == 64
    assert len(set(digests)) == 1
