"""A call in a process of its own: its memory, garbage and threads are none of the next one's."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_S: Final = 900.0

Result = TypeVar("Result")


def apart(call: Callable[..., Result], *args: object) -> Result:
    """Return what ``call`` of a module returns for ``args``, in a fresh process, within ``LIMIT_S``."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *args).result(LIMIT_S)
