"""The flow of the mixed fleet. It notes what reached it, so that ciphertext would be seen there too."""

import json
import os
from pathlib import Path

from loom import Context, flow


def note(execution_id: str, what: str, value: object) -> None:
    """One line in the ledger of what the flows of this fleet were handed."""
    line = json.dumps({"execution": execution_id, "what": what, "value": value}) + "\n"
    with Path(os.environ["FLEET_LEDGER"]).open("a") as ledger:
        ledger.write(line)


async def keep(execution_id: str, value: str) -> str:
    """A step whose result rests sealed."""
    note(execution_id, "step", value)
    return value + "+"


@flow("sealed-busy")
async def sealed_busy(ctx: Context, secret: str) -> str:
    """Sealed input, steps and messages, a timer, a message more."""
    note(ctx.execution_id, "input", secret)
    kept = await ctx.run(keep, ctx.execution_id, secret)
    first = await ctx.receive("go")
    note(ctx.execution_id, "message", first)
    await ctx.sleep(0.2)
    kept = await ctx.run(keep, ctx.execution_id, kept + first)
    second = await ctx.receive("go")
    note(ctx.execution_id, "message", second)
    return kept + second
