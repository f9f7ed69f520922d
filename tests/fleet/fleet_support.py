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


def show_workers(report, fleet):
    """Put into the report of a failed test what its fleet's workers said last: their folders go with the test."""
    if report.failed and fleet is not None and fleet.workers:
        report.sections.append(("the last lines of the workers", fleet.tails()))
    return report
