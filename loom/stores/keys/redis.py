"""Keys on Redis, shared by a fleet. Redis must persist them: what it loses, nobody can open any more.

Each script is atomic and harmless when repeated; the shape of a row is that of ``loom.stores.keys.file.dump_row``.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from pydantic_core import from_json, to_json

from loom.errors import DecodeError, LoomError
from loom.ids import IdSource, ulid
from loom.stores.gathered import Gathered
from loom.stores.keys.file import load_row
from loom.stores.keys.store import Charge, KeyRow, WrappingKeyStore
from loom.stores.redis.connection import RedisConnection
from loom.stores.redis.scripts import Script

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loom.stores.keys.wrapping import KeyWrapper

_PART: Final = "keys"


def _script(name: str, source: str) -> Script:
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


# KEYS: rows (hash: subject -> row). ARGV: a JSON list of [subject, key id, wrapped key, uses, limit (-1: always a new
# version)]. Answered is a JSON list of rows; one that is the proposal alone is '': whoever proposed it knows it. One word each
# way costs this process less than five and one for each.
_CHARGE: Final = _script(
    "charge keys",
    """
local rows = {}
for at, charge in ipairs(cjson.decode(ARGV[1])) do
  local subject, id, wrapped, uses, limit = unpack(charge)
  local raw = redis.call('HGET', KEYS[1], subject)
  local row = raw and cjson.decode(raw) or {k = {}}
  if not row.d then
    local n = #row.k
    if n > 0 and row.k[n][3] + uses <= limit then
      row.k[n][3] = row.k[n][3] + uses
    else
      row.k[n + 1] = {id, wrapped, uses}
    end
    raw = cjson.encode(row)
    redis.call('HSET', KEYS[1], subject, raw)
    if n == 0 then raw = '' end
  end
  rows[at] = raw
end
return cjson.encode(rows)
""",
)

_DESTROY: Final = _script(
    "destroy keys",
    """
local raw = redis.call('HGET', KEYS[1], ARGV[1])
if not raw or cjson.decode(raw).d then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], '{"d":1}')
return 1
""",
)


class _RedisRows:
    waits = True

    def __init__(self, connection: RedisConnection) -> None:
        self.connection = connection
        self._keys = [connection.key(_PART, "rows")]
        self._loads = Gathered(self._load_all)

    async def load(self, subject: str) -> KeyRow | None:
        raw = await self._loads.ask(subject)
        return None if raw is None else load_row(raw, subject)

    async def charge(self, charges: Sequence[Charge]) -> list[KeyRow | LoomError | None]:
        words = [(subject, key.id, key.wrapped.hex(), key.uses, limit) for subject, key, limit in charges]
        rows = from_json(await self.connection.call(_CHARGE, self._keys, [to_json(words).decode()]))
        return [
            _loaded(raw, subject) if raw else None for raw, (subject, _, _) in zip(rows, charges, strict=True)
        ]

    async def destroy(self, subject: str) -> bool:
        return bool(await self.connection.call(_DESTROY, self._keys, [subject]))

    def identity(self) -> str:
        return f"redis://{self.connection.address}/{self.connection.database}#{self.connection.prefix}"

    async def close(self) -> None:
        await self.connection.close()

    async def _load_all(self, subjects: Sequence[str]) -> list[str | None]:
        found: list[str | None] = await self.connection.command("HMGET", self._keys[0], *subjects)
        return found


def _loaded(raw: str, subject: str) -> KeyRow | LoomError:
    try:
        return load_row(raw, subject)
    except DecodeError as error:
        return error


class RedisKeyStore(WrappingKeyStore):
    """See :class:`loom.stores.keys.contract.KeyStore`. Errors of every call: those of ``RedisConnection.call``."""

    def __init__(
        self,
        url: str,
        prefix: str,
        wrapper: KeyWrapper,
        *,
        timeout_ms: int = 1000,
        ids: IdSource | None = None,
    ) -> None:
        """Prepare the store; nothing is connected yet."""
        self.connection = RedisConnection(url, prefix, timeout_ms=timeout_ms, ids=ulid)
        super().__init__(_RedisRows(self.connection), wrapper, ids=ids)
