"""What the judge decides: transactions of several writes against the same writes one by one, and each rule."""

import pytest
from hypothesis import given, settings
from judge_ops import INBOXES, state, transactions

from loom.errors import (
    ExecutionAlreadyExistsError,
    ExecutionNotFoundError,
    InboxFullError,
    InvalidInputError,
    PayloadTooLargeError,
    StaleFenceError,
    StreamBrokenError,
    WrongHeadError,
)
from loom.ids import inbox_stream
from loom.schemas.envelope import Kind, NewEvent
from loom.stores.contracts import Observation, Outgoing, Snapshot, StreamAppend
from loom.stores.judge import (
    RECENT_IDS,
    UNKNOWN_PLACE,
    Accepted,
    AcquireFence,
    AppendOps,
    CopyPrefix,
    Delete,
    DropSnapshot,
    PutEvent,
    PutMark,
    Rejected,
    Repeated,
    SaveSnapshot,
    SendOut,
    Staged,
    Tick,
    Truncate,
)
from loom.stores.memory.log import MemoryIndex
from loom.stores.rules import streams_of

INBOX = inbox_stream("a", "t")


def ev(event_id, kind=Kind.STEP_COMPLETED, **metadata):
    return NewEvent(event_id, kind, {}, metadata)


def app(stream_id, head, *ids, **options):
    return AppendOps((StreamAppend(stream_id, tuple(ev(i) for i in ids), expected_head=head, **options),))


def msg(event_id, **options):
    return StreamAppend(INBOX, (ev(event_id, Kind.INBOX_MESSAGE),), **options)


def outcome(verdict):
    """A verdict without what may differ: whether it waits, and of which state it speaks.

    That is the head as of which it was refused, and where a repeated message stands: its inbox may be going at that moment.
    """
    if isinstance(verdict, Rejected):
        return type(verdict.error)
    if not isinstance(verdict.result, list):
        return type(verdict), verdict.result
    return type(verdict), [
        (a.stream_id, True) if a.repeated and a.stream_id in INBOXES else a for a in verdict.result
    ]


class World:
    """An index and the transaction being formed over it."""

    def __init__(self):
        self.index, self.now = MemoryIndex(), 100
        self.staged = Staged(self.index)

    def judge(self, op):
        return self.staged.judge(op, self.now)

    def commit(self):
        self.index.apply(self.staged.effects)
        self.staged = Staged(self.index)

    def abort(self):
        self.staged.discard()

    def do(self, *ops):
        for op in ops:
            verdict = self.judge(op)
            assert isinstance(verdict, Accepted), verdict
        self.commit()


@pytest.fixture
def world():
    return World()


# -- in whatever transactions ---------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(transactions)
def test_transactions_change_nothing_but_when(script):
    """Ops in any transactions, some aborted, leave what the committed ones leave one by one, and say the same."""
    together, alone = World(), World()
    pending = []

    def settle(end):
        if end == "abort":
            together.abort()
        else:
            together.commit()
            for op, said in pending:
                assert outcome(alone.judge(op)) == said
                alone.commit()
        pending.clear()

    for op, end in zip(*script, strict=True):
        pending.append((op, outcome(together.judge(op))))
        if end:
            settle(end)
    settle("commit")
    assert state(together.index) == state(alone.index)


@settings(max_examples=80, deadline=None)
@given(transactions)
def test_an_answer_that_does_not_wait_stands_whatever_comes(script):
    """``on_staged`` is False exactly for what the committed state says, too, and goes on saying."""
    world = World()
    for op, end in zip(*script, strict=True):
        verdict = world.judge(op)
        if not isinstance(verdict, Accepted):
            settled = Staged(world.index).judge(op, world.now)
            if not verdict.on_staged:
                assert outcome(settled) == outcome(verdict)
            else:
                assert any(world.staged._holds(s) for s in streams_of(op))
                assert outcome(settled) != outcome(verdict) or _may_still_turn(settled)
        if end == "commit":
            world.commit()
        elif end == "abort":
            world.abort()


def _may_still_turn(refusal):
    """Whether a later append could bring about what was expected."""
    error = refusal.error
    if isinstance(error, WrongHeadError):
        return error.head <= error.expected
    return isinstance(error, ExecutionNotFoundError) or (
        isinstance(error, StaleFenceError) and error.token > error.current
    )


