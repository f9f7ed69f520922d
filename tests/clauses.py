"""Which tests pin which rule: of the log on Kafka, top to bottom, and of faults that others met.

A rule here goes red in at least one of its tests when it is broken. Paths are from the root of the project; a test of a
conformance suite stands where the suite does, and runs on every twin.
"""

from __future__ import annotations

from typing import Final

SUITES: Final = "loom/testing/conformance/"
APPENDING: Final = f"{SUITES}event_store/appending.py::"
REMOVAL: Final = f"{SUITES}event_store/removal.py::"
INBOX: Final = f"{SUITES}event_store/inbox.py::"
SEVERAL: Final = f"{SUITES}event_store/several.py::"
READING: Final = f"{SUITES}event_store/reading.py::"
OWNING: Final = f"{SUITES}event_store/owning.py::"
LEASES: Final = f"{SUITES}lease_store.py::"
WAKES: Final = f"{SUITES}wake_store.py::"
KEYS: Final = f"{SUITES}key_store.py::"

WRITER: Final = "tests/kafka/test_writer.py::"
TAKEOVER: Final = "tests/kafka/test_writer_takeover.py::"
FAULTS: Final = "tests/kafka/test_faults.py::"
CLIENT: Final = "tests/kafka/test_client.py::"
LANES: Final = "tests/kafka/test_lanes.py::"
UNENDED: Final = "tests/kafka/test_unended.py::"
OUTAGE: Final = "tests/kafka/test_writer_outage.py::"
OWNERS: Final = "tests/kafka/test_owners.py::"
MEMBERSHIP: Final = "tests/kafka/test_membership.py::"
REQUESTS: Final = "tests/kafka/test_requests.py::"
REPLIES: Final = "tests/kafka/test_replies.py::"
START: Final = "tests/kafka/test_store_start.py::"
SUBSCRIBE: Final = "tests/kafka/test_subscribe.py::"
COMPACTION: Final = "tests/kafka/test_compaction.py::"
INDEX: Final = "tests/stores/test_index.py::"
JUDGE: Final = "tests/stores/test_judge.py::"
REDIS: Final = "tests/stores/test_redis_faults.py::"
CATALOGUE: Final = "tests/topics/test_catalogue.py::"
PARTITIONER: Final = "tests/topics/test_partitioner.py::"
PROVISIONING: Final = "tests/topics/test_provisioning.py::"
RECOVERY: Final = "tests/runtime/test_runtime_recovery.py::"
WAITS: Final = "tests/runtime/test_runtime_waits.py::"
JOURNAL: Final = "tests/runtime/test_runtime_journal.py::"
CHILDREN: Final = "tests/runtime/test_runtime_children.py::"
POISON: Final = "tests/runtime/test_runtime_poison.py::"
LEASE_KEEPER: Final = "tests/runtime/test_runtime_lease_keeper.py::"
DELIVERY: Final = "tests/processors/test_delivery.py::"
APP: Final = "tests/processors/test_app.py::"
FOLD: Final = "tests/processors/test_fold.py::"
TRANSPORT: Final = "tests/processors/test_transport.py::"
LEDGER: Final = "tests/processors/test_ledger.py::"
DEATHS: Final = "tests/processors/test_deaths.py::"
REPLAY: Final = "tests/kernel/test_kernel_replay.py::"
ENVELOPES: Final = "tests/schemas/test_envelope_bytes.py::"
SERVICES: Final = "tests/test_services.py::"

