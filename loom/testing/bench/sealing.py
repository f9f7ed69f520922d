"""What sealing costs: one-step executions with and without it, and the guard's walk over a payload."""

from __future__ import annotations

import base64
import json
import os
import statistics
import time
from typing import TYPE_CHECKING, Any, Final

from loom.kernel import inspect_payload
from loom.schemas.envelope import Kind
from loom.testing.bench.turns import Mode, take_turns

if TYPE_CHECKING:
    from loom.testing.bench.turns import Windows

UNSEALED: Final = "unsealed"
WALKS: Final = 200
PAYLOAD_BYTES: Final = 64 * 1024
KEK: Final = "LOOM_BENCH_KEK"
SENSITIVE: Final = {
    Kind.EXECUTION_STARTED: ["input"],
    Kind.STEP_COMPLETED: ["output"],
    Kind.EXECUTION_COMPLETED: ["output"],
}


def costs(bootstrap: str, redis_url: str, *, seconds: float) -> dict[str, Windows]:
    """One-step executions unsealed, and with everything of them sealed, keys on Redis (see :func:`take_turns`)."""
    os.environ[KEK] = base64.b64encode(os.urandom(32)).decode()
    sealing: dict[str, Any] = {"keys": "redis", "kek": f"env:{KEK}", "sensitive": SENSITIVE}
    modes = {
        UNSEALED: Mode(),
        "one subject": Mode({"sealing": sealing}, "bench"),
        "a subject each": Mode({"sealing": sealing}),
    }
    return take_turns(bootstrap, redis_url, modes, seconds=seconds)


def payload() -> list[dict[str, Any]]:
    """JSON of about 64 KiB: small records, as a message has them."""
    row = {"sku": "lamp-0001", "price": 4200, "quantity": 2, "tags": ["a", "b"], "note": None}
    return [dict(row) for _ in range(PAYLOAD_BYTES // len(json.dumps(row)))]


def walk_us() -> tuple[float, float]:
    """Microseconds of one walk over the payload: median, and the best."""
    given = payload()
    taken: list[float] = []
    for _ in range(WALKS):
        began = time.perf_counter_ns()
        inspect_payload(given)
        taken.append((time.perf_counter_ns() - began) / 1000)
    return statistics.median(taken), min(taken)
