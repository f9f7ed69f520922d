"""The table of rules and their tests names nothing that is not there."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
from clauses import CLAUSES

ROOT = Path(__file__).parent.parent


@cache
def named_in(file: str) -> frozenset[str]:
    path = ROOT / file
    if not path.is_file():
        return frozenset()
    named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return frozenset(
        node.name
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, named) and node.name.lower().startswith("test")
    )


@pytest.mark.parametrize("chapter", CLAUSES)
def test_every_named_test_exists(chapter):
    missing = []
    for clause, tests in CLAUSES[chapter].items():
        assert tests, f"nothing pins: {clause}"
        for test in tests:
            file, _, name = test.partition("::")
            if name not in named_in(file):
                missing.append(f"{clause}: {test}")
    assert not missing, "\n".join(missing)
