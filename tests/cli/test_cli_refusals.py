"""On the command line, too, a sealed execution is denied as one of unknown owner is: output, status, and nothing else told."""

import asyncio
import base64
import uuid

import pytest
import typer
from test_cli_subjects import ORDER, sealed, sealed_env, sealed_worker  # noqa: F401 - fixtures

from loom import Client, Config
from loom.cli.main import app

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
    "expire": ["expire", "{id}", "ship", "--older-than", "1"],
    "purge": ["purge", "{id}"],
    "delete": ["delete", "{id}"],
    "erase": ["erase", "{subject}"],
    "export": ["export", "{subject}"],
}
"""Every command that acts on one execution, or on one subject."""

TRIED = ("discard", "quarantine", "release", "expire", "purge", "delete", "erase")
"""Those that can be tried first, with ``--dry-run``."""

OTHERS = {
    "start": "a taken id is still taken (system.md 2.4; test_a_start_on_a_taken_id_says_that_it_is_taken)",
    "worker": "a node",
    "list": "the states topic, which holds no payload",
    "held": "for operators of the fleet; a log that does not open is a row that says so",
    "doctor": "findings",
    "leases": "rows of nodes",
    "wakes list": "rows, without what they are for",
    "wakes rebuild": "goes on past what does not open (test_a_rebuild_of_alarms_leaves_what_it_cannot_open_to_others)",
    **dict.fromkeys(
        [f"schedules {verb}" for verb in ("create", "list", "show", "pause", "unpause", "trigger", "delete")],
        "a schedule is an execution, reached through the verbs above",
    ),
    "bench": "measures a fleet of its own",
    "sim": "simulates one",
    "topics plan": "the catalogue",
    "topics apply": "the catalogue",
    "topics check": "the catalogue",
    "topics export": "the catalogue",
}
"""Every command that does not, and why."""


def commands(group, before=""):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}"


def test_every_command_has_its_row():
    assert sorted(commands(typer.main.get_command(app))) == sorted([*VERBS, *OTHERS])
    group = typer.main.get_command(app)
    tried = [name for name in VERBS if any("--dry-run" in p.opts for p in group.commands[name].params)]
    assert sorted(tried) == sorted(TRIED)


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
    names = {
        SEALED: {"{id}": SEALED, "{subject}": "r-1"},
        OWNERLESS: dict.fromkeys(("{id}", "{subject}"), OWNERLESS),
    }
    rows, callers = [*VERBS.values()], [("alice", ["--json"])]
    if kind == "without keys":
        rows += [[*VERBS[verb], "--dry-run"] for verb in TRIED]
        callers.append(("mallory", []))
    for words in rows:
        for who, form in callers:
            said = {}
            for execution_id in (SEALED, OWNERLESS):
                done = both(*(names[execution_id].get(word, word) for word in words), "--as", who, *form)
                told = (done.out, done.err)
                for name in names[execution_id].values():
                    told = tuple(text.replace(name, "ID") for text in told)
                said[execution_id] = (done.status, *told)
                assert done.status == 1, (words, done.err)
                assert "Traceback" not in done.err
            # both are denied for want of an owner: alice is none of either that this node could know
            assert said[SEALED] == said[OWNERLESS], (words, who, form)
