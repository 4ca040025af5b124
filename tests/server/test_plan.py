"""What the fold is told of each contribution: synchronous rounds weigh, asynchronous ones scale."""

import pytest

from atoll.aggregation.weights import FIXED_POINT_ONE
from atoll.protocol.vocabulary import ClientId, Digest, RoundId, Version
from atoll.server.events import Aggregate, Contribution
from atoll.server.method import AggregationConfig, Method, OptimizerConfig
from atoll.server.plan import weights_and_factors
from atoll.server.policy import Mode

METHOD = Method.of(AggregationConfig(), OptimizerConfig())


def aggregate(mode: Mode, *rows: tuple[int, float]) -> Aggregate:
    contributions = tuple(
        Contribution(ClientId(f"c{k}"), Digest(f"d{k}"), num_examples, scale, Version(0))
        for k, (num_examples, scale) in enumerate(rows)
    )
    return Aggregate(RoundId(1), Version(0), contributions, mode)


def mean(weights: object, factors: object, updates: list[float]) -> float:
    """As the fold has it."""
    terms = list(zip(weights, factors, updates, strict=True))  # type: ignore[call-overload]
    return sum(w * f * u for w, f, u in terms) / sum(w for w, _, _ in terms)


def test_a_synchronous_round_discounts_numerator_and_denominator() -> None:
    weights, factors = weights_and_factors(aggregate("sync", (10, 1.0), (10, 0.5)), METHOD, [1.0, 1.0])
    assert (weights, factors) == ((FIXED_POINT_ONE, FIXED_POINT_ONE // 2), [1.0, 1.0])
    assert mean(weights, factors, [3.0, 6.0]) == pytest.approx((3 + 0.5 * 6) / 1.5)


def test_fedbuff_divides_by_the_number_of_updates() -> None:
    weights, factors = weights_and_factors(aggregate("fedbuff", (1000, 1.0), (1, 0.5)), METHOD, [1.0, 1.0])
    assert mean(weights, factors, [3.0, 6.0]) == (3 + 0.5 * 6) / 2


def test_fedasync_takes_its_share_of_the_one_update() -> None:
    weights, factors = weights_and_factors(aggregate("fedasync", (1000, 0.3)), METHOD, [1.0])
    assert mean(weights, factors, [10.0]) == pytest.approx(3.0)


def test_the_norm_bound_holds_for_what_is_scaled() -> None:
    _, factors = weights_and_factors(aggregate("fedbuff", (1, 0.5), (1, 1.0)), METHOD, [0.5, 1.0])
    assert factors == [0.25, 1.0]
