"""A process with one writer, told what to do in JSON lines, answering in JSON lines; for tests that stop or race it.

``{"append": [stream, first, count, name], "seconds": 20}`` answers ``{"name": ..., "ok": [first, head, repeated]}`` or
``{"name": ..., "error": type}``; ``null`` ends it. States are told as ``{"state": ..., "reason": ...}``.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
import sys

from writers import Writers, append

from loom.errors import LoomError
from loom.stores.kafka.writer import WriterState


def say(**what):
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def do_append(writer, stream_id, first, count, name, seconds):
    try:
        (done,) = await writer.write(append(stream_id, first, count, name=name), seconds=seconds)
    except LoomError as error:
        say(name=name, error=type(error).__name__)
    else:
        say(name=name, ok=[done.first, done.head, done.repeated])


async def serve(writer):
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    tasks = set()
    while line := await reader.readline():
        asked = json.loads(line)
        if asked is None:
            break
        task = loop.create_task(do_append(writer, *asked["append"], asked.get("seconds", 20)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)


async def main():
    asked = json.loads(sys.argv[1])
    folder = pathlib.Path(asked.pop("folder"))
    confirm = asked.pop("confirm", True)
    writers = Writers(asked.pop("bootstrap"), asked.pop("prefix"), folder)
    writer = writers.make(asked.pop("node"), confirm=lambda: confirm, start=False, **asked)
    note = writer._note

    def told(who, state):
        note(who, state)
        say(state=state.value, reason=writer.stop_reason.value if state is WriterState.STOPPED else None)

    writer._on_state = told
    writer.start()
    try:
        await serve(writer)
    finally:
        writers.close()


if __name__ == "__main__":
    asyncio.run(main())
