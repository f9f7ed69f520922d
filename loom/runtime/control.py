"""Control records: what is written behind the last event of a log by whoever does not drive it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loom.errors import WrongHeadError
from loom.stores.contracts import NO_EVENTS, StreamAppend

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from loom.runtime.engine import Engine
    from loom.schemas.envelope import NewEvent


async def append_control(
    engine: Engine,
    execution_id: str,
    event: NewEvent,
    *,
    races: int,
    check: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Append where the log ends as observed; again where somebody was quicker, at most ``races`` times.

    ``check`` is asked after each observation, and raises where nothing is to be written.

    Raises:
        WrongHeadError: others were quicker each time. What the store raises once patience has ended.
    """
    for _ in range(races):
        seen = await engine.patiently(lambda: engine.events.observe(execution_id), execution_id)
        if check is not None:
            await check()
        append = StreamAppend(execution_id, (event,), observation=seen)
        try:
            await engine.patiently(lambda append=append: engine.events.append(append), execution_id)  # type: ignore[misc]
        except WrongHeadError:
            continue
        return
    raise WrongHeadError(execution_id, NO_EVENTS, NO_EVENTS)
