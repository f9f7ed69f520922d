"""The scripts of the Redis stores. Each is atomic, judges time by the server's clock, and may be repeated unharmed.

All keys come in ``KEYS``. Rows are packed into one string per field, numbers first, so that a name may hold anything.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Script:
    """A script: its name in errors, its source, and the digest by which the server caches it."""

    name: str
    source: str
    sha: str


def _script(name: str, *parts: str) -> Script:
    source = "".join(parts)
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


_NOW: Final = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
"""

EPOCH: Final = _script(
    "epoch",
    """
redis.call('SET', KEYS[1], ARGV[1], 'NX')
return redis.call('GET', KEYS[1])
""",
)

# Leases. KEYS: rows (hash: id -> "acquired expires owner"), expiry (zset by expires), lapsed (zset by id).
# A row is in exactly one of expiry and lapsed; LEASE_EXPIRED moves what has expired from the first to the second,
# so that a page of expired rows in the order of ids costs what it returns.
_LEASE: Final = (
    _NOW
    + """
local function load(id)
  local row = redis.call('HGET', KEYS[1], id)
  if not row then return nil end
  local since, till, owner = string.match(row, '^(%d+) (%d+) (.*)$')
  return {since = tonumber(since), till = tonumber(till), owner = owner}
end
local function keep(id, since, till, owner)
  redis.call('HSET', KEYS[1], id, string.format('%.0f %.0f %s', since, till, owner))
  redis.call('ZADD', KEYS[2], till, id)
  redis.call('ZREM', KEYS[3], id)
end
"""
)

LEASE_ACQUIRE: Final = _script(
    "acquire a lease",
    _LEASE,
    """
local owner, ttl, held = ARGV[1], tonumber(ARGV[2]), {}
for i = 3, #ARGV do
  local id, since = ARGV[i], now
  local row = load(id)
  local ours = row and row.owner == owner
  if ours then since = row.since end
  if not row or ours or row.till <= now then
    keep(id, since, now + ttl, owner)
    held[#held + 1] = {id, since, now + ttl}
  end
end
return held
""",
)

LEASE_RENEW: Final = _script(
    "renew leases",
    _LEASE,
    """
local owner, ttl, held = ARGV[1], tonumber(ARGV[2]), {}
for i = 3, #ARGV do
  local row = load(ARGV[i])
  if row and row.owner == owner then
    keep(ARGV[i], row.since, now + ttl, owner)
    held[#held + 1] = ARGV[i]
  end
end
return held
""",
)

LEASE_RELEASE: Final = _script(
    "release leases",
    _LEASE,
    """
local released = {}
for i = 2, #ARGV do
  local row = load(ARGV[i])
  if row and row.owner == ARGV[1] then
    redis.call('HDEL', KEYS[1], ARGV[i])
    redis.call('ZREM', KEYS[2], ARGV[i])
    redis.call('ZREM', KEYS[3], ARGV[i])
    released[#released + 1] = ARGV[i]
  end
end
return released
""",
)

LEASE_STEAL: Final = _script(
    "steal a lease",
    _LEASE,
    """
local row = load(ARGV[3])
local since = now
if row and row.owner == ARGV[1] then since = row.since end
keep(ARGV[3], since, now + tonumber(ARGV[2]), ARGV[1])
return {since, now + tonumber(ARGV[2])}
""",
)

LEASE_GET: Final = _script(
    "read a lease",
    _LEASE,
    """
local row = load(ARGV[1])
if not row then return nil end
return {row.owner, row.since, row.till, row.till <= now and 1 or 0}
""",
)

