"""The thread that keeps an index within memory, and lets a writer go first."""

from __future__ import annotations

import threading

import pytest
from test_index import log, open_index, write

from loom.schemas.envelope import Kind
from loom.stores.index_table import BATCH_STREAMS
from loom.stores.kafka.keeper import IndexKeeper

CHECKS = 3


@pytest.fixture
def checks():
    """How often a keeper looked, counted by the callback that it is given."""
    return threading.Semaphore(0)


def finish(index, number):
    for n in range(number):
        write(log(f"e{n:04}", Kind.EXECUTION_STARTED, Kind.EXECUTION_COMPLETED, size=500), index)


def after(checks, keeper):
    """Let a keeper look a few times; what it began at the last look is done once it stopped."""
    keeper.start()
    for _ in range(CHECKS):
        assert checks.acquire(timeout=10)
    keeper.stop()


def test_what_is_finished_leaves_memory(tmp_path, checks):
    index = open_index(tmp_path)
    finish(index, BATCH_STREAMS)
    after(checks, IndexKeeper(index, "test", checks.release))
    assert index.streams_in_memory == 0
    index.close()


def test_while_it_yields_what_is_finished_stays(tmp_path, checks):
    index = open_index(tmp_path, budget=10_000_000)
    finish(index, BATCH_STREAMS)
    keeper = IndexKeeper(index, "test", checks.release)
    keeper.yields = True
    after(checks, keeper)
    assert index.streams_in_memory == BATCH_STREAMS
    index.close()
