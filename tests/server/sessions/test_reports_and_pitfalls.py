"""Faults of secure sums that others have reported, and pitfalls of our own list: the tests with the smallest input.

The reports of differential privacy have theirs in `tests/protocol/privacy/test_public_reports.py`.
"""

import random
from dataclasses import replace

import numpy as np
import pytest

from atoll.client.secure.member import Mask
from atoll.ground.strict_json import ManifestError
from atoll.protocol.secure.boxes import Shares
from atoll.protocol.secure.messages import Boxes, Opening
from atoll.protocol.secure.terms import read_terms
from atoll.server.opening.streams import open_sum
from tests.protocol.privacy.test_public_reports import functions_of
from tests.server.sessions.small_federation import sites_of, terms_of
from tests.server.sessions.test_lies import Honest

REPORTS = {
    "flower#7631: an update of zeros ends the round": (
        "tensors/masked/test_encode.py::test_a_zero_update_is_a_member_like_any_other",
        "aggregation/masked/test_fold.py::test_a_sum_of_zero_updates_is_the_base_again",
    ),
    "flower#7633: a clip norm of 0 or less is accepted": (
        "server/sessions/test_reports_and_pitfalls.py::test_a_range_of_clipping_that_is_none_is_refused",
        "server/config/test_secure.py::test_values_out_of_range_are_refused",
        "tensors/secure/test_plan.py::test_what_is_out_of_range_is_refused",
    ),
    "fedbiomed#1210, #1056, #898: sums of many nodes or samples overflow": (
        "tensors/masked/test_mask.py::test_the_sum_of_masked_files_is_that_of_the_words",
        "tensors/secure/test_vector.py::test_the_sum_of_most_members_at_the_end_of_the_range_does_not_wrap",
        "tensors/masked/test_whole_numbers.py::test_the_sum_of_64_members_does_not_wrap",
        "server/hosting/test_secure_terms.py::test_a_full_session_of_any_width_adds_without_overflow",
    ),
    "openfl#1407: masks and weights disagree": (
        "aggregation/masked/test_fold.py::test_the_new_version_is_the_base_and_the_mean_of_all_members",
        "aggregation/masked/test_fold.py::test_a_sum_of_impossible_counts_is_dropped",
        "tensors/secure/test_vector.py::test_a_weight_is_a_part_of_the_most_examples_at_most_1",
    ),
    "openmed#2829, APPFL#337: members that drop out after the shares": (
        "server/sessions/test_schedules.py::test_every_set_of_survivors_of_small_sessions_opens_or_ends",
        "server/rounds/test_secure_round.py::test_a_schedule_of_faults_opens_exact_sums_or_ends",
        "federation/test_secure_sums.py::test_a_site_that_is_killed_in_its_session_costs_the_others_nothing",
    ),
    "fedbiomed#973: secrets from a seeded generator": (
        "server/sessions/test_reports_and_pitfalls.py::"
        "test_generators_that_a_coordinator_can_seed_draw_nothing_of_a_session",
        "tensors/masked/test_encode.py::test_rounding_is_secret_and_new_at_each_encoding",
    ),
    "Truxify#3844: weights are clipped, and not updates": (
        "tensors/masked/test_encode.py::test_the_update_is_clipped_and_not_the_weights",
    ),
    "pytorch#170862, VeOmni#184, SpecForge#663: the norm of one shard for the whole": (
        "tensors/masked/test_parts.py::test_the_norm_is_of_all_ranks_boxes",
        "parallel/mesh_client/test_secure_words.py::test_the_norm_is_of_the_whole_update_and_each_rank_clips_by_it",
    ),
}
"""Tests by the reports about secure sums in the reference."""