TOPICS: Final = {
    "partitions as the Java client numbers them, at P = 6 and 8": (
        PARTITIONER + "test_equals_the_java_client",
        PARTITIONER + "test_the_vectors_tell_the_bracket_fault",
    ),
    "everything of a chain in one partition number": (
        PARTITIONER + "test_every_stream_of_a_chain_shares_its_partition",
        OWNING + "test_all_streams_of_a_chain_are_of_one_shard",
    ),
    "minted ids hash to the partition that they are for": (
        PARTITIONER + "test_minted_ids_hash_to_their_shard",
    ),
    "no two chains share a stream's name": (
        "tests/test_ids.py::test_streams_of_different_chains_and_topics_have_different_names",
        "tests/cli/test_cli_errors.py::test_bad_input_is_refused",
    ),
    "a record in the wrong partition is forwarded": (
        REQUESTS + "test_a_request_in_the_wrong_partition_is_forwarded",
        REQUESTS + "test_a_request_across_partitions_goes_to_dead",
    ),
    "P is recorded; a mismatch is refused by every role": (
        TAKEOVER + "test_a_log_of_another_number_of_partitions_is_refused",
        START + "test_a_log_made_with_another_number_is_refused_by_its_owner",
        START + "test_another_number_of_partitions_is_refused",
        PROVISIONING + "test_another_number_of_partitions_under_records_is_refused_with_what_to_do",
        "tests/cli/test_cli_errors.py::test_another_number_of_partitions_is_refused",
    ),
    "trim, truncate and delete leave a mark, with the tombstones": (
        WRITER + "test_a_wholly_trimmed_stream_goes_on_counting_after_a_takeover",
        WRITER + "test_a_deleted_id_refuses_reuse_after_a_takeover",
        WRITER + "test_tombstones_and_their_mark_are_one_transaction",
        REMOVAL + "test_a_wholly_trimmed_stream_goes_on_counting",
        REMOVAL + "test_a_deleted_id_refuses_reuse",
        JUDGE + "test_a_mark_carries_what_the_events_no_longer_say",
    ),
    "erasure's horizon: a lag of 24 h, segments of 256 MB": (
        CATALOGUE + "test_settings_are_those_the_log_rests_on",
    ),
    "a quiet partition that owes a deletion ticks, also after a takeover": (
        TAKEOVER + "test_a_quiet_partition_that_owes_a_deletion_appends_a_tick_once_the_lag_has_passed",
        TAKEOVER + "test_the_debt_is_found_again_at_a_takeover",
        COMPACTION + "test_what_was_deleted_leaves_the_disk_of_a_partition_that_went_quiet",
    ),
    "the log's own time on every topic": (
        CATALOGUE + "test_settings_are_those_the_log_rests_on",
        REQUESTS + "test_a_request_past_its_time_is_not_applied",
    ),
    "replicas and in-sync replicas by the size of the cluster": (
        CATALOGUE + "test_replicas_follow_the_size_of_the_cluster",
        PROVISIONING + "test_too_few_replicas_are_remarked_and_never_made_to_block_writes",
    ),
    "headers say what an index needs": (WRITER + "test_headers_say_what_an_index_needs",),
    "two framings, told apart by the first byte": (
        ENVELOPES + "test_both_framings_are_told_apart_by_the_first_byte",
        "tests/schemas/test_apicurio.py::test_the_log_in_the_wire_format_of_a_real_registry",
    ),
    "schemas are kept with the log, and read by an old and a new release": (
        "tests/schemas/test_table.py::test_a_schema_that_this_release_does_not_know_is_learned_from_the_log",
        "tests/schemas/test_golden.py::test_a_golden_envelope_reads_as_it_did",
        "tests/schemas/test_golden.py::test_a_golden_envelope_is_written_as_it_was",
    ),
    "the catalogue is data: plan, apply, check, export": (
        "tests/topics/test_topics_command.py::test_plan_apply_and_check_tell_one_story",
        PROVISIONING + "test_applying_the_same_plan_again_changes_nothing",
        PROVISIONING + "test_drift_is_named_setting_by_setting_and_only_that_is_mended",
        "tests/topics/test_strimzi.py::test_equals_the_golden_file",
    ),
    "only nodes write what the kernel stamps": (CATALOGUE + "test_only_nodes_write_what_the_kernel_stamps",),
}

