"""Sealed logs that repeat themselves byte for byte, for tests that compare them. Never outside tests."""

from __future__ import annotations

import hashlib

from loom.stores.sealing.nonces import NONCE_BYTES, NoncePlace, NonceSource, brand, check_test_runner


class _SeededSource:
    """Nonces that follow from seed, stream, sequence, event and path alone."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, place: NoncePlace) -> bytes:
        check_test_runner()
        parts = (str(self._seed), *map(str, place))
        text = "".join(f"{len(part)}:{part}" for part in parts)
        return hashlib.sha256(text.encode()).digest()[:NONCE_BYTES]


def seeded_iv_source(seed: int) -> NonceSource:
    """Return a nonce source for ``iv_source=`` of the encrypting stores: the same seed seals to the same bytes.

    Raises:
        ConfigError: no test runner is evident, or this is production. So does every use of the source.
    """
    return brand(_SeededSource(seed))
