"""Who an unmarked log names by a ciphertext: no authorizer is asked about them, and the process itself goes on (system.md 2.5)."""

from __future__ import annotations

import pytest
from mixed import (
    ALICE,
    OPERATOR,
    OPERATORS_OWN,
    Fleet,
    Trouble,
    denied,
    seen,
    start,
    subject_verbs,
    two_halves,
    verbs,
)

from loom import Principal
from loom.errors import UNKNOWN_OWNER_REASON
from loom.operator import is_sealed_unreadable, sealed_detail_of
from loom.schemas.envelope import EVENT_SCHEMA, Kind, NewEvent
from loom.stores.contracts import NO_EVENTS, StreamAppend
from loom.testing.runtime import until, until_parked

CIPHERTEXT = {"__loomEnc": "another/cipher", "ct": "tell-tale"}
PERSONS = {
    "whole": CIPHERTEXT,
    "actor": {"actor": CIPHERTEXT},
    "identity": {"actor": "alice", "identity": CIPHERTEXT},
    "identity.*": {"actor": "alice", "identity": {"tenant": CIPHERTEXT}},
}


@pytest.fixture
def mixed():
    seen.clear()
    return Fleet()


async def begin(mixed, person, execution_id="old"):
    """As a writer left it that sealed and did not say so."""
    data = {
        "workflow": "two-halves",
        "input": "plain",
        "chainId": execution_id,
        "subject": execution_id,
        "principal": person,
    }
    first = NewEvent(f"{execution_id}-0", Kind.EXECUTION_STARTED, data, {"schema": EVENT_SCHEMA})
    await mixed.fleet.store(()).append(StreamAppend(execution_id, (first,), expected_head=NO_EVENTS, fence=1))


class Allowing:
    """A policy that would let everybody, and keeps whom it was told of."""

    def __init__(self):
        self.asked = []

    def __call__(self, request):
        self.asked.append(request)


@pytest.mark.parametrize("person", PERSONS)
async def test_no_policy_is_asked_about_one_that_cannot_be_read(mixed, person):
    await begin(mixed, PERSONS[person])
    before = mixed.resting()
    policy = Allowing()
    async with mixed.node("raw", authorizer=policy) as node:
        for caller in (ALICE, Principal("mallory"), None):
            for verb, call in verbs(node, "old", caller).items():
                if caller is None and verb in OPERATORS_OWN:
                    continue  # an operator verb needs a principal
                policy.asked.clear()
                error = await denied(call)
                assert is_sealed_unreadable(error), verb
                assert error.reason == UNKNOWN_OWNER_REASON
                assert sealed_detail_of(error).reason == "marker-unopenable"
                assert [request.owner for request in policy.asked] == [None], verb
    assert mixed.resting() == before


@pytest.mark.parametrize("person", PERSONS)
async def test_what_the_process_does_by_itself_goes_on_as_before_there_were_markers(mixed, person):
    await begin(mixed, PERSONS[person])
    async with mixed.node("raw", owns=True) as node:
        await until_parked(node, "old")
        await node.send("old", "go", "-2")
        await until(lambda: seen == ["-2"], "the delivery")
        await until_parked(node, "old")
        assert (await node.load_state("old")).status == "suspended"
        await node.resume("old", "approve", "-3")
        assert await node.handle("old", two_halves).result(5) == "plain-1-2-3"


async def test_who_recorded_an_outcome_is_treated_likewise(mixed):
    await begin(mixed, {"actor": "alice"})
    owner = Principal("alice")
    async with mixed.node("raw", owns=True) as node:
        await until_parked(node, "old")
        await node.cancel("old")
        head = mixed.fleet.log.index.row("old").head
        noted = NewEvent("o", Kind.OUTCOME_RECORDED, {"outcome": 1, "recordedBy": CIPHERTEXT})
        await mixed.fleet.store(()).append(StreamAppend("old", (noted,), expected_head=head))
        before = mixed.resting()
        error = await denied(lambda: node.record_outcome("old", 2, principal=owner))
        assert is_sealed_unreadable(error)
        assert mixed.resting() == before
        assert (await node.load_state("old", principal=owner)).status == "cancelled"
        await node.record_outcome("old", 2)


@pytest.mark.parametrize("kind", ["raw", "poorer", "no keys", "other keys"])
async def test_no_policy_sees_a_sealed_owner_of_a_subject(mixed, kind):
    await start(mixed, subject="sealed")
    policy, trouble = Allowing(), Trouble()
    async with mixed.node(kind, authorizer=policy, trouble=trouble) as node:
        for call in subject_verbs(node, "sealed", Principal("mallory")).values():
            await denied(call)
    assert [request.owner for request in policy.asked] == [None] * len(policy.asked)
    assert "__loomEnc" not in repr(policy.asked)
    assert "$shredded" not in repr(policy.asked)


async def test_an_operator_may_still_erase_an_owner_that_cannot_be_read(mixed):
    await begin(mixed, PERSONS["identity.*"])
    async with mixed.node("capable", operators=("olga",)) as node:
        report = await node.erase_subject("old", dry_run=True, principal=OPERATOR)
        assert report.executions == ("old",)
