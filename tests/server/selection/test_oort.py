"""Oort: the paper's numbers, its formula by hand, and the distribution of its draws."""

import itertools
import math
import random
from collections import Counter
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.vocabulary import ClientId, Digest, RoundId, Version
from atoll.server.members.member import Candidate
from atoll.server.members.oort_pacer import Pacer
from atoll.server.rounds.events import Sums, Update
from atoll.server.rounds.oort_utility import loss_of, utility_of
from atoll.server.selection.oort import Oort, normalized, quantile, slowness, temporal_uncertainty
from atoll.server.selection.sampling import draw


def known(name: str, utility: float, seconds: float | None = 1.0, last_round: int = 1) -> Candidate:
    return Candidate(ClientId(name), 10, "", 1.0, utility, seconds, RoundId(last_round), 1)


def new(name: str, times_chosen: int = 0) -> Candidate:
    return Candidate(ClientId(name), 10, "", times_chosen=times_chosen)


def update(num_examples: int, **statistics: tuple[float, ...]) -> Update:
    return Update(ClientId("a"), RoundId(1), Version(0), Digest("d"), num_examples, 1.0, statistics=statistics)


def drawn(sampler: Oort, round_id: int, count: int, *candidates: Candidate, seed: int = 0, relaxed: int = 0) -> str:
    return "".join(
        draw(sampler, seed=seed, round_id=RoundId(round_id), count=count, candidates=candidates, relaxed=relaxed)
    )


# ---------------------------------------------------------------- the utility


def test_the_utility_of_losses_1_2_3_is_the_paper_s() -> None:
    whole = update(3, loss=(6.0, 3.0), loss_squared=(14.0, 3.0))
    assert utility_of(whole) == pytest.approx(6.480741, abs=5e-7)
    assert utility_of(whole) * slowness(20.0, 10.0, 2.0) == pytest.approx(1.620185, abs=5e-7)
    assert slowness(10.0, 10.0, 2.0) == slowness(1.0, 10.0, 2.0) == 1.0


def test_without_squares_the_mean_loss_stands_for_their_root_and_is_never_more() -> None:
    assert utility_of(update(3, loss=(6.0, 3.0))) == 6.0
    assert utility_of(update(4, loss=(8.0, 4.0), loss_squared=(16.0, 4.0))) == utility_of(update(4, loss=(8.0, 4.0)))


@pytest.mark.parametrize(
    ("sums", "loss"),
    [
        ({}, None),
        ({"loss": (3.0, 2.0)}, 1.5),
        ({"loss": (-3.0, 2.0)}, -1.5),
        ({"loss": (3.0, 0.0)}, None),
        ({"loss": (3.0, -2.0)}, None),
        ({"loss": (math.nan, 2.0)}, None),
        ({"loss": (3.0, math.inf)}, None),
        ({"loss": (3.0,)}, None),
        ({"loss": (1e308, 1e-308)}, 1e100),
    ],
)
def test_a_claim_that_is_no_loss_is_none(sums: Sums, loss: float | None) -> None:
    assert loss_of(sums) == loss
    assert utility_of(update(2, **sums)) == 2 * max(0.0, loss or 0.0)


@given(st.lists(st.floats(), max_size=3), st.lists(st.floats(), max_size=3), st.integers(1, 2**40))
def test_whatever_a_client_claims_its_utility_is_a_number_that_adds_up(
    loss: list[float], squared: list[float], num_examples: int
) -> None:
    utility = utility_of(update(num_examples, loss=tuple(loss), loss_squared=tuple(squared)))
    assert 0 <= utility < 1e113
    Pacer().committed([utility] * 1000, 1)
    assert all(0 <= share <= 1 for share in normalized([utility, 1.0, 0.0, 5.0]))


# ---------------------------------------------------------------- the score


