"""The clip norm that follows a quantile: the noise of sum and count together, and its steps."""

import math

import pytest

from atoll.protocol.privacy.adaptive_clip import CLIP_MAX, CLIP_MIN, AdaptiveClip


@pytest.mark.parametrize(("z", "sigma", "expected"), [(1.0, 5.0, 1.0050378), (2.0, 5.0, 2.0412415)])
def test_the_noise_of_the_sum_is_that_of_the_paper(z: float, sigma: float, expected: float) -> None:
    rule = AdaptiveClip(0.5, 0.2, sigma, 100)
    assert rule.sum_multiplier(z) == pytest.approx(expected, abs=1e-7)
    both = rule.sum_multiplier(z) ** -2 + (2 * sigma) ** -2
    assert both == pytest.approx(z**-2), "the two mechanisms together are one of z"


@pytest.mark.parametrize("z", [10.0, 11.0])
def test_a_count_that_costs_more_than_the_round_is_refused(z: float) -> None:
    with pytest.raises(ValueError, match="is not below twice 5"):
        AdaptiveClip(0.5, 0.2, 5.0, 100).sum_multiplier(z)


def test_its_steps_are_those_of_another_program() -> None:
    """TensorFlow Privacy's test values: quantile 0, geometric steps of ln 2, lengths 5 and 2.5, begun at 16."""
    rule, norm, seen = AdaptiveClip(0.0, math.log(2), 1.0, 2), 16.0, []
    for _ in range(5):
        norm = rule.next_norm(norm, sum(0.5 if length <= norm else -0.5 for length in (5.0, 2.5)))
        seen.append(norm)
    assert seen == pytest.approx([8.0, 4.0, 2.828427, 2.0, 2.0], abs=1e-6)


def test_absent_clients_move_nothing_and_the_norm_has_bounds() -> None:
    rule = AdaptiveClip(0.5, 0.2, 1.0, 10)
    assert rule.next_norm(3.0, 0.0) == 3.0
    assert rule.next_norm(CLIP_MIN, 1e6) == CLIP_MIN
    assert rule.next_norm(CLIP_MAX, -1e6) == CLIP_MAX