@settings(max_examples=50, deadline=None)
@given(transactions)
def test_an_aborted_transaction_leaves_no_trace(script):
    world = World()
    for op in script[0][: len(script[0]) // 2]:
        world.judge(op)
        world.commit()
    before = state(world.index)
    for op in script[0]:
        world.judge(op)
    world.abort()
    assert world.staged.effects == []
    assert state(world.index) == state(world.staged) == before


@settings(max_examples=50, deadline=None)
@given(transactions)
def test_what_is_staged_reads_as_it_will_be(script):
    """The overlay shows the state that the commit makes, also through a second one over the first."""
    world = World()
    below = world.staged
    for op, end in zip(*script, strict=True):
        if end == "commit":
            world.staged = Staged(below)
        world.judge(op)
    if world.staged is not below:
        seen = state(world.staged)
        world.index.apply(below.effects)
        world.index.apply(world.staged.effects)
    else:
        seen = state(below)
        world.index.apply(below.effects)
    assert seen == state(world.index)


# -- what rests on what -----------------------------------------------------------------------------------------------


def test_a_conflict_with_a_staged_head_waits(world):
    world.do(app("a", -1, "0"))
    assert isinstance(world.judge(app("a", 0, "1")), Accepted)
    conflict = world.judge(app("a", 0, "2"))
    assert isinstance(conflict.error, WrongHeadError)
    assert conflict.on_staged
    world.abort()
    assert isinstance(world.judge(app("a", 0, "2")), Accepted)


def test_a_conflict_with_a_committed_head_does_not(world):
    world.do(app("a", -1, "0", "1"))
    assert isinstance(world.judge(app("a", 1, "2")), Accepted)
    conflict = world.judge(app("a", 0, "x"))
    assert (conflict.on_staged, conflict.error.head) == (False, 1)


def test_a_head_that_is_not_there_yet_waits_only_for_what_is_staged(world):
    world.do(app("a", -1, "0"))
    assert not world.judge(app("a", 5, "x")).on_staged
    world.judge(app("a", 0, "1"))
    assert world.judge(app("a", 5, "x")).on_staged


def test_a_repeat_waits_for_what_it_repeats(world):
    world.do(app("a", -1, "0"))
    world.judge(app("a", 0, "1"))
    assert world.judge(app("a", 0, "1")) == Repeated(world.judge(app("a", 0, "1")).result, on_staged=True)
    assert not world.judge(app("a", -1, "0")).on_staged
    world.judge(AppendOps((msg("m"),)))
    assert world.judge(AppendOps((msg("m"),))).on_staged
    world.commit()
    assert not world.judge(AppendOps((msg("m"),))).on_staged


def test_a_stale_fence_waits_for_the_fence(world):
    world.do(app("a", -1, "0", fence=1))
    world.judge(AcquireFence("a", "n"))
    stale = world.judge(app("a", 0, "1", fence=1))
    assert isinstance(stale.error, StaleFenceError)
    assert stale.on_staged
    assert isinstance(world.judge(app("a", 0, "1", fence=2)), Accepted)
    world.commit()
    assert not world.judge(app("a", 1, "2", fence=1)).on_staged


def test_deletion_and_truncation_that_are_staged(world):
    world.do(app("a", -1, "0", "1", "2"))
    world.judge(Truncate("a", 2))
    assert world.judge(Truncate("a", 2)) == Repeated(None, on_staged=True)
    assert world.judge(app("a", 0, "1")).on_staged
    world.judge(Delete("a"))
    assert world.judge(Delete("a")).on_staged
    refused = world.judge(app("a", -1, "0"))
    assert isinstance(refused.error, ExecutionAlreadyExistsError)
    assert refused.on_staged
    world.commit()
    assert not world.judge(app("a", -1, "0")).on_staged
    assert not world.judge(app("a", 2, "3")).on_staged


def test_a_deletion_that_is_committed_stands(world):
    world.do(app("a", -1, "0"), AppendOps((msg("0"),)), Delete(INBOX))
    world.judge(app("a", 0, "1", consumed=((INBOX, 0),)))
    refused = world.judge(app(INBOX, 0, "x"))
    assert isinstance(refused.error, WrongHeadError)
    assert not refused.on_staged
    assert not world.judge(AppendOps((msg("x"),))).on_staged


def test_a_full_inbox_waits_for_the_message_that_fills_it(world):
    world.do(AppendOps((msg("0"),)))
    world.judge(AppendOps((msg("1", backlog_cap=2),)))
    full = world.judge(AppendOps((msg("2", backlog_cap=2),)))
    assert isinstance(full.error, InboxFullError)
    assert full.on_staged
    assert not world.judge(AppendOps((msg("2", backlog_cap=1),))).on_staged


def test_an_observation_that_the_fence_has_passed_does_not_wait(world):
    world.do(app("a", -1, "0", fence=1), AcquireFence("a", "n"))
    world.judge(app("a", 0, "1"))
    seen = Observation(0, 1, "0")
    late = StreamAppend("a", (ev("x"),), observation=seen)
    assert not world.judge(AppendOps((late,))).on_staged
    assert not world.judge(AcquireFence("a", "m", seen)).on_staged
    assert world.judge(AcquireFence("a", "m", Observation(0, 2, "0"))).on_staged


def test_a_stack_of_two_transactions(world):
    world.do(app("a", -1, "0"))
    world.judge(app("a", 0, "1"))
    upper = Staged(world.staged)
    assert upper.judge(app("a", 0, "1"), 1).on_staged
    assert upper.judge(app("a", 0, "x"), 1).on_staged
    assert not upper.judge(app("a", -1, "0"), 1).on_staged
    assert isinstance(upper.judge(app("a", 1, "2"), 1), Accepted)
    world.index.apply(world.staged.effects)
    assert [e.id for e in upper.events("a", 0, 9)] == ["0", "1", "2"]


# -- effects ---------------------------------------------------------------------------------------------------------


def test_an_append_says_all_that_a_record_needs(world):
    world.do(app("a", -1, "0"), AppendOps((msg("m0"), msg("m1"))))
    out = Outgoing("publish", "o", "k", b"v", topic="t")
    verdict = world.judge(app("a", 0, "1", "2", consumed=((INBOX, 1),), outgoing=(out,)))
    first, second, sent = verdict.effects
    assert [(e.position, e.size, e.consumed) for e in (first, second)] == [(0, 2, ()), (1, 2, ((INBOX, 1),))]
    assert [e.envelope.sequence for e in (first, second)] == [1, 2]
    assert sent == SendOut(out, "a", 2)
    world.commit()
    assert world.index.row(INBOX).waiting == 0


def test_the_first_fence_needs_no_mark_and_the_next_does(world):
    assert [type(e) for e in world.judge(app("a", -1, "0", fence=1)).effects] == [PutEvent]
    (mark,) = world.judge(AcquireFence("a", "n:2")).effects
    assert isinstance(mark, PutMark)
    assert (mark.row.fence, mark.row.fence_owner, mark.row.head) == (2, "n:2", 0)
    assert mark.row is not world.staged.row("a") or world.judge(app("a", 0, "1")) and mark.row.head == 0


def test_an_op_is_staged_whole_or_not_at_all(world):
    world.do(app("a", -1, "0"))
    good, bad = app("a", 0, "1").appends, app("b", 3, "x").appends
    assert isinstance(world.judge(AppendOps((*good, msg("m"), *bad))), Rejected)
    assert world.staged.effects == []
    assert world.staged.row("a").head == 0
    assert world.staged.row(INBOX) is None


def test_what_is_admitted_is_decided_before_it_is_staged(world):
    def admit(effects):
        for effect in effects:
            effect.encoded = b"x"
            if effect.envelope.id == "large":
                raise PayloadTooLargeError(effect.envelope.stream_id, 2, 1)

    assert world.staged.judge(app("a", -1, "0"), 1, admit).effects[0].encoded == b"x"
    refused = world.staged.judge(app("a", 0, "1", "large"), 1, admit)
    assert isinstance(refused.error, PayloadTooLargeError)
    assert not refused.on_staged
    assert world.staged.row("a").head == 0
    assert len(world.staged.effects) == 1


def test_a_stream_that_the_index_stopped_is_refused(world):
    broken = StreamBrokenError("a", 3, "a gap")

    class Stopped(MemoryIndex):
        def row(self, stream_id):
            raise broken

    assert Staged(Stopped()).judge(app("a", -1, "0"), 1) == Rejected(broken)


def test_timestamps_never_fall(world):
    world.do(app("a", -1, "0"))
    world.now = 50
    world.do(app("a", 0, "1"))
    world.now = 200
    world.do(app("a", 1, "2"))
    assert [e.timestamp for e in world.index.events("a", 0, 9)] == [100, 100, 200]


# -- repeats -----------------------------------------------------------------------------------------------------------


def test_a_message_beyond_the_window_is_new(world):
    world.do(*(AppendOps((msg(str(n)),)) for n in range(RECENT_IDS + 1)))
    assert world.judge(AppendOps((msg("1"),))).result[0].first == 1
    assert isinstance(world.judge(AppendOps((msg("0"),))), Accepted)
    assert len(world.index.row(INBOX).recent) == RECENT_IDS


def test_a_guarded_append_in_place_proves_the_message_beside_it(world):
    both = AppendOps((*app("a", -1, "0").appends, msg("m")))
    world.do(both, *(AppendOps((msg(str(n)),)) for n in range(RECENT_IDS)))
    again = world.judge(both)
    assert isinstance(again, Repeated)
    assert [r.first for r in again.result] == [0, UNKNOWN_PLACE]
    assert world.index.row(INBOX).head == RECENT_IDS


def test_a_message_known_already_does_not_hold_up_the_fact_beside_it(world):
    world.do(app("a", -1, "0"), AppendOps((msg("m"),)))
    verdict = world.judge(AppendOps((*app("a", 0, "1").appends, msg("m"))))
    assert isinstance(verdict, Accepted)
    assert [(r.first, r.repeated) for r in verdict.result] == [(1, False), (0, True)]


def test_a_repeat_sends_nothing_again(world):
    out = Outgoing("publish", "o", "k", b"v", topic="t")
    world.do(app("a", -1, "0", outgoing=(out,)))
    assert isinstance(world.judge(app("a", -1, "0", outgoing=(out,))), Repeated)
    assert world.staged.effects == []


def test_an_unguarded_record_of_a_log_is_known_by_its_id(world):
    world.do(app("a", -1, "0", "1"))
    note = AppendOps((StreamAppend("a", (ev("note", Kind.EXECUTION_DENIED),)),))
    world.do(note)
    assert world.judge(note).result[0].first == 2
    world.do(app("a", 2, "3"), Truncate("a", 3))
    assert isinstance(world.judge(AppendOps((StreamAppend("a", (ev("0"),)),))), Repeated)


def test_two_guards_or_no_events_are_refused(world):
    two = StreamAppend("a", (ev("0"),), expected_head=-1, observation=Observation(-1, 0, None))
    for bad in (two, StreamAppend("a", ()), StreamAppend("a", (), expected_head=-1)):
        assert isinstance(world.judge(AppendOps((bad,))).error, InvalidInputError)


# -- the other ops -----------------------------------------------------------------------------------------------------


def test_a_mark_carries_what_the_events_no_longer_say(world):
    world.do(
        app("a", -1, "0"),
        *(AppendOps((msg(str(n)),)) for n in range(5)),
        app("a", 0, "1", consumed=((INBOX, 3),)),
    )
    *drops, mark = world.judge(Truncate(INBOX, 4)).effects
    assert [(d.stream_id, d.sequence) for d in drops] == [(INBOX, n) for n in (1, 2, 3)]
    row = mark.row
    assert (row.first, row.head, row.anchor, row.consumed) == (4, 4, "0", 3)
    assert list(row.recent) == [str(n) for n in range(5)]


def test_deletion_takes_the_snapshot_along_and_leaves_the_fence(world):
    world.do(app("a", -1, "0", fence=1), AcquireFence("a", "n"), SaveSnapshot(Snapshot("a", 0, {})))
    verdict = world.judge(Delete("a"))
    assert DropSnapshot("a") in verdict.effects
    row = world.staged.row("a")
    assert (row.deleted, row.fence, row.head, row.anchor) == (True, 2, -1, None)
    assert world.staged.snapshot_sequence("a") == -1
    assert isinstance(world.judge(SaveSnapshot(Snapshot("a", 1, {}))), Rejected)


def test_the_later_snapshot_stands(world):
    world.do(SaveSnapshot(Snapshot("a", 5, {})))
    assert world.judge(SaveSnapshot(Snapshot("a", 4, {}))) == Repeated(None)
    assert isinstance(world.judge(SaveSnapshot(Snapshot("a", 5, {"again": 1}))), Accepted)


def test_a_copy_of_a_trimmed_log_has_a_mark(world):
    world.do(app("a", -1, *"0123456"), Truncate("a", 3))
    verdict = world.judge(CopyPrefix("a", "b", 4))
    assert [type(e) for e in verdict.effects] == [PutEvent] * 3 + [PutMark]
    assert (verdict.effects[-1].row.first, verdict.effects[-1].row.head) == (3, 4)
    world.commit()
    assert [e.sequence for e in world.index.events("b", 0, 9)] == [0, 3, 4]
    assert world.judge(CopyPrefix("a", "b", 4)) == Repeated(4)


def test_a_tick_changes_nothing(world):
    assert world.judge(Tick()) == Accepted([], None)


def test_no_stream_is_founded_beside_a_deleted_log():
    """Also told at once where the deletion is committed, and only after its commit where it is staged."""
    index = MemoryIndex()
    staged = Staged(index)
    staged.judge(app("a", -1, "a0"), 1)
    staged.judge(Delete("a"), 2)
    refused = staged.judge(AppendOps((msg("m0"),)), 3)
    assert (type(refused.error), refused.on_staged) == (ExecutionNotFoundError, True)
    index.apply(staged.effects)
    refused = Staged(index).judge(AppendOps((msg("m0"),)), 4)
    assert (type(refused.error), refused.on_staged) == (ExecutionNotFoundError, False)
    beside = StreamAppend(inbox_stream("b", "t"), (ev("m1", Kind.INBOX_MESSAGE),))
    assert isinstance(Staged(index).judge(AppendOps((beside,)), 5), Accepted), "a log that never was may come"
