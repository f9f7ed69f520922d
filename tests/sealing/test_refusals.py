"""What callers and operators are told of a log that this node cannot open (system.md 2.4 to 2.7; clauses.md, point 1)."""

from __future__ import annotations

import traceback

import pytest
from mixed import (
    ALICE,
    KINDS,
    OPERATOR,
    SECRET,
    Fleet,
    Trouble,
    denied,
    ownerless,
    seen,
    start,
    two_halves,
    verbs,
)
from test_guarded import _faces

from loom import (
    ExecutionDeniedError,
    Principal,
    execution_access_policy,
)
from loom.errors import UNKNOWN_OWNER_REASON, SealedStreamUnreadableError
from loom.ids import inbox_stream
from loom.operator import is_sealed_unreadable, sealed_detail_of
from loom.schemas.envelope import EVENT_SCHEMA, Kind, NewEvent
from loom.stores.contracts import NO_EVENTS, StreamAppend
from loom.stores.keys.memory import MemoryKeyStore
from loom.stores.sealing.encrypting import EncryptingEventStore


@pytest.fixture
def mixed():
    seen.clear()
    return Fleet()


# -- equality of refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "who", [ALICE, Principal("mallory"), OPERATOR], ids=["owner", "stranger", "operator"]
)
async def test_a_refusal_equals_that_of_an_ownerless_execution(mixed, kind, who):
    await start(mixed)
    await ownerless(mixed)
    before = mixed.resting("sealed", inbox_stream("sealed", "go"))
    row = mixed.fleet.log.index.row("sealed").copy()
    trouble = Trouble()
    async with mixed.node(
        kind, trouble=trouble, authorizer=execution_access_policy(operators=["olga"])
    ) as node:
        ordinary = verbs(node, "ownerless", who)
        for verb, call in verbs(node, "sealed", who).items():
            error = await denied(call)
            if verb == "discard" and who == OPERATOR:
                # To an operator an ordinary one is not denied; the refusal has the wording of an unknown owner.
                assert error.reason == UNKNOWN_OWNER_REASON
                continue
            plain = await denied(ordinary[verb])
            assert type(plain) is ExecutionDeniedError
            ours, theirs = _faces(error), _faces(plain)
            for face in ours:
                mine = repr(ours[face]).replace("sealed", "ownerless")
                if face == "pickle":
                    continue
                assert mine == repr(theirs[face]), (verb, face)
            assert error.__context__ is None
            assert error.__cause__ is None
            if error.reason == UNKNOWN_OWNER_REASON:
                assert isinstance(error, SealedStreamUnreadableError)
    assert mixed.resting("sealed", inbox_stream("sealed", "go")) == before
    assert mixed.fleet.log.index.row("sealed") == row
    told = [
        (request.op, request.workflow, reason)
        for request, reason in trouble.denied
        if request.execution_id == "sealed"
    ]
    assert {workflow for _, workflow, _ in told} == {""}
    assert "query" not in {op for op, _, _ in told}
    ordinary = [(r.op, reason) for r, reason in trouble.denied if r.execution_id == "ownerless"]
    skipped = [("discard", UNKNOWN_OWNER_REASON)] if who == OPERATOR else []
    assert [(op, reason) for op, _, reason in told if (op, reason) not in skipped] == ordinary


@pytest.mark.parametrize("kind", KINDS)
async def test_whatever_the_policy_says_the_refusal_stands(mixed, kind):
    await start(mixed)
    asked = []

    def failing(request):
        asked.append(request)
        raise RuntimeError("no")

    def allowing(request):
        asked.append(request)

    def wording(request):
        asked.append(request)
        return "come back tomorrow"

    policies = {
        failing: UNKNOWN_OWNER_REASON,
        allowing: UNKNOWN_OWNER_REASON,
        wording: "come back tomorrow",
        execution_access_policy(unknown_owner="allow"): UNKNOWN_OWNER_REASON,
        None: UNKNOWN_OWNER_REASON,
    }
    for policy, reason in policies.items():
        async with mixed.node(kind, authorizer=policy) as node:
            for principal in (ALICE, Principal("mallory"), None):
                asked.clear()
                error = await denied(lambda node=node, p=principal: node.load_state("sealed", principal=p))
                assert (error.op, error.execution_id, error.reason) == ("load_state", "sealed", reason)
                assert is_sealed_unreadable(error)
                assert len(asked) <= 1
                assert all(r.owner is None and r.workflow == "" for r in asked)


