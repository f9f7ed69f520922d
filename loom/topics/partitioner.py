"""Which partition a chain lives in: the Java client's default, bit for bit (kafka.md "Topics").

``(murmur2(utf8(id)) & 0x7fffffff) % P``, so that any Java producer of the estate that keys its commands by chain id
puts them where the owner reads. librdkafka's own default is another function; loom always names the partition.
"""

from __future__ import annotations

import struct
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from loom.errors import InvalidIdError
from loom.ids import CROCKFORD, IdSource, ulid

if TYPE_CHECKING:
    from collections.abc import Iterator

CACHED_PARTITIONS: Final = 16_384
"""How many placements are remembered: a chain that is active is looked up at every append."""

HEAD_MS: Final = 100
"""How long a minter keeps what its ids begin with: they sort by time to within that."""

MAX_DRAWS_PER_PARTITION: Final = 64
"""Bound of :func:`mint`, times P: a fair source misses that often with probability e^-64."""

_M: Final = 0x5BD1E995
_SEED: Final = 0x9747B28C
_MASK: Final = 0xFFFFFFFF
_POSITIVE: Final = 0x7FFFFFFF
_BASE32: Final = CROCKFORD.encode()
_WORDS: Final = tuple(struct.Struct(f"<{n}I").unpack_from for n in range(64))
_ULID_LENGTH: Final = 26
_ULID_HEAD: Final = 24  # whole words of a ULID; its last two characters are the tail of the hash
_TAILS: Final = tuple(first | second << 8 for first in _BASE32 for second in _BASE32)


def murmur2(data: bytes) -> int:
    """Return the unsigned 32-bit MurmurHash2 of ``data`` with Kafka's seed (``Utils.murmur2`` read as unsigned)."""
    length = len(data)
    h = _mix_words(data, length >> 2, _SEED ^ length)
    rest = length & 3
    if rest:
        h = ((h ^ int.from_bytes(data[length - rest :], "little")) * _M) & _MASK
    return _finish(h)


def _mix_words(data: bytes, count: int, h: int) -> int:
    words = _WORDS[count](data) if count < len(_WORDS) else struct.unpack_from(f"<{count}I", data)
    for word in words:
        k = (word * _M) & _MASK
        h = (h * _M ^ (k ^ k >> 24) * _M) & _MASK
    return h


def _finish(h: int) -> int:
    h = ((h ^ h >> 13) * _M) & _MASK
    return h ^ h >> 15


@lru_cache(CACHED_PARTITIONS)
def partition_of(routing_id: str, partitions: int) -> int:
    """Return the partition number, below ``partitions``, of a chain id (``loom.ids.routing_id`` of any of its streams)."""
    return (murmur2(routing_id.encode()) & _POSITIVE) % partitions


def mint(shard: int, partitions: int, source: IdSource = ulid) -> str:
    """Return a fresh id that hashes to ``shard``.

    ``source`` is asked until one fits. The default is quicker: one ULID is drawn, and its last two characters are
    turned until it fits; 70 random bits beside the millisecond stay.

    Raises:
        InvalidIdError: 64 ids per partition were asked for and none fits: the source repeats itself.
    """
    if not 0 <= shard < partitions:
        raise ValueError(f"shard {shard} is not one of {partitions} partitions")
    candidate = ""
    for _ in range(MAX_DRAWS_PER_PARTITION * partitions):
        candidate = _turned_ulid(shard, partitions) if source is ulid else source()
        if (murmur2(candidate.encode()) & _POSITIVE) % partitions == shard:
            return candidate
    raise InvalidIdError(
        candidate, f"none of the source's ids hashes to partition {shard}; give a source of fresh ids"
    )


def _turned_ulid(shard: int, partitions: int) -> str:
    """Return a ULID with the first tail, counted on from a random one, that hashes to ``shard``; any if none does."""
    data = ulid().encode()
    head = _mix_words(data, _ULID_HEAD >> 2, _SEED ^ _ULID_LENGTH)
    start = _BASE32.index(data[-2]) << 5 | _BASE32.index(data[-1])
    for step in range(len(_TAILS)):
        tail = _TAILS[(start + step) & 1023]
        h = ((head ^ tail) * _M) & _MASK
        h = ((h ^ h >> 13) * _M) & _MASK
        if ((h ^ h >> 15) & _POSITIVE) % partitions == shard:
            data = data[:_ULID_HEAD] + tail.to_bytes(2, "little")
            break
    return data.decode()


class Minter:
    """Mints ids for one shard after another, quicker than :func:`mint`: what the id and the hash begin with is shared.

    Ids of one minter that are made within ``HEAD_MS`` differ in their last two characters; between minters, and from
    one head to the next, 70 random bits beside the millisecond do.
    """

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self._heads: dict[int, Iterator[str]] = {}
        self._stale_at = 0.0

    def __call__(self, shard: int) -> str:
        """Return a fresh id that hashes to ``shard``."""
        if time.monotonic() >= self._stale_at:
            self._heads.clear()
            self._stale_at = time.monotonic() + HEAD_MS / 1000
        while True:
            ids = self._heads.get(shard)
            if ids is None:
                ids = self._heads[shard] = _turnings(shard, self._partitions)
            minted = next(ids, None)
            if minted is not None:
                return minted
            del self._heads[shard]  # every ending is used up


def _turnings(shard: int, partitions: int) -> Iterator[str]:
    """Every id of one fresh head that hashes to ``shard``."""
    if not 0 <= shard < partitions:
        raise ValueError(f"shard {shard} is not one of {partitions} partitions")
    text = ulid()[:_ULID_HEAD]
    head = _mix_words(text.encode(), _ULID_HEAD >> 2, _SEED ^ _ULID_LENGTH)
    for tail in _TAILS:
        h = ((head ^ tail) * _M) & _MASK
        h = ((h ^ h >> 13) * _M) & _MASK
        if ((h ^ h >> 15) & _POSITIVE) % partitions == shard:
            yield text + tail.to_bytes(2, "little").decode()
