"""What callers and operators are told of a log that this node cannot open (system.md 2.4 to 2.7; clauses.md, point 1)."""

from __future__ import annotations

import inspect
import pickle
import traceback

import pytest
from mixed import (
    ALICE,
    KINDS,
    OPERATOR,
    OPERATORS_OWN,
    SECRET,
    Fleet,
    Trouble,
    denied,
    ownerless,
    seen,
    start,
    subject_verbs,
    two_halves,
    verbs,
)
from test_guarded import _faces

from loom import (
    ExecutionDeniedError,
    Principal,
    Runtime,
    execution_access_policy,
)
from loom.errors import UNKNOWN_OWNER_REASON, SealedStreamUnreadableError
from loom.operator import is_sealed_unreadable, sealed_detail_of


@pytest.fixture
def mixed():
    seen.clear()
    return Fleet()


# -- equality of refusals ------------------------------------------------------------------------------------------


TELLING = ("SealedDetail", "marker-unopenable", "key-unavailable", "__loomEnc", "covers")
"""What no caller may find, in whatever leads away from an error."""


def _frames(error):
    """Everything that the locals of a raised error's frames hold, as a debugger would print them."""
    at, texts = error.__traceback__, []
    while at is not None:
        if "loom" in at.tb_frame.f_code.co_filename.rsplit("tests", 1)[0]:
            texts += [repr(value) for value in at.tb_frame.f_locals.values()]
        at = at.tb_next
    return "\n".join(texts)


def _assert_equal(error, plain, verb):
    assert type(plain) is ExecutionDeniedError
    ours, theirs = _faces(error), _faces(plain)
    for face in ours.keys() - {"pickle"}:
        assert repr(ours[face]).replace("sealed", "ownerless") == repr(theirs[face]), (verb, face)
    assert type(pickle.loads(pickle.dumps(error))) is ExecutionDeniedError
    assert error.__context__ is None, verb
    assert error.__cause__ is None, verb
    assert not [word for word in TELLING if word in _frames(error)], verb
    if error.reason == UNKNOWN_OWNER_REASON and verb not in subject_verbs(None, "", None):
        assert isinstance(
            error, SealedStreamUnreadableError
        )  # a subject's may be denied before anything is opened


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "who",
    [ALICE, Principal("mallory"), None, OPERATOR],
    ids=["owner", "stranger", "anonymous", "operator"],
)
async def test_a_refusal_equals_that_of_an_ownerless_execution(mixed, kind, who):
    await start(mixed, subject="sealed")
    await ownerless(mixed)
    rest = lambda: {s: raw for s, raw in mixed.resting().items() if "ownerless" not in s}  # noqa: E731
    before, row = rest(), mixed.fleet.log.index.row("sealed").copy()
    trouble = Trouble()
    # To an operator an ordinary one is not denied; the refusal has the wording of an unknown owner all the same.
    skipped = OPERATORS_OWN if who == OPERATOR else set()
    async with mixed.node(
        kind, trouble=trouble, authorizer=execution_access_policy(operators=["olga"])
    ) as node:
        ours, theirs = verbs(node, "sealed", who), verbs(node, "ownerless", who)
        if who != OPERATOR:  # who may erase what nobody owns
            ours |= subject_verbs(node, "sealed", who)
            theirs |= subject_verbs(node, "ownerless", who)
        for verb, call in ours.items():
            error = await denied(call)
            if verb in skipped:
                assert error.reason == UNKNOWN_OWNER_REASON
                continue
            _assert_equal(error, await denied(theirs[verb]), verb)
    assert rest() == before
    assert mixed.fleet.log.index.row("sealed") == row
    told = [(r.op, r.workflow, reason) for r, reason in trouble.denied if r.execution_id == "sealed"]
    assert {workflow for _, workflow, _ in told} == {""}
    assert "query" not in {op for op, _, _ in told}
    plain = [(r.op, reason) for r, reason in trouble.denied if r.execution_id == "ownerless"]
    own = (
        {("discard", UNKNOWN_OWNER_REASON), *((op, UNKNOWN_OWNER_REASON) for op in skipped)}
        if skipped
        else ()
    )
    assert [(op, reason) for op, _, reason in told if (op, reason) not in own] == plain


WITHOUT = {
    "start": "a taken id is still taken: test_a_start_on_a_taken_id_says_that_it_is_taken",
    "handle": "reads nothing; what it says is judged: test_a_handle_is_refused_too",
    "held": "for operators of the fleet; a log that does not open is a row that says so",
    "look_after_copies": "of a node's own processors, and no caller's: ids and counts, at rest",
    "expire_chain": "of a node's own retention, and no caller's; nothing of the chain is opened",
    "findings": "names executions that no node opens, to operators",
    "rebuild_wakes": "goes on past what does not open: test_mixed_breaks.py",
    "add_flow": "",
    "open": "",
    "close": "",
}
"""Public methods of a node that are no verb on one execution or subject, and why they need no row."""

NAMED = {
    "notify": "notify_inbox",
    "expire": "expire_inbox",
    "restore": "restore_from_state",
    "discard": "discard_inbox",
    "quarantine": "quarantine_inbox",
    "release": "release_inbox",
    "drop": "release_inbox",
    "purge": "purge_history",
    "delete": "delete_chain",
    "erase": "erase_subject",
    "erase, tried": "erase_subject",
    "shred": "shred_subject",
    "export": "export_subject",
}


async def test_every_verb_has_its_row(mixed):
    public = {
        name for name, member in inspect.getmembers(Runtime, inspect.isfunction) if not name.startswith("_")
    }
    rows = {NAMED.get(verb, verb) for verb in {**verbs(None, "", None), **subject_verbs(None, "", None)}}
    assert rows | WITHOUT.keys() == public
    assert not rows & WITHOUT.keys()


def test_every_verb_on_one_execution_or_subject_is_worded():
    """One wrapper on every public method that reads a stream (the seed's D7)."""
    for name, member in inspect.getmembers(Runtime, inspect.isfunction):
        if (
            name.startswith("_") or name in WITHOUT or name == "release_inbox"
        ):  # which calls one of two that are
            continue
        assert hasattr(member, "__wrapped__"), name
    for name in ("_release_held", "_drop_held"):
        assert hasattr(getattr(Runtime, name), "__wrapped__")


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


@pytest.mark.parametrize("kind", KINDS)
async def test_the_frames_of_a_refusal_tell_nothing(mixed, kind):
    await start(mixed)
    async with mixed.node(kind) as node:
        error = await denied(lambda node=node: node.load_state("sealed", principal=ALICE))
    assert not [word for word in TELLING if word in _frames(error)]
