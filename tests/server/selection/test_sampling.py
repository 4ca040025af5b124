"""Cohorts: reproducible anywhere, and distributed as their names promise."""

import itertools
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocol.settings import ConfigError
from atoll.protocol.vocabulary import ClientId, RoundId
from atoll.server.config.extensions import CUSTOM_SAMPLER
from atoll.server.members.member import Candidate
from atoll.server.selection.oort import Oort
from atoll.server.selection.sampling import (
    SAMPLERS,
    Sampler,
    SamplerError,
    allocate,
    draw,
    power_of_choice,
    stratified,
    uniform,
    weighted,
)

SAMPLERS_OF_OURS: dict[str, Sampler | Oort] = {
    **SAMPLERS,
    "power_of_choice": partial(power_of_choice, num_considered=6),
    "oort": Oort(),
}

CHI_SQUARE_5, CHI_SQUARE_9 = 25.74, 33.72
"""Exceeded with probability 1e-4 by a chi-square of 5, of 9 degrees of freedom."""


def candidates(*sizes: int, labels: str = "") -> list[Candidate]:
    """Clients c0, c1, ... of these sizes; each with one letter of `labels`."""
    return [Candidate(ClientId(f"c{index}"), size, labels[index : index + 1]) for index, size in enumerate(sizes)]


def seen(*losses: float | None, sizes: Sequence[int] = ()) -> list[Candidate]:
    """Clients c0, c1, ... with these losses."""
    return [
        Candidate(ClientId(f"c{index}"), size, "", loss, loss or 0.0, 1.0 + index, RoundId(1), 1)
        for index, (loss, size) in enumerate(zip(losses, sizes or [1] * len(losses), strict=True))
    ]


def cohorts(
    sampler: Sampler, population: Sequence[Candidate], *, count: int, num_rounds: int
) -> Counter[tuple[ClientId, ...]]:
    return Counter(
        draw(sampler, seed=1, round_id=RoundId(round_id), count=count, candidates=population)
        for round_id in range(1, num_rounds + 1)
    )


def chi_square(observed: Counter[tuple[ClientId, ...]], expected: dict[tuple[ClientId, ...], float]) -> float:
    assert observed.keys() <= expected.keys()
    total = sum(observed.values())
    return sum((observed[key] - total * p) ** 2 / (total * p) for key, p in expected.items())


def inclusion(observed: Counter[tuple[ClientId, ...]]) -> dict[ClientId, float]:
    """Return the fraction of cohorts that each client was in."""
    times = Counter(client for cohort, num in observed.items() for client in cohort * num)
    return {client: num / sum(observed.values()) for client, num in times.items()}


# ---------------------------------------------------------------- reproducible


@given(
    st.sampled_from(sorted(SAMPLERS_OF_OURS)),
    st.integers(0, 2**63),
    st.integers(1, 12),
    st.randoms(use_true_random=False),
)
@settings(deadline=None)
def test_a_cohort_does_not_depend_on_the_order_of_the_candidates(
    name: str, seed: int, count: int, rng: random.Random
) -> None:
    losses = [None, 0.5, 1.0, 2.0, None, 1.0, 3.0, None, 0.1]
    with_losses = [
        row._replace(loss=loss, utility=loss or 0.0, seconds=loss, last_round=RoundId(loss is not None))
        for row, loss in zip(candidates(*range(9), labels="aabbbcccc"), losses, strict=True)
    ]
    population = candidates(*range(9), labels="aabbbcccc") if name in SAMPLERS else with_losses
    shuffled = rng.sample(population, len(population))
    first, second = (
        draw(SAMPLERS_OF_OURS[name], seed=seed, round_id=RoundId(3), count=count, candidates=who)
        for who in (population, shuffled)
    )
    assert first == second == tuple(sorted(first))
    assert len(first) == min(count, 6 if name == "power_of_choice" else 9)


