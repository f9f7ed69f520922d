"""The key store that settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loom.errors import ConfigError
from loom.stores.keys.file import FileKeyStore
from loom.stores.keys.memory import MemoryKeyStore
from loom.stores.keys.redis import RedisKeyStore
from loom.stores.keys.wrapping import load_kek

if TYPE_CHECKING:
    from loom.config import Config
    from loom.stores.keys.contract import KeyStore


def open_keys(config: Config) -> KeyStore | None:
    """Return the store of ``sealing.keys``; None where none is named, so nothing is sealed. The caller closes it.

    Raises:
        ConfigError: the key-encryption key, the file or the Redis that it needs is missing.
    """
    sealing = config.sealing
    if sealing.keys is None:
        return None
    if sealing.keys == "memory":
        return MemoryKeyStore(wrapper=load_kek(sealing.kek) if sealing.kek else None)
    wrapper = load_kek(sealing.kek)
    if sealing.keys.startswith("file:"):
        return FileKeyStore(sealing.keys.removeprefix("file:"), wrapper)
    if config.redis_url is None:
        raise ConfigError("redis_url", "it is missing, and sealing.keys is redis", "set LOOM_REDIS_URL")
    return RedisKeyStore(config.redis_url, config.topic_prefix, wrapper)
