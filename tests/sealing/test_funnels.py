"""Where a runtime reads logs: all of it through the guarded store, and each place known (system.md 2.3)."""

import ast
from pathlib import Path

import loom

ROOT = Path(loom.__file__).parent
WINGS = ("runtime", "processors", "connectors", "cli", "console")
READS = {"read", "read_last", "subscribe", "read_at_rest", "read_redacted", "subscribe_loud", "copy_prefix"}

FUNNELS = {
    "runtime/driving.py": {"_conflict"},
    "runtime/engine.py": {"first_of"},
    "runtime/feeds.py": {"_read"},
    "runtime/holds.py": {"read_entry"},
    "runtime/inbox_verbs.py": {"rows", "_dispose"},
    "runtime/handle.py": {"_subscription", "terminal_of"},
    "runtime/owner_reads.py": {"read"},
    "runtime/quarantine.py": {"_head"},
    "runtime/queries.py": {"follow"},
    "runtime/reading.py": {"load", "_read_on", "head_of", "_successor", "unread"},
    "runtime/recovery.py": {"_reason"},
    "runtime/verbs.py": {"_was_sent"},
}
"""Every function of a wing above the stores that reads a stream. One that is added here has been thought about."""


def _trees():
    for wing in WINGS:
        for file in sorted((ROOT / wing).rglob("*.py")):
            yield file.relative_to(ROOT).as_posix(), ast.parse(file.read_text("utf-8"))


def _functions(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _innermost(tree, wanted):
    """The function that each wanted node stands in."""
    owner = {}
    for function in _functions(tree):
        for node in ast.walk(function):
            owner[id(node)] = function.name  # inner functions are walked later
    return {owner.get(id(node), "<module>") for node in ast.walk(tree) if wanted(node)}


def _reads_a_store(node):
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READS):
        return False
    target = node.func.value
    name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
    return name in {"events", "owning", "store", "_inner"}


def test_every_place_that_reads_a_stream_is_known():
    found = {}
    for name, tree in _trees():
        functions = _innermost(tree, _reads_a_store)
        if functions:
            found[name] = functions
    assert found == FUNNELS


def test_the_runtime_holds_no_store_but_the_guarded_one():
    """``Stores.events`` is what was built or given; only the engine takes it, and guards it."""
    using = {}
    for name, tree in _trees():
        places = _innermost(
            tree,
            lambda node: (
                isinstance(node, ast.Attribute)
                and node.attr == "events"
                and isinstance(node.value, ast.Name)
                and node.value.id in {"stores", "made", "sealed"}
            ),
        )
        if places:
            using[name] = places
    assert using == {"runtime/engine.py": {"__init__"}, "runtime/factory.py": {"build_stores", "_made"}}
    engine = ast.unparse(next(tree for name, tree in _trees() if name == "runtime/engine.py"))
    assert "GuardedEventStore.over(stores.events)" in engine
    assert engine.count("stores.events") == 1


def test_nothing_above_the_stores_reads_at_rest():
    for name, tree in _trees():
        for node in ast.walk(tree):
            attribute = node.attr if isinstance(node, ast.Attribute) else ""
            assert attribute not in {"read_at_rest", "read_redacted", "load_at_rest", "subscribe_loud"}, name


# -- past the guard, for the quarantine verbs alone (system.md 4.9) ------------------------------------------------

VIEWS = {
    "stores/guarded.py": {"quarantine_view"},
    "runtime/forks.py": {"held_copies"},
    "runtime/holds.py": {"read_entry", "stored_copies"},
    "runtime/owner_reads.py": {"read", "_past_payloads"},
    "runtime/quarantine.py": {"_stored"},
}
"""Who may take the view at rest: copies and originals as stored, and an owner's log for the two verbs."""

OWNERS = {"runtime/quarantine.py": {"__init__", "_owner", "_find_releases"}}
"""Who reads an owner's log through it."""


def test_the_view_at_rest_is_taken_only_by_the_quarantine_verbs():
    found, owners = {}, {}
    for file in sorted(ROOT.rglob("*.py")):
        name, text = file.relative_to(ROOT).as_posix(), file.read_text("utf-8")
        if not any(word in text for word in ("quarantine_view", "_owner_reads", "OwnerReads")):
            continue
        tree = ast.parse(text)
        places = _innermost(tree, lambda n: isinstance(n, ast.Attribute) and n.attr == "quarantine_view")
        if name == "stores/guarded.py":
            places |= {f.name for f in _functions(tree) if f.name == "quarantine_view"}
        if places:
            found[name] = places
        places = _innermost(
            tree,
            lambda n: (
                (isinstance(n, ast.Attribute) and n.attr == "_owner_reads")
                or (isinstance(n, ast.Call) and getattr(n.func, "id", "") == "OwnerReads")
            ),
        )
        if places:
            owners[name] = places
    assert found == VIEWS
    assert owners == OWNERS


def test_the_view_only_reads():
    from loom.stores.at_rest import AtRestView

    assert {name for name in dir(AtRestView) if not name.startswith("_")} == {"read", "read_last", "stored"}
