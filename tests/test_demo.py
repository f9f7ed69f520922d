"""``make demo``, on the session's broker and Redis: it ends well, and leaves nothing on them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import redis as redis_client
from confluent_kafka.admin import AdminClient

ROOT = Path(__file__).parent.parent


def test_the_demo_ends_well_and_leaves_nothing(kafka_bootstrap, redis_url):
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo"],
        cwd=ROOT,
        env={**os.environ, "LOOM_BOOTSTRAP": kafka_bootstrap, "LOOM_REDIS_URL": redis_url},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6_000:] + done.stderr[-3_000:]
    assert "Every order completed exactly once." in done.stdout
    assert "recovered from a node that is gone" in done.stdout
    assert "its log is sealed, and this node lacks keys or paths for it (marker-unopenable" in done.stdout
    assert "is denied: the execution's owner is unknown to this policy" in done.stdout
    assert "subject 'customer-7' was erased" in done.stdout
    assert "Sealed, refused, completed, erased." in done.stdout
    topics = (
        AdminClient({"bootstrap.servers": kafka_bootstrap, "log_level": 0}).list_topics(timeout=15).topics
    )
    assert [name for name in topics if name.startswith("demo-")] == []
    with contextlib.closing(redis_client.Redis.from_url(redis_url)) as client:
        assert list(client.scan_iter(match="*demo-*", count=1_000)) == []