@pytest.mark.real
def test_a_cohort_is_the_same_in_every_process() -> None:
    program = (
        "from tests.server.selection.test_sampling import *\n"
        "for name in sorted(SAMPLERS):\n"
        "    print(*draw(SAMPLERS[name], seed=7, round_id=RoundId(2), count=4,"
        " candidates=candidates(*range(1, 10), labels='aabbbcccc')))\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parents[3],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert outputs == {"c1 c4 c7 c8\nc1 c4 c6 c8\nc1 c4 c6 c8\n"}


def test_each_round_and_each_seed_has_a_cohort_of_its_own() -> None:
    population = candidates(*[1] * 40)
    drawn = {
        draw(uniform, seed=seed, round_id=RoundId(round_id), count=10, candidates=population)
        for seed in range(5)
        for round_id in range(5)
    }
    assert len(drawn) == 25


# ---------------------------------------------------------------- distributions


def test_uniform_draws_every_set_equally_often() -> None:
    population = candidates(1, 1000, 1, 1, 0)
    observed = cohorts(uniform, population, count=2, num_rounds=5000)
    sets = itertools.combinations([c.client_id for c in population], 2)
    assert chi_square(observed, dict.fromkeys(sets, 1 / 10)) < CHI_SQUARE_9


def successive(weights: dict[ClientId, float]) -> dict[tuple[ClientId, ...], float]:
    """P({i, j}) of two draws without replacement: p_i p_j / (1 - p_i) + p_j p_i / (1 - p_j)."""
    total = sum(weights.values())
    p = {client: weight / total for client, weight in weights.items()}
    return {(i, j): p[i] * p[j] * (1 / (1 - p[i]) + 1 / (1 - p[j])) for i, j in itertools.combinations(sorted(p), 2)}


def test_weighted_draws_sets_as_often_as_successive_sampling_does() -> None:
    population = candidates(1, 2, 3, 10)
    observed = cohorts(weighted, population, count=2, num_rounds=5000)
    expected = successive({c.client_id: c.num_examples for c in population})
    assert sum(expected.values()) == pytest.approx(1)
    assert chi_square(observed, expected) < CHI_SQUARE_5


def test_weighted_includes_each_client_as_often_as_numpy_does() -> None:
    sizes = np.array([5, 1, 8, 2, 40, 3, 1])
    rng, num_rounds = np.random.default_rng(0), 4000
    drawn = [rng.choice(7, size=3, replace=False, p=sizes / sizes.sum()) for _ in range(num_rounds)]
    theirs = np.bincount(np.concatenate(drawn), minlength=7) / num_rounds
    ours = inclusion(cohorts(weighted, candidates(*sizes.tolist()), count=3, num_rounds=num_rounds))
    for index, frequency in enumerate(theirs):
        sigma = (2 * frequency * (1 - frequency) / num_rounds) ** 0.5
        assert abs(ours[ClientId(f"c{index}")] - frequency) < 5 * sigma


def test_weighted_counts_a_client_that_does_not_tell_its_size_as_one_example() -> None:
    observed = cohorts(weighted, candidates(0, 1, 1, 7), count=2, num_rounds=5000)
    expected = successive({ClientId("c0"): 1, ClientId("c1"): 1, ClientId("c2"): 1, ClientId("c3"): 7})
    assert chi_square(observed, expected) < CHI_SQUARE_5


# ---------------------------------------------------------------- power of choice


def test_power_of_choice_keeps_the_largest_losses_of_those_that_it_considers() -> None:
    """The reference draws pairs by successive sampling and keeps the client with the larger loss."""
    sizes, losses = [1, 2, 3, 10], [0.3, 4.0, 0.1, 2.0]
    pairs = successive({ClientId(f"c{index}"): size for index, size in enumerate(sizes)})
    expected = dict.fromkeys([("c0",), ("c1",), ("c3",)], 0.0)
    for pair, probability in pairs.items():
        best = max(pair, key=lambda client: losses[int(client[1:])])
        expected[best,] += probability
    sampler = partial(power_of_choice, num_considered=2)
    observed = cohorts(sampler, seen(*losses, sizes=sizes), count=1, num_rounds=5000)
    assert chi_square(observed, expected) < CHI_SQUARE_5  # type: ignore[arg-type]


def test_power_of_choice_among_all_takes_the_unknown_and_the_worst_off_first() -> None:
    everybody = partial(power_of_choice, num_considered=9)
    population = seen(0.3, 4.0, -1.0, None, 2.0)
    for count, expected in ((1, "c3"), (2, "c1 c3"), (3, "c1 c3 c4"), (4, "c0 c1 c3 c4")):
        assert " ".join(draw(everybody, seed=5, round_id=RoundId(1), count=count, candidates=population)) == expected


def test_power_of_choice_of_as_many_as_are_invited_is_weighted() -> None:
    sizes = [3, 1, 4, 1, 5, 9]
    for round_id in range(1, 50):
        first, second = (
            draw(sampler, seed=1, round_id=RoundId(round_id), count=3, candidates=seen(*[1.0] * 6, sizes=sizes))
            for sampler in (weighted, partial(power_of_choice, num_considered=3))
        )
        assert first == second


def test_power_of_choice_draws_evenly_among_those_not_yet_known() -> None:
    observed = cohorts(partial(power_of_choice, num_considered=5), seen(*[None] * 5), count=2, num_rounds=5000)
    sets = itertools.combinations([ClientId(f"c{index}") for index in range(5)], 2)
    assert chi_square(observed, dict.fromkeys(sets, 1 / 10)) < CHI_SQUARE_9


# ---------------------------------------------------------------- stratified


@pytest.mark.parametrize(
    ("count", "sizes", "lowest", "highest"),
    [
        (4, [6, 3, 3], [2, 1, 1], [2, 1, 1]),  # shares 2, 1, 1
        (5, [6, 3, 1], [3, 1, 0], [3, 2, 1]),  # shares 3, 1.5, 0.5
        (10, [14, 13, 13], [3, 3, 3], [4, 4, 4]),  # shares 3.5, 3.25, 3.25
        (1, [1, 1], [0, 0], [1, 1]),
        (9, [9], [9], [9]),
    ],
)
def test_each_stratum_has_its_share_rounded_down_or_up(
    count: int, sizes: list[int], lowest: list[int], highest: list[int]
) -> None:
    seen = set()
    for seed in range(100):
        seats = allocate(count, {f"s{index}": size for index, size in enumerate(sizes)}, random.Random(seed))
        numbers = [seats[f"s{index}"] for index in range(len(sizes))]
        assert sum(numbers) == count
        seen.add(tuple(numbers))
    assert [min(column) for column in zip(*seen, strict=True)] == lowest
    assert [max(column) for column in zip(*seen, strict=True)] == highest


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(0, 2**32), st.data())
@settings(deadline=None)
def test_seats_are_all_given_and_never_exceed_a_stratum(sizes: list[int], seed: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, sum(sizes)))
    strata = {str(index): size for index, size in enumerate(sizes)}
    seats = allocate(count, strata, random.Random(seed))
    assert sum(seats.values()) == count
    for label, size in strata.items():
        assert count * size // sum(sizes) <= seats[label] <= min(size, -(-count * size // sum(sizes)))


