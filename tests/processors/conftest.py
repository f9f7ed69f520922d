from __future__ import annotations

import pytest
from kafka_bench import Bench


@pytest.fixture
def bench(kafka_bootstrap, topic_prefix):
    return Bench(kafka_bootstrap, topic_prefix)