LEASE_EXPIRED: Final = _script(
    "list expired leases",
    _LEASE,
    """
local after, limit, cap = ARGV[1], ARGV[2], ARGV[3]
local moved = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, cap)
for _, id in ipairs(moved) do
  redis.call('ZREM', KEYS[2], id)
  redis.call('ZADD', KEYS[3], 0, id)
end
local from = after == '' and '-' or '(' .. after
local rows = {}
for _, id in ipairs(redis.call('ZRANGEBYLEX', KEYS[3], from, '+', 'LIMIT', 0, limit)) do
  local row = load(id)
  if row and row.till <= now then
    rows[#rows + 1] = {id, row.owner, row.since, row.till}
  end
end
return {#moved, rows}
""",
)

LEASE_HELD: Final = _script(
    "list leases",
    _LEASE,
    """
local last, rows = tonumber(ARGV[1]) - 1, {}
for i = 3, 2, -1 do
  for _, id in ipairs(redis.call('ZRANGE', KEYS[i], 0, last)) do
    local row = load(id)
    if row then rows[#rows + 1] = {id, row.owner, row.since, row.till, row.till <= now and 1 or 0} end
  end
end
return rows
""",
)

CLOCK: Final = _script("read the clock", _NOW, "return now")

# Presence. KEYS: present (hash: node -> "expires json").
_PRESENCE: Final = (
    _NOW
    + """
local function shown(node, row)
  local till, body = string.match(row, '^(%d+) (.*)$')
  return {node, tonumber(till), tonumber(till) <= now and 1 or 0, body}
end
"""
)

PRESENCE_BEAT: Final = _script(
    "announce presence",
    _NOW,
    """
local till = now + tonumber(ARGV[2])
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f %s', till, ARGV[3]))
return till
""",
)

PRESENCE_GET: Final = _script(
    "read presence",
    _PRESENCE,
    """
local rows = {}
for _, node in ipairs(ARGV) do
  local row = redis.call('HGET', KEYS[1], node)
  if row then rows[#rows + 1] = shown(node, row) end
end
return rows
""",
)

PRESENCE_ALL: Final = _script(
    "list presence",
    _PRESENCE,
    """
local flat, rows = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #flat, 2 do rows[#rows + 1] = shown(flat[i], flat[i + 1]) end
return rows
""",
)

PRESENCE_LEAVE: Final = _script(
    "end presence",
    _PRESENCE,
    """
local row = redis.call('HGET', KEYS[1], ARGV[1])
if not row then return 0 end
local seen = shown(ARGV[1], row)
if seen[2] > now then redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f %s', now, seen[4])) end
return 1
""",
)

# Wake rows of one shard. KEYS: rows (hash: member -> "head holds again claimed_until kind owner"), due (zset by
# wake_at: timers and inbox rows), refused (zset by wake_at: refusal rows), ids (zset by member). A member is
# "<execution_id>:<wake_at>"; ids hold no colon, so the rows of one execution stand together in ids.
_WAKE: Final = (
    _NOW
    + """
local RANK = {inbox = 0, refusal = 1, timer = 2}
local function load(member)
  local row = redis.call('HGET', KEYS[1], member)
  if not row then return nil end
  local head, holds, again, till, kind, owner = string.match(row, '^(%-?%d+) (%d+) (%d) (%d+) (%a+) (.*)$')
  return {head = tonumber(head), holds = tonumber(holds), again = again, till = tonumber(till), kind = kind, owner = owner}
end
local function keep(member, wake_at, row)
  redis.call('HSET', KEYS[1], member,
    string.format('%.0f %.0f %s %.0f %s %s', row.head, row.holds, row.again, row.till, row.kind, row.owner))
  local mine, other = KEYS[2], KEYS[3]
  if row.kind == 'refusal' then mine, other = other, mine end
  redis.call('ZADD', mine, wake_at, member)
  redis.call('ZREM', other, member)
  redis.call('ZADD', KEYS[4], 0, member)
end
local function drop(member)
  redis.call('HDEL', KEYS[1], member)
  redis.call('ZREM', KEYS[2], member)
  redis.call('ZREM', KEYS[3], member)
  redis.call('ZREM', KEYS[4], member)
end
local function upsert(member, wake_at, kind, head, holds)
  local row = load(member)
  if not row then
    row = {head = head, holds = holds, again = '0', till = 0, kind = kind, owner = ''}
  else
    if kind ~= 'timer' and row.till > now then row.again = '1' end
    if RANK[kind] > RANK[row.kind] then row.kind = kind end
    row.head, row.holds = math.max(row.head, head), math.max(row.holds, holds)
  end
  keep(member, wake_at, row)
end
"""
)

