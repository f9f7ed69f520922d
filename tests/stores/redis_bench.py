"""Redis stores under test, and a proxy that loses what the server answers."""

from __future__ import annotations

import asyncio
import contextlib
from urllib.parse import urlsplit

from redis.asyncio import Redis


class RedisBench:
    """Handles on one Redis under a prefix of the test's own; ``forgetful`` empties the script cache before each call."""

    def __init__(self, url, prefix, make, *, forgetful=False):
        self.url, self.prefix, self._make, self._forgetful = url, prefix, make, forgetful
        self._admin = Redis.from_url(url, decode_responses=True)
        self._opened = []

    def open(self):
        store = self._make(self.url, self.prefix)
        self._opened.append(store)
        if self._forgetful:
            call = store.connection.call

            async def after_flush(*args, **kwargs):
                await self._admin.script_flush()
                return await call(*args, **kwargs)

            store.connection.call = after_flush
        return store

    async def advance(self, ms):
        end = await self.now() + ms
        while await self.now() < end:  # noqa: ASYNC110 - the server's clock has no event to wait for
            await asyncio.sleep(0.002)

    async def now(self):
        seconds, micros = await self._admin.time()
        return int(seconds) * 1000 + int(micros) // 1000

    async def dump(self):
        """Everything the store holds, without instants."""
        held = {}
        async for key in self._admin.scan_iter(match=f"{{{self.prefix}*"):
            kind = await self._admin.type(key)
            if kind == "zset":
                held[key] = sorted(await self._admin.zrange(key, 0, -1))
            elif kind == "hash":
                held[key] = sorted(await self._admin.hkeys(key))
        return held

    async def empty(self):
        async for key in self._admin.scan_iter(match=f"{{{self.prefix}*"):
            await self._admin.delete(key)

    async def close(self):
        for store in self._opened:
            await store.close()
        await self._admin.aclose()


class LossyProxy:
    """Stands before a Redis; told to, it passes a request on and loses the answer, by hanging up or in silence."""

    def __init__(self, url):
        parts = urlsplit(url)
        self._upstream = parts.hostname, parts.port
        self._tasks = set()
        self.lose = None  # None, "cut" or "silence"
        self.lost = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        up_reader, up_writer = await asyncio.open_connection(*self._upstream)
        requests = asyncio.create_task(self._pass(reader, up_writer))
        self._tasks.add(requests)
        with contextlib.suppress(OSError):
            while answer := await up_reader.read(65536):
                if self.lose is not None:
                    self.lost += 1
                    if self.lose == "silence":
                        continue
                    break
                writer.write(answer)
                await writer.drain()
        writer.close()
        up_writer.close()
        requests.cancel()

    async def _pass(self, reader, up_writer):
        with contextlib.suppress(OSError):
            while request := await reader.read(65536):
                up_writer.write(request)
                await up_writer.drain()
        up_writer.close()