PITFALLS = {
    "a nonce is used twice": (
        "server/sessions/test_reports_and_pitfalls.py::test_no_box_and_no_pair_has_the_key_of_another",
    ),
    "the encoded update is deleted before the verdict": (
        "client/session/test_secure_session.py::test_another_attempt_gives_up_what_was_masked_for_the_one_before",
        "client/session/test_secure_session.py::test_after_a_restart_the_encoded_update_is_still_known",
        "client/work/test_secure_sums.py::test_each_attempt_at_the_sum_is_joined",
    ),
    "masks made again have another rounding": (
        "server/sessions/test_dishonest_moves.py::test_what_is_masked_again_has_the_same_bytes",
        "client/work/test_masking.py::test_parts_are_masked_by_the_ranks_or_here_to_the_same_bytes",
    ),
    "manifests and the upload's opening tell examples, work, statistics, seconds": (
        "client/work/test_masking.py::test_the_upload_of_a_masked_update_tells_nothing_of_its_training",
        "federation/test_secure_sums.py::test_a_secure_run_has_the_model_of_a_plain_one_and_no_single_update",
    ),
    "secrets in logs, core dumps, worker requests": (
        "server/sessions/test_reports_and_pitfalls.py::test_no_text_of_an_effect_has_a_key_or_a_share",
        "server/sessions/test_reports_and_pitfalls.py::test_no_text_of_an_opening_has_a_key",
        "client/work/test_masking.py::test_an_order_does_not_show_its_keys",
        "aggregation/masked/test_fold.py::test_keys_are_in_no_text",
        "ground/process/test_core_dumps.py::test_a_process_and_its_children_dump_no_memory",
        "federation/test_secure_sums.py::"
        "test_after_the_commit_no_state_directory_has_an_update_a_key_a_seed_or_a_share",
    ),
    "opened shares are kept": (
        "server/journal/test_reveals.py::test_revealed_shares_are_in_no_file_after_their_round",
    ),
    "integers are in the 32-bit part": (
        "tensors/secure/test_exact.py::test_the_masked_layout_has_the_floats_by_name_and_one_tensor_for_the_rest",
    ),
    "positions at odd sizes, words of the other byte order": (
        "tensors/secure/test_positions.py::test_the_runs_of_a_box_are_the_positions_of_its_elements",
        "tensors/secure/test_keystream.py::test_the_first_block_is_that_of_nist",
        "tensors/masked/test_encode.py::test_the_boxes_of_a_mesh_have_the_words_of_one_process",
    ),
    "a simulated session looks like a guarantee": (
        "simulations/secure/test_sums.py::"
        "test_every_record_says_that_a_session_was_simulated_and_tells_no_single_client",
    ),
}
"""Tests by the pitfalls of secure sums in the reference."""


@pytest.mark.parametrize("what", [*REPORTS, *PITFALLS])
def test_each_report_and_each_pitfall_has_its_tests(what):
    for test in (REPORTS | PITFALLS)[what]:
        file, _, name = test.partition("::")
        assert name in functions_of(file), test


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan"), float("inf")])
def test_a_range_of_clipping_that_is_none_is_refused(norm):
    with pytest.raises(ManifestError, match="clip_norm"):
        read_terms(replace(terms_of(), clip_norm=norm).canonical())


def test_generators_that_a_coordinator_can_seed_draw_nothing_of_a_session():
    """Seeded alike, as a task's training is, two members have no secret in common, and neither have two attempts."""
    drawn = []
    site = sites_of(3)[0]
    for attempt in (1, 1, 2):
        random.seed(0)
        np.random.seed(0)
        member = site.member(terms_of(attempt=attempt))
        member.start()
        secrets = member._secrets
        drawn += [secrets.seed, secrets.mask.private_bytes_raw(), secrets.box.private_bytes_raw()]
    assert len({*drawn}) == len(drawn) == 9
    assert np.random.get_state()[2] == 624, "numpy's generator has drawn nothing"


def test_no_box_and_no_pair_has_the_key_of_another():
    """A box has the nonce 0, so its key seals once: in one direction, of one pair, in one session."""
    keys: list[bytes] = []
    for terms in (terms_of(), terms_of(attempt=2)):
        honest = Honest(terms=terms, sites=None)
        honest.masked()
        keys += [key for member in honest.members for key in member._secrets.boxes.values()]
        pairs = [key for member in honest.members for key in member._secrets.masks.values()]
        assert sorted(pairs.count(key) for key in {*pairs}) == [2] * 10, "both members of a pair have its key"
        keys += {*pairs}
    assert len({*keys}) == len(keys) == 2 * (20 + 10)


def test_no_text_of_an_effect_has_a_key_or_a_share():
    honest = Honest()
    boxes = Boxes(honest.shared()[0].boxes)
    secrets = honest.members[0]._secrets
    [mask] = honest.members[0].ask(boxes)
    assert isinstance(mask, Mask)
    said = repr(mask) + repr(secrets.shares) + str(vars(honest.members[0]))
    hidden = [
        *(stream.key for stream in mask.streams),
        secrets.seed,
        *(str(each.seed) for each in secrets.shares.values()),
    ]
    assert all((repr(each) if isinstance(each, bytes) else each) not in said for each in hidden)
    assert repr(Shares(5, 6)) == "Shares()"


def test_no_text_of_an_opening_has_a_key():
    honest = Honest()
    signatures = honest.agreed()
    session = honest.members[0]._session
    reveals = {number: honest.ask(Opening(signatures), number).shares for number in range(5)}
    opened = open_sum(honest.roster, session, honest.survivors, honest.survivors, reveals)
    assert repr(opened) == f"Opened(streams=({', '.join(['Taken(sign=-1)'] * 5)}), wrong=frozenset())"