APPEND: Final = {
    "a single writer per partition, by Kafka's own fence": (
        TAKEOVER + "test_a_new_writer_sees_everything_and_the_old_one_writes_nothing_more",
        TAKEOVER + "test_of_two_processes_that_race_one_wins_each_round",
        FAULTS + "test_a_writer_stopped_in_the_middle_and_resumed_says_what_is_true_and_steps_down",
    ),
    "a tenure fences, reads to the end captured after it, then serves": (
        TAKEOVER + "test_a_new_writer_sees_everything_and_the_old_one_writes_nothing_more",
        FAULTS + "test_a_takeover_before_the_old_writer_committed_shows_nothing_of_it",
        FAULTS + "test_a_takeover_after_the_old_writer_committed_loses_nothing_of_it",
        FAULTS + "test_a_takeover_whose_questions_get_no_answer_still_reads_everything",
    ),
    "fenced ends the tenure: membership is confirmed, then retaken, or given up": (
        TAKEOVER + "test_a_fence_ends_the_tenure_and_not_the_assignment",
        TAKEOVER + "test_two_owners_of_one_partition_settle",
        MEMBERSHIP + "test_confirm_and_rejoin",
        MEMBERSHIP + "test_a_blocked_loop_loses_its_partitions_and_gets_some_back",
    ),
    "what waits is one transaction, bounded by count and bytes": (
        WRITER + "test_what_waits_together_is_one_transaction_and_one_call_per_loop",
        WRITER + "test_a_transaction_is_bounded_by_count_and_by_bytes",
    ),
    "an answer that rests on something staged waits for the commit, and is judged again": (
        WRITER + "test_of_two_appends_on_one_head_one_wins_and_both_answers_come_with_the_same_commit",
        FAULTS + "test_an_answer_that_rests_on_an_aborted_transaction_is_judged_again",
        JUDGE + "test_a_conflict_with_a_staged_head_waits",
        JUDGE + "test_a_repeat_waits_for_what_it_repeats",
        JUDGE + "test_a_stale_fence_waits_for_the_fence",
    ),
    "an answer that rests on what is committed does not wait": (
        JUDGE + "test_a_conflict_with_a_committed_head_does_not",
        JUDGE + "test_an_answer_that_does_not_wait_stands_whatever_comes",
    ),
    "who knows more than the writer is refused only after a commit": (
        WRITER + "test_a_caller_who_knows_more_than_the_writer_is_not_refused_from_stale_memory",
    ),
    "a retry whose events are there is success": (
        WRITER + "test_an_append_is_durable_and_a_repeat_is_the_same_append",
        APPENDING + "test_a_repeat_is_success_and_adds_nothing",
        APPENDING + "test_a_repeat_succeeds_under_a_newer_fence",
    ),
    "listeners in this process hear what was committed": (
        WRITER + "test_listeners_get_what_was_committed_with_its_origin_before_the_caller_is_told",
        OWNING + "test_what_becomes_durable_is_heard_once_and_in_order",
    ),
    "any exception from produce aborts": (
        FAULTS + "test_an_oversize_event_in_the_middle_shows_nothing_and_only_its_caller_is_told",
        FAULTS + "test_a_full_client_queue_aborts_the_whole_and_all_of_it_goes_again",
    ),
    "three outcomes: written, not written, unknown": (
        FAULTS + "test_a_commit_whose_reply_is_lost_is_success_and_one_copy",
        FAULTS + "test_a_fenced_writer_reads_what_became_of_its_last_transaction",
        CLIENT + "test_flags_say_what_to_do",
        CLIENT + "test_what_asks_for_nothing_is_fatal",
        JOURNAL + "test_an_unknown_outcome_is_repeated_unchanged_and_stands_once",
    ),
    "fenced with no rival about: retake": (
        FAULTS + "test_a_transaction_that_outlives_its_timeout_without_a_rival_is_written_once",
        OUTAGE + "test_a_transactional_id_that_expired_costs_one_retry",
    ),
    "an end that is resent poisons the tenure, even where the commit succeeded": (
        FAULTS + "test_an_end_held_past_the_deadline_and_let_go_in_a_later_transaction_ends_nothing_else",
        FAULTS + "test_a_client_that_resends_an_end_by_itself_poisons_the_tenure_though_the_commit_succeeds",
        FAULTS + "test_what_the_client_says_between_two_transactions_ends_the_tenure_too",
        CLIENT + "test_what_is_not_known_to_be_harmless_is_a_disturbance",
    ),
    "commit deadline below the socket's and the transaction's timeout": (
        CLIENT + "test_the_poison_rule_is_in_the_settings_and_cannot_be_configured_away",
    ),
    "two lanes: initialised in order, anchored by a commit of lane 0, ended together": (
        LANES + "test_every_lane_is_initialised_and_lane_0_first",
        LANES + "test_lane_1_waits_until_lane_0_has_committed_in_this_tenure",
        LANES + "test_a_disturbance_of_any_lane_is_one_of_all",
        LANES + "test_a_lane_that_cannot_be_initialised_ends_all_of_them",
        FAULTS + "test_an_end_held_past_the_deadline_and_let_go_in_a_later_transaction_ends_nothing_else",
    ),
    "no client delays its small requests": (CLIENT + "test_no_client_waits_for_more_to_send",),
    "replies leave outside of transactions, and no open one hides them": (
        REPLIES + "test_no_open_transaction_of_another_hides_a_reply",
    ),
    "a lost reply is repaired by resending": (
        REQUESTS + "test_an_unanswered_request_is_sent_again_with_the_same_id_and_one_answer_is_enough",
        REQUESTS + "test_a_repeated_request_is_applied_once_and_answered_each_time",
    ),
    "the asker's position in the replies is fixed before it sends": (
        REPLIES + "test_what_is_answered_right_after_the_start_is_heard",
    ),
    "a gap or a torn batch stops its stream, judged on a fresh mark": (
        TAKEOVER + "test_a_gap_or_a_torn_batch_stops_its_stream_and_no_other",
        TAKEOVER + "test_a_stream_trimmed_while_it_was_read_is_not_broken",
        TAKEOVER + "test_events_below_a_mark_that_are_missing_are_a_gap",
    ),
    "what a restarting broker left open is ended by what it says": (
        UNENDED + "test_what_a_broker_left_open_is_ended_and_the_log_goes_on",
        UNENDED + "test_the_outcome_is_what_could_have_been_acknowledged",
    ),
}

