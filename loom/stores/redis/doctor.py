"""What ``loom doctor`` asks a Redis: does it keep what loom puts there (kafka.md "Redis")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from loom.stores.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from loom.stores.redis.connection import RedisConnection

MIN_VERSION: Final = (6, 2)
FULL: Final = 0.9
"""Share of ``maxmemory`` from which on a warning is due: a full Redis refuses leases and alarms."""


async def examine(connection: RedisConnection) -> list[Finding]:
    """Return what stands in the way of leases and alarms on this server; empty if nothing does.

    Raises:
        UnreachableError: it does not answer. ConfigError: it refuses the credentials.
        StoreRefusedError: it does not let this user read INFO.
    """
    info = await connection.command("INFO", "all")
    return list(_findings(info, connection.address)) if isinstance(info, dict) else []


def _findings(info: Mapping[str, Any], where: str) -> Iterator[Finding]:
    version = str(info.get("redis_version", ""))
    if _numbers(version) < MIN_VERSION:
        yield Finding(
            "redis-version",
            "error",
            f"Redis at {where} is version {version or 'unknown'}",
            "run 6.2 or newer",
        )
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        yield Finding(
            "redis-evicts",
            "error",
            f"Redis at {where} evicts keys when it is full ({policy}): leases, alarms and keys would vanish",
            "set maxmemory-policy to noeviction",
        )
    if not int(info.get("aof_enabled", 0)):
        yield Finding(
            "redis-not-durable",
            "warning",
            f"Redis at {where} keeps no append-only file: a restart loses the newest leases and alarms "
            "(rebuilt from the log) and the newest keys of subjects (not rebuilt)",
            "set appendonly to yes",
        )
    elif info.get("aof_last_write_status", "ok") != "ok":
        yield Finding(
            "redis-aof-fails",
            "error",
            f"Redis at {where} cannot write its append-only file",
            "free disk space there",
        )
    if info.get("role", "master") != "master":
        yield Finding(
            "redis-replica",
            "error",
            f"Redis at {where} is a replica and takes no writes",
            "name the primary in redis_url",
        )
    if int(info.get("cluster_enabled", 0)):
        yield Finding(
            "redis-cluster",
            "error",
            f"Redis at {where} is a node of a cluster",
            "name a Redis that is not clustered",
        )
    limit, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
    if limit and used > limit * FULL:
        yield Finding(
            "redis-full",
            "warning",
            f"Redis at {where} uses {100 * used // limit} % of maxmemory",
            "raise maxmemory",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
