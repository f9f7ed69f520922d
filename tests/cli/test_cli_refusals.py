"""On the command line, too, a sealed execution is denied as one of unknown owner is: output, status, and nothing else told."""

import asyncio
import base64
import uuid

import pytest
from test_cli_subjects import ORDER, sealed, sealed_env, sealed_worker  # noqa: F401 - fixtures

from loom import Client, Config

SEALED, OWNERLESS = "sealed-execution", "ownerless-execut"

UNSEALED = ("LOOM_SEALING__KEYS", "LOOM_SEALING__KEK", "LOOM_SEALING__SENSITIVE")

VERBS = {
    "show": ["show", "{id}"],
    "send": ["send", "{id}", "ship", "{}"],
    "resume": ["resume", "{id}", "approve", "1"],
    "cancel": ["cancel", "{id}"],
    "tail": ["tail", "{id}"],
    "inbox": ["inbox", "{id}"],
    "discard": ["discard", "{id}", "ship"],
    "quarantine": ["quarantine", "{id}", "ship"],
    "release": ["release", "{id}", "ship", "m1", "--discard"],
    "recover": ["recover", "{id}"],
}


def settings(env):
    names = {k[5:].lower(): v for k, v in env.items() if k.startswith("LOOM_") and "__" not in k}
    return Config(**names, node_id=f"client-{uuid.uuid4().hex[:6]}")


@pytest.fixture
def both(sealed, sealed_env, monkeypatch):  # noqa: F811 - the fixtures' own names
    """A sealed execution of alice, and one that has no owner; ``sealed`` goes on without what opens the first."""
    if not getattr(both, "made", False):
        sealed.json("start", "order", "--input", ORDER, "--id", SEALED, "--subject", "r-1", "--as", "alice")

        for name in UNSEALED:
            monkeypatch.delenv(name)

        async def ownerless():
            async with Client(settings(sealed_env)) as client:
                await client.start(
                    "order", {"card": "t", "items": [{"sku": "a", "price": 1}]}, execution_id=OWNERLESS
                )

        asyncio.run(ownerless())
        sealed.env(**sealed_env)
        both.made = True
    return sealed


@pytest.mark.parametrize("kind", ["without keys", "other keys"])
def test_every_command_answers_as_for_an_ownerless_execution(both, kind, monkeypatch):  # noqa: F811
    if kind == "without keys":
        for name in UNSEALED:
            monkeypatch.delenv(name)
    else:
        both.env(CLI_KEK=base64.b64encode(b"o" * 32).decode())
    for verb, words in VERBS.items():
        for who, form in (("alice", ["--json"]), ("mallory", [])):
            said = {}
            for execution_id in (SEALED, OWNERLESS):
                arguments = [word.format(id=execution_id) if word == "{id}" else word for word in words]
                done = both(*arguments, "--as", who, *form)
                said[execution_id] = (
                    done.status,
                    done.out.replace(execution_id, "ID"),
                    done.err.replace(execution_id, "ID"),
                )
                assert done.status == 1, (verb, done.err)
                assert "Traceback" not in done.err
            # both are denied for want of an owner: alice is none of either that this node could know
            assert said[SEALED] == said[OWNERLESS], (verb, who, form)