OWNERSHIP: Final = {
    "one static member per node, cooperative, a session of 6 to 10 s, commits of our own": (
        CLIENT + "test_what_the_group_rests_on_cannot_be_configured_away",
        OWNERS + "test_the_same_node_comes_back_at_once_after_kill_9",
        OWNERS + "test_after_kill_9_another_owner_takes_over_within_a_session",
        MEMBERSHIP + "test_a_member_fenced_by_its_own_id_ends_with_the_reason",
    ),
    "offsets are committed after the transaction": (
        "tests/kafka/test_offsets.py::test_a_position_never_passes_an_open_offset",
        MEMBERSHIP + "test_positions_are_committed_and_the_next_member_begins_there",
    ),
    "polled only while the event loop ticks": (
        MEMBERSHIP + "test_a_blocked_loop_loses_its_partitions_and_gets_some_back",
        OWNERS + "test_a_blocked_event_loop_does_not_keep_its_partitions",
    ),
    "assigned: nothing is read until the takeover ends": (
        MEMBERSHIP + "test_nothing_is_read_of_a_partition_before_it_is_resumed",
        MEMBERSHIP + "test_what_is_resumed_from_an_offset_is_read_from_there",
    ),
    "revoked finishes what is in flight, lost stops at once": (
        WRITER + "test_a_stopped_writer_hands_back_what_it_did_not_write",
        WRITER + "test_an_abandoned_writer_begins_nothing_more",
        OWNERS + "test_owners_share_and_take_over_from_one_that_stops",
        OWNERS + "test_a_stopped_owner_that_resumes_steps_down",
    ),
    "ids are minted for one partition until its writer is saturated": (
        "tests/kafka/test_minting.py::test_ids_move_on_only_when_the_writer_is_saturated",
    ),
    "an unanswered request is settled by an answer, or by a cancel behind it": (
        REQUESTS + "test_a_write_that_is_late_is_cancelled_and_known_as_not_written",
        REQUESTS + "test_a_cancel_says_what_became_of_everything_before_it",
        REQUESTS + "test_answers_are_remembered_up_to_a_bound_and_then_nothing_is_claimed",
        START + "test_without_an_owner_a_write_is_unknown_and_a_read_is_late",
    ),
    "a message of another node gets its sequence from the owner": (
        INBOX + "test_messages_queue_in_the_order_they_were_accepted",
        INBOX + "test_a_message_enters_once",
        INBOX + "test_the_cap_holds_against_a_crowd",
    ),
    "applied once: the highest offset stands in the same transaction": (
        WRITER + "test_a_request_is_applied_once_whoever_reads_it",
        WRITER + "test_a_refused_request_is_recorded_before_its_refusal_leaves",
        WRITER + "test_what_cannot_be_used_is_recorded_as_done_with",
    ),
    "a command's id defaults to where it stands": (
        DELIVERY + "test_a_commands_id_defaults_to_where_it_stands",
    ),
    "what cannot be decoded or used goes to dead, and the reading moves on": (
        REQUESTS + "test_an_undecodable_request_goes_to_dead_and_the_next_one_is_served",
        DELIVERY + "test_a_command_that_cannot_be_read_or_used_goes_to_dead",
        DELIVERY + "test_a_record_is_not_acknowledged_before_dead_has_it",
    ),
    "work on another chain leaves with the event that decides it, and is applied once": (
        SEVERAL + "test_a_request_leaves_with_its_event_and_is_applied_once",
        SEVERAL + "test_a_refused_append_sends_nothing",
        CHILDREN + "test_messages_between_executions",
        "tests/sealing/test_sealing.py::test_a_request_is_sealed_for_its_receiver",
    ),
    "the streams of a chain move in one transaction, or not at all": (
        SEVERAL + "test_log_inbox_and_quarantine_move_together",
        SEVERAL + "test_all_streams_or_none",
    ),
    "what is published leaves with its fact": (
        FAULTS + "test_a_published_record_leaves_with_its_fact",
        CHILDREN + "test_a_record_is_published_in_the_transaction_of_its_fact",
    ),
    "a target is checked before staging, and a bad one aborts nobody else's appends": (
        FAULTS + "test_a_target_that_cannot_be_written_is_refused_before_anything_is_staged",
        FAULTS + "test_one_bad_target_does_not_keep_others_from_being_written",
        CHILDREN + "test_a_topic_that_refuses_the_record_is_a_failed_step",
    ),
}

