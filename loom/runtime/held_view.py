"""What operators see of held messages: since when, by whom, why, and what each waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from loom.errors import SealedStreamUnreadableError
from loom.kernel.guard import Verdict, inspect_payload
from loom.kernel.quarantine import HELD, Entry
from loom.runtime.holds import read_entry
from loom.runtime.wake_rows import open_logs
from loom.schemas.envelope import Kind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from loom.runtime.engine import Engine
    from loom.runtime.reading import Loaded
    from loom.schemas.envelope import Envelope, Json

MAX_HOPS: Final = 64
"""Predecessors of a chain in which the fact of a carried hold is looked for."""


async def held_rows(engine: Engine, loaded: Loaded) -> list[dict[str, Json]]:
    """The held messages of an execution, per topic, oldest first."""
    state = loaded.state
    if not state.quarantined:
        return []
    told = await _facts(engine, loaded)
    rows: list[dict[str, Json]] = []
    for topic, queue in state.quarantined.items():
        for place, entry in enumerate(queue):
            copy = await read_entry(engine, state.chain_id, topic, entry)
            fact = told.get((topic, str(entry["key"]), int(entry["inboxSeq"])))
            data = {} if fact is None else fact.data
            row: dict[str, Json] = {
                "topic": topic,
                "inbox_seq": entry["inboxSeq"],
                "message_id": data.get("messageId", entry["key"]) if copy is None else copy.message_id,
                "sender": None if copy is None else copy.sender,
                "age_ms": None if fact is None else max(0, engine.now() - fact.timestamp),
                "state": entry["state"],
                "held_since": None if fact is None else fact.timestamp,
                "held_by": (data.get("operator") or {}).get("actor"),
                "reason": data.get("reason"),
                "awaits": _awaits(entry, place, None if copy is None else inspect_payload(copy.payload)),
            }
            if (
                not engine.config.inbox_auto_release
                and row["awaits"] == "delivery"
                and entry["state"] == HELD
            ):
                row["awaits"] = "an operator"
            rows.append(row)
    return rows


def _awaits(entry: Entry, place: int, verdict: Verdict | None) -> str:
    """What has to happen before a held message is delivered, as far as this node can tell."""
    if place:
        return "the one before it"
    if entry["state"] == HELD and verdict is not Verdict.CLEAN:
        return "a capable node"
    return "delivery"


async def _facts(engine: Engine, loaded: Loaded) -> dict[tuple[str, str, int], Envelope]:
    """The facts that held what is held now; those of carried holds stand in the logs before this one."""
    missing = {
        (topic, str(e["key"]), int(e["inboxSeq"])) for topic, q in loaded.state.quarantined.items() for e in q
    }
    found: dict[tuple[str, str, int], Envelope] = {}
    at: Loaded | None = loaded
    for _ in range(MAX_HOPS):
        if at is None:
            break
        found |= {key: fact for key, fact in _holds(at.history) if key in missing and key not in found}
        before = at.state.continued_from
        if before is None or missing <= found.keys():
            break
        at = await engine.driving.load(before)
    return found


def _holds(history: Iterable[Envelope]) -> Iterable[tuple[tuple[str, str, int], Envelope]]:
    for event in history:
        if event.type == Kind.INBOX_QUARANTINED:
            data = event.data
            yield (str(data.get("topic")), str(data.get("key")), int(data.get("inboxSeq", -1))), event


async def held_everywhere(engine: Engine, chains: Iterable[str] | None) -> AsyncIterator[dict[str, Json]]:
    """Every held message of these chains, else of the open executions served here; reads each of their logs.

    A log that cannot be opened here is told in a row of its own, without its messages.
    """
    ids = _served(engine) if chains is None else _heads(engine, chains)
    async for execution_id in ids:
        try:
            loaded = await engine.driving.load(execution_id)
        except SealedStreamUnreadableError:
            yield {"execution_id": execution_id, "state": "cannot be opened here"}
            continue
        for row in [] if loaded is None or loaded.state.finished else await held_rows(engine, loaded):
            yield {"execution_id": execution_id, **row}


async def _served(engine: Engine) -> AsyncIterator[str]:
    async for info in open_logs(engine):
        yield info.stream_id


async def _heads(engine: Engine, chains: Iterable[str]) -> AsyncIterator[str]:
    for chain_id in chains:
        try:
            yield await engine.driving.current(chain_id)
        except SealedStreamUnreadableError:
            yield chain_id
