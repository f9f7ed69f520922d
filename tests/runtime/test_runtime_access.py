"""Who may do what, and what a denial tells."""

from __future__ import annotations

import pytest
from runtime_support import kinds, of_kind

from loom import (
    ExecutionDeniedError,
    ExecutionNotFoundError,
    Principal,
    execution_access_policy,
    flow,
)
from loom.errors import UNKNOWN_OWNER_REASON
from loom.schemas.envelope import Kind
from loom.testing.runtime import until_parked

ALICE = Principal("alice", {"tenant": "t1"})
MALLORY = Principal("mallory", {"tenant": "t2"})


@flow("waits")
async def waits(ctx):
    return await ctx.gate("approve")


def verbs(runtime, execution_id, principal):
    return {
        "send": lambda: runtime.send(execution_id, "go", 1, principal=principal),
        "resume": lambda: runtime.resume(execution_id, "approve", 1, principal=principal),
        "cancel": lambda: runtime.cancel(execution_id, principal=principal),
        "load_state": lambda: runtime.load_state(execution_id, principal=principal),
        "query": lambda: runtime.query(execution_id, principal=principal),
        "fork": lambda: runtime.fork(execution_id, principal=principal),
        "record_outcome": lambda: runtime.record_outcome(execution_id, 1, principal=principal),
        "acquire_fence": lambda: runtime.acquire_fence(execution_id, principal=principal),
        "notify": lambda: runtime.notify_inbox(execution_id, principal=principal),
        "expire": lambda: runtime.expire_inbox(execution_id, "go", older_than_ms=1, principal=principal),
        "recover": lambda: runtime.recover_abandoned(execution_id, principal=principal),
        "resume_as": lambda: runtime.resume_as(execution_id, waits, principal=principal),
        "discard": lambda: runtime.discard_inbox(execution_id, "go", principal=principal),
    }


async def denied(call):
    with pytest.raises(ExecutionDeniedError) as caught:
        await call()
    return caught.value


@pytest.fixture
async def owned(fleet, trouble):
    async with fleet.runtime("node", [waits], **trouble.options) as runtime:
        handle = await runtime.start(waits, principal=ALICE)
        await until_parked(runtime, handle.execution_id)
        yield runtime, handle.execution_id


async def test_a_stranger_may_do_nothing(owned, trouble):
    runtime, execution_id = owned
    for op, call in verbs(runtime, execution_id, MALLORY).items():
        error = await denied(call)
        assert (error.op, error.execution_id) == (op, execution_id)
    told = set(verbs(runtime, execution_id, MALLORY)) - {"query"}
    assert {request.op for request, _ in trouble.denied} == told
    state = await runtime.load_state(execution_id)
    assert state.status == "suspended"


async def test_the_owner_may_but_not_discard(owned):
    runtime, execution_id = owned
    assert (await runtime.load_state(execution_id, principal=ALICE)).status == "suspended"
    await denied(verbs(runtime, execution_id, ALICE)["discard"])
    await runtime.resume(execution_id, "approve", 7, principal=ALICE)
    assert await runtime.handle(execution_id).result(5) == 7


async def test_an_owner_s_name_without_its_identity_is_not_the_owner(owned):
    runtime, execution_id = owned
    await denied(verbs(runtime, execution_id, Principal("alice"))["query"])
    await denied(verbs(runtime, execution_id, Principal("alice", {"tenant": "t2"}))["query"])


async def test_a_missing_id_is_missing_to_the_identified_and_denied_to_others(owned):
    runtime, _ = owned
    for op, call in verbs(runtime, "nobody", MALLORY).items():
        if op != "discard":
            with pytest.raises(ExecutionNotFoundError):
                await call()
    for call in verbs(runtime, "nobody", Principal("mallory")).values():
        await denied(call)


