"""Key-encryption keys: no data key rests unwrapped. A KMS is another ``KeyWrapper``."""

from __future__ import annotations

import base64
import binascii
import os
from pathlib import Path
from typing import Final, Protocol

from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap, aes_key_wrap

from loom.errors import ConfigError

SETTING: Final = "sealing.kek"
KEY_BYTES: Final = 32
_REMEDY: Final = "give base64 of 32 random bytes, made with `openssl rand -base64 32`"


class KeyWrapper(Protocol):
    """Wraps data keys: a key-encryption key in this process, or a service that holds one (KMS)."""

    ahead: int
    """How many keys are made when one is wanted; 1 where each is a call of a service."""

    async def wrap(self, key: bytes) -> bytes:
        """Return the key as it may rest.

        Raises:
            UnreachableError: a service that wraps does not answer.
        """
        ...

    async def unwrap(self, wrapped: bytes) -> bytes | None:
        """Return the key, None where it was not wrapped by this wrapper; raises as ``wrap``."""
        ...


class KekWrapper:
    """AES key wrap (RFC 3394) under a key-encryption key of 32 bytes.

    ``older`` ones unwrap only: name the previous KEK there while data keys that it wrapped are still in use.
    """

    ahead = 64

    def __init__(self, kek: bytes, *older: bytes) -> None:
        for key in (kek, *older):
            if len(key) != KEY_BYTES:
                raise ConfigError(SETTING, f"a key has {len(key)} bytes, not {KEY_BYTES}", _REMEDY)
        self._keks = (kek, *older)

    async def wrap(self, key: bytes) -> bytes:
        """See :class:`KeyWrapper`."""
        return aes_key_wrap(self._keks[0], key)

    async def unwrap(self, wrapped: bytes) -> bytes | None:
        """See :class:`KeyWrapper`."""
        for kek in self._keks:
            try:
                return aes_key_unwrap(kek, wrapped)
            except (InvalidUnwrap, ValueError):
                continue
        return None


def random_wrapper() -> KekWrapper:
    """A wrapper that nothing outlives, for keys in memory."""
    return KekWrapper(os.urandom(KEY_BYTES))


def load_kek(source: str | None) -> KekWrapper:
    """Read the key-encryption key that ``sealing.kek`` names: ``env:NAME`` or ``file:PATH``, base64 of 32 bytes.

    Several, separated by white space, are the one that wraps and older ones that only unwrap.

    Raises:
        ConfigError: it is not named, not there, or no such key. No part of it is shown.
    """
    if not source:
        raise ConfigError(SETTING, "it is missing", f"set {SETTING} to env:NAME or file:PATH; {_REMEDY}")
    kind, _, name = source.partition(":")
    if kind not in {"env", "file"} or not name:
        raise ConfigError(SETTING, "it names no source", "write env:NAME or file:PATH")
    keys = [_decoded(word, source) for word in _read(kind, name, source).split()]
    if not keys:
        raise ConfigError(SETTING, "it is empty", _REMEDY, source)
    return KekWrapper(*keys)


def _read(kind: str, name: str, source: str) -> str:
    if kind == "env":
        return os.environ.get(name, "")
    try:
        return Path(name).read_text("ascii")
    except (OSError, UnicodeError) as error:
        raise ConfigError(SETTING, f"it cannot be read ({type(error).__name__})", _REMEDY, source) from None


def _decoded(word: str, source: str) -> bytes:
    try:
        key = base64.b64decode(word, validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError(SETTING, "it is no base64", _REMEDY, source) from None
    if len(key) != KEY_BYTES:
        raise ConfigError(SETTING, f"it has {len(key)} bytes, not {KEY_BYTES}", _REMEDY, source)
    return key
