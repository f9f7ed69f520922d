"""One bounded connection pool to Redis: scripts by digest, typed errors, no retry that loom did not decide (pitfalls.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import redis.exceptions
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from loom.errors import ConfigError, LoomError, StoreRefusedError, UnreachableError
from loom.ids import IdSource, ulid
from loom.stores.redis.scripts import EPOCH, Script

SETTING: Final = "redis_url"
MIN_TIMEOUT_MS: Final = 100
"""No call is given less by default: pauses of a loaded host would look like an outage of the server."""

_FOREIGN: Final[tuple[type[Exception], ...]] = (
    OSError,
    *(
        kind
        for kind in vars(redis.exceptions).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    ),
)
"""What the system may raise, and every exception that redis-py defines: not all share a base."""

TimedOut = Callable[[str, int], LoomError]
"""Builds the error of a call that was not answered in time, from what was asked and the bound in milliseconds."""


class RedisConnection:
    """A pool of at most ``max_connections`` connections to one Redis server, under one key prefix.

    A store owns its connection and closes it. Keys are made by :meth:`key`: all keys of one part carry one hash tag,
    hence one slot. redis-py's own retries are off: a script that timed out may have been applied, so whether it is
    sent again is for the caller to decide, and every script of ours is harmless when it is.
    """

    def __init__(
        self,
        url: str,
        prefix: str,
        *,
        timeout_ms: int = 1000,
        floor_ms: int = MIN_TIMEOUT_MS,
        max_connections: int = 8,
        ids: IdSource = ulid,
        timed_out: TimedOut | None = None,
    ) -> None:
        """Prepare the pool; nothing is connected yet.

        Args:
            url: ``redis://``, ``rediss://`` or ``unix://``.
            prefix: start of every key; must not hold braces.
            timeout_ms: bound of every call, waiting for a free connection included.
            floor_ms: no call that asks for less is given less.
            max_connections: bound of the pool.
            ids: where the identity of an empty store comes from.
            timed_out: the error for a call that was not answered in time; default UnreachableError.

        Raises:
            ConfigError: the URL or the prefix cannot be used.
        """
        if not prefix or "{" in prefix or "}" in prefix:
            raise ConfigError("redis_prefix", f"{prefix!r} cannot start a key", "use a name without braces")
        self.prefix, self.timeout_ms, self._floor_ms = prefix, timeout_ms, floor_ms
        self._ids, self._timed_out = ids, timed_out
        seconds = timeout_ms / 1000
        try:
            self._pool = BlockingConnectionPool.from_url(
                url,
                max_connections=max_connections,
                timeout=None,  # bounded with the rest of the call
                socket_timeout=seconds,
                socket_connect_timeout=seconds,
                retry=Retry(NoBackoff(), 0),
                decode_responses=True,
            )
        except ValueError:  # its text may repeat a password
            raise ConfigError(SETTING, "the URL cannot be used", "write redis://HOST:PORT/DB") from None
        self.address = _address(self._pool.connection_kwargs)
        self.database = str(self._pool.connection_kwargs.get("db") or 0)
        self._client: Redis = Redis(connection_pool=self._pool)
        self._execute: Callable[..., Awaitable[Any]] = self._client.execute_command

    def key(self, part: str, name: str) -> str:
        """Return the key ``name`` of a part; every key of the part lives in one slot."""
        return f"{{{self.prefix}{part}}}:{name}"

    async def call(
        self, script: Script, keys: Sequence[str], args: Sequence[str | int], *, timeout_ms: int | None = None
    ) -> Any:
        """Run a script once and return its answer.

        An answer of NOSCRIPT proves that nothing ran, so the whole source is sent instead: it runs even if the
        script cache is emptied again in between.

        Raises:
            UnreachableError: no connection, or it broke: the script may have run.
            what ``timed_out`` builds: no answer in time: the script may have run.
            ConfigError: the server refuses the credentials, or is a node of a Redis Cluster.
            StoreRefusedError: the server refused it.
        """
        return await self._bounded(script.name, lambda: self._run(script, keys, args), timeout_ms)

    async def command(self, *words: str | int) -> Any:
        """Run one plain command; same errors as :meth:`call`."""
        return await self._bounded(str(words[0]).lower(), lambda: self._execute(*words), None)

    async def epoch(self, part: str) -> str:
        """Return the identity of what the server holds: another after it was emptied, restarted or replaced.

        The identity of the process is part of it, since a server that comes back, or a replica that takes over, may
        lack the last writes. Where the server does not tell it, only emptying shows.
        """
        identity = await self.call(EPOCH, [self.key(part, "epoch")], [self._ids()])
        try:
            info = await self.command("INFO", "server")
        except (ConfigError, StoreRefusedError):
            return str(identity)
        return f"{identity}.{info.get('run_id', '') if isinstance(info, dict) else ''}"

    async def close(self) -> None:
        """Close every connection; idempotent."""
        await self._client.aclose()
        await self._pool.disconnect()

    async def _run(self, script: Script, keys: Sequence[str], args: Sequence[str | int]) -> Any:
        try:
            return await self._execute("EVALSHA", script.sha, len(keys), *keys, *args)
        except redis.exceptions.NoScriptError:
            return await self._execute("EVAL", script.source, len(keys), *keys, *args)

    def _late(self, what: str, bound_ms: int) -> LoomError:
        if self._timed_out is not None:
            return self._timed_out(f"{what} on Redis at {self.address}", bound_ms)
        return UnreachableError("Redis", self.address, SETTING, f"{what}: no answer within {bound_ms} ms")

    async def _bounded(self, what: str, call: Callable[[], Any], timeout_ms: int | None) -> Any:
        bound = max(self._floor_ms, min(self.timeout_ms, timeout_ms or self.timeout_ms))
        task = asyncio.current_task()
        cancels = task.cancelling() if task is not None else 0
        try:
            async with asyncio.timeout(bound / 1000):
                answer = await call()
        except (TimeoutError, redis.exceptions.TimeoutError):
            raise self._late(what, bound) from None
        except _FOREIGN as error:
            raise translated(error, self.address) from None
        if task is not None and task.cancelling() > cancels:
            # redis-py sends under asyncio.wait_for, which before Python 3.12 loses a cancellation that comes just as
            # the sending is done; a task that polls would never end.
            raise asyncio.CancelledError
        return answer


def translated(error: Exception, address: str) -> LoomError:
    """Return loom's error for one of redis-py's or the system's; it repeats no text that could hold a value."""
    for kinds, build in _TRANSLATIONS:
        if isinstance(error, kinds):
            return build(type(error).__name__, address)
    return StoreRefusedError(
        "Redis", address, f"{type(error).__name__} ({_code(error)})", "check the server with `loom doctor`"
    )