READS: Final = {
    "memory within a budget, the rest in a local file": (
        INDEX + "test_memory_keeps_to_its_budget",
        INDEX + "test_finished_executions_leave_nothing_in_memory",
        INDEX + "test_a_parked_execution_comes_back_with_what_it_left",
    ),
    "a read that decides waits for a commit of this tenure": (
        WRITER + "test_a_deciding_read_needs_a_commit_of_this_tenure",
        FAULTS + "test_a_deciding_read_needs_a_commit_that_was_sent_after_it_was_asked",
        "tests/kafka/test_deciding.py::test_a_superseded_owner_does_not_answer_from_stale_memory",
    ),
    "others ask the owner, or keep a view that answers at the end captured at the call": (
        REQUESTS + "test_queries",
        SUBSCRIBE + "test_a_view_answers_with_everything_committed_when_asked",
        SUBSCRIBE + "test_a_view_never_answers_with_less_as_if_it_were_all",
    ),
    "absence in a second topic counts only at an end captured after the first": (
        TAKEOVER + "test_a_stream_trimmed_while_it_was_read_is_not_broken",
    ),
    "a checkpoint of another log, too old, or beyond the end is thrown away": (
        INDEX + "test_a_checkpoint_that_does_not_fit_is_thrown_away",
        TAKEOVER + "test_a_restart_reads_only_what_its_checkpoint_lacks",
        TAKEOVER + "test_topics_made_again_under_their_names_void_a_checkpoint",
    ),
    "the folder is locked by the node, and what is damaged in it replaced": (
        "tests/kafka/test_folder.py::test_a_folder_is_of_one_process",
        INDEX + "test_a_damaged_file_is_replaced",
    ),
    "the wake row stands before the park": (
        WAITS + "test_a_park_waits_for_its_row",
        WAITS + "test_a_timer_row_stands_before_the_park_and_goes_after_it",
    ),
    "a takeover writes the rows of every open wait": (
        RECOVERY + "test_flushed_wake_rows_come_back_and_each_timer_fires_once",
        RECOVERY + "test_rows_lost_with_the_leases_are_rebuilt_without_being_asked",
        RECOVERY + "test_a_shard_that_moves_takes_its_parked_executions_along",
    ),
    "read to the end means position": (TAKEOVER + "test_a_log_that_ends_in_an_abort_marker_replays_at_once",),
}

