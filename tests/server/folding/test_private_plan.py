"""The noise of a private plan with an adaptive clip norm: its deviation, and the count for the next norm."""

import math
from statistics import mean, stdev

import pytest

from atoll.protocol.privacy.adaptive_clip import AdaptiveClip
from atoll.protocol.vocabulary import ClientId, Digest, RoundId, Version
from atoll.server.folding.plan import Private
from atoll.server.rounds.events import Aggregate, Contribution
from atoll.server.rounds.privacy_rules import PrivacyRules
from atoll.tensors.layout import Tensor

CLIENTS, SIGMA = 100, 5.0
NORMS = [1.0] * 30 + [3.0] * 70
BASE = Digest("0" * 64)
LAYOUT = (Tensor("w", "F32", (10,)),)


def private(adaptive: AdaptiveClip | None, noise: bytes = bytes(32)) -> Private:
    return Private(PrivacyRules(8.0, 1e-5, 2.0, 1.0, 10, 100.0, adaptive=adaptive), CLIENTS, noise)


def effect(name: str, clip_norm: float = 2.0) -> Aggregate:
    of_clients = (Contribution(ClientId("a"), Digest(name), 1, 1.0),)
    return Aggregate(RoundId(1), Version(0), of_clients, clip_norm=clip_norm)


def test_the_sum_is_clipped_to_the_norm_of_the_round_and_its_noise_leaves_room_for_the_count() -> None:
    it = private(AdaptiveClip(0.5, 0.2, SIGMA, CLIENTS))
    assert it.planned(effect("x"), BASE, LAYOUT).deviation == pytest.approx(2.0 * 2.0412415, abs=1e-6)
    assert it.planned(effect("x", 0.0), BASE, LAYOUT).deviation == pytest.approx(2.0412415, abs=1e-6)
    (kept, cut) = it.clip_factors([1.9, 4.0], LAYOUT, 2.0)
    assert (kept, cut) == (1.0, pytest.approx(0.5, abs=1e-6))
    assert private(None).planned(effect("x", 0.0), BASE, LAYOUT).deviation == 2.0


def test_the_next_norm_follows_the_share_of_short_updates_with_the_noise_of_sigma() -> None:
    """30 of 100 are within the norm, 0.2 less than the quantile: it grows by exp(0.04) on average."""
    it = private(AdaptiveClip(0.5, 0.2, SIGMA, CLIENTS))
    steps = [math.log(it.next_clip_norm(effect(str(number)), BASE, NORMS) / 2.0) for number in range(1000)]
    deviation = 0.2 * SIGMA / CLIENTS
    assert mean(steps) == pytest.approx(0.04, abs=4 * deviation / math.sqrt(1000))
    assert stdev(steps) == pytest.approx(deviation, rel=0.1)


def test_a_repeated_fold_has_the_same_count_and_another_secret_or_set_another_one() -> None:
    rule = AdaptiveClip(0.5, 0.2, SIGMA, CLIENTS)
    first = private(rule).next_clip_norm(effect("x"), BASE, NORMS)
    assert first == private(rule).next_clip_norm(effect("x"), BASE, NORMS)
    assert first != private(rule).next_clip_norm(effect("y"), BASE, NORMS)
    assert first != private(rule, bytes([1] * 32)).next_clip_norm(effect("x"), BASE, NORMS)
    assert private(None).next_clip_norm(effect("x"), BASE, NORMS) == 0.0
    assert math.isfinite(private(rule).next_clip_norm(effect("x"), BASE, [math.nan] * 3))
