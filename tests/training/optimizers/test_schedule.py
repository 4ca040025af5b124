import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from atoll.training.optimizers.schedule import KINDS, Schedule, scaled_lr


def rates(schedule: Schedule, steps: int) -> list[float]:
    return [schedule(step) for step in range(steps)]


def torch_rates(make: Any, lr: float, steps: int) -> list[float]:
    """Return the rates of a scheduler of torch's."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr)
    scheduler, found = make(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("kind", "options", "theirs"),
    [
        ("cosine", {"end_lr": 0.01}, lambda o: lr_scheduler.CosineAnnealingLR(o, 20, eta_min=0.01)),
        ("polynomial", {"power": 2.0}, lambda o: lr_scheduler.PolynomialLR(o, 20, power=2.0)),
        ("linear", {"end_lr": 0.05}, lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=20)),
        ("constant", {}, lambda o: lr_scheduler.ConstantLR(o, factor=1.0)),
    ],
)
def test_without_warm_up_the_rates_are_torch_s(kind: str, options: Any, theirs: Any) -> None:
    ours = rates(Schedule(lr=0.5, steps=20, kind=kind, **options), 20)
    assert ours == pytest.approx(torch_rates(theirs, 0.5, 20), abs=1e-12)


def test_warm_up_is_linear_per_step_and_ends_at_the_peak() -> None:
    ours = rates(Schedule(lr=0.8, steps=10, warmup_steps=4), 6)
    assert ours == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    theirs = torch_rates(lambda o: lr_scheduler.LinearLR(o, 0.25, 1.0, total_iters=3), 0.8, 6)
    assert ours == pytest.approx(theirs)


def test_warm_up_may_rise_from_the_rate_of_the_small_batch() -> None:
    ours = rates(Schedule(lr=3.2, steps=10, warmup_steps=5, warmup_from=0.1), 5)
    assert ours == pytest.approx([0.72, 1.34, 1.96, 2.58, 3.2])


def test_wsd_stays_and_then_falls_in_a_line() -> None:
    schedule = Schedule(lr=1.0, steps=10, kind="wsd", warmup_steps=2, decay_steps=4, end_lr=0.2)
    assert rates(schedule, 12) == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])


@given(
    kind=st.sampled_from(KINDS),
    steps=st.integers(1, 60),
    warm=st.floats(0, 1),
    lr=st.floats(1e-4, 10),
    end=st.floats(0, 1),
)
def test_a_rate_rises_to_the_peak_and_never_rises_again(
    kind: str, steps: int, warm: float, lr: float, end: float
) -> None:
    warmup = int(warm * steps)
    schedule = Schedule(lr=lr, steps=steps, kind=kind, warmup_steps=warmup, end_lr=end * lr)
    found = rates(schedule, steps + 3)
    assert found[:warmup] == sorted(found[:warmup])
    assert all(
        later <= earlier * (1 + 1e-12) for earlier, later in zip(found[warmup:], found[warmup + 1 :], strict=False)
    )
    assert max(found) <= lr * (1 + 1e-12)
    assert min(found[warmup:]) >= end * lr * (1 - 1e-12)
    assert found[-1] == pytest.approx(lr if kind == "constant" else end * lr)
    if warmup:
        assert found[warmup - 1] == pytest.approx(lr)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lr": 0.0, "steps": 0}, "schedule.lr: .*0.0; schedule.steps: .*0"),
        ({"lr": 1.0, "steps": 5, "warmup_steps": 6}, r"warmup_steps: must be in 0..5, the steps, got 6"),
        ({"lr": 1.0, "steps": 5, "kind": "step"}, "kind: must be one of constant, .*got 'step'"),
        ({"lr": 1.0, "steps": 5, "kind": "cosine", "decay_steps": 2}, "decay_steps: belongs to wsd, not to cosine"),
        ({"lr": 1.0, "steps": 5, "kind": "wsd", "warmup_steps": 3, "decay_steps": 3}, r"decay_steps: must be in 1..2"),
    ],
)
def test_faults_of_a_schedule_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Schedule(**options)


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        Schedule(lr=1.0, steps=2)(-1)


def test_the_linear_rule_gives_the_rate_of_imagenet_in_an_hour() -> None:
    assert scaled_lr(0.1, 8192, 256, "linear") == pytest.approx(3.2)  # Goyal et al. 2017
    assert scaled_lr(0.1, 8192, 256, "sqrt") == pytest.approx(0.1 * math.sqrt(32))
    assert scaled_lr(0.1, 8192, 256, "none") == 0.1


@pytest.mark.parametrize("arguments", [(0.1, 0, 32), (0.0, 8, 32), (0.1, 8, 32, "cubic")])
def test_a_rate_that_cannot_be_scaled_is_refused(arguments: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        scaled_lr(*arguments)
