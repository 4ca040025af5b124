"""Faults of differential privacy that others have reported, each with the tests that have its smallest input.

The reports of secure sums have theirs in `tests/server/sessions/test_reports_and_pitfalls.py`.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]

REPORTS = {
    "flower#7631: an update of zeros ends the round": (
        "server/folding/test_private.py::test_no_update_is_longer_than_the_clip_norm_and_a_short_one_stays",
        "tensors/masked/test_encode.py::test_a_zero_update_is_a_member_like_any_other",
        "training/private/test_gradients.py::test_a_row_without_a_finite_gradient_adds_zero",
    ),
    "flower#7633: a clip norm of 0 or less is accepted": (
        "server/config/test_privacy.py::test_numbers_that_promise_nothing_are_refused",
        "cli/test_privacy.py::test_all_faults_are_told_at_once",
        "training/private/test_config.py::test_faults_are_listed_all_at_once",
    ),
    "opacus#792: tokens that do not count are in the mean of an example": (
        "training/private/test_gradients.py::test_each_way_equals_a_loop_over_single_rows",
        "training/private/test_local_steps.py::test_adapters_on_a_llama_are_trained_by_dp_sgd",
    ),
    "opacus#813: the length of a sampler is taken for the rate": (
        "training/private/test_noise.py::test_each_example_takes_part_independently_with_the_rate",
        "parallel/private/test_training.py::test_an_epoch_is_the_steps_in_which_each_example_is_expected_once",
    ),
    "opacus#161, #420: empty samples, and samples of other sizes": (
        "parallel/private/test_training.py::test_an_empty_sample_is_a_step_on_noise",
        "training/private/test_gradients.py::test_no_rows_have_a_sum_of_zero",
        "training/private/test_local_steps.py::test_the_divisor_is_the_expected_batch",
    ),
    "opacus#80, privacy#483, jax_privacy#272: shuffled batches are accounted as Poisson samples": (
        "training/private/test_noise.py::test_each_example_takes_part_independently_with_the_rate",
        "training/private/test_noise.py::test_a_sample_follows_from_key_and_step_and_may_be_empty_or_whole",
    ),
    "fedbiomed#1210, #1056, #898: sums of many overflow": (
        "aggregation/noise/test_private_sum.py::test_noise_too_large_for_its_grid_and_too_little_for_its_sum_are_refused",
        "tensors/masked/test_private.py::test_noise_that_does_not_fit_into_the_words_is_a_fault",
    ),
    "NVFlare#343, #1214: values leave without noise, or share one": (
        "simulations/federation/test_private.py::test_every_value_of_a_version_has_noise_of_its_own",
        "server/config/test_privacy.py::test_tensors_without_noise_are_refused_by_name",
        "training/private/test_local_steps.py::test_nothing_that_is_told_of_a_training_comes_from_its_rows",
        "tensors/noise/test_grid_noise.py::test_a_box_has_the_noise_of_its_elements",
    ),
    "NVFlare#4470: the account is wiped at the end of a job": (
        "client/policy/budgets/test_ledger.py::"
        "test_a_ledger_that_is_read_again_has_the_same_accounts_and_charges_no_repetition",
        "server/rounds/test_privacy.py::test_a_resume_with_a_larger_budget_continues_and_forgets_no_charge",
        "parallel/private/test_account.py::test_charges_never_fall_over_kills_and_lost_checkpoints",
    ),
    "opacus#757, #779: an adaptive clip norm spends more than it says": (
        "protocol/privacy/test_adaptive_clip.py::test_a_count_that_costs_more_than_the_round_is_refused",
        "protocol/privacy/test_adaptive_clip.py::test_the_noise_of_the_sum_is_that_of_the_paper",
    ),
    "jax_privacy#238, #218: the sensitivity of correlated noise by another length, or of coefficients that rise": (
        "protocol/privacy/test_correlated.py::test_coefficients_go_on_where_those_of_the_noise_end",
        "protocol/privacy/test_correlated.py::test_coefficients_that_rise_or_change_their_sign_are_bounded_from_above",
    ),
    "optax#527, opacus#191: noise for each micro-batch, or for each rank": (
        "training/private/test_local_steps.py::test_one_noise_a_step_however_the_rows_are_divided",
        "parallel/private/test_training.py::test_micro_batches_and_repeated_passes_change_nothing",
        "parallel/private/test_on_ranks.py::test_it_computes_dp_sgd_with_the_noise_of_one_process",
    ),
    "fedbiomed#973, opacus#616: noise from a seeded generator, or of floats": (
        "parallel/private/test_training.py::test_noise_comes_from_the_system_and_no_seed_repeats_it",
        "training/private/test_noise.py::test_sum_and_noise_are_rounded_to_a_grid_that_follows_from_the_noise",
        "aggregation/noise/test_private_sum.py::test_the_grid_follows_from_the_deviation",
    ),
    "programming-dp#45: the classic formula above epsilon 1": (
        "protocol/privacy/test_gaussian.py::test_the_classic_formula_is_not_this_one",
    ),
    "Truxify#3844: weights are clipped, and not updates": (
        "simulations/federation/test_private.py::test_updates_are_clipped_and_not_the_weights",
        "tensors/masked/test_encode.py::test_the_update_is_clipped_and_not_the_weights",
    ),
    "APPFL#349: the gradient of a batch is clipped, and not those of its examples": (
        "training/private/test_gradients.py::test_one_row_moves_the_sum_by_at_most_the_clip_norm",
        "training/private/test_local_steps.py::test_a_round_is_dp_sgd_by_hand",
    ),
    "pfl#70: noise for another cohort looks like a guarantee": (
        "simulations/federation/test_private.py::"
        "test_fewer_clients_have_the_noise_of_a_cohort_and_every_record_says_that_there_is_no_guarantee",
    ),
    "vero#36: a damaged file refunds a budget": (
        "client/policy/budgets/test_ledger.py::test_any_flipped_bit_allows_nothing_or_changes_nothing",
        "client/policy/budgets/test_ledger.py::test_a_removed_and_an_older_file_allow_nothing_beside_the_agent_s_memory",
        "parallel/private/test_account.py::test_an_account_that_is_not_sound_allows_nothing",
    ),
    "pytorch#170862, VeOmni#184, SpecForge#663: the norm of one shard for the whole": (
        "parallel/private/test_mesh_gradients.py::test_ranks_that_compute_each_layer_together",
        "tensors/masked/test_parts.py::test_the_norm_is_of_all_ranks_boxes",
        "server/files/test_part_files.py::test_parts_that_are_made_whole_are_folded_with_what_was_found_in_all_of_them",
    ),
}
"""Tests by the reports, which the reference of differential privacy lists."""


@cache
def functions_of(file: str) -> frozenset[str]:
    """Return the names of the tests in a file."""
    tree = ast.parse((TESTS / file).read_text("utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("report", REPORTS)
def test_each_report_has_its_tests(report: str) -> None:
    for test in REPORTS[report]:
        file, _, name = test.partition("::")
        assert name in functions_of(file), test