async def test_a_start_on_a_taken_id_says_that_it_is_taken(mixed):
    await start(mixed)
    before = mixed.resting("sealed")
    for kind in KINDS:
        async with mixed.node(kind) as node:
            with pytest.raises(Exception, match="is taken"):
                await node.start(two_halves, "x", execution_id="sealed", subject="mine")
    assert mixed.resting("sealed") == before


async def test_a_missing_id_answers_as_everywhere(mixed):
    await start(mixed)
    for kind in ("capable", *KINDS):
        async with mixed.node(kind) as node:
            with pytest.raises(Exception, match="does not exist"):
                await node.load_state("missing", principal=ALICE)
            await denied(lambda node=node: node.load_state("missing", principal=Principal("bob")))


# -- operators -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("raw", "marker-unopenable"),
        ("poorer", "marker-unopenable"),
        ("no keys", "key-unavailable"),
        ("other keys", "key-unavailable"),
    ],
)
async def test_operators_are_told_why_first_and_every_16th(mixed, kind, reason):
    await start(mixed)
    trouble = Trouble()
    async with mixed.node(kind, trouble=trouble) as node:
        for _ in range(20):
            await denied(lambda node=node: node.load_state("sealed", principal=ALICE))
    told = [(error, about) for error, about in trouble.storage if about == "sealed"]
    assert len(told) == 2
    detail = sealed_detail_of(told[0][0])
    assert (detail.reason, detail.sequence) == (reason, 0)
    assert "EXECUTION_STARTED.input" in detail.covers
    for error, _ in told:
        assert SECRET not in repr(error)
        assert SECRET not in "".join(traceback.format_exception(error))


def _frames(error):
    """Everything that the locals of a raised error's frames hold, as a debugger would print them."""
    at, texts = error.__traceback__, []
    while at is not None:
        if "loom" in at.tb_frame.f_code.co_filename.rsplit("tests", 1)[0]:
            texts += [repr(value) for value in at.tb_frame.f_locals.values()]
        at = at.tb_next
    return "\n".join(texts)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_frames_of_a_refusal_tell_nothing(mixed, kind):
    await start(mixed)
    async with mixed.node(kind) as node:
        error = await denied(lambda node=node: node.load_state("sealed", principal=ALICE))
    text = _frames(error)
    for word in ("SealedDetail", "marker-unopenable", "key-unavailable", "__loomEnc", "covers"):
        assert word not in text


# -- a log that is sealed only further on --------------------------------------------------------------------------

DARK = {"status", "follow_to_head", "send"}
"""Verbs that read the first and the last event alone; what lies between reaches nothing that they decide."""


@pytest.mark.parametrize("kind", ["raw", "poorer", "no keys"])
async def test_a_log_that_is_sealed_further_on_is_refused_before_its_fence_is_taken(mixed, kind):
    data = {
        "workflow": "two-halves",
        "input": 1,
        "chainId": "late",
        "subject": "s",
        "principal": {"actor": "alice"},
    }
    events = (
        NewEvent("e0", Kind.EXECUTION_STARTED, data, {"schema": EVENT_SCHEMA, "node": "n:1"}),
        NewEvent("e1", Kind.STEP_COMPLETED, {"siteId": "0:0", "name": "add", "output": SECRET, "attempt": 1}),
        NewEvent("e2", Kind.EXECUTION_SUSPENDED, {"waits": [{"siteId": "0:1", "arms": []}]}),
    )
    writer = EncryptingEventStore.over(
        mixed.fleet.store(()), MemoryKeyStore(mixed.keys), {Kind.STEP_COMPLETED: ("output",)}
    )
    await writer.append(StreamAppend("late", events, expected_head=NO_EVENTS, fence=1))
    before, row = mixed.resting("late"), mixed.fleet.log.index.row("late").copy()
    owner = Principal("alice")
    async with mixed.node(kind) as node:
        for verb, call in verbs(node, "late", owner).items():
            if verb in DARK or verb == "discard":
                continue
            error = await denied(call)
            assert is_sealed_unreadable(error), verb
            assert sealed_detail_of(error).sequence == 1
            assert error.reason == UNKNOWN_OWNER_REASON
        error = await denied(lambda: node.discard_inbox("late", "go", principal=OPERATOR))
        assert isinstance(error, ExecutionDeniedError)
    assert mixed.resting("late") == before
    assert mixed.fleet.log.index.row("late") == row
