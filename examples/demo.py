"""The main job, start to end: orders on real Kafka and Redis, and a worker killed in the middle of them.

``make demo`` runs it. Two workers drive five orders. The worker that is packing the first one is killed (kill -9); the
other takes over, redoes the step that was cut short, and finishes every order. What is shown is read from the executions
topic with a plain consumer, and checked: nothing missing, nothing twice. Then comes an order that is sealed, which the
worker that is left cannot open (``sealed``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confluent_kafka.admin import AdminClient
from redis import Redis
from rich.console import Console
from rich.table import Table
from rich.text import Text

from examples.sealed import tell_of_the_sealed
from examples.watch import DemoFailedError, Watch, writer_of
from loom.cli.timeline import describe
from loom.errors import LoomError
from loom.schemas.envelope import TERMINAL_KINDS, Kind
from loom.testing import services
from loom.testing.services import OwnedProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROOT = Path(__file__).parent.parent
ORDERS = [f"order-{number}" for number in range(1001, 1006)]
FIRST, *OTHERS = ORDERS
INPUT = {
    "card": "tok-1",
    "items": [{"sku": "lamp", "price": 4200}, {"sku": "bulb", "price": 350, "quantity": 2}],
}
SHIP = '{"carrier": "post"}'
EFFECTS = ("charge", "reserve lamp", "reserve bulb", "pack", "hand over")
PACKING_SECONDS = 3.0
COMMAND_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Demo:
    """What the steps of the demo share."""

    console: Console
    folder: Path
    env: dict[str, str]
    workers: dict[str, OwnedProcess] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    victim: str = ""
    killed_at_ms: int = 0

    def say(self, text: str) -> None:
        """One line of the story."""
        self.console.print(
            Text(f"{time.monotonic() - self.began:6.1f} s  ", style="dim").append(text, style="not dim")
        )

    def loom(self, *arguments: str, quiet: bool = False, env: Mapping[str, str] | None = None) -> Any:
        """Run the command line as a user would; what it printed as JSON."""
        if not quiet:
            self.shows(*arguments)
        done = self.ask(*arguments, "--json", env=env)
        if done.returncode != 0:
            raise DemoFailedError(f"loom {arguments[0]} ended with {done.returncode}: {done.stderr.strip()}")
        return json.loads(done.stdout) if done.stdout.strip() else None

    def shows(self, *arguments: str) -> None:
        """Show a command as one would type it."""
        line = "          $ loom " + " ".join(quoted(a) for a in arguments)
        self.console.print(Text(line, style="cyan"), soft_wrap=True)

    def ask(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run the command line, whatever it answers. ``env`` is set beside the demo's own."""
        return subprocess.run(
            [str(Path(sys.executable).with_name("loom")), *arguments],
            cwd=self.folder,
            env={**os.environ, **self.env, **(env or {})},
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )

    def loom_each(self, first: tuple[str, ...], *others: tuple[str, ...]) -> None:
        """Run several commands side by side, and show the first."""
        with ThreadPoolExecutor(1 + len(others)) as pool:
            rest = [pool.submit(self.loom, *arguments, quiet=True) for arguments in others]
            self.loom(*first)
            self.console.print(Text(f"          ... and {len(others)} more like it", style="cyan"))
            for done in rest:
                done.result()

    def start_worker(self, name: str, env: Mapping[str, str] | None = None) -> None:
        """Start a worker process, which ends with this one."""
        worker = OwnedProcess(name, self.folder / name)
        worker.spawn(
            [str(Path(sys.executable).with_name("loom")), "worker", "--flows", "examples.orders"],
            env={**self.env, **(env or {}), "LOOM_NODE_ID": name},
        )
        self.workers[name] = worker

    def until(self, watch: Watch, what: str, reached: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Read the topic until ``reached()``, as long as the workers that should run do run."""

        def check() -> bool:
            for name, worker in self.workers.items():
                if name != self.victim and not worker.running:
                    raise DemoFailedError(f"{name} ended by itself")
            return reached()

        watch.until(what, check, timeout_s)

    def effects(self, order: str) -> Counter[tuple[str, str]]:
        """What the outside world saw of an order: how often each effect was begun and done."""
        ledger = self.folder / "ledger.jsonl"
        lines = ledger.read_text().splitlines() if ledger.exists() else []
        noted = [line for line in map(json.loads, lines) if line["order"] == order]
        return Counter((line["effect"], line["stage"]) for line in noted)


def quoted(argument: str) -> str:
    """An argument as one would type it."""
    return f"'{argument}'" if set(argument) & set(' {"') else argument


def main() -> int:
    """Run the demo; 0 when everything that it promises was seen."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 110
    console.rule("[bold]loom: durable orders on Kafka")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loom-demo-")))
        demo = Demo(console, folder, {})
        try:
            demo.say("starting the real parts (the first time, Apache Kafka's jars are downloaded)")
            run(demo, stack)
        except (DemoFailedError, TimeoutError, subprocess.TimeoutExpired, LoomError) as problem:
            console.print(Text(f"the demo failed: {problem}", style="bold red"))
            for name, worker in demo.workers.items():
                console.print(Text(f"--- last lines of {name}\n{worker.log_tail()}", style="dim"))
            return 1
    return 0


def run(demo: Demo, stack: ExitStack) -> None:
    """The story."""
    parts = stack.enter_context(services.find_or_start())
    for note in parts.notes:
        demo.say(note)
    prefix = f"demo-{uuid.uuid4().hex[:8]}."
    demo.env = {
        **parts.env,
        "LOOM_TOPIC_PREFIX": prefix,
        "LOOM_PARTITIONS": "4",
        "LOOM_DATA_DIR": str(demo.folder / "cache"),
        "LOOM_LEASES__TTL_MS": "2000",  # a dead node is missed after two seconds
        "ORDERS_LEDGER": str(demo.folder / "ledger.jsonl"),
        "ORDERS_PACKING_SECONDS": str(PACKING_SECONDS),
        "PYTHONPATH": str(ROOT),
    }
    stack.callback(tidy, parts, prefix)
    demo.loom("topics", "apply")
    for name in ("worker-north", "worker-south"):
        demo.start_worker(name)
        stack.callback(demo.workers[name].stop)
    demo.say("two workers run the flow of examples/orders.py")
    watch = Watch(parts.bootstrap, prefix)
    stack.callback(watch.close)

    demo.loom("start", "order", "--id", FIRST, "--input", json.dumps(INPUT))
    demo.loom_each(*(("start", "order", "--id", order, "--input", json.dumps(INPUT)) for order in OTHERS))
    demo.until(watch, "orders wait for the warehouse", lambda: all(waits(watch, order) for order in ORDERS))
    demo.say("all are charged and reserved, and wait for the warehouse: parked, they cost nothing")

    kill_while_packing(demo, watch)
    demo.say("the others are told to ship, whoever drove them and whether or not anybody listens:")
    demo.loom_each(*(("send", order, "ship", SHIP, "--message-id", f"ship-{order}") for order in OTHERS))
    demo.until(watch, "every order has ended", lambda: all(ended(watch, order) for order in ORDERS), 90)
    demo.say(f"every order is complete; {demo.victim} never came back")

    show(demo, watch)
    check(demo, watch)
    demo.console.print(Text("Every order completed exactly once.", style="bold green"))
    tell_of_the_sealed(demo, watch, stack)


def tidy(parts: services.Services, prefix: str) -> None:
    """Remove the demo's topics and keys from a broker and a Redis that go on running."""
    if os.environ.get("LOOM_BOOTSTRAP"):
        admin = AdminClient({"bootstrap.servers": parts.bootstrap, "log_level": 2})
        mine = [name for name in admin.list_topics(timeout=15).topics if name.startswith(prefix)]
        for deleted in (admin.delete_topics(mine, request_timeout=15) if mine else {}).values():
            deleted.result(15)
    if os.environ.get("LOOM_REDIS_URL"):
        with closing(Redis.from_url(parts.redis_url)) as client:
            for key in client.scan_iter(match=f"*{prefix}*", count=1_000):
                client.delete(key)


def kill_while_packing(demo: Demo, watch: Watch) -> None:
    """Let the first order ship, and kill the worker that packs it while it does."""
    demo.loom("send", FIRST, "ship", SHIP, "--message-id", f"ship-{FIRST}")
    demo.until(watch, "the first order is being packed", lambda: demo.effects(FIRST)["pack", "begun"] > 0)
    victim = watch.node_of(FIRST)
    if victim not in demo.workers:
        raise DemoFailedError(f"the event's node {victim!r} is none of {sorted(demo.workers)}")
    demo.victim = victim
    demo.killed_at_ms = round(time.time() * 1000)
    pid = demo.workers[victim].pid
    demo.workers[victim].kill()
    demo.say(f"kill -9 {pid}: {victim} dies while it packs {FIRST}")


def waits(watch: Watch, order: str) -> bool:
    """Whether an order is parked."""
    return watch.kinds(order)[-1:] == [Kind.EXECUTION_SUSPENDED]


def ended(watch: Watch, order: str) -> bool:
    """Whether an order has its last event."""
    return watch.kinds(order)[-1:] != [] and watch.kinds(order)[-1] in TERMINAL_KINDS


def show(demo: Demo, watch: Watch) -> None:
    """The first order's life, as the topic tells it, and all orders in a table."""
    console = demo.console
    console.print()
    console.rule(f"[bold]{FIRST}, as the executions topic tells it")
    life = watch.executions[FIRST]
    grid = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", "seconds", "what happened", "written by", "partition @ offset"):
        grid.add_column(column, justify="right" if column in ("", "seconds") else "left")
    marked = False
    for seen in life:
        event = seen.event
        if not marked and event.timestamp > demo.killed_at_ms:
            marked = True
            grid.add_row(
                "",
                f"{(demo.killed_at_ms - life[0].event.timestamp) / 1000:.1f}",
                Text(f"✂ kill -9 of {demo.victim}", "bold red"),
            )
        style = (
            "bold green"
            if event.type in TERMINAL_KINDS
            else "yellow"
            if event.type == Kind.EXECUTION_RECOVERED
            else ""
        )
        grid.add_row(
            Text(str(event.sequence), "dim"),
            f"{(event.timestamp - life[0].event.timestamp) / 1000:.1f}",
            Text(describe(event), style),
            Text(writer_of(event), "dim"),
            Text(f"{seen.partition} @ {seen.offset}", "dim"),
        )
    console.print(grid)
    console.print()
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("order", "status", "events", "finished by", "effects outside, each done once"):
        table.add_column(column)
    for order in ORDERS:
        noted = demo.effects(order)
        effects = ", ".join(
            f"{effect}{again(noted, effect)}" for effect in EFFECTS if noted[effect, "done"] == 1
        )
        last = watch.executions[order][-1].event
        status = str((last.data.get("output") or {}).get("status"))
        table.add_row(order, status, str(last.sequence + 1), watch.node_of(order), effects)
    console.print(table)
    console.print()


def again(noted: Counter[tuple[str, str]], effect: str) -> str:
    """A remark for an effect that was begun more often than done."""
    return (
        f" (begun {noted[effect, 'begun']} times)" if noted[effect, "begun"] > noted[effect, "done"] else ""
    )


def check(demo: Demo, watch: Watch) -> None:
    """Hold the topic and the outside world against what was promised.

    Raises:
        DemoFailedError: something is missing, or there twice.
    """
    for order in ORDERS:
        events = [seen.event for seen in watch.executions[order]]
        steps = Counter(str(e.data["name"]) for e in events if e.type == Kind.STEP_COMPLETED)
        promised = {
            "sequences have no gap and no repeat": [e.sequence for e in events] == list(range(len(events))),
            "one event ends it": sum(e.type in TERMINAL_KINDS for e in events) == 1,
            "it completed": events[-1].type == Kind.EXECUTION_COMPLETED,
            "each step has one result": steps == {"charge": 1, "reserve": 2, "pack": 1, "hand_over": 1},
            "its message was taken once": sum(e.type == Kind.MESSAGE_CONSUMED for e in events) == 1,
            "each effect was done once": all(demo.effects(order)[effect, "done"] == 1 for effect in EFFECTS),
        }
        broken = [what for what, held in promised.items() if not held]
        if broken:
            raise DemoFailedError(f"{order}: not so: {'; '.join(broken)}")


if __name__ == "__main__":
    sys.exit(main())