PROCESSORS: Final = {
    "a loop and a thread of its own; a blocked one is told": (
        APP + "test_the_bridge_answers_on_its_own_loop",
        APP + "test_a_blocked_loop_is_told",
    ),
    "the fast path does not wait for Faust": (
        WAITS + "test_a_message_wakes_a_parked_flow_in_one_batch",
        OWNING + "test_what_becomes_durable_is_heard_once_and_in_order",
    ),
    "agents do what the fast path did not, and acknowledge after the owner's answer": (
        DELIVERY + "test_a_message_is_acknowledged_after_the_bridge_answered",
        APP + "test_an_owner_elsewhere_is_waited_for",
        APP + "test_what_was_not_answered_is_delivered_to_the_next_process",
    ),
    "a refusal leaves a wake row": (
        POISON + "test_a_sealed_head_holds_the_execution_and_nothing_is_written",
    ),
    "a fold that was overtaken writes nothing, and never replaces a higher head": (
        FOLD + "test_a_fold_that_was_overtaken_is_fenced_and_writes_nothing",
        FOLD + "test_kill_and_zombies_leave_states_equal_to_the_oracle",
        FOLD + "test_a_restart_goes_on_from_states",
    ),
    "no payload in states; its lag is a metric": (
        FOLD + "test_nothing_but_short_names_enters_a_summary",
        "tests/processors/test_metrics.py::test_the_page_names_every_figure",
    ),
    "the app runs on kafka://, reaches its topics and commits": (
        APP + "test_inbox_and_commands_reach_the_bridge_and_are_committed",
        APP + "test_credentials_follow_librdkafkas_names",
    ),
    "agents see committed data only, with headers": (
        TRANSPORT + "test_an_agent_sees_no_aborted_record_and_keeps_headers",
        TRANSPORT + "test_tables_are_recovered_and_hold_committed_data_only",
    ),
    "a Faust that moved what is touched is refused at start": (
        TRANSPORT + "test_the_installed_faust_fits",
        TRANSPORT + "test_another_faust_is_refused_at_start",
        TRANSPORT + "test_a_faust_that_calls_another_name_is_refused",
        TRANSPORT + "test_a_faust_that_takes_other_parameters_is_refused",
    ),
    "a hole right after offset 0 holds nothing back": (
        LEDGER + "test_a_hole_right_after_offset_0_holds_nothing_back",
        TRANSPORT + "test_commits_pass_every_hole_and_memory_stays_flat",
    ),
}

CLOCKS: Final = {
    "one slot per script, no expiry on rows that are evidence": (
        REDIS + "test_no_row_has_a_key_expiry_and_each_script_keeps_to_one_slot",
    ),
    "an expired lease stays until it is taken or collected": (
        LEASES + "test_an_expired_lease_stays_as_evidence",
        LEASES + "test_an_expired_untaken_lease_is_renewed",
    ),
    "wake rows merge to the highest head and holds": (
        WAKES + "test_rows_that_meet_on_a_key_merge_alike_in_any_order",
        WAKES + "test_a_hold_never_completes_a_timers_key",
    ),
    "a destroyed key stays destroyed, and keys are wrapped": (
        KEYS + "test_a_destroyed_key_is_gone_for_good",
        KEYS + "test_no_key_rests_bare_or_prints",
    ),
    "doctor names what would lose rows": (REDIS + "test_doctor_names_what_would_lose_rows",),
    "rows are rebuilt from the log": (
        RECOVERY + "test_flushed_wake_rows_come_back_and_each_timer_fires_once",
        "tests/fleet/test_fleet_redis.py::test_a_flushed_redis_loses_no_alarm",
    ),
}

PARTS: Final = {
    "Apache Kafka where Java and Maven are, the embedded broker elsewhere, and it is said": (
        SERVICES + "test_the_shared_broker_runs_transactions",
        SERVICES + "test_without_java_the_embedded_broker_serves_and_says_so",
        SERVICES + "test_named_parts_are_used_and_left_alone",
    ),
    "Redis of the system or of the package": (
        SERVICES + "test_the_redis_of_the_package_serves_where_the_system_has_none",
    ),
    "the registry's own deserializer reads the log, and refuses what does not fit": (
        "tests/schemas/test_apicurio.py::test_the_registrys_own_deserializer_reads_the_log",
        "tests/schemas/test_apicurio.py::test_an_incompatible_schema_is_refused_by_the_registry",
    ),
}

