"""The sentences of D1 to D8 that can be tested (system.md 0 to 3; the seed), each beside the test that holds it.

A row: the rule, what it says, where it is shown. A test that is renamed or dropped turns this one red.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUARD = "tests/kernel/test_kernel_guard.py"
WALK = "tests/kernel/test_kernel_walk.py"
MACHINE = "tests/kernel/test_kernel_machine.py"
INBOX = "tests/kernel/test_kernel_inbox.py"
POISON = "tests/runtime/test_runtime_poison.py"
WAITS = "tests/runtime/test_runtime_waits.py"
ACCESS = "tests/runtime/test_runtime_access.py"
MIXED = "tests/sealing/test_mixed_fleet.py"
OWNER = "tests/sealing/test_incapable_owner.py"
REFUSALS = "tests/sealing/test_refusals.py"
FURTHER = "tests/sealing/test_sealed_further_on.py"
BREAKS = "tests/sealing/test_mixed_breaks.py"
PERSONS = "tests/sealing/test_sealed_persons.py"
RECORDED = "tests/sealing/test_recorded_answers.py"
DOCTOR = "tests/sealing/test_doctor.py"
GUARDED = "tests/sealing/test_guarded.py"
SEALING = "tests/sealing/test_sealing.py"
OPENING = "tests/sealing/test_opening.py"
MARKER = "tests/sealing/test_marker_paths.py"
WRAPPERS = "tests/sealing/test_wrappers.py"
SHARDED = "tests/sealing/test_sharded.py"
FUNNELS = "tests/sealing/test_funnels.py"
NONCES = "tests/sealing/test_nonces.py"
HANDOVER = "tests/sealing/test_handover.py"
ERASURE = "tests/sealing/test_erasure.py"
SNAPSHOTS = "tests/sealing/test_sealed_snapshots.py"
KEYS = "tests/sealing/test_key_stores.py"
KEY_SUITE = "loom/testing/conformance/key_store.py"
FLEET = "tests/fleet/test_fleet_mixed.py"
PLANTED = "tests/fleet/test_planted.py"
CLI = "tests/cli/test_cli_refusals.py"

SENTENCES = [
    # The guard on delivery
    ("D1", "the guard is the kernel's, and imports neither cipher nor key", "tests/test_house.py", "test_imports_run_one_way"),
    ("D2", "an own __loomEnc whose value is a string, at any depth", GUARD, "test_an_envelope_is_found_at_any_depth_and_plain_values_are_clean"),
    ("D2", "an inherited key, or another value, is ordinary data", GUARD, "test_what_only_looks_alike_is_ordinary_data"),
    ("D2", "foreign ciphertext is relayed as a string", GUARD, "test_ingest_takes_ordinary_payloads"),
    ("D2", "any mapping counts, not only dict", GUARD, "test_any_mapping_counts"),
    ("D2", "breadth-first: a near envelope wins over the budget", GUARD, "test_breadth_first_a_near_envelope_wins_over_the_budget"),
    ("D2", "the budget is 100,000 nodes, and beyond it fails closed", GUARD, "test_the_budget_is_a_hundred_thousand_nodes"),
    ("D2", "depth cannot blow the stack", GUARD, "test_depth_cannot_blow_the_stack"),
    ("D2", "a cycle is unverifiable, a shared reference is none", GUARD, "test_a_cycle_is_unverifiable_and_a_shared_reference_is_none"),
    ("D2", "the walk is what it is defined to be, on random payloads", WALK, "test_the_walk_is_what_it_is_defined_to_be"),
    ("D3", "one check before MESSAGE_CONSUMED, at the notify scan", MIXED, "test_a_sealed_message_of_an_open_log_is_the_guards_business"),
    ("D3", "and at the live receive", POISON, "test_a_sealed_head_holds_the_execution_and_nothing_is_written"),
    ("D3", "duplicates need no check", INBOX, "test_a_sealed_duplicate_needs_no_check"),
    ("D3", "the operator's discard stays allowed", "tests/sealing/test_quarantine_at_rest.py", "test_every_verb_on_every_kind_of_node_at_every_head"),
    ("D3", "what is passed over is journaled without its payload", INBOX, "test_duplicates_and_the_expired_are_disposed_of_on_the_way"),
    ("D4", "a refusal appends nothing and fails nothing; the flow stays parked", POISON, "test_a_sealed_head_holds_the_execution_and_nothing_is_written"),
    ("D4", "replay latches: the flow never sees it, nothing more comes out", MACHINE, "test_a_sealed_answer_latches_and_the_flow_never_sees_it"),
    ("D4", "a refused replay is told as recorded, writes nothing, and leaves a row", RECORDED, "test_the_replay_is_refused_and_a_capable_node_completes"),
    ("D4", "a flow that swallows the refusal cannot go on", MACHINE, "test_a_flow_cannot_go_on_past_a_latch_inside_a_step"),
    ("D4", "a durable row is left, and a capable node carries on by itself", OWNER, "test_whatever_wakes_it_a_capable_node_carries_on"),
    ("D4", "whatever the owner's back-off, alarms ring for a capable node", BREAKS, "test_one_alarm_after_another_rings_in_time_though_the_owner_backs_off"),
    ("D4", "alarms that were lost are written again by who can read them", BREAKS, "test_an_alarm_that_was_lost_under_an_owner_that_cannot_open_rings_all_the_same"),
    ("D4", "a node that drove and refuses leaves its lease to expire", BREAKS, "test_what_is_sealed_under_a_run_of_a_node_that_cannot_open_it_moves_the_run"),
    ("D4", "a parent's cancellation waits for a capable node", OWNER, "test_a_parents_cancellation_reaches_a_sealed_child_of_an_incapable_owner"),
    ("D4", "sealed chains go on under an owner that opens none of them", BREAKS, "test_a_chain_goes_on_though_its_owner_can_open_none_of_it"),
    ("D4", "head-of-line is per execution", INBOX, "test_a_sealed_head_holds_the_whole_execution"),
    ("D4", "the back-off doubles, has no attempt cap and a bounded map", POISON, "test_back_off_doubles_is_bounded_and_forgets"),
    ("D4", "the back-off hides the row from nobody", OWNER, "test_incapable_nodes_do_not_keep_a_row_from_a_capable_one"),
    ("D4", "reported first and then every 16th", REFUSALS, "test_operators_are_told_why_first_and_every_16th"),
    ("D5", "the error holds ids, never ciphertext", GUARD, "test_assert_deliverable"),
    ("D6", "send refuses what is dressed as sealed or erased", GUARD, "test_ingest_refuses_what_is_dressed_up"),
    ("D6", "judged on the JSON that is stored, after its size", WAITS, "test_what_send_refuses_is_never_appended"),
    ("D6", "on capable nodes too, before anything is appended", MIXED, "test_a_forged_envelope_is_sent_from_nowhere"),
    # The marker
    ("D7", "the marker is stamped in the same append", SEALING, "test_a_sealed_event_is_marked_in_its_own_append"),
    ("D7", "on exactly the envelopes in which something was sealed", SEALING, "test_only_what_was_sealed_is_marked"),
    ("D7", "it carries no key, key id or subject", SEALING, "test_the_marker_holds_no_key_and_no_subject"),
    ("D7", "covers are the configured patterns, sorted, without repeats", SEALING, "test_a_sealed_event_is_marked_in_its_own_append"),
    ("D7", "the kernel's own kinds are sealed by default", SEALING, "test_by_default_the_kernels_own_kinds_are_sealed"),
    ("D7", "opens: every entry equal to or below one of ours", MARKER, "test_what_is_equal_to_or_below_ours_opens"),
    ("D7", "one entry that is not ours is enough", MARKER, "test_what_is_not_does_not"),
    ("D7", "malformed, empty or of an unknown version: not opened", MARKER, "test_malformed_and_unknown_markers_do_not"),
    ("D7", "another cipher is not opened", MARKER, "test_malformed_and_unknown_markers_do_not"),
    ("D7", "a store without the method opens nothing", GUARDED, "test_a_node_that_cannot_open_is_refused_and_writes_nothing"),
    ("D7", "later registrations are reflected live", SEALING, "test_paths_may_be_added_later"),
    ("D7", "every wrapper forwards, overrides or refuses every optional method", WRAPPERS, "test_every_method_is_declared"),
    ("D7", "and what it declares is true", WRAPPERS, "test_the_declarations_are_true"),
    ("D7", "shards that disagree are refused, judged each time", SHARDED, "test_the_question_is_judged_each_time"),
    ("D7", "the list of funnels is pinned", FUNNELS, "test_every_place_that_reads_a_stream_is_known"),
    ("D7", "before fold, replay, policy and fence", FURTHER, "test_every_verb_is_refused_before_anything_is_used_and_before_a_fence"),
    ("D7", "a stream is sealed if any of its envelopes is", FURTHER, "test_a_log_of_several_pages_is_judged_to_its_end"),
    ("D7", "no chain is passed of which a log does not open", FURTHER, "test_no_verb_passes_a_link_that_does_not_open"),
    ("D7", "a reader along gets nothing of it", FURTHER, "test_whoever_follows_gets_nothing_of_it"),
    ("D7", "a handle is refused too", FURTHER, "test_a_handle_is_refused_too"),
    ("D7", "the refusal equals the denial of an ownerless execution", REFUSALS, "test_a_refusal_equals_that_of_an_ownerless_execution"),
    ("D7", "on the command line, too", CLI, "test_every_command_answers_as_for_an_ownerless_execution"),
    ("D7", "every verb has its row", REFUSALS, "test_every_verb_has_its_row"),
    ("D7", "every command has its row", CLI, "test_every_command_has_its_row"),
    ("D7", "every public method that reads a stream is worded", REFUSALS, "test_every_verb_on_one_execution_or_subject_is_worded"),
    ("D7", "nothing reachable from it names its cause", GUARDED, "test_nothing_reachable_from_the_refusal_names_its_cause"),
    ("D7", "nor the frames of its traceback", REFUSALS, "test_the_frames_of_a_refusal_tell_nothing"),
    ("D7", "the policy words it, with the owner unset, and decides nothing", REFUSALS, "test_whatever_the_policy_says_the_refusal_stands"),
    ("D7", "a taken id is still taken", REFUSALS, "test_a_start_on_a_taken_id_says_that_it_is_taken"),
    ("D7", "a missing id answers as everywhere", REFUSALS, "test_a_missing_id_answers_as_everywhere"),
    ("D7", "an ordinary denial of resume and cancel is journaled, a sealed one never", ACCESS, "test_denials_of_resume_and_cancel_are_journaled_and_the_flow_goes_on"),
    ("D7", "an unmarked sealed principal is refused before the policy is asked", PERSONS, "test_no_policy_is_asked_about_one_that_cannot_be_read"),
    ("D7", "an identity of which a part is sealed is one", GUARDED, "test_without_a_marker_only_a_sealed_person_is_refused"),
    ("D7", "what the process does by itself is not affected", PERSONS, "test_what_the_process_does_by_itself_goes_on_as_before_there_were_markers"),
    ("D7", "who recorded an outcome is treated likewise", PERSONS, "test_who_recorded_an_outcome_is_treated_likewise"),
    ("D7", "no policy ever sees a sealed owner", PERSONS, "test_no_policy_sees_a_sealed_owner_of_a_subject"),
    ("D7", "an unmarked envelope is treated as before", OPENING, "test_an_unmarked_event_is_judged_as_before"),
    ("D7", "what needs no sealing is stored byte for byte as without", SEALING, "test_what_needs_no_sealing_is_stored_byte_for_byte_as_without"),
    ("D7", "logs of 1.24.0 are read byte for byte", "tests/schemas/test_golden.py", "test_an_old_envelope_written_again_differs_in_its_schema_alone"),
    ("D7", "inboxes are read non-loudly", OPENING, "test_without_the_key_a_log_is_unavailable_and_an_inbox_redacted"),
    ("D7", "a present but wrong key reads as unavailable", OPENING, "test_with_another_key_a_log_is_unavailable"),
    ("D7", "absent is not erased: only a tombstone says so", OPENING, "test_only_a_tombstone_makes_it_erased"),
    ("D7", "redacted is not erased", GUARD, "test_only_a_tombstone_makes_a_redacted_message_an_erased_one"),
    ("D7", "a live subscription drops what it cannot open, with a stable code", HANDOVER, "test_a_live_reader_is_spared_what_cannot_be_opened"),
    ("D7", "nonces are random, and made in one place", NONCES, "test_random_nonces_are_made_in_one_place"),
    ("D7", "all 96 bits of them", NONCES, "test_without_a_source_nonces_are_random"),
    ("D7", "the seeded source is branded, and refused outside a test", NONCES, "test_outside_a_test_nothing_seeded_runs"),
    ("D7", "no other code can pass one", NONCES, "test_no_other_code_can_give_a_source"),
    # Erasure
    ("D7 r4", "intent, destruction, tombstone, in that order, at head + 2", ERASURE, "test_intent_destruction_tombstone_and_the_end_of_what_ran"),
    ("D7 r4", "every intent is durable before the key dies", ERASURE, "test_every_intent_is_durable_before_the_key_dies_and_no_tombstone_is"),
    ("D7 r4", "an intent is not duplicated", ERASURE, "test_two_at_once_say_it_once"),
    ("D7 r4", "key absent, sealed data, no intent: nothing written, nothing destroyed", ERASURE, "test_a_destruction_out_of_hand_is_no_erasure"),
    ("D7 r4", "a crash at any point, then a capable node completes", ERASURE, "test_a_retry_from_a_capable_node_completes"),
    ("D7 r5", "intent is not destruction: a node that cannot know writes nothing", ERASURE, "test_a_retry_from_a_node_that_cannot_know_writes_and_destroys_nothing"),
    ("D7 r5", "was_destroyed is never true of keys that were not here", KEY_SUITE, "test_what_was_never_here_was_not_destroyed_here"),
    ("D7 r6", "the operator's assertion counts only beside the intent", ERASURE, "test_the_operators_assertion_counts_only_beside_the_intent"),
    ("D7 r6", "an export is redacted only beside intent and proof", ERASURE, "test_a_retry_from_a_node_that_cannot_know_writes_and_destroys_nothing"),
    ("D7", "warm caches redact within a second", ERASURE, "test_every_node_forgets_within_a_second"),
    ("D7", "an erased execution can still be cancelled", ERASURE, "test_a_shredded_execution_that_waits_is_cancelled_without_being_opened"),
    ("D7", "nothing is sealed for an erased subject any more", OPENING, "test_nothing_is_sealed_for_an_erased_subject_any_more"),
    ("D7", "no planted plaintext rests anywhere, and nothing opens after", PLANTED, "test_no_planted_plaintext_rests_anywhere_and_nothing_opens_after_the_erasure"),
    ("D7", "metrics hold numbers alone", "tests/processors/test_metrics.py", "test_the_page_holds_numbers_alone"),
    ("keys", "each key is wrapped, and none rests bare or prints", KEY_SUITE, "test_no_key_rests_bare_or_prints"),
    ("keys", "a key is rotated before it is worn", KEY_SUITE, "test_a_key_is_rotated_before_it_is_worn"),
    ("keys", "keys under another kek are unavailable, and never replaced", KEY_SUITE, "test_keys_under_another_kek_are_unavailable_and_never_replaced"),
    ("keys", "a key-encryption key is changed by putting one before it", KEYS, "test_an_older_kek_unwraps_and_the_first_one_wraps"),
    # Snapshots
    ("D8", "a whole state is one envelope, index fields clear", SNAPSHOTS, "test_a_state_rests_as_one_envelope_with_clear_index_fields"),
    ("D8", "a moved row does not open", SNAPSHOTS, "test_a_row_moved_to_another_execution_does_not_open"),
    ("D8", "nor an older state in a newer slot", SNAPSHOTS, "test_an_older_state_rolled_into_a_newer_slot_does_not_open"),
    ("D8", "nor an envelope that was changed, or lacks its binding", SNAPSHOTS, "test_a_changed_envelope_does_not_open"),
    ("D8", "a defect never reads as an erasure", SNAPSHOTS, "test_a_field_envelope_in_the_place_of_a_state_does_not_open"),
    ("D8", "a plaintext row loads unless refused", SNAPSHOTS, "test_a_plaintext_row_loads_unless_refused"),
    ("D8", "in an older row each envelope is tried, the rest left as stored", SNAPSHOTS, "test_in_an_older_row_what_opens_is_opened_and_the_rest_left_as_stored"),
    ("D8", "a state is sealed as a whole or by paths, never both", SNAPSHOTS, "test_a_state_is_sealed_in_one_way"),
    ("D8", "erased only with proof", SNAPSHOTS, "test_a_destroyed_key_alone_proves_nothing"),
    ("D8", "a checkpoint rests sealed under shared keys or not at all", SNAPSHOTS, "test_a_checkpoint_rests_sealed_under_shared_keys_or_not_at_all"),
    ("D8", "judged when a runtime is made", MIXED, "test_plaintext_checkpoints_are_refused_when_a_runtime_is_made"),
    ("D8", "and when keys come late", MIXED, "test_plaintext_checkpoints_are_refused_when_keys_come_late"),
    ("D8", "doctor and kernel judge alike, each finding with its fix", DOCTOR, "test_the_doctor_and_the_kernel_judge_alike"),
    ("D8", "with no snapshot store given, the default is a sealed one", MIXED, "test_settings_alone_make_a_node_seal"),
    # All of it
    ("fleet", "four kinds of workers under kill -9: nothing leaks, all completes", FLEET, "test_a_mixed_fleet_under_kills"),
    ("fleet", "before there is a capable node nobody writes anything", FLEET, "test_everything_waits_for_a_capable_node"),
]  # fmt: skip


def functions_of(path):
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("path", sorted({path for _, _, path, _ in SENTENCES}))
def test_every_sentence_has_its_test(path):
    missing = {name for _, _, where, name in SENTENCES if where == path} - functions_of(path)
    assert missing == set()


def test_no_sentence_stands_twice():
    said = [(rule, sentence) for rule, sentence, _, _ in SENTENCES]
    assert len(said) == len(set(said))
