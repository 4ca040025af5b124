from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from atoll.parallel.planner.bubble import BACKWARD, BACKWARD_WEIGHT, FORWARD, Action, Times, actions, bubble, simulate
from atoll.parallel.planner.candidate import Candidate
from atoll.parallel.planner.memory import in_flight


def test_the_known_figures() -> None:
    assert bubble("gpipe", 2, 1) == 0.5
    assert bubble("gpipe", 2, 10) < 0.1 <= bubble("gpipe", 2, 9)
    assert bubble("1f1b", 4, 28) < 0.1 <= bubble("1f1b", 4, 27)
    assert bubble("1f1b", 8, 64) < 0.1 <= bubble("1f1b", 8, 63)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@given(p=st.integers(1, 8), m=st.integers(1, 24))
@settings(deadline=None, max_examples=40)
def test_a_played_pipeline_idles_as_long_as_the_formula_says(schedule: str, p: int, m: int) -> None:
    played = simulate(actions(schedule, p, m), p, Times(0.7, 1.1, 0.4))
    assert played == pytest.approx(bubble(schedule, p, m))


def most_in_flight(order: Sequence[Action]) -> int:
    """Return the largest number of a rank's forward passes that wait for their backward pass (or W, if split)."""
    waiting = most = 0
    for action in order:
        waiting += {FORWARD: 1, BACKWARD: -1, BACKWARD_WEIGHT: -1}.get(action.kind, 0)
        most = max(most, waiting)
    return most


ROUNDS = [
    *[("interleaved-1f1b", p, k * p, v) for p in (2, 4) for k in (1, 2, 3) for v in (2, 3)],
    *[("looped-bfs", p, k * p, 2) for p in (2, 4) for k in (1, 2)],
    *[("interleaved-zero-bubble", p, k * p, v) for p in (2, 4) for k in (1, 2, 3) for v in (2, 3)],
    *[(name, p, k * p, 2) for name in ("zbv-zero-bubble", "dualpipe-v") for p in (2, 4) for k in (2, 3)],
]


@pytest.mark.parametrize(("schedule", "p", "m", "v"), ROUNDS)
def test_torch_s_own_lists_of_actions_idle_as_long_as_the_formula_says(schedule: str, p: int, m: int, v: int) -> None:
    orders = actions(schedule, p, m, v)
    assert sum(map(len, orders)) >= 2 * p * m * v
    assert simulate(orders, p * v) == pytest.approx(bubble(schedule, p, m, v))


@pytest.mark.parametrize(("schedule", "p", "m", "v"), ROUNDS)
def test_a_rank_s_passes_in_flight_are_those_of_torch_s_own_lists(schedule: str, p: int, m: int, v: int) -> None:
    plan = Plan(mesh=Mesh(pp=p), schedule=schedule, stages_per_rank=v, num_microbatches=m)
    orders = actions(schedule, p, m, v)
    assert [in_flight(Candidate(plan=plan), rank) for rank in range(p)] == [most_in_flight(order) for order in orders]


@given(p=st.integers(2, 6), m=st.integers(1, 20))
@settings(deadline=None, max_examples=30)
def test_1f1b_holds_fewer_micro_batches_than_gpipe_and_idles_as_long(p: int, m: int) -> None:
    for rank in range(p):
        assert most_in_flight(actions("1f1b", p, m)[rank]) == min(m, p - rank)
        assert most_in_flight(actions("gpipe", p, m)[rank]) == m


@given(st.sampled_from(["1f1b", "interleaved-1f1b", "interleaved-zero-bubble"]), st.integers(2, 16), st.integers(1, 99))
def test_the_bubble_falls_with_micro_batches_and_rises_with_ranks(schedule: str, p: int, m: int) -> None:
    assert 0 < bubble(schedule, p, m + 1, 2) < bubble(schedule, p, m, 2) < bubble(schedule, p + 1, m, 2) < 1
    assert bubble("interleaved-zero-bubble", p, m, 2) < bubble("interleaved-1f1b", p, m, 2) < bubble("1f1b", p, m)


def test_zero_bubble_idles_a_third_of_1f1b_when_a_pass_has_equal_thirds() -> None:
    """Table 1 of Qi et al. 2024: (p - 1)(F + B - W) in place of (p - 1)(F + B + W), in units of time."""

    def idle_for_each_busy(share: float) -> float:
        return share / (1 - share)

    ratio = idle_for_each_busy(bubble("interleaved-zero-bubble", 8, 64)) / idle_for_each_busy(bubble("1f1b", 8, 64))
    assert ratio == pytest.approx(1 / 3)


def test_ranks_that_wait_for_each_other_are_noticed() -> None:
    orders: Sequence[Sequence[Action]] = [
        [Action(0, "B", 0), Action(0, "F", 0)],
        [Action(1, "F", 0), Action(1, "B", 0)],
    ]
    with pytest.raises(ValueError, match="wait for each other"):
        simulate(orders, 2)
