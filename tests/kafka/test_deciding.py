"""Reads of a store decide: whoever answers has proved that it still is the writer (kafka.md, "Reading")."""

from __future__ import annotations

import pytest
from writers import Writers, append

from stores import StoreBench

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def bench(kafka_bootstrap, topic_prefix, tmp_path):
    bench = StoreBench(kafka_bootstrap, topic_prefix, tmp_path)
    yield bench
    await bench.close()


@pytest.mark.parametrize("asker", ["the owner itself", "another node"])
async def test_a_superseded_owner_does_not_answer_from_stale_memory(bench, tmp_path, asker):
    owner = await bench.owner()
    store = owner if asker == "the owner itself" else await bench.client()
    stream_id, rivals = bench.chain(), Writers(bench.bootstrap, bench.prefix, tmp_path, partitions=2)
    try:
        for head, ask in enumerate(
            [
                store.observe,
                store.info,
                store.read_last,
                lambda stream: store.read(stream, from_sequence=2),
            ]
        ):
            # a rival takes the partition, writes, and goes: nobody has told the owner
            rival = rivals.make(f"rival-{head}", partition=owner.shard_of(stream_id)).serving()
            await rival.write(append(stream_id, head))
            assert rival.stop(10_000)
            found = await ask(stream_id)
            last = found[-1] if isinstance(found, list) else found
            assert getattr(last, "head", getattr(last, "sequence", None)) == head
    finally:
        rivals.close()