async def test_a_missing_id_and_an_ownerless_execution_read_alike(fleet):
    async with fleet.runtime("node", [waits]) as runtime:
        ownerless = (await runtime.start(waits)).execution_id
        stranger = Principal("mallory")
        for op in verbs(runtime, "x", stranger):
            there = await denied(verbs(runtime, ownerless, stranger)[op])
            missing = await denied(verbs(runtime, "nobody", stranger)[op])
            assert there.reason == missing.reason
            if op != "discard":
                assert there.reason == UNKNOWN_OWNER_REASON
            assert str(there).replace(ownerless, "nobody") == str(missing)


async def test_denials_of_resume_and_cancel_are_journaled_and_the_flow_goes_on(owned):
    runtime, execution_id = owned
    for op in ("resume", "cancel", "send", "query"):
        await denied(verbs(runtime, execution_id, MALLORY)[op])
    history = await runtime.history(execution_id)
    facts = of_kind(history, Kind.EXECUTION_DENIED)
    assert [(e.data["op"], e.data["actor"]) for e in facts] == [("resume", "mallory"), ("cancel", "mallory")]
    await runtime.resume(execution_id, "approve", 1, principal=ALICE)
    assert await runtime.handle(execution_id).result(5) == 1


async def test_a_denial_while_the_flow_runs_does_not_disturb_it(fleet, trouble):
    import asyncio

    hold = asyncio.Event()

    @flow("held")
    async def held(ctx):
        await ctx.run(hold.wait)
        return await ctx.gate("approve")

    async with fleet.runtime("node", [held], **trouble.options) as runtime:
        handle = await runtime.start(held, principal=ALICE)
        for _ in range(3):
            await denied(verbs(runtime, handle.execution_id, MALLORY)["cancel"])
        hold.set()
        await until_parked(runtime, handle.execution_id)
        await denied(verbs(runtime, handle.execution_id, MALLORY)["cancel"])
        await runtime.resume(handle.execution_id, "approve", 1, principal=ALICE)
        assert await handle.result(5) == 1
        recorded = kinds(await runtime.history(handle.execution_id))
        assert recorded.count(Kind.EXECUTION_DENIED) == 4
        assert recorded.count(Kind.EXECUTION_RECOVERED) == 0
        assert (await runtime.load_state(handle.execution_id)).head == len(recorded) - 1
    assert trouble.errors == []


async def test_an_authorizer_of_one_s_own_judges_every_call(fleet):
    asked = []

    async def authorizer(request):
        asked.append((request.op, request.workflow, request.principal, request.owner))
        return None if request.principal == ALICE else "ask Alice"

    async with fleet.runtime("node", [waits], authorizer=authorizer) as runtime:
        handle = await runtime.start(waits, principal=ALICE)
        error = await denied(lambda: runtime.query(handle.execution_id))
        assert error.reason == "ask Alice"
        await runtime.query(handle.execution_id, principal=ALICE)
        assert asked == [("query", "waits", None, ALICE), ("query", "waits", ALICE, ALICE)]


async def test_a_policy_that_fails_allows_nothing(fleet):
    def authorizer(request):
        raise RuntimeError("database down")

    async with fleet.runtime("node", [waits], authorizer=authorizer) as runtime:
        handle = await runtime.start(waits, principal=ALICE)
        error = await denied(lambda: runtime.query(handle.execution_id, principal=ALICE))
        assert "database" not in str(error)
        missing = await denied(lambda: runtime.query("nobody", principal=Principal("alice")))
        assert missing.reason == UNKNOWN_OWNER_REASON


async def test_a_policy_may_be_limited_to_workflows_or_let_the_ownerless_be(fleet):
    policy = execution_access_policy(allow_workflows=["other"])
    async with fleet.runtime("node", [waits], authorizer=policy) as runtime:
        handle = await runtime.start(waits, principal=ALICE)
        await denied(lambda: runtime.query(handle.execution_id, principal=ALICE))
    policy = execution_access_policy(unknown_owner="allow")
    async with fleet.runtime("node", [waits], authorizer=policy) as runtime:
        handle = await runtime.start(waits)
        await runtime.query(handle.execution_id, principal=MALLORY)