def _unreachable(problem: str) -> Callable[[str, str], LoomError]:
    return lambda name, address: UnreachableError("Redis", address, SETTING, problem or name)


_TRANSLATIONS: Final[tuple[tuple[tuple[type[Exception], ...], Callable[[str, str], LoomError]], ...]] = (
    (
        (
            redis.exceptions.AuthenticationError,
            redis.exceptions.AuthorizationError,
            redis.exceptions.AuthenticationWrongNumberOfArgsError,
            redis.exceptions.NoPermissionError,
        ),
        lambda name, address: ConfigError(
            SETTING,
            f"Redis at {address} refuses the credentials ({name})",
            "correct the user and the password",
        ),
    ),
    ((redis.exceptions.MasterDownError,), _unreachable("it is a replica that lost its primary")),
    (
        (
            redis.exceptions.RedisClusterException,
            redis.exceptions.ClusterError,
            redis.exceptions.AskError,
            redis.exceptions.TryAgainError,
            redis.exceptions.ClusterCrossSlotError,
        ),
        lambda name, address: ConfigError(
            SETTING, f"{address} is a node of a Redis Cluster ({name})", "name a Redis that is not clustered"
        ),
    ),
    ((redis.exceptions.ReadOnlyError,), _unreachable("it is a replica that takes no writes")),
    ((redis.exceptions.BusyLoadingError,), _unreachable("it is still loading its data")),
    ((redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError), _unreachable("")),
    (
        (redis.exceptions.OutOfMemoryError,),
        lambda _, address: StoreRefusedError(
            "Redis", address, "it is out of memory", "give it more, or raise maxmemory"
        ),
    ),
)
"""The first kind that fits decides; what none fits is refused by the server for a reason of its own."""


def _code(error: Exception) -> str:
    """Return the error code a server's answer starts with, and nothing of what may follow it."""
    first = str(error).split(" ", 1)[0]
    return first if first.isascii() and first.isupper() else "no code"


def _address(kwargs: dict[str, Any]) -> str:
    if path := kwargs.get("path"):
        return str(path)
    return f"{kwargs.get('host', 'localhost')}:{kwargs.get('port', 6379)}"
