"""The demo's second part: an order whose fields rest sealed, in a fleet of which one worker cannot open them.

That worker owns every partition. It refuses, and leaves the log as it is; its operator is told why, a stranger is told what
strangers are told. A worker with the keys joins and completes the order. Then its customer is erased.
"""

from __future__ import annotations

import base64
import json
import os
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from examples.watch import DemoFailedError, Watch, writer_of
from loom.cli.timeline import describe
from loom.schemas.envelope import TERMINAL_KINDS, Kind

if TYPE_CHECKING:
    from contextlib import ExitStack

    from examples.demo import Demo

ORDER = "order-1006"
CUSTOMER = "customer-7"
CARD = "tok-private-7"
INPUT = {"card": CARD, "items": [{"sku": "lamp", "price": 4200}, {"sku": "bulb", "price": 350}]}
WITH_KEYS = "worker-with-keys"


def keys() -> dict[str, str]:
    """Settings of who has the keys: wrapped by a key of this demo alone, kept in Redis."""
    return {
        "DEMO_KEK": base64.b64encode(os.urandom(32)).decode(),
        "LOOM_SEALING__KEYS": "redis",
        "LOOM_SEALING__KEK": "env:DEMO_KEK",
        "LOOM_SEALING__SENSITIVE": json.dumps(
            {"EXECUTION_STARTED": ["input"], "STEP_COMPLETED": ["output"], "EXECUTION_COMPLETED": ["output"]}
        ),
        "LOOM_ACCESS__OPERATORS": json.dumps(["ops"]),
    }


def tell_of_the_sealed(demo: Demo, watch: Watch, stack: ExitStack) -> None:
    """The story of the sealed order.

    Raises:
        DemoFailedError, TimeoutError: it does not go as promised.
    """
    console, capable = demo.console, keys()
    blind = next(name for name, worker in demo.workers.items() if worker.running)
    console.print()
    console.rule("[bold]a sealed order, and a worker that cannot open it")
    demo.say(
        f"the next order is sealed for {CUSTOMER}; {blind}, alone and without keys, owns every partition"
    )
    demo.loom(
        *("start", "order", "--id", ORDER, "--subject", CUSTOMER, "--as", "alice"),
        *("--input", json.dumps(INPUT)),
        env=capable,
    )
    refused = f"({ORDER}): its log is sealed"
    log = demo.workers[blind].log_path
    demo.until(watch, "the refusal", lambda: refused in log.read_text("utf-8", "replace"))
    demo.say(f"{blind} refuses, writes nothing, and tells its operator why:")
    line = next(line for line in log.read_text("utf-8", "replace").splitlines() if refused in line)
    console.print(Text(f"            {line.strip()}", style="yellow"), soft_wrap=True)
    stranger(demo)
    demo.until(watch, "the start of the sealed order", lambda: watch.kinds(ORDER) != [])
    if watch.kinds(ORDER) != [Kind.EXECUTION_STARTED]:
        raise DemoFailedError(f"{blind} wrote into a log that it cannot open")

    demo.start_worker(WITH_KEYS, capable)
    stack.callback(demo.workers[WITH_KEYS].stop)
    demo.say(
        f"{WITH_KEYS} joins, and carries on by itself; meanwhile the warehouse sends its word, sealed as well"
    )
    demo.loom(
        "send", ORDER, "ship", '{"carrier": "post"}', "--message-id", "s6", "--as", "alice", env=capable
    )
    demo.until(watch, "the end of the sealed order", lambda: _ended(watch), 90)
    show(demo, watch)
    check(watch, blind)
    erase(demo, capable)


def stranger(demo: Demo) -> None:
    """Somebody else asks, on a machine without keys: the ordinary denial, which tells neither of seals nor of owners."""
    demo.say("a stranger who asks there is told what strangers are told:")
    arguments = ("show", ORDER, "--as", "mallory")
    demo.shows(*arguments)
    done = demo.ask(*arguments)
    said = done.stderr.strip()
    demo.console.print(Text(f"            {said}", style="yellow"), soft_wrap=True)
    if done.returncode != 1 or "seal" in said.lower() or "is denied" not in said:
        raise DemoFailedError(f"a stranger was told: {said}")


def show(demo: Demo, watch: Watch) -> None:
    """The life of the sealed order, as it rests in the topic."""
    grid = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", "what happened", "written by", "sealed at rest"):
        grid.add_column(column)
    for seen in watch.executions[ORDER]:
        seal = seen.event.metadata.get("seal")
        covers = ", ".join(seal["covers"]) if isinstance(seal, dict) else ""
        style = "bold green" if seen.event.type in TERMINAL_KINDS else ""
        grid.add_row(
            Text(str(seen.event.sequence), "dim"),
            Text(describe(seen.event), style),
            Text(writer_of(seen.event), "dim"),
            Text(covers, "magenta"),
        )
    demo.console.print(grid)


def check(watch: Watch, blind: str) -> None:
    """Hold the topic against what was promised.

    Raises:
        DemoFailedError: something in the clear, or written by who cannot read it.
    """
    seen = watch.executions[ORDER]
    writers = {writer_of(one.event) for one in seen} - {""}
    promised = {
        "it completed": seen[-1].event.type == Kind.EXECUTION_COMPLETED,
        "the worker without keys wrote none of it": blind not in writers and writers == {WITH_KEYS},
        "no plaintext rests in the topic": all(CARD.encode() not in one.raw for one in seen),
    }
    broken = [what for what, held in promised.items() if not held]
    if broken:
        raise DemoFailedError(f"{ORDER}: not so: {'; '.join(broken)}")


def erase(demo: Demo, capable: dict[str, str]) -> None:
    """Destroy the customer's key: what rests in the topics opens nowhere any more.

    Raises:
        DemoFailedError: it still opens, or is reported as anything else than erased.
    """
    opened = demo.ask("show", ORDER, "--payloads", "--as", "alice", env=capable)
    demo.say(f"{CUSTOMER} asks to be forgotten: the key is destroyed, and every log of it says so")
    demo.loom("erase", CUSTOMER, "--reason", "asked for", "--as", "ops", env=capable)
    after = demo.ask("show", ORDER, "--payloads", "--as", "alice", env=capable)
    demo.console.print(Text(f"            {after.stderr.strip()}", style="yellow"), soft_wrap=True)
    if CARD not in opened.stdout or after.returncode != 1 or "was erased" not in after.stderr:
        raise DemoFailedError("the erasure was not seen")
    demo.console.print(Text("Sealed, refused, completed, erased.", style="bold green"))


def _ended(watch: Watch) -> bool:
    return watch.kinds(ORDER)[-1:] != [] and watch.kinds(ORDER)[-1] in TERMINAL_KINDS
