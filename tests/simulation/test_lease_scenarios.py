"""The scenarios of leases, by name, on the virtual clock, in both modes where they exist in both (seed, D11 8 and S7g)."""

from __future__ import annotations

import contextlib

import pytest
from lease_stage import MARGIN_S, TTL_S, Stage

from loom.config import Leases
from loom.kernel.evidence import CONTINUE, UNLEASED
from loom.schemas.envelope import Kind
from loom.testing.simulation.fleet import TTL_MS
from loom.testing.simulation.network import run_now

BOTH = pytest.mark.parametrize("mode", ["lazy", "eager"])
PAST_THE_GRACE_S = 0.6 * TTL_S


@contextlib.contextmanager
def staged(*args, **options):
    stage = Stage(*args, **options)
    try:
        yield stage
    finally:
        stage.end()


async def yes(_execution_id):
    return True


@BOTH
def test_a_stall_longer_than_the_ttl(mode):
    """Another takes over; the stalled one starts nothing more, gives up what runs, and appends nothing."""
    with staged(mode) as stage:
        stage.start("silent")
        stage.run(PAST_THE_GRACE_S)
        assert stage.lease_table.rows["x"].owner == stage.a.runtime.node
        stage.a.freeze()
        stage.give(stage.b)
        stage.until(lambda: stage.recoveries)
        stage.run(TTL_S)
        stage.a.thaw()
        stage.until(lambda: stage.done)
        stage.run(TTL_S)
        assert stage.steps("first") == ["n0", "n1"]
        assert stage.steps("second") == ["n1"]
        assert [node for _, step, node in stage.gave_up] == ["n0"]
        assert len(stage.of(Kind.EXECUTION_COMPLETED)) == 1
        assert not stage.lease_table.rows


@BOTH
def test_a_stall_in_which_the_step_ends_starts_no_next_one(mode):
    """The first thing that a stalled loop runs is the step's end: the gate is asked before anything follows it."""
    with staged(mode, silent_s=1.5 * TTL_S) as stage:
        stage.start("silent")
        stage.run(PAST_THE_GRACE_S)
        stage.a.freeze()
        stage.give(stage.b)
        stage.until(lambda: stage.recoveries)
        stage.a.thaw()
        stage.until(lambda: stage.done)
        assert stage.steps("second") == ["n1"]


@BOTH
def test_a_step_that_blocks_the_loop_past_the_ttl_is_followed_by_nothing(mode):
    """What comes after it runs before any timer can tell of the lapse: only the gate stands in the way."""
    with staged(mode, silent_s=PAST_THE_GRACE_S) as stage:
        stage.world.rng.choice = lambda options: 3.0 if 3.0 in options else options[0]
        stage.start("silent")
        stage.a.blocks = True
        stage.until(lambda: stage.a.frozen)
        stage.give(stage.b)
        stage.until(lambda: stage.done and not stage.a.frozen)
        stage.run(TTL_S)
        assert stage.steps("second") == ["n1"]
        assert len(stage.recoveries) == 1


@BOTH
def test_a_node_cut_from_the_lease_store_stops_before_another_takes_over(mode):
    with staged(mode) as stage:
        stage.start("silent")
        stage.run(PAST_THE_GRACE_S)
        stage.give(stage.b)
        stage.isolate(stage.a)
        stage.until(lambda: stage.recoveries)
        (gave_up, _, node), (taken_over, _) = stage.gave_up[0], stage.recoveries[0]
        assert node == "n0"
        assert gave_up + MARGIN_S * 0.5 < taken_over
        stage.until(lambda: stage.done)
        assert stage.steps("second") == ["n1"]


@BOTH
@pytest.mark.parametrize("crash", ["mid-renew", "mid-release", "plain"])
def test_a_crash_leaves_a_row_that_expires_and_is_recovered_once(mode, crash):
    with staged(mode, silent_s=0.9 * TTL_S) as stage:
        stage.start("silent")
        stage.run(PAST_THE_GRACE_S)
        stage.a.redis.lose_replies = 1 if crash == "mid-renew" else 0
        stage.a.redis.lose_requests = 1 if crash == "mid-release" else 0
        stage.run(0.01)
        stage.a.kill()
        stage.give(stage.b)
        stage.until(lambda: stage.done)
        assert len(stage.recoveries) == 1
        assert stage.recoveries[0][1].data["evidence"] in {"lease expired", "presence expired"}


@BOTH
def test_a_park_whose_release_was_lost_with_its_node_is_no_evidence(mode):
    with staged(mode, silent_s=PAST_THE_GRACE_S) as stage:
        stage.start("parks")
        stage.until(lambda: "x" in stage.lease_table.rows)
        stage.a.redis.cut = True
        stage.until(lambda: stage.of(Kind.EXECUTION_SUSPENDED))
        stage.a.kill()
        assert "x" in stage.lease_table.rows
        stage.give(stage.b)
        stage.run(5 * TTL_S)
        assert stage.recoveries == []
        stage.client.spawn(stage.client.runtime.send("x", "go", 7))
        stage.until(lambda: stage.done)
        assert stage.recoveries == []


@BOTH
def test_a_live_silent_driver_is_not_entered_twice_whatever_a_host_believes(mode):
    with staged(mode, silent_s=6 * TTL_S, is_abandoned=yes) as stage:
        stage.start("silent")
        stage.give(stage.b)  # from inside the lazy grace on
        for _ in range(10):
            stage.b.spawn(stage.b.runtime.recover_abandoned())
            stage.run(TTL_S / 3)
        assert stage.recoveries == []
        stage.until(lambda: stage.done)
        assert stage.steps("first") == ["n0"]
        assert stage.recoveries == []


