"""A node that owns partitions, in a process of its own: ``owner_process.py SETTINGS_JSON``.

It prints ``owned N`` whenever the number of its partitions changes, and does what it reads: ``block SECONDS`` blocks its
event loop, ``close`` ends it cleanly.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

from loom.stores.kafka.event_store import KafkaEventStore
from loom.stores.kafka.settings import KafkaSettings


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def main(settings):
    settings["data_dir"] = Path(settings["data_dir"])
    store = KafkaEventStore(KafkaSettings(**settings), owns=True, clock=lambda: time.time_ns() // 1_000_000)
    await store.open()
    loop = asyncio.get_running_loop()
    words = asyncio.Queue()
    loop.add_reader(sys.stdin, lambda: words.put_nowait(sys.stdin.readline().split()))
    told = -1
    while True:
        if len(store.owned()) != told:
            told = len(store.owned())
            say("owned", told)
        try:
            word = await asyncio.wait_for(words.get(), 0.05)
        except TimeoutError:
            continue
        if not word or word[0] == "close":
            break
        if word[0] == "block":
            say("blocked")
            time.sleep(float(word[1]))  # noqa: ASYNC251 - that is the point
            say("unblocked")
    await store.close()
    say("closed")


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
