"""When a schedule fires: the instants after another, in order, by cron or by interval."""

from __future__ import annotations

import datetime as dt
import itertools
from typing import TYPE_CHECKING, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from loom.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

CRON_FIELDS: Final = 5
ANY_TIME: Final = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)


def check_cron(expression: str) -> None:
    """Read a cron expression.

    Raises:
        InvalidInputError: it is none, or never fires.
    """
    remedy = 'write five fields: minute, hour, day of month, month, day of week, as "30 2 * * 1-5"'
    if not isinstance(expression, str) or len(expression.split()) != CRON_FIELDS:
        raise InvalidInputError("cron", "it does not have five fields", remedy)
    try:
        next(CronSim(expression, ANY_TIME))
    except CronSimError as error:
        raise InvalidInputError("cron", f"it cannot be read ({error})", remedy) from None
    except StopIteration:
        raise InvalidInputError("cron", "no such day ever comes", remedy) from None


def zone_of(name: str) -> dt.tzinfo:
    """The time zone of that name.

    Raises:
        InvalidInputError: there is none here.
    """
    try:
        return dt.UTC if name == "UTC" else ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError, TypeError):
        raise InvalidInputError(
            "time_zone", "no zone of that name is known here", 'use a name as "Europe/Berlin"'
        ) from None


def cron_instants(expression: str, zone: str, after_ms: int) -> Iterator[int]:
    """Instants of a cron expression after another, rising; milliseconds since the epoch.

    An instant that the zone's clocks bring twice counts once, whatever place ``after_ms`` has between the two.
    """
    begin = dt.datetime.fromtimestamp(after_ms // 1000, zone_of(zone))
    last = after_ms
    for found in CronSim(expression, begin):
        at = round(found.timestamp()) * 1000
        if at > last:
            last = at
            yield at


def interval_instants(every_ms: int, offset_ms: int, after_ms: int) -> Iterator[int]:
    """Multiples of a span since the epoch, moved by an offset, after an instant; in milliseconds."""
    first = (after_ms - offset_ms) // every_ms + 1
    return itertools.count(first * every_ms + offset_ms, every_ms)
