"""Where a runtime reads logs: all of it through the guarded store, and each place known (system.md 2.3)."""

import ast
from pathlib import Path

import loom

ROOT = Path(loom.__file__).parent
WINGS = ("runtime", "processors", "connectors", "cli", "console")
READS = {"read", "read_last", "subscribe", "read_at_rest", "read_redacted", "subscribe_loud", "copy_prefix"}

INBOX, COPY = "an inbox: the delivery guard's business", "a held message's copy: the quarantine's business"
FURTHER = "tests/sealing/test_sealed_further_on.py"
BREAKS = "tests/sealing/test_mixed_breaks.py"
MIXED = "tests/sealing/test_mixed_fleet.py"
OWNER = "tests/sealing/test_incapable_owner.py"
REFUSALS = "tests/sealing/test_refusals.py"
AT_REST = "tests/sealing/test_quarantine_at_rest.py"
HELD = "tests/sealing/test_quarantine.py"
GUARD = (MIXED, "test_a_sealed_message_of_an_open_log_is_the_guards_business")

FUNNELS = {
    "runtime/driving.py": {
        "_conflict": ("what came under a run", BREAKS, "test_what_is_sealed_under_a_run_of_a_node_that_cannot_open_it_moves_the_run"),
    },
    "runtime/engine.py": {
        "first_of": ("the owner, for the policy", REFUSALS, "test_whatever_the_policy_says_the_refusal_stands"),
    },
    "runtime/feeds.py": {"_read": (INBOX, *GUARD)},
    "runtime/holds.py": {"read_entry": (COPY, HELD, "test_releasing_to_deliver_needs_a_node_that_can_open_it")},
    "runtime/inbox_verbs.py": {
        "rows": (INBOX, HELD, "test_operators_see_what_is_held_since_when_by_whom_and_awaiting_what"),
        "_dispose": (INBOX, HELD, "test_a_dropped_message_is_gone_and_a_retry_of_it_is_a_duplicate"),
    },
    "runtime/handle.py": {
        "_subscription": ("an end that is read along", MIXED, "test_a_client_without_keys_that_waits_for_the_end_is_refused_not_left_waiting"),
        "terminal_of": ("a recorded end; a park's alarms", BREAKS, "test_a_rebuild_of_alarms_leaves_what_it_cannot_open_to_others_and_goes_on"),
    },
    "runtime/owner_reads.py": {"read": ("the fold of the quarantine verbs", AT_REST, "test_anything_else_that_is_sealed_is_the_ordinary_denial")},
    "runtime/quarantine.py": {"_head": (INBOX, HELD, "test_a_redacted_head_is_refused_as_sealed_and_nothing_is_copied")},
    "runtime/queries.py": {"follow": ("events for a caller, live", FURTHER, "test_whoever_follows_gets_nothing_of_it")},
    "runtime/reading.py": {
        "load": ("the fold, the flow, what is appended", FURTHER, "test_every_verb_is_refused_before_anything_is_used_and_before_a_fence"),
        "_read_on": ("the same, page by page", FURTHER, "test_a_log_of_several_pages_is_judged_to_its_end"),
        "_path": ("where a chain is", FURTHER, "test_no_verb_passes_a_link_that_does_not_open"),
        "_successor": ("the same, behind control records", FURTHER, "test_no_verb_passes_a_link_that_does_not_open"),
        "unread": (INBOX, *GUARD),
    },
    "runtime/recovery.py": {"_reason": (INBOX, OWNER, "test_a_parents_cancellation_reaches_a_sealed_child_of_an_incapable_owner")},
    "runtime/verbs.py": {"_was_sent": (INBOX, "tests/runtime/test_runtime_verbs.py", "test_a_sender_that_repeats_itself_is_told_the_same_after_the_end")},
}  # fmt: skip
"""Every function of a wing above the stores that reads a stream: what it feeds, and the test that is red where it reads
past the guard (or, of an inbox, where what it reads is taken as it is)."""


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
    assert found == {name: set(places) for name, places in FUNNELS.items()}


def test_every_funnel_has_its_test():
    rows = [row for places in FUNNELS.values() for row in places.values()]
    for _, path, name in rows:
        tree = ast.parse((ROOT.parent / path).read_text("utf-8"))
        assert name in {f.name for f in _functions(tree)}, (path, name)


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
    assert using == {
        "runtime/engine.py": {"__init__"},
        "runtime/factory.py": {"build_stores", "_made"},
        "runtime/lease_checkup.py": {"lease_findings"},  # how streams stand, no event of them
    }
    checkup = next(tree for name, tree in _trees() if name == "runtime/lease_checkup.py")
    assert "events.read" not in ast.unparse(checkup)
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
