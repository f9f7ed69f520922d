"""Commands that are, or look at, a node: worker, doctor."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from loom.cli.common import load_config, load_flows
from loom.errors import ConfigError
from loom.operator import sealed_detail_of

if TYPE_CHECKING:
    from loom import Config, FlowDefinition

ROLES: Final = ("drive", "delivery", "fold")


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(worker)


def worker(
    flows: Annotated[
        list[str] | None,
        typer.Option(
            "--flows", metavar="MODULE", help="Module with flows; may be repeated. Default: LOOM_FLOWS."
        ),
    ] = None,
    roles: Annotated[
        str, typer.Option("--roles", help=f"all, or a list of {', '.join(ROLES)}: what this node does.")
    ] = "all",
) -> None:
    """Run a node until SIGTERM or Ctrl-C.

    Example: loom worker --flows shop.flows --roles all
    """
    config = load_config()
    modules = flows or list(config.flows)
    if not modules:
        raise ConfigError("--flows", "it names no module", "name one with flows, or set LOOM_FLOWS")
    asyncio.run(run_worker(config, load_flows(modules), parse_roles(roles)))


def parse_roles(text: str) -> frozenset[str]:
    """Roles of a node.

    Raises:
        ConfigError: one that does not exist.
    """
    wanted = set(ROLES) if text == "all" else {role.strip() for role in text.split(",")}
    unknown = wanted - set(ROLES)
    if unknown or not wanted:
        raise ConfigError("--roles", f"{text!r} names no roles", f"use all, or a list of {', '.join(ROLES)}")
    return frozenset(wanted)


async def run_worker(
    config: Config, definitions: list[FlowDefinition[..., Any]], roles: frozenset[str]
) -> None:
    """Run a node until a signal asks it to stop; it then finishes what is in flight."""
    from loom import Client, Runtime
    from loom.processors.service import Processors
    from loom.runtime.collector import calm_collector

    calm_collector()
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _settle, ended, None)
    async with AsyncExitStack() as stack:
        kind = Runtime if "drive" in roles else Client
        runtime = kind(
            config,
            flows=definitions,
            on_storage_error=_report("storage"),
            on_error=_report("execution"),
            on_warn=_warn,
            on_fatal=partial(_settle, ended),
        )
        await stack.enter_async_context(runtime)
        forwarder: Any = runtime.stores.events
        await stack.enter_async_context(Processors(config, runtime, forwarder, roles))
        names = ", ".join(sorted(definition.name for definition in definitions))
        typer.echo(f"loom: node {config.node_id} runs {names} ({', '.join(sorted(roles))})", err=True)
        await ended  # raises what makes this node useless: a supervisor starts it again
        typer.echo(f"loom: node {config.node_id} stops", err=True)


def _settle(ended: asyncio.Future[None], error: Exception | None) -> None:
    if ended.done():
        return
    if error is None:
        ended.set_result(None)
    else:
        ended.set_exception(error)


def explained(error: BaseException) -> str:
    """An error as operators are told it: of a sealed refusal, what its caller is not (system.md 2.4)."""
    detail = sealed_detail_of(error)
    if detail is None:
        return str(error)
    lacks = "keys or paths for it" if detail.reason == "marker-unopenable" else "its key"
    return (
        f"its log is sealed, and this node lacks {lacks} ({detail.reason} at event {detail.sequence}: "
        f"{', '.join(detail.covers)}); it was left as it is, for a node that can open it (sealing.keys, sealing.sensitive)"
    )


def _report(kind: str) -> Any:
    def report(error: BaseException, *about: Any) -> None:
        where = f" ({about[0]})" if about else ""
        typer.echo(f"loom: {kind} error{where}: {explained(error)}", err=True)

    return report


def _warn(message: str, about: str | None = None) -> None:
    typer.echo(f"loom: {message}" + (f" ({about})" if about else ""), err=True)