PITFALLS: Final = {
    "a late end settles the next transaction": (
        FAULTS + "test_an_end_held_past_the_deadline_and_let_go_in_a_later_transaction_ends_nothing_else",
    ),
    "a commit failed, yet its records are there": (
        FAULTS + "test_a_commit_whose_reply_is_lost_is_success_and_one_copy",
    ),
    "a transactional id expired": (OUTAGE + "test_a_transactional_id_that_expired_costs_one_retry",),
    "a local enqueue error does not poison the transaction": (
        FAULTS + "test_an_oversize_event_in_the_middle_shows_nothing_and_only_its_caller_is_told",
    ),
    "two owners fence each other for ever": (TAKEOVER + "test_two_owners_of_one_partition_settle",),
    "epochs run out: initialisation backs off": (
        OUTAGE + "test_epochs_may_run_out",
        "tests/kafka/test_tenure.py::test_pauses_grow_with_each_fence_and_end",
        "tests/kafka/test_tenure.py::test_a_tenure_that_settled_begins_anew",
        "tests/kafka/test_tenure.py::test_attempts_without_number_are_paced_and_jittered",
    ),
    "the last offset is a control record": (
        TAKEOVER + "test_a_log_that_ends_in_an_abort_marker_replays_at_once",
    ),
    "another's open transaction: a silent short read": (
        TAKEOVER + "test_an_open_transaction_of_another_is_waited_for_and_never_read_past",
    ),
    "what was deleted never leaves the disk": (
        COMPACTION + "test_what_was_deleted_leaves_the_disk_of_a_partition_that_went_quiet",
    ),
    "a stuck stable offset": (TAKEOVER + "test_health_names_a_stuck_partition_and_its_age",),
    "markers cleaned too early": (COMPACTION + "test_compacting_twice_leaves_the_same_visible_set",),
    "the lost-partitions callback never fires": (
        MEMBERSHIP + "test_without_an_answer_of_the_group_everything_is_given_up_in_a_session",
    ),
    "a static member fenced by its own id": (
        MEMBERSHIP + "test_a_member_fenced_by_its_own_id_ends_with_the_reason",
        START + "test_two_processes_with_one_node_id_are_told_apart",
    ),
    "agents read uncommitted data": (TRANSPORT + "test_an_agent_sees_no_aborted_record_and_keeps_headers",),
    "duplicates after a crash": (DEATHS + "test_messages_outlive_two_kills",),
    "table recovery never ends": (TRANSPORT + "test_tables_are_recovered_and_hold_committed_data_only",),
    "consumers die silently": (
        APP + "test_the_watch_names_what_stands_still",
        APP + "test_a_healthy_app_is_left_alone_and_a_dead_broker_is_told",
    ),
    "a web server and table data served by default": (
        APP + "test_nothing_is_served_unless_asked_for",
        APP + "test_two_processes_share_the_partitions",
    ),
    "failover loses leases": (
        LEASE_KEEPER + "test_a_lease_that_another_took_is_lost_and_a_row_that_was_emptied_is_written_again",
        RECOVERY + "test_an_emptied_lease_store_is_no_evidence_for_one_ttl",
    ),
    "a script applied more than once": (
        REDIS + "test_a_call_whose_answer_was_lost_is_sent_once_and_may_be_repeated",
    ),
    "scripts flushed between two steps": (
        "tests/stores/test_lease_store.py::TestRedis",
        "tests/stores/test_wake_store.py::TestRedis",
    ),
    "keys in several slots": (REDIS + "test_no_row_has_a_key_expiry_and_each_script_keeps_to_one_slot",),
    "an empty restart": ("tests/fleet/test_fleet_redis.py::test_a_thousand_alarms_outlive_a_flush",),
    "defaults of bytes come back as text": (
        "tests/schemas/test_schema_files.py::test_a_schema_file_keeps_the_rules",
    ),
    "a union takes the first branch that fits": (
        "tests/schemas/test_record_bytes.py::test_every_branch_round_trips_to_the_same_bytes",
    ),
    "the registry lost an id": (
        "tests/schemas/test_table.py::test_with_the_registry_off_a_cold_start_replays_what_it_registered",
        "tests/schemas/test_apicurio.py::test_reading_goes_on_when_the_registry_is_gone",
    ),
    "a nonce used twice, a key worn out": (
        "tests/sealing/test_sealing.py::test_nonces_never_repeat",
        KEYS + "test_a_key_is_rotated_before_it_is_worn",
    ),
    "ciphertext moved between records": (
        "tests/sealing/test_opening.py::test_ciphertext_moved_to_another_subject_does_not_open",
        "tests/sealing/test_sealed_snapshots.py::test_a_row_moved_to_another_execution_does_not_open",
    ),
    "an erasure noticed only when opening fails": (
        "tests/sealing/test_erasure.py::test_every_node_forgets_within_a_second",
    ),
    "a signal before an earlier completion": (REPLAY + "test_every_split_of_one_history",),
    "the order of a set of tasks": (
        "tests/kernel/test_kernel_hash_seeds.py::test_twenty_processes_with_random_hash_seeds_give_the_same_commands",
    ),
    "continue-as-new drops late messages": (
        "tests/runtime/test_runtime_continue.py::test_a_hundred_messages_racing_the_switch_are_each_handled_once",
    ),
    "poison retried for ever": (
        POISON + "test_a_spinning_flow_is_stopped_and_neighbours_progress",
        POISON + "test_back_off_doubles_is_bounded_and_forgets",
    ),
    "a replay mismatch passes silently": (
        REPLAY + "test_the_first_event_that_the_code_did_not_ask_for_is_named",
    ),
    "timers of what is refused fire for ever": (
        WAKES + "test_a_hold_moves_a_row_in_one_step",
        WAKES + "test_pollers_that_hold_the_same_row_leave_one",
    ),
    "the offset moved first, or poison dropped": (
        DELIVERY + "test_a_record_is_not_acknowledged_before_dead_has_it",
        APP + "test_what_was_not_answered_is_delivered_to_the_next_process",
    ),
}

