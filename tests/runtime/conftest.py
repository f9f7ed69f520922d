from __future__ import annotations

import pytest
from runtime_support import Trouble

from loom.testing.runtime import MemoryFleet, TimeSkippingRuntime


@pytest.fixture
def trouble():
    return Trouble()


@pytest.fixture
def fleet():
    return MemoryFleet(ttl_ms=600)


@pytest.fixture
async def runtime(fleet, trouble):
    async with fleet.runtime("node-a", **trouble.options) as opened:
        yield opened
    assert trouble.errors == []


@pytest.fixture
async def skipping(trouble):
    async with TimeSkippingRuntime(**trouble.options) as opened:
        yield opened
    assert trouble.errors == []