def test_stratified_includes_every_client_equally_often() -> None:
    num_rounds = 5000
    often = inclusion(cohorts(stratified, candidates(*[1] * 10, labels="aaaaaaaaab"), count=2, num_rounds=num_rounds))
    sigma = (0.2 * 0.8 / num_rounds) ** 0.5
    assert len(often) == 10
    assert all(abs(frequency - 0.2) < 4 * sigma for frequency in often.values())


def test_stratified_draws_uniformly_within_a_label() -> None:
    observed = cohorts(stratified, candidates(*[1] * 8, labels="aaaabbbb"), count=4, num_rounds=5000)
    first = Counter(tuple(client for client in cohort if client < "c4") for cohort in observed.elements())
    sets = itertools.combinations([ClientId(f"c{index}") for index in range(4)], 2)
    assert chi_square(first, dict.fromkeys(sets, 1 / 6)) < CHI_SQUARE_5


# ---------------------------------------------------------------- a user's own


def own(answer: Sequence[object]) -> Sampler:
    return lambda candidates, count, rng: answer  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([], "named 0 clients; allowed: 1 to 2"),
        (["c0", "c1", "c2"], "named 3 clients"),
        (["c0", "c0"], "'c0' more than once"),
        (["c0", "mallory"], "'mallory', which is not one of the 3 candidates"),
        ([0], "named 0, which is not one"),
        ([["c0"]], "which is not one"),
        (None, "the sampler raised TypeError"),
    ],
)
def test_an_answer_that_is_no_cohort_is_refused(answer: Sequence[object], message: str) -> None:
    with pytest.raises(SamplerError, match=message):
        draw(own(answer), seed=0, round_id=RoundId(1), count=2, candidates=candidates(1, 1, 1))


@pytest.mark.parametrize("error", [KeyError("site"), SystemExit("site")])
def test_a_sampler_that_raises_is_named_with_its_cause(error: BaseException) -> None:
    def broken(candidates: Sequence[Candidate], count: int, rng: random.Random) -> Sequence[ClientId]:
        raise error

    with pytest.raises(SamplerError, match=rf"the sampler raised {type(error).__name__}: '?site'?") as refusal:
        draw(broken, seed=0, round_id=RoundId(1), count=2, candidates=candidates(1))
    assert refusal.value.__cause__ is error


def test_nobody_to_draw_from_is_an_error() -> None:
    with pytest.raises(SamplerError, match="no candidates"):
        draw(uniform, seed=0, round_id=RoundId(1), count=2, candidates=[])


def test_a_user_s_own_sampler_sees_sorted_candidates_and_the_round_s_randomness(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def largest(candidates, count, rng):\n"
        "    assert [c.client_id for c in candidates] == sorted(c.client_id for c in candidates)\n"
        "    assert 0 <= rng.random() < 1\n"
        "    return [c.client_id for c in sorted(candidates, key=lambda c: -c.num_examples)][:count]\n"
        "three = 3\n"
    )
    sampler = CUSTOM_SAMPLER.load(f"{tmp_path}/mine.py:largest")
    cohort = draw(sampler, seed=0, round_id=RoundId(1), count=2, candidates=candidates(1, 9, 4)[::-1])
    assert cohort == ("c1", "c2")
    with pytest.raises(ConfigError, match="three: is of the type int; allowed: a function of"):
        CUSTOM_SAMPLER.load(f"{tmp_path}/mine.py:three")
    with pytest.raises(ConfigError, match="there is no smallest"):
        CUSTOM_SAMPLER.load(f"{tmp_path}/mine.py:smallest")
