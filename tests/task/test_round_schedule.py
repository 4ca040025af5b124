"""The schedules of settings over the rounds, beside torch's own."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.task.overrides import OverridesRefused
from atoll.task.round_schedule import RoundSchedule, read_schedule

ROUNDS = 12


def of_torch(make, start):
    """Return the learning rates that a scheduler of torch gives to the first rounds."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=start)
    scheduler = make(optimizer)
    found = []
    for _ in range(ROUNDS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def values(**fields):
    schedule = RoundSchedule(**fields)
    return [schedule.at(round_) for round_ in range(1, ROUNDS + 1)]


def test_cosine_is_that_of_torch():
    theirs = of_torch(lambda it: torch.optim.lr_scheduler.CosineAnnealingLR(it, ROUNDS, eta_min=0.01), 0.5)
    assert values(kind="cosine", start=0.5, end=0.01, rounds=ROUNDS) == pytest.approx(theirs, rel=1e-12)


def test_linear_is_that_of_torch_and_stays_at_its_end():
    theirs = of_torch(lambda it: torch.optim.lr_scheduler.LinearLR(it, 1.0, 0.1, total_iters=8), 0.5)
    assert values(kind="linear", start=0.5, end=0.05, rounds=8) == pytest.approx(theirs, rel=1e-12)


def test_exponential_and_step_are_those_of_torch():
    theirs = of_torch(lambda it: torch.optim.lr_scheduler.ExponentialLR(it, 0.9), 0.3)
    assert values(kind="exponential", start=0.3, factor=0.9) == pytest.approx(theirs, rel=1e-12)
    theirs = of_torch(lambda it: torch.optim.lr_scheduler.StepLR(it, 5, 0.5), 0.3)
    assert values(kind="step", start=0.3, factor=0.5, every=5) == pytest.approx(theirs, rel=1e-12)


def test_a_warmup_rises_in_equal_stairs_to_the_start_and_the_rest_follows():
    plain = values(kind="exponential", start=0.4, factor=0.5)
    warm = values(kind="exponential", start=0.4, factor=0.5, warmup=3)
    assert warm == pytest.approx([0.1, 0.2, 0.3, *plain[: ROUNDS - 3]])


def test_a_list_has_a_value_for_each_round_or_from_some_on():
    assert values(kind="list", values=(3, 2, 1)) == [3, 2] + [1] * 10
    assert values(kind="list", values=("adam", "sgd"), rounds_from=(1, 5)) == ["adam"] * 4 + ["sgd"] * 8


PLAIN = st.floats(0.001, 100)
CURVED = st.builds(
    lambda kind, start, end, rounds, warmup: RoundSchedule(
        kind=kind, start=start, end=end, rounds=rounds + warmup, warmup=warmup
    ),
    st.sampled_from(["cosine", "linear"]),
    PLAIN,
    PLAIN,
    st.integers(1, 30),
    st.integers(0, 5),
)
STEPPED = st.builds(
    lambda start, factor, every, warmup: RoundSchedule(
        kind="step", start=start, factor=factor, every=every, warmup=warmup
    ),
    PLAIN,
    st.floats(0.1, 3),
    st.integers(1, 9),
    st.integers(0, 5),
)
LISTS = st.lists(PLAIN, min_size=1, max_size=20).map(lambda found: RoundSchedule(kind="list", values=tuple(found)))


@given(st.one_of(CURVED, STEPPED, LISTS), st.integers(1, 50))
def test_the_turns_have_the_least_and_the_largest_value_of_all_rounds(schedule, rounds):
    every = [schedule.at(round_) for round_ in range(1, rounds + 1)]
    at_turns = [schedule.at(turn) for turn in schedule.turns(rounds)]
    assert min(at_turns) == pytest.approx(min(every), rel=1e-12)
    assert max(at_turns) == pytest.approx(max(every), rel=1e-12)


def test_a_factor_that_leaves_the_numbers_is_infinite():
    assert RoundSchedule(kind="exponential", start=1.0, factor=10.0).at(1000) == math.inf


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ({}, "lr: kind: missing (allowed: cosine, linear, exponential, step, list)"),
        ({"kind": "poly"}, "lr: kind: must be one of cosine, linear, exponential, step, list, got 'poly'"),
        ({"kind": "cosine", "factor": 2.0}, "lr: factor: not of kind cosine (known: start, end, rounds, warmup)"),
        ({"kind": "step", "factor": 2.0}, "lr: every: step needs it"),
        ({"kind": "cosine", "gamma": 1}, "lr: gamma: unknown key, got 1 (known: "),
        ({"kind": "exponential", "factor": -1.0}, "lr: factor: must be positive, got -1.0"),
        ({"kind": "cosine", "end": math.nan}, "lr: end: must be finite, got nan"),
        ({"kind": "cosine", "rounds": 3, "warmup": 3}, "lr: warmup: must be less than rounds (3), got 3"),
        ({"kind": "cosine", "rounds": 2.5}, "lr: rounds: expected int or none, got 2.5"),
        ({"kind": "list", "values": []}, "lr: values: must have at least one"),
        ({"kind": "list", "values": 3}, "lr: values: must be a list, got 3"),
        ({"kind": "list", "values": [[1]]}, "lr: values: must be numbers, strings, true or false, got [[1]]"),
        ({"kind": "list", "values": [1, 2], "rounds_from": [1]}, "lr: rounds_from: must be as many as values (2)"),
        ({"kind": "list", "values": [1, 2], "rounds_from": [2, 3]}, "lr: rounds_from: must be rising rounds"),
        ({"kind": "list", "values": [1, 2], "rounds_from": [1, True]}, "lr: rounds_from: must be rising rounds"),
    ],
)
def test_what_is_no_schedule_is_refused_by_name(table, fault):
    with pytest.raises(OverridesRefused) as refused:
        read_schedule("lr", table)
    assert any(line.startswith(fault) for line in refused.value.faults)


def test_all_faults_are_told_at_once():
    with pytest.raises(OverridesRefused) as refused:
        read_schedule("lr", {"kind": "step", "every": 0, "factor": -1.0})
    assert len(refused.value.faults) == 2
