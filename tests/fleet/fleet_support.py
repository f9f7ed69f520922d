"""What the fleet tests share."""

import asyncio

from loom import LoomError


async def stubborn(call, patience_s=120.0):
    """What a caller does about an error that says that trying again is safe."""
    async with asyncio.timeout(patience_s):
        while True:
            try:
                return await call()
            except LoomError as error:
                if not error.retryable:
                    raise
                await asyncio.sleep(0.05)
