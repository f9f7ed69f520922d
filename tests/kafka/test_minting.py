"""Ids are minted for one partition owned here, until its writer is saturated (kafka.md, "Minted ids")."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from loom.testing.conformance.event_store.support import started
from loom.testing.proxy import Api
from stores import StoreBench, until

pytestmark = pytest.mark.timeout(120)
MORE_THAN_TWO_TRANSACTIONS = 3_200
"""One in flight, one formed behind it, and a third full one waiting."""


async def test_ids_move_on_only_when_the_writer_is_saturated(proxied_broker, proxy, tmp_path):
    prefix = f"t{uuid.uuid4().hex[:12]}."
    bench = StoreBench(proxied_broker.bootstrap, prefix, tmp_path)
    try:
        owner = await bench.owner(bootstrap=f"127.0.0.1:{proxy.port}")
        first = owner.mint_shard()
        assert {owner.shard_of(owner.mint_id()) for _ in range(50)} == {first}
        held = proxy.hold(Api.END_TXN, f"*-log-{first}.*")
        chains = [bench.chain(first) for _ in range(MORE_THAN_TWO_TRANSACTIONS)]
        writing = [asyncio.ensure_future(owner.append(started(c, fence=None))) for c in chains]
        await until(lambda: owner.mint_shard() != first)
        second = owner.mint_shard()
        held.release()
        await asyncio.gather(*writing)
        assert owner.mint_shard() == second, "there is no reason to go back"
    finally:
        proxy.clear()
        await bench.close()
