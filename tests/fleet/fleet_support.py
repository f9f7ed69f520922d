"""What the fleet tests share."""

import asyncio
import contextlib
from urllib.parse import urlsplit

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
    if report.failed and fleet.workers:
        report.sections.append(("the last lines of the workers", fleet.tails()))


class RedisLink:
    """The way of one worker to Redis: open, cut (nothing gets through, new connections are closed), or mute (requests
    arrive, and no answer comes back)."""

    def __init__(self, url):
        parts = urlsplit(url)
        self._upstream = parts.hostname, parts.port
        self._tasks, self._writers = set(), set()
        self.state = "open"

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"
        return self

    async def __aexit__(self, *exc):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def become(self, state):
        self.state = state
        if state == "cut":
            for writer in self._writers:
                writer.close()

    async def _serve(self, reader, writer):
        if self.state == "cut":
            writer.close()
            return
        self._tasks.add(asyncio.current_task())
        up_reader, up_writer = await asyncio.open_connection(*self._upstream)
        self._writers |= {writer, up_writer}
        await asyncio.gather(
            self._pass(reader, up_writer, both=True), self._pass(up_reader, writer, both=False)
        )

    async def _pass(self, reader, writer, *, both):
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if self.state == "open" or (both and self.state == "mute"):
                    writer.write(data)
                    await writer.drain()
        writer.close()
        self._writers.discard(writer)
