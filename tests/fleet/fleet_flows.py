"""Flows of the fleet tests. Effects are lines in a file, so that what happened outside can be counted."""

import asyncio
import json
import os
import uuid
from pathlib import Path

from loom import Context, flow


async def effect(execution_id: str, name: str) -> str:
    """Do something outside, once per call; the token tells calls apart."""
    token = uuid.uuid4().hex
    line = json.dumps({"execution": execution_id, "name": name, "token": token}) + "\n"
    with Path(os.environ["FLEET_LEDGER"]).open("a") as ledger:  # noqa: ASYNC230 - one short line
        ledger.write(line)
    await asyncio.sleep(0.02)
    return token


@flow("busy")
async def busy(ctx: Context, number: int) -> dict:
    """Steps one by one and side by side, messages of one topic, a timer."""
    me = ctx.execution_id
    steps = [await ctx.run(effect, me, "first")]
    messages = [await ctx.receive("go")]
    await ctx.sleep(0.2)
    steps.append(await ctx.run(effect, me, "second"))
    messages += [await ctx.receive("go"), await ctx.receive("go")]
    steps += await asyncio.gather(*(ctx.run(effect, me, f"side {n}") for n in range(3)))
    return {"number": number, "steps": steps, "messages": messages}


@flow("sleeper")
async def sleeper(ctx: Context, seconds: float) -> str:
    """Waits for its alarm, then does one thing."""
    await ctx.sleep(seconds)
    return await ctx.run(effect, ctx.execution_id, "woken")


@flow("letters")
async def letters(ctx: Context, _number: int) -> list:
    """Told to go, takes what comes on one topic until the end; what it saw, in order."""
    await ctx.receive("go")
    seen: list = []
    while (value := await ctx.receive("t")) != "end":
        seen.append(value)
    return seen


async def slow_effect(execution_id: str, name: str, seconds: float) -> str:
    """Say which worker begins it, then take a while."""
    line = json.dumps({"execution": execution_id, "name": name, "token": os.environ["LOOM_NODE_ID"]}) + "\n"
    with Path(os.environ["FLEET_LEDGER"]).open("a") as ledger:  # noqa: ASYNC230 - one short line
        ledger.write(line)
    await asyncio.sleep(seconds)
    return name


@flow("slow")
async def slow(ctx: Context, seconds: float) -> str:
    """A step that outlasts a TTL, and one behind it."""
    await ctx.run(slow_effect, ctx.execution_id, "first", seconds)
    return await ctx.run(slow_effect, ctx.execution_id, "second", 0.1)


@flow("tick")
async def tick(ctx: Context) -> str:
    """One thing done for one instant."""
    return await ctx.run(effect, ctx.execution_id, "tick")
