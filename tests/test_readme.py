"""What the documents show works: commands parse, code compiles, settings load, and blocks marked ``<!-- run -->`` run.

A fenced ``sh`` block directly after the line ``<!-- run -->`` is executed as it stands, in an empty folder, with ``loom``
on PATH and ``LOOM_BOOTSTRAP``, ``LOOM_REDIS_URL`` and a topic prefix of its own set; it must end with status 0.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^(<!-- run -->\n+)?```(\w*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
RUN_TIMEOUT_S = 120
ENDS_COMMAND = {"|", "&&", "||", ";", "&", ">", "<", ">>"}


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    run: bool

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str, run: bool | None = None) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text("utf-8")
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start(3)) + 1
            found.append(Block(page.relative_to(ROOT).as_posix(), line, match[2], match[3], bool(match[1])))
    return [b for b in found if b.language in languages and run in (None, b.run)]


def commands(block: Block, program: str) -> list[list[str]]:
    """The arguments of each call of ``program`` in a shell block."""
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words = words[1:]  # a variable set for one command
        if words and words[0] == program:
            end = next((i for i, word in enumerate(words) if word in ENDS_COMMAND), len(words))
            found.append(words[1:end])
    return found


@pytest.mark.parametrize("block", blocks("sh", "bash", "shell", "console"), ids=str)
def test_commands_exist(block):
    """Each command, option and argument that a document shows is one that ``loom`` takes."""
    import typer

    from loom.cli.main import app

    root = typer.main.get_command(app)
    for arguments in commands(block, "loom"):
        parse(root, arguments)
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for arguments in commands(block, "make"):
        assert {a for a in arguments if "=" not in a and not a.startswith("-")} <= targets


def parse(command, arguments):
    """Parse as the command line would, without running anything."""
    parent = None
    given = list(arguments)
    while True:
        context = command.make_context(command.name or "loom", given, parent=parent)
        if not hasattr(command, "commands"):
            return
        rest = [*getattr(context, "_protected_args", []), *context.args]
        name, command, given = command.resolve_command(context, rest)
        assert command is not None, f"no such command: {name}"
        parent = context


@pytest.mark.parametrize("block", blocks("python", "py"), ids=str)
def test_code_compiles_and_its_imports_resolve(block):
    tree = ast.parse(block.text, feature_version=(3, 11))
    compile(block.text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "loom":
            module = importlib.import_module(node.module)
            assert [a.name for a in node.names if not resolves(module, a.name)] == []
        elif isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "loom":
            assert resolves(importlib.import_module("loom"), node.attr), f"loom.{node.attr}"


def resolves(module, name) -> bool:
    if hasattr(module, name):
        return True
    try:
        importlib.import_module(f"{module.__name__}.{name}")
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_settings_load(block, tmp_path, monkeypatch):
    from loom import Config

    assert tomllib.loads(block.text)
    for name in [n for n in os.environ if n.startswith("LOOM_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    Path("loom.toml").write_text(block.text)
    Config()


@pytest.mark.parametrize("block", blocks("sh", run=True), ids=str)
def test_blocks_marked_to_run_run(
    block, tmp_path, tmp_path_factory, kafka_bootstrap, topic_prefix, redis_url
):
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith("LOOM_")},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "LOOM_BOOTSTRAP": kafka_bootstrap,
        "LOOM_REDIS_URL": redis_url,
        "LOOM_TOPIC_PREFIX": topic_prefix,
        "LOOM_PARTITIONS": "2",
        "LOOM_DATA_DIR": str(tmp_path_factory.mktemp("data")),
    }
    # a worker that the block starts in the background ends with it
    script = f"set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n{block.text}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{block}\n{done.stdout[-3_000:]}\n{done.stderr[-3_000:]}"
    assert list(tmp_path.iterdir()) == [], "nothing is left in the working directory"
