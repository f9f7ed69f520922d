"""What a node does beside, over and over, from its start to its stop."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import ClassVar


class Background(ABC):
    """One task, ``TASK`` by name, of the loop that runs."""

    TASK: ClassVar[str]
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Work from now on."""
        self._task = asyncio.create_task(self._keep(), name=self.TASK)

    async def stop(self) -> None:
        """Work no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @abstractmethod
    async def _keep(self) -> None:
        """Do it, until cancelled."""
