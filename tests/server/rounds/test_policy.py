"""The policy's derived numbers and its bounds."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from atoll.protocol.attribute_docs import attribute_docs
from atoll.server.rounds.policy import StragglerPolicy


def test_every_field_is_documented() -> None:
    assert StragglerPolicy.model_fields.keys() <= attribute_docs(StragglerPolicy).keys()


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"cohort_size": 3, "quorum": 4}, "quorum 4 is more than cohort_size (3)"),
        ({"quorum": 0}, "a count must be at least 1"),
        ({"quorum": 0.0}, "a fraction must be in (0, 1]"),
        ({"quorum": 1.5}, "a fraction must be in (0, 1]"),
        ({"deadline_min": 9.0, "deadline_max": 8.0}, "deadline_min 9.0 is more than deadline_max (8.0)"),
        ({"cohort_size": 4, "min_available": 2}, "min_available 2 is less than the quorum (4)"),
        ({"deadline": 0.0}, "greater than 0"),
        ({"deadline": math.inf}, "finite"),
        ({"deadline": "soon"}, "adaptive"),
        ({"linger": -1.0}, "greater than or equal to 0"),
        ({"late": "never"}, "next_round"),
        ({"partial_work": "half"}, "scaled"),
        ({"cohort_sise": 3}, "Extra inputs are not permitted"),
        ({"cohort_size": "3"}, "valid integer"),
        ({"buffer_size": 3}, "buffer_size belongs to mode fedbuff, and mode is sync"),
        ({"alpha": 0.5}, "alpha belongs to mode fedasync, and mode is sync"),
        ({"concurrency": 3}, "concurrency belongs to mode fedbuff and fedasync, and mode is sync"),
        ({"mode": "fedbuff", "late": "next_round"}, "late belongs to mode sync, and mode is fedbuff"),
        ({"mode": "fedbuff", "alpha": 0.5}, "alpha belongs to mode fedasync, and mode is fedbuff"),
        ({"mode": "fedasync", "buffer_size": 3}, "buffer_size belongs to mode fedbuff, and mode is fedasync"),
        ({"mode": "fedbuff", "buffer_size": 3, "quorum": 4}, "quorum 4 is more than buffer_size (3)"),
        ({"mode": "fedasync", "quorum": 2}, "quorum 2 is more than the updates of a fedasync version (1)"),
        ({"mode": "fedprox"}, "'sync', 'fedbuff' or 'fedasync'"),
        ({"staleness": "hinge", "staleness_exponent": 1.0}, "staleness_exponent belongs to the polynomial discount"),
        ({"hinge_delay": 2}, "hinge_delay belongs to the hinge discount, and staleness is polynomial"),
        ({"mode": "fedasync", "alpha": 0.0}, "greater than 0"),
        ({"mode": "fedasync", "alpha": 1.1}, "less than or equal to 1"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_with_its_reason(fields: dict[str, object], fault: str) -> None:
    with pytest.raises(ValidationError) as caught:
        StragglerPolicy.model_validate(fields)
    assert fault in str(caught.value)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ValidationError) as caught:
        StragglerPolicy(cohort_size=1, quorum=2, deadline_min=9.0, deadline_max=8.0)
    assert "quorum 2" in str(caught.value)
    assert "deadline_min 9.0" in str(caught.value)


def test_an_integer_is_a_count_and_a_number_with_a_point_a_fraction() -> None:
    assert StragglerPolicy(cohort_size=10, quorum=1).quorum_count == 1
    assert StragglerPolicy(cohort_size=10, quorum=1.0).quorum_count == 10


@given(st.integers(1, 10_000), st.integers(100, 1000))
def test_the_invited_are_the_exact_product_rounded_up(cohort_size: int, percent: int) -> None:
    policy = StragglerPolicy(cohort_size=cohort_size, quorum=1, over_selection=percent / 100)
    assert policy.num_invited == math.ceil(Fraction(cohort_size * percent, 100))


@given(st.integers(1, 10_000), st.integers(1, 100))
def test_the_quorum_is_the_exact_fraction_rounded_up(cohort_size: int, percent: int) -> None:
    policy = StragglerPolicy(cohort_size=cohort_size, quorum=percent / 100)
    assert policy.quorum_count == math.ceil(Fraction(cohort_size * percent, 100))
    assert 1 <= policy.quorum_count <= cohort_size <= policy.num_invited


def test_as_many_as_are_invited_must_be_there_unless_min_available_says_otherwise() -> None:
    assert StragglerPolicy(cohort_size=10, over_selection=1.3).num_needed_to_draw == 13
    assert StragglerPolicy(cohort_size=10, over_selection=1.3, min_available=40).num_needed_to_draw == 40


def test_every_fault_of_a_mode_is_told_at_once() -> None:
    with pytest.raises(ValidationError) as caught:
        StragglerPolicy(mode="fedasync", cohort_size=3, linger=1.0, buffer_size=4, hinge_slope=2.0, quorum=2)
    for name in ("cohort_size", "linger", "buffer_size", "hinge_slope", "quorum"):
        assert name in str(caught.value)


def test_a_policy_that_was_written_down_whole_is_read_back() -> None:
    for policy in (StragglerPolicy(), StragglerPolicy(mode="fedbuff"), StragglerPolicy(mode="fedasync", alpha=0.9)):
        assert StragglerPolicy.model_validate_json(policy.model_dump_json()) == policy


def test_what_an_asynchronous_mode_takes_when_nothing_is_said() -> None:
    fedbuff, fedasync = StragglerPolicy(mode="fedbuff"), StragglerPolicy(mode="fedasync")
    assert (fedbuff.num_wanted, fedbuff.quorum_count, fedbuff.max_staleness) == (10, 10, 20)
    assert (fedasync.num_wanted, fedasync.quorum_count, fedasync.max_staleness) == (1, 1, 20)
    assert StragglerPolicy(mode="fedbuff", buffer_size=6, quorum=0.5).quorum_count == 3


def test_the_discounts_with_their_golden_numbers() -> None:
    polynomial = [StragglerPolicy().discount(t) for t in (0, 1, 3, 8)]
    assert polynomial == pytest.approx([1, 0.70711, 0.5, 0.33333], abs=5e-6)
    hinge = [StragglerPolicy(staleness="hinge").discount(t) for t in (4, 5, 8)]
    assert hinge == pytest.approx([1, 0.090909, 0.024390], abs=5e-7)
    assert StragglerPolicy(staleness="constant").discount(1000) == 1.0


@pytest.mark.parametrize(
    ("mode", "concurrency", "size", "clients", "usual", "default"),
    [
        ("fedasync", 9, None, None, 8, 20),
        ("fedasync", 100, None, 9, 8, 198),
        ("fedasync", 100, None, None, 99, 198),
        ("fedasync", 100_000, None, None, 99_999, 1000),
        ("fedbuff", 10, 10, None, 1, 20),
        ("fedbuff", 101, 4, None, 25, 50),
        ("fedbuff", 1, 4, None, 0, 20),
    ],
)
def test_the_usual_age_of_an_update_is_that_of_clients_of_one_speed(
    mode: str, concurrency: int, size: int | None, clients: int | None, usual: int, default: int
) -> None:
    """While a client trains, each of the others sends one update: ceil((C - 1) / K) versions."""
    given = {"mode": mode, "concurrency": concurrency} | ({} if size is None else {"buffer_size": size})
    policy = StragglerPolicy.model_validate(given)
    assert policy.usual_staleness(clients) == usual
    assert policy.max_staleness == default
    if usual:
        tight = policy.model_copy(update={"max_staleness": usual - 1})
        assert f"got {usual - 1};" in tight.warning_of_staleness(clients)
        assert f"set at least {usual}," in tight.warning_of_staleness(clients)
    enough = policy.model_copy(update={"max_staleness": usual})
    assert enough.warning_of_staleness(clients) == ""


def test_a_synchronous_run_has_no_usual_age_to_warn_of() -> None:
    assert StragglerPolicy(max_staleness=0).warning_of_staleness(5) == ""
