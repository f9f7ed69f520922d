"""The one place where nonces are made: 96 random bits each (system.md 2.9).

Tests that compare logs byte for byte may give another source. It has to be branded, which only ``loom.testing.crypto``
does, and works only where a test runner is evident: a repeated nonce under AES-GCM gives the plaintext away.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final
from weakref import WeakSet

from loom.entropy import Entropy
from loom.errors import ConfigError

NONCE_BYTES: Final = 12

_bits = Entropy(NONCE_BYTES)

_RUNNERS: Final = ("PYTEST_CURRENT_TEST", "PYTEST_VERSION")
_ENVIRONMENT: Final = "LOOM_ENV"


NoncePlace = tuple[str, int | None, str, str]
"""What a nonce is for: stream, sequence (None where the store assigns it), id and path of an event's (or snapshot's) field."""

NonceSource = Callable[[NoncePlace], bytes]

_branded: WeakSet[NonceSource] = WeakSet()


def random_nonce(_place: NoncePlace) -> bytes:
    """Return 96 random bits of the operating system."""
    return _bits()


def brand(source: NonceSource) -> NonceSource:
    """Let a source of chosen nonces be used. Only ``loom.testing.crypto`` calls this; a test pins it.

    Raises:
        ConfigError: no test runner is evident.
    """
    check_test_runner()
    _branded.add(source)
    return source


def nonce_source(given: NonceSource | None) -> NonceSource:
    """Return the source to seal with: the random one unless a branded one is given.

    Raises:
        ConfigError: the given one has no brand, or no test runner is evident.
    """
    if given is None:
        return random_nonce
    if given not in _branded:
        raise _refused("it is not one of loom.testing.crypto")
    check_test_runner()
    return given


def check_test_runner() -> None:
    """Refuse to go on unless a test is evidently being run; ``LOOM_ENV=production`` is refused always.

    Raises:
        ConfigError: none is.
    """
    if os.environ.get(_ENVIRONMENT, "").lower() == "production" or not any(map(os.environ.get, _RUNNERS)):
        raise _refused("no test runner is evident")


def _refused(problem: str) -> ConfigError:
    return ConfigError(
        "iv_source", problem, "leave it out: nonces are random, and only tests may choose them"
    )
