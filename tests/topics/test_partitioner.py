"""The partitioner against vectors that Kafka's own Java client computed (``Utils.murmur2``, ``Utils.toPositive``)."""

import itertools
import json
from pathlib import Path

import pytest

from loom.errors import InvalidIdError
from loom.ids import check_execution_id, inbox_stream, quarantine_stream, routing_id, ulid
from loom.topics.partitioner import MAX_DRAWS_PER_PARTITION, mint, murmur2, partition_of

VECTORS = json.loads((Path(__file__).parent / "murmur2_vectors.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["id"][:12] or "empty")
def test_equals_the_java_client(vector):
    assert murmur2(vector["id"].encode()) == vector["murmur2"] & 0xFFFFFFFF
    for partitions, expected in vector["partitions"].items():
        assert partition_of(vector["id"], int(partitions)) == expected


def test_the_vectors_tell_the_bracket_fault():
    """``murmur2 & 0x7fffffff % P`` binds the other way; eight partitions hide it, six, ten and twelve do not."""

    def faulty(data, partitions):
        return murmur2(data) & (0x7FFFFFFF % partitions)

    def differing(partitions):
        return sum(faulty(v["id"].encode(), partitions) != v["partitions"][str(partitions)] for v in VECTORS)

    assert differing(6) > len(VECTORS) / 2
    assert differing(10) > len(VECTORS) / 2
    assert differing(8) == 0 or differing(8) < differing(6)


def test_every_stream_of_a_chain_shares_its_partition():
    chain = "order-2024~1"
    streams = [chain, inbox_stream(chain), inbox_stream(chain, "a:b/%"), quarantine_stream(chain)]
    assert {partition_of(routing_id(s), 8) for s in streams} == {partition_of(chain, 8)}


@pytest.mark.parametrize("partitions", [1, 6, 8, 12, 1000])
def test_minted_ids_hash_to_their_shard(partitions):
    for shard in {0, partitions // 2, partitions - 1}:
        minted = {mint(shard, partitions) for _ in range(20)}
        assert len(minted) == 20
        assert {partition_of(i, partitions) for i in minted} == {shard}
        assert all(len(check_execution_id(i)) == 26 for i in minted)


def test_minted_ids_keep_time_and_most_of_their_randomness():
    before, minted, after = ulid(), mint(3, 8), ulid()
    assert before[:10] <= minted[:10] <= after[:10]


def test_minting_asks_an_injected_source_until_one_fits():
    counter = itertools.count()
    source = lambda: f"case-{next(counter):06d}"  # noqa: E731
    minted = [mint(5, 6, source) for _ in range(10)]
    assert minted == sorted(set(minted))
    assert {partition_of(i, 6) for i in minted} == {5}


def test_minting_from_a_source_that_repeats_itself_ends():
    asked = itertools.count()

    def stuck():
        next(asked)
        return "always-the-same"

    wrong = (partition_of("always-the-same", 8) + 1) % 8
    with pytest.raises(InvalidIdError, match="fresh ids"):
        mint(wrong, 8, stuck)
    assert next(asked) == MAX_DRAWS_PER_PARTITION * 8


@pytest.mark.parametrize("shard", [-1, 8])
def test_minting_refuses_a_shard_that_is_none(shard):
    with pytest.raises(ValueError, match="partitions"):
        mint(shard, 8)
