"""What every command shares: options, output for people and machines, and the four exit statuses.

0 done, 1 refused or not found, 2 usage or configuration, 3 broker or Redis cannot be reached.
"""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from loom.errors import ConfigError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from loom import Client, Config, FlowDefinition, Principal

T = TypeVar("T")

EXIT_DONE: Final = 0
EXIT_REFUSED: Final = 1
EXIT_USAGE: Final = 2
EXIT_UNREACHABLE: Final = 3
EXIT_INTERRUPTED: Final = 130

As = Annotated[
    str | None,
    typer.Option(
        "--as", metavar="NAME", help="Principal to act as; default: your user name, an ordinary actor."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of a table.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done and do nothing.")]
ExecutionId = Annotated[str, typer.Argument(metavar="ID", help="Execution id.")]


def out(*, stderr: bool = False) -> Console:
    """A console that writes plain text where it is no terminal."""
    return Console(stderr=stderr, highlight=False, soft_wrap=not sys.stdout.isatty())


def principal(name: str | None) -> Principal:
    """The caller: ``--as``, else the operating system's user name."""
    from loom import Principal

    if name:
        return Principal(name)
    try:
        return Principal(getpass.getuser())
    except (OSError, KeyError):
        return Principal(f"uid-{os.getuid()}")


def load_config(**overrides: Any) -> Config:
    """Settings from the command's options, ``LOOM_*``, ``./loom.toml`` and defaults, in this order."""
    from loom import Config

    return Config(**{key: value for key, value in overrides.items() if value is not None})


def load_flows(modules: Iterable[str]) -> list[FlowDefinition[..., Any]]:
    """Import modules (the working directory first) and collect their flows.

    Raises:
        ConfigError: a module cannot be imported, or holds no flow.
    """
    from loom.kernel import collect_flows

    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    found: list[FlowDefinition[..., Any]] = []
    for name in modules:
        try:
            definitions = collect_flows(import_module(name))
        except ImportError as error:
            raise ConfigError(
                "--flows", f"module {name!r} cannot be imported ({error})", "check its name and PYTHONPATH"
            ) from error
        if not definitions:
            raise ConfigError("--flows", f"module {name!r} holds no flow", "decorate one with @loom.flow")
        found += definitions
    return found


def parse_json(text: str, what: str) -> Any:
    """Parse a JSON argument.

    Raises:
        InvalidInputError: it is no JSON; the message shows the position, never the text.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise InvalidInputError(what, "it is nested too deeply", "flatten it") from None
    except ValueError as error:
        place = (
            f"line {error.lineno}, column {error.colno}"
            if isinstance(error, json.JSONDecodeError)
            else "a number"
        )
        raise InvalidInputError(
            what, f"it is not valid JSON ({place})", "quote it for the shell, as '{\"a\": 1}'"
        ) from None


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def with_client(work: Callable[[Client], Awaitable[T]], **overrides: Any) -> T:
    """Run ``work`` with a connected client, and close it."""
    from loom import Client

    config = load_config(**overrides)

    async def body() -> T:
        async with Client(
            config,
            flows=load_flows(config.flows),
            on_storage_error=_trouble,
            on_error=_trouble,
            on_warn=_remark,
        ) as client:
            return await work(client)

    return asyncio.run(body())


def _trouble(error: BaseException, about: str) -> None:
    """What a client meets on its way. A sealed refusal is told to nobody here: whoever types is no operator of the node."""
    from loom.operator import is_sealed_unreadable

    if not is_sealed_unreadable(error):
        _remark(str(error), about)


def _remark(message: str, about: str) -> None:
    if sys.stderr.isatty():  # for who waits; a machine is told the outcome alone
        typer.echo(f"loom: {message} ({about})", err=True)


def emit(value: Any, *, as_json: bool, human: Callable[[Console], None]) -> None:
    """Print ``value`` as one JSON document, or let ``human`` print it for a person."""
    if as_json:
        typer.echo(json.dumps(value, ensure_ascii=False, default=str))
    else:
        human(out())


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None) -> Table:
    """A plain table."""
    grid = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        grid.add_row(*(str(cell) if cell is not None else "" for cell in row))
    return grid


def require(setting: str, value: str | None, remedy: str) -> str:
    """Return a setting that the command cannot do without.

    Raises:
        ConfigError: it is not set.
    """
    if not value:
        raise ConfigError(setting, "it is not set", remedy)
    return value
