"""What a data set draws follows from (seed, epoch, index): not from the model, the batches or the threads."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset

from atoll import Local, Task
from atoll.parallel.local_training.draws import Drew, Steady, drawing, unseeded
from atoll.parallel.local_training.training import evaluate, train_locally
from tests.parallel import drawing as odd
from tests.parallel.drawing import Noisy, Residual, Together, expected


def rows(fetched: Any) -> list[list[float]]:
    inputs, targets = fetched
    assert torch.equal(inputs, targets)
    found: list[list[float]] = inputs.tolist()
    return found


def test_an_example_draws_the_numbers_of_its_seed_epoch_and_index_in_any_batch() -> None:
    fetch = drawing(Noisy(), 5)
    assert rows(fetch(2, torch.tensor([7, 3, 11]))) == [expected(5, 2, index) for index in (7, 3, 11)]
    assert rows(fetch(2, torch.tensor([3]))) == [expected(5, 2, 3)]
    assert rows(drawing(Subset(Noisy(), [9, 8]), 5)(0, torch.tensor([1])))[0][1:] == expected(5, 0, 1)[1:]


def test_seed_epoch_and_index_each_change_the_draws_of_all_three_generators() -> None:
    draws = [expected(1, 1, 1)[1:], expected(2, 1, 1)[1:], expected(1, 2, 1)[1:], expected(1, 1, 2)[1:]]
    assert all(len(set(column)) == len(draws) for column in zip(*draws, strict=True))


def test_examples_that_are_read_together_draw_by_the_first_of_them() -> None:
    fetch = drawing(Together(), 5)
    first, again = (rows(fetch(1, torch.tensor([4, 5, 6]))) for _ in range(2))
    assert first == again
    assert first[0] == expected(5, 1, 4)


def test_a_data_set_for_evaluations_draws_the_same_in_every_epoch() -> None:
    fetch = drawing(Steady(Noisy()), 5)
    assert rows(fetch(0, torch.tensor([2]))) == rows(fetch(9, torch.tensor([2]))) == [expected(5, 0, 2)]


def test_fetching_leaves_the_generators_of_the_process_as_they_were() -> None:
    def three() -> tuple[float, float, float]:
        return torch.rand(()).item(), np.random.rand(), random.random()

    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(3)
    undisturbed = [three(), three()]
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(3)
    first = three()
    drawing(Noisy(), 5)(0, torch.arange(5))
    assert [first, three()] == undisturbed


@pytest.mark.parametrize("draw", [torch.rand(3).normal_, lambda: nn.functional.dropout(torch.ones(3)), np.random.rand])
def test_beside_other_threads_a_draw_is_refused_before_it_disturbs_them(draw: Any) -> None:
    class Draws(Noisy):
        def __getitem__(self, index: int) -> Any:
            draw()
            return torch.ones(1), torch.ones(1)

    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    with pytest.raises(Drew):
        unseeded(Draws())(0, torch.tensor([0]))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert random.getstate() == before[2]


def test_a_draw_is_found_where_the_data_set_catches_its_refusal() -> None:
    class Catching(Noisy):
        def __getitem__(self, index: int) -> Any:
            try:
                return torch.rand(1), torch.ones(1)
            except Exception:
                return torch.zeros(1), torch.ones(1)

    with pytest.raises(Drew):
        unseeded(Catching())(0, torch.tensor([0]))


def test_a_generator_of_the_data_sets_own_is_no_draw() -> None:
    class Own(Noisy):
        def __getitem__(self, index: int) -> Any:
            row = torch.rand(2, generator=torch.Generator().manual_seed(index))
            return row, row + np.random.default_rng(index).random()

    inputs, _ = unseeded(Own())(0, torch.tensor([3]))
    assert torch.equal(inputs[0], torch.rand(2, generator=torch.Generator().manual_seed(3)))


def seen_by(model: nn.Module, local: Local) -> list[list[float]]:
    """Return the examples of a local training in the order in which the loss has seen them."""
    seen: list[list[float]] = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.extend(targets.tolist())
        return nn.functional.mse_loss(outputs, targets)

    task = Task(model=lambda: model, data=odd.data, loss=loss)
    train_locally(task, model, Noisy(), local, seed=11)
    return seen


def test_local_training_draws_by_seed_epoch_and_index_whatever_the_model_draws() -> None:
    local = Local(epochs=2, batch_size=5, lr=1e-6)
    quiet, noisy = seen_by(Residual(0.0), local), seen_by(Residual(0.5), local)
    assert quiet == noisy
    assert quiet == [expected(11, number // 24, int(row[0])) for number, row in enumerate(quiet)]
    in_turn = seen_by(Residual(), replace(local, shuffle=False))
    assert in_turn == [expected(11, epoch, index) for epoch in (0, 1) for index in range(24)]


def test_an_evaluation_is_the_same_each_time_and_in_batches_of_any_size() -> None:
    task = Task(model=Residual, data=odd.data, loss=lambda outputs, targets: (targets[:, 1:] ** 2).mean())
    found = [evaluate(task, Residual(), Noisy(12), batch_size=size)["loss"] for size in (12, 4, 4)]
    right = sum(value**2 for index in range(12) for value in expected(0, 0, index)[1:]) / 36
    assert [total / count for total, count in found] == pytest.approx([right] * 3, rel=1e-6)