def test_the_score_is_the_formula_s() -> None:
    """Utilities 0, 50, 100 are 0, 0.5, 1; T is the median time, 20; R = 100, alpha = 2."""
    who = [known("a", 0.0, 10.0, 4), known("b", 50.0, 20.0, 10), known("c", 100.0, 40.0, 99)]
    uncertain = [math.sqrt(0.1 * math.log(100) / last) for last in (4, 10, 99)]
    expected = [uncertain[0], 0.5 + uncertain[1], (1 + uncertain[2]) * 0.25]
    assert Oort().scores(who, RoundId(100), 0.5) == pytest.approx(expected)
    assert Oort(penalty=0.0).scores(who, RoundId(100), 0.5)[2] == pytest.approx(1 + uncertain[2])
    assert Oort().scores(who, RoundId(100), 1.0)[2] == pytest.approx(1 + uncertain[2])


def test_who_has_no_measured_time_counts_as_the_slowest() -> None:
    who = [known("a", 5.0, 10.0), known("b", 5.0, 40.0), known("c", 5.0, None)]
    first, second, third = Oort().scores(who, RoundId(2), 0.1)
    assert second == third == pytest.approx(first / 16)


def test_a_client_that_was_asked_long_ago_is_the_less_certain() -> None:
    assert temporal_uncertainty(50, 2) > temporal_uncertainty(50, 40) > 0
    assert temporal_uncertainty(50, 2) == pytest.approx(math.sqrt(0.1 * math.log(50) / 2))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.floats(0, 0.99))
def test_a_quantile_is_numpy_s_higher_one_of_the_next_place(values: list[float], share: float) -> None:
    at = min(int(len(values) * share), len(values) - 1)
    assert quantile(values, share) == np.partition(values, at)[at]


def test_an_outlier_counts_no_more_than_the_95th_of_a_hundred() -> None:
    cut = normalized([*map(float, range(1, 100)), 1e9])
    assert cut[-1] == cut[95] == 1.0
    assert cut[0] == 0.0
    assert cut[50] == pytest.approx(50 / 95)
    assert normalized([3.0, 3.0]) == [1.0, 1.0]


# ---------------------------------------------------------------- the draws


OLD = [known(f"k{n}", 100.0 + n % 5) for n in range(50)]
YOUNG = [new(f"n{n}") for n in range(50)]


@pytest.mark.parametrize(("round_id", "explored"), [(1, 18), (11, 15), (36, 9), (75, 4), (500, 4)])
def test_the_share_of_new_clients_decays_from_nine_tenths_to_a_fifth(round_id: int, explored: int) -> None:
    """round(20 max(0.2, 0.9 x 0.98^(R - 1))): 0.9, 0.735, 0.444, 0.202, 0.2."""
    cohort = draw(Oort(), seed=3, round_id=RoundId(round_id), count=20, candidates=[*OLD, *YOUNG])
    assert sum(client.startswith("n") for client in cohort) == explored


def test_when_there_are_too_few_of_one_sort_the_others_take_their_places() -> None:
    assert len(draw(Oort(), seed=3, round_id=RoundId(1), count=20, candidates=OLD)) == 20
    assert len(draw(Oort(), seed=3, round_id=RoundId(500), count=20, candidates=YOUNG)) == 20
    mixed = draw(Oort(), seed=3, round_id=RoundId(500), count=20, candidates=[*OLD[:3], *YOUNG])
    assert [client for client in mixed if client.startswith("k")] == ["k0", "k1", "k2"]


@given(
    st.lists(
        st.tuples(st.none() | st.floats(-5, 5), st.floats(0, 1e6), st.none() | st.floats(0, 1e4)),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 30),
    st.integers(1, 300),
    st.integers(0, 50),
)
def test_as_many_are_drawn_as_were_asked_for_or_there_are(
    rows: list[tuple[float | None, float, float | None]], count: int, round_id: int, relaxed: int
) -> None:
    who = [Candidate(ClientId(f"c{n:02}"), 1, "", *row, RoundId(1), n) for n, row in enumerate(rows)]
    cohort = draw(Oort(), seed=1, round_id=RoundId(round_id), count=count, candidates=who, relaxed=relaxed)
    assert len(cohort) == min(count, len(who))


