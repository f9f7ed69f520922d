"""The command line: how people use loom. It decides nothing."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command ``loom``; exits with its status."""
    from loom.cli.main import main as run

    sys.exit(run(arguments))
