"""The command ``loom``: its commands, and how every error becomes one line and an exit status."""

from __future__ import annotations

import json
import sys
import traceback
from typing import TYPE_CHECKING

import typer

from loom.cli import (
    bench,
    doctor,
    executions,
    inbox,
    node,
    recovery,
    removal,
    schedules,
    simulation,
    subjects,
)
from loom.cli.common import EXIT_DONE, EXIT_INTERRUPTED, EXIT_REFUSED, EXIT_USAGE, out
from loom.cli.topics import app as topics_app
from loom.errors import LoomError, public_fields

if TYPE_CHECKING:
    from collections.abc import Sequence

app = typer.Typer(
    name="loom",
    help="Durable workflows on Kafka.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for group in (node, doctor, executions, inbox, recovery, removal, schedules, subjects, bench, simulation):
    group.register(app)
app.add_typer(topics_app, name="topics", help="The topic catalogue against the cluster.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; with ``--debug`` an error shows where it came from."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = [argument for argument in given if argument != "--debug"]
    try:
        status = app(args=given, standalone_mode=False)
    except LoomError as error:
        return _explain(error, as_json="--json" in given, debug=debug)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone; nothing is left to say
        return EXIT_DONE
    except Exception as error:  # noqa: BLE001 - the last line of defence: no traceback is printed at a user
        return _unexpected(error, debug=debug)
    return status if isinstance(status, int) else EXIT_DONE


def _explain(error: LoomError, *, as_json: bool, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    if as_json:
        body = {"error": type(error).__name__, "message": str(error), **public_fields(error)}
        typer.echo(json.dumps(body, ensure_ascii=False, default=list), err=True)
    else:
        out(stderr=True).print(f"loom: {error}", markup=False)
    return error.exit_status


def _unexpected(error: Exception, *, debug: bool) -> int:
    show = getattr(error, "show", None)  # usage errors of the command line library print themselves
    if callable(show):
        show()
        return EXIT_USAGE
    if debug:
        traceback.print_exception(error)
    if isinstance(error, RuntimeError) and hasattr(error, "exit_code"):
        return int(error.exit_code)
    out(stderr=True).print(
        f"loom: unexpected {type(error).__name__}; run again with --debug to see where", markup=False
    )
    return EXIT_REFUSED