def test_only_those_near_the_last_place_are_drawn_each_in_proportion_to_its_score() -> None:
    """Gains 1, 1, 1 and 0.5, with L so large that nothing is uncertain: three share two places, evenly; the fourth is
    beyond the cut-off of 0.95."""
    who = [
        known(name, utility, 1.0, 10**9)
        for name, utility in (("a", 3.0), ("b", 3.0), ("c", 3.0), ("d", 2.0), ("e", 1.0))
    ]
    sampler = Oort(exploration_min=0.0)
    times = Counter(client for seed in range(900) for client in drawn(sampler, 9, 2, *who, seed=seed))
    assert times.keys() == {"a", "b", "c"}
    assert all(abs(times[client] - 600) < 4 * math.sqrt(900 * 2 / 9) for client in "abc")


def test_a_draw_near_the_cut_off_is_in_proportion_to_the_scores() -> None:
    """One place; gains 1 and 0.96, the least 0: drawn as 100 to 96."""
    who = [known("a", 100.0, 1.0, 10**9), known("b", 96.0, 1.0, 10**9), known("c", 0.0, 1.0, 10**9)]
    times = Counter(drawn(Oort(exploration_min=0.0), 9, 1, *who, seed=seed) for seed in range(4000))
    assert times["c"] == 0
    assert abs(times["a"] - 4000 * 100 / 196) < 4 * math.sqrt(4000) / 2


def test_fast_clients_go_first_until_the_pacer_has_more_patience() -> None:
    """Five clients take 10 s and have a low utility, five take 1000 s and have a high one."""
    quick = [known(f"{n}", 60.0, 10.0) for n in range(5)]
    slow = [known(f"{n + 5}", 100.0 + n, 1000.0) for n in range(4)] + [known("9", 0.0, 1000.0)]
    sampler = Oort(exploration_min=0.0, exploration=0.0)
    assert drawn(sampler, 5, 5, *quick, *slow) == "01234"
    assert set(drawn(sampler, 5, 4, *quick, *slow, relaxed=4)) == set("5678")


def test_a_client_that_was_chosen_in_vain_is_the_less_often_explored() -> None:
    """Weights 1 and 1/4."""
    times = Counter(drawn(Oort(), 1, 1, new("a"), new("b", 2), seed=seed) for seed in range(2000))
    assert abs(times["b"] - 400) < 4 * math.sqrt(2000 * 0.2 * 0.8)
    assert drawn(Oort(), 1, 1, new("a", 5000)) == "a"


def test_those_who_never_report_do_not_keep_the_places_of_new_ones_for_ever() -> None:
    """20 clients, each chosen 6 times in vain: 20/64, so one place is theirs and not 20 x 0.9."""
    hopeless = [new(f"n{n}", 6) for n in range(20)]
    cohort = draw(Oort(), seed=0, round_id=RoundId(1), count=20, candidates=[*OLD, *hopeless])
    assert sum(client.startswith("n") for client in cohort) == 1


def test_a_round_is_a_function_of_its_seed_round_and_candidates() -> None:
    sampler = Oort().at(RoundId(7), 2)
    assert isinstance(sampler, partial)
    assert sampler(OLD, 5, random.Random(4)) == Oort().at(RoundId(7), 2)(OLD, 5, random.Random(4))


# ---------------------------------------------------------------- the pacer


def test_the_pacer_relaxes_when_a_window_is_worth_no_more_than_the_last() -> None:
    pacer = Pacer()
    relaxed = []
    for utility in (5, 5, 6, 6, 6, 6, 5, 1, 9, 9, 9, 8):
        pacer.committed([utility - 1.0, utility + 1.0], 2)
        relaxed.append(pacer.relaxed)
    assert relaxed == [0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 3]


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 7))
def test_the_pacer_compares_each_whole_window_with_the_one_before(utilities: list[int], window: int) -> None:
    pacer = Pacer()
    for utility in utilities:
        pacer.committed([float(utility)], window)
    sums = [sum(utilities[at : at + window]) for at in range(0, len(utilities) - window + 1, window)]
    assert pacer.relaxed == sum(b <= a for a, b in itertools.pairwise(sums))