WAKE_SCHEDULE: Final = _script(
    "schedule wake rows",
    _WAKE,
    """
for i = 1, #ARGV, 5 do
  upsert(ARGV[i], ARGV[i + 1], ARGV[i + 2], tonumber(ARGV[i + 3]), tonumber(ARGV[i + 4]))
end
""",
)

# Claimed rows are stepped over, within a bound: a shard never has more of them than its pollers are driving.
WAKE_DUE: Final = _script(
    "list due wake rows",
    _WAKE,
    """
local until_, limit, rows = ARGV[1], tonumber(ARGV[2]), {}
local function collect(key)
  local found, offset = 0, 0
  while found < limit and offset < 8192 do
    local page = redis.call('ZRANGEBYSCORE', key, '-inf', until_, 'LIMIT', offset, 256)
    for _, member in ipairs(page) do
      local row = load(member)
      if row and row.till <= now and found < limit then
        found = found + 1
        rows[#rows + 1] = {member, row.kind, row.head, row.holds}
      end
    end
    if #page < 256 then return end
    offset = offset + 256
  end
end
collect(KEYS[2])
if ARGV[3] == '1' then collect(KEYS[3]) end
return rows
""",
)

WAKE_REFUSALS: Final = _script(
    "list refused wake rows",
    _WAKE,
    """
local rows = {}
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', ARGV[1], 'LIMIT', ARGV[2], ARGV[3])) do
  local row = load(member)
  if row then rows[#rows + 1] = {member, row.kind, row.head, row.holds} end
end
return rows
""",
)

WAKE_CLAIM: Final = _script(
    "claim a wake row",
    _WAKE,
    """
local row = load(ARGV[1])
if not row or (row.till > now and row.owner ~= ARGV[3]) then return 0 end
row.till, row.owner = now + tonumber(ARGV[4]), ARGV[3]
keep(ARGV[1], ARGV[2], row)
return 1
""",
)

WAKE_COMPLETE: Final = _script(
    "complete a wake row",
    _WAKE,
    """
local row = load(ARGV[1])
if not row then return 0 end
if row.again == '1' then
  row.again, row.till, row.owner = '0', 0, ''
  keep(ARGV[1], ARGV[2], row)
else
  drop(ARGV[1])
end
return 1
""",
)

WAKE_MOVE: Final = _script(
    "move a wake row",
    _WAKE,
    """
local row = load(ARGV[1])
local kind, head, holds = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
if not row or (row.kind == 'timer' and kind ~= 'timer') then return 0 end
drop(ARGV[1])
upsert(ARGV[2], ARGV[3], kind, math.max(row.head, head), math.max(row.holds, holds))
return 1
""",
)

WAKE_ROWS_OF: Final = _script(
    "read wake rows",
    _WAKE,
    """
local rows = {}
for _, member in ipairs(redis.call('ZRANGEBYLEX', KEYS[4], '[' .. ARGV[1] .. ':', '(' .. ARGV[1] .. ';')) do
  local row = load(member)
  if row then rows[#rows + 1] = {member, row.kind, row.head, row.holds} end
end
return rows
""",
)

WAKE_CLEAR: Final = _script(
    "clear wake rows",
    _WAKE,
    """
local members = redis.call('ZRANGEBYLEX', KEYS[4], '[' .. ARGV[1] .. ':', '(' .. ARGV[1] .. ';')
for _, member in ipairs(members) do drop(member) end
return #members
""",
)
