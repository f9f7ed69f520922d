"""A stage for scenarios of leases: simulated nodes, a flow with two silent steps, and a director who says what happens."""

from __future__ import annotations

import asyncio

from loom import flow
from loom.schemas.envelope import Kind
from loom.testing.simulation.fleet import TTL_MS, Fleet
from loom.testing.simulation.world import SimulationError, World

TTL_S = TTL_MS / 1000
MARGIN_S = TTL_S / 6


class Stage(Fleet):
    """Two nodes; the director gives the shards. ``began`` and ``gave_up`` are (time, step, node)."""

    def __init__(self, acquire="lazy", *, silent_s=4 * TTL_S, settings=None, **options):
        self.began, self.gave_up, self.silent_s, self.settings = [], [], silent_s, settings or {}
        self.ends, self.commits, self.directed = [], [], False
        super().__init__(World(1), nodes=2, acquire=acquire, **options)
        self.a, self.b = self.nodes
        self.directed = True
        self.run(0.1)
        self.give(self.a)

    def config(self, name):
        return super().config(name).model_copy(update={"max_resident": 100, **self.settings.get(name, {})})

    def flows(self, node):
        async def effect(step, seconds):
            self.began.append((self.world.now, step, node.name))
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                self.gave_up.append((self.world.now, step, node.name))
                raise
            node.step_ends()
            return step

        @flow("silent")
        async def silent(ctx):
            await ctx.run(effect, "first", self.silent_s)
            await ctx.run(effect, "second", 0.01)
            return "done"

        @flow("parks")
        async def parks(ctx):
            await ctx.run(effect, "first", self.silent_s)
            return await ctx.receive("go")

        @flow("chain")
        async def chain(ctx, n):
            await ctx.run(effect, f"link {n}", 0.01)
            if n:
                ctx.continue_as_new(n - 1)

        return [silent, parks, chain]

    # The director ---------------------------------------------------------------------------------------------------

    def _reassign(self, *, shuffle=False):
        if not self.directed:
            super()._reassign(shuffle=shuffle)

    def give(self, node):
        """Give every shard to a node."""
        for shard in self.owners:
            self.owners[shard] = (node, node.incarnation)
        for other in self.nodes:
            if other.store is not None:
                shards = frozenset(self.owners) if other is node else frozenset()
                other.log.deliver(lambda other=other, shards=shards: other.store.assigned(shards))
        self.run(0.1)

    def run(self, seconds):
        """Let time pass."""
        until = self.world.now + seconds
        over = []
        self.world.after(seconds, lambda: over.append(1))
        while not over:
            self.world.step()
            if self.world.failure:
                raise SimulationError(self.world.failure)
        assert self.world.now >= until - 1e-9

    def until(self, holds, seconds=20 * TTL_S):
        """Let time pass until it holds."""
        limit = self.world.now + seconds
        while not holds():
            assert self.world.now < limit, "\n".join(self.world.lines[-60:])
            self.run(0.02)

    def start(self, name, given=None, *, on=None):
        """Start an execution ``x`` on a node, which drives it."""
        node = on or self.a
        node.spawn(node.runtime.start(name, given, execution_id="x"))
        self.until(lambda: self.began)

    def isolate(self, *nodes, cut=True):
        for node in nodes:
            node.redis.cut = cut

    # What is seen ---------------------------------------------------------------------------------------------------

    def committed(self, batch, appender):
        super().committed(batch, appender)
        for one in batch:
            self.commits += [(self.world.now, one.stream_id, e) for e in one.envelopes]

    def of(self, kind):
        return [(at, e) for at, _, e in self.commits if e.type == kind]

    @property
    def recoveries(self):
        return self.of(Kind.EXECUTION_RECOVERED)

    @property
    def done(self):
        return bool(self.of(Kind.EXECUTION_COMPLETED))

    def steps(self, step):
        return [node for _, s, node in self.began if s == step]

    def end(self):
        for node in (*self.nodes, self.client):
            node.bury()