AGENT: Final = "tests/processors/test_quarantine_agent.py::"
KEPT: Final = "tests/sealing/test_kept_copies.py::"
REMOVED: Final = "tests/sealing/test_removal.py::"

QUARANTINE: Final = {
    "a copy is freed only when nothing needs it and its original is passed, whoever left it behind": (
        KEPT + "test_a_live_copy_and_one_in_flight_stay_and_an_orphan_behind_the_cursor_goes",
        KEPT + "test_what_a_node_left_behind_when_it_died_is_freed_by_another",
        KEPT + "test_an_ended_chain_keeps_no_copy_even_where_its_log_cannot_be_opened",
    ),
    "no copy is left of a cycle, on the topic and on the disk; tombstones counted": (
        "tests/fleet/test_fleet_copies.py::test_after_a_cycle_no_copy_is_left_and_what_nobody_freed_is_freed_by_the_workers",
    ),
    "what is awaited is told the first time and then every 16th": (
        AGENT + "test_what_is_awaited_is_told_the_first_time_and_then_every_16th",
        AGENT + "test_a_signal_that_was_not_written_is_written_by_the_next_look",
    ),
    "the agent knows what was held before its start, and reads committed data only": (
        AGENT + "test_what_stands_in_the_topic_at_a_start_is_looked_at_and_what_went_elsewhere_no_longer",
        APP + "test_chains_that_keep_copies_are_looked_at_also_those_from_before_the_start",
    ),
    "purge, deletion and erasure cover what is held": (
        REMOVED + "test_a_purge_leaves_how_it_began_and_ended_and_takes_what_was_held",
        REMOVED + "test_a_deleted_chain_takes_its_holds_along",
        REMOVED + "test_a_held_chain_is_erased_with_its_copies",
    ),
    "a removal says who and why first, is finished by a repeat, and needs an operator": (
        REMOVED + "test_a_deletion_that_breaks_off_anywhere_is_told_by_the_log_and_finished_by_a_repeat",
        REMOVED + "test_what_has_not_ended_is_not_removed_and_only_operators_remove",
    ),
    "finished executions have a retention": (
        "tests/fleet/test_fleet_retention.py::test_what_ended_before_is_removed_with_its_inbox_and_what_runs_is_kept",
        REMOVED + "test_a_retention_that_breaks_off_is_finished_by_the_next_sweep",
    ),
    "a held topic is not retired as drained": (
        "tests/sealing/test_retiring.py::test_a_held_topic_is_not_retired_and_the_pass_is_made_by_itself",
        "tests/sealing/test_retiring.py::test_a_drained_topic_keeps_its_numbering_and_nothing_that_was_consumed",
    ),
}

CLAUSES: Final = {
    "topics": TOPICS,
    "conditional append": APPEND,
    "ownership and requests": OWNERSHIP,
    "reading": READS,
    "processors": PROCESSORS,
    "quarantine and removal": QUARANTINE,
    "the clocks": CLOCKS,
    "parts": PARTS,
    "faults that others met": PITFALLS,
}
