"""The house keeps its own rules: what the root shows, how large files are, where links lead, which way imports run."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLAN = (
    "topics",
    "processors",
    "schemas",
    "stores",
    "connectors",
    "tests",
    "docker",
    "helm",
    "pyproject.toml",
)
MAX_LINES = 460
MAX_TEST_LINES = 600
MAX_FUNCTION_LINES = 75
LONG_FILES: dict[str, str] = {
    "loom/errors.py": "the whole tree of errors in one place, drawn at its top",
    "loom/stores/contracts.py": "every contract of a store, read as one",
}
LONG_FUNCTIONS: dict[str, str] = {}

# Put together from pieces, or this file would hold what it forbids.
FORBIDDEN = {
    "a path of somebody's machine": ("/wo" + "rk/", "/ro" + "ot/", "/home" + "/", "C:" + "\\Users"),
    "the host of a package registry": (
        *(
            "py" + "pi.org",
            "python" + "hosted",
            "maven.apache" + ".org/maven2",
            "repo1" + ".maven",
            "repo.maven" + ".",
        ),
        *("registry" + ".npmjs", "proxy" + ".golang", "deb.debian" + ".org", "crates" + ".io"),
    ),
    "a tool or company that has no part in the program": (
        *("clau" + "de", "anthro" + "pic", "chat" + "gpt", "open" + "ai", "co" + "pilot"),
        "as an " + "ai",
    ),
}


def tracked(*suffixes: str) -> list[Path]:
    """Files under version control, without the links at the root; all files of the folder where git is missing."""
    git = shutil.which("git")
    done = git and subprocess.run([git, "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if not done or done.returncode != 0:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in done.stdout.decode().split("\0") if name]
    return [f for f in files if f.is_file() and not f.is_symlink() and (not suffixes or f.suffix in suffixes)]


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def test_the_root_shows_the_plan_of_the_house():
    missing = [name for name in PLAN if not (ROOT / name).exists()]
    assert not missing


def test_the_doors_lead_into_the_wings():
    for door in PLAN[:5]:
        assert (ROOT / door).resolve() == (ROOT / "loom" / door).resolve()


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names(what):
    found = []
    for file in tracked():
        try:
            text = file.read_text("utf-8").lower()
        except UnicodeDecodeError:
            continue
        found += [f"{name_of(file)}: {word}" for word in FORBIDDEN[what] if word.lower() in text]
    assert not found


def test_files_stay_small():
    lengths = {name_of(f): len(f.read_text("utf-8").splitlines()) for f in tracked(".py")}
    bound = {n: MAX_TEST_LINES if n.startswith("tests/") else MAX_LINES for n in lengths}
    assert [f"{n}: {k} lines" for n, k in lengths.items() if k > bound[n] and n not in LONG_FILES] == []
    assert [n for n in LONG_FILES if lengths.get(n, 0) <= MAX_LINES] == [], (
        "no longer long: take it off the list"
    )


def test_functions_stay_small():
    long = {}
    for file in tracked(".py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long[f"{name_of(file)}:{node.name}"] = lines
    assert {n: k for n, k in long.items() if n not in LONG_FUNCTIONS} == {}
    assert [n for n in LONG_FUNCTIONS if n not in long] == [], "no longer long: take it off the list"


# -- documents ---------------------------------------------------------------------------------------------------

FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(<?([^)\s>]+)>?[^)]*\)")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """The anchors that a Markdown page has for its headings."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", document.read_text("utf-8"))):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        number, unique = 0, slug
        while unique in found:
            number += 1
            unique = f"{slug}-{number}"
        found.add(unique)
    return found


def test_links_of_documents_lead_somewhere():
    broken = []
    for page in tracked(".md"):
        for target in LINK.findall(FENCE.sub("", page.read_text("utf-8"))):
            if re.match(r"[a-z]+:", target):
                continue  # the test reaches no network
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
                broken.append(f"{name_of(page)} -> {target}")
    assert not broken


def test_the_licence_is_whole():
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert text.rstrip().endswith("limitations under the License.")


def test_the_lock_files_pin_every_version():
    for name in ("requirements-dev.lock", "requirements-embedded.lock"):
        lines = [x for x in (ROOT / name).read_text("utf-8").splitlines() if x and not x.startswith("#")]
        assert lines
        assert [x for x in lines if not re.match(r"[a-z0-9.-]+==[\w.]+( ; .+)?$", x)] == []


def test_imports_run_one_way():
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-1_000:]


def test_no_two_test_modules_share_a_name():
    names = [f.name for f in tracked(".py") if f.is_relative_to(ROOT / "tests") and f.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))