@BOTH
def test_a_crash_inside_the_lazy_grace_is_found_by_presence(mode):
    with staged(mode) as stage:
        stage.start("silent")
        stage.a.kill()
        stage.lease_table.rows.pop("x", None)
        stage.give(stage.b)
        stage.until(lambda: stage.recoveries)
        assert stage.recoveries[0][1].data["evidence"] == "presence expired"


@BOTH
def test_a_lease_that_is_lost_on_the_way_to_the_fence_leaves_nobody_waiting(mode):
    """The fence is won for a run that was stopped meanwhile: its node drives it anew, and not never."""
    with staged(mode, silent_s=PAST_THE_GRACE_S) as stage:
        stage.start("silent")
        stage.run(PAST_THE_GRACE_S / 2)
        stage.a.kill()
        link = stage.b.log

        def fence_is_late(_stream_id):
            stage.lease_table.flush()
            return 0.7 * TTL_S

        def then_the_fence(_stream_id):
            link.overtaken = fence_is_late
            return 0

        link.overtaken = then_the_fence
        stage.give(stage.b)
        stage.until(lambda: stage.done)


@BOTH
def test_a_ghost_lease_is_collected_and_nothing_is_driven(mode):
    with staged(mode) as stage:
        run_now(stage.leases.acquire_many(["ghost", "x"], "gone:1", 100))
        run_now(stage.leases.acquire_many(["outlives"], f"gone:1{CONTINUE}", 100))
        stage.until(lambda: "ghost" not in stage.lease_table.rows)
        stage.run(2 * TTL_S)
        assert set(stage.lease_table.rows) == {"outlives"}  # its starter may live
        assert stage.commits == []


@BOTH
def test_a_row_that_speaks_for_a_running_execution_is_never_collected(mode):
    with staged(mode, settings={"n1": {"max_recoveries": 1}}, is_abandoned=no) as stage:
        stage.start("silent")
        stage.run(PAST_THE_GRACE_S)
        stage.a.kill()
        stage.give(stage.b)
        stage.run(5 * TTL_S)
        assert stage.lease_table.lease("x").expired
        assert stage.recoveries == []


async def no(_execution_id):
    return False


@BOTH
def test_a_successor_is_leased_at_every_instant(mode):
    with staged(mode) as stage:
        seen = []
        plain = stage.invariants.committed

        def judged(one):
            plain(one)
            for envelope in one.envelopes:
                if envelope.type == Kind.EXECUTION_STARTED and "continuedFrom" in envelope.data:
                    lease = stage.lease_table.lease(one.stream_id)
                    seen.append(lease is not None and not lease.expired)

        stage.invariants.committed = judged
        stage.start("chain", 5)
        stage.until(lambda: stage.done)
        stage.run(1)
        assert seen == [True] * 5
        assert not stage.lease_table.rows


@BOTH
def test_after_an_outage_drivers_renew_before_anybody_judges(mode):
    with staged(mode, silent_s=8 * TTL_S) as stage:
        stage.start("silent")
        stage.run(PAST_THE_GRACE_S)
        stage.give(stage.b)
        stage.isolate(stage.a, stage.b)
        stage.run(2 * TTL_S)
        assert [node for _, _, node in stage.gave_up] == [
            "n0"
        ]  # it cannot tell an outage from a cut of its own
        assert stage.recoveries == []
        healed = stage.world.now
        stage.isolate(stage.a, stage.b, cut=False)
        stage.until(lambda: stage.recoveries)
        at, event = stage.recoveries[0]
        by_another = event.metadata["node"] == stage.b.runtime.node
        assert not by_another or at > healed + TTL_S


@BOTH
def test_in_mode_continue_an_outage_stops_nobody_and_its_rows_prove_nothing(mode):
    outlives = {"leases": Leases(ttl_ms=TTL_MS, acquire=mode, on_store_error="continue")}
    with staged(mode, silent_s=4 * TTL_S, settings={"n0": outlives, "n1": outlives}) as stage:
        stage.start("silent")
        stage.run(PAST_THE_GRACE_S)
        stage.isolate(stage.a)
        stage.give(stage.b)
        stage.until(lambda: stage.done)
        assert stage.steps("first") == ["n0"]
        assert stage.recoveries == []
        assert stage.gave_up == []


@BOTH
def test_a_driver_that_keeps_no_rows_is_taken_over_only_on_a_host_s_word(mode):
    legacy = {"n0": {"leases": Leases(enabled=False)}}
    for word, taken in ((None, False), (yes, True)):
        with staged(mode, silent_s=6 * TTL_S, settings=legacy, is_abandoned=word) as stage:
            assert stage.a.runtime.node.endswith(UNLEASED)
            stage.start("silent")
            stage.give(stage.b)
            stage.run(4 * TTL_S)
            assert bool(stage.recoveries) == taken


def test_a_lazy_acquire_whose_reply_is_lost_ends_before_its_row_does():
    with staged("lazy", silent_s=8 * TTL_S) as stage:
        stage.start("silent")
        stage.until(lambda: stage.world.now > stage.began[0][0] + 0.3 * TTL_S)
        for node in stage.nodes:
            node.redis.lose_replies = 10_000
        stage.until(lambda: stage.gave_up)
        lease = stage.lease_table.lease("x")
        assert lease is None or not lease.expired
