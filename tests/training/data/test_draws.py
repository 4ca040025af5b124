"""What a data set draws follows from (seed, epoch, index): not from the model, the batches or the threads."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from atoll import Local, Task
from atoll.ground.noise.generator import SecretGenerator
from atoll.task.collated import Collated
from atoll.training.data.draws import Drew, Steady, drawing, unseeded
from atoll.training.data.row_forms import kind_of
from atoll.training.local.training import evaluate, train_locally
from tests.training import drawing as odd
from tests.training.drawing import Noisy, Residual, Together, expected


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


class OnlyTogether(Together):
    """The same, of which torch's `DataLoader` reads no single row."""

    def __getitem__(self, index: int) -> Any:
        raise RuntimeError("read me together")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [Noisy.__getitem__(self, index) for index in indices]


@pytest.mark.parametrize("make", [drawing, lambda data, _seed: unseeded(data)], ids=["drawing", "unseeded"])
def test_rows_that_can_only_be_read_together_are(make: Any) -> None:
    class Plain(OnlyTogether):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [(torch.tensor([float(index)]),) * 2 for index in indices]

    size = len(Plain())
    single = TensorDataset(*(torch.arange(size).float()[:, None],) * 2)
    of_two = ConcatDataset([Plain(), single, Subset(Plain(), [9, 7])])
    indices = torch.tensor([2 * size + 1, size + 4, 3, 2 * size, 5])
    assert rows(make(of_two, 5)(0, indices)) == [[7.0], [4.0], [3.0], [9.0], [5.0]]
    assert rows(make(Subset(Plain(), [9, 8]), 5)(0, torch.tensor([1]))) == [[8.0]]
    collated = Collated(Plain(), lambda found: tuple(torch.stack(column) + 1 for column in zip(*found, strict=True)))
    assert rows(make(collated, 5)(0, torch.tensor([6, 2]))) == [[7.0], [3.0]]
    assert kind_of(of_two, reads=True) == kind_of(collated, reads=True) == "a tuple of 2 float32 of 1 dimension"


def test_rows_of_several_sites_that_are_read_together_draw_by_the_first_of_each_site() -> None:
    fetch, size = drawing(ConcatDataset([OnlyTogether(), OnlyTogether()]), 5), len(OnlyTogether())
    found = rows(fetch(1, torch.tensor([size + 3, 4, 5])))
    assert found[0] == [3.0, *expected(5, 1, size + 3)[1:]]
    assert found[1] == expected(5, 1, 4)


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


RNG = np.random.default_rng(0)


class Holding(Noisy):
    """Draws from generators of every kind that a data set holds: an attribute, a transform, a closure, a global."""

    def __init__(self, size: int = 24) -> None:
        super().__init__(size)
        self.generator, self.old, self.transforms = torch.Generator(), np.random.RandomState(3), [Jitter(), jitter()]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = [torch.rand((), generator=self.generator).item(), self.old.rand(), RNG.random()]
        row = torch.tensor([float(index), *drawn, *(transform() for transform in self.transforms)])
        return row, row.clone()


class Jitter:
    def __init__(self) -> None:
        self.rng = random.Random(1)

    def __call__(self) -> float:
        return self.rng.random()


def jitter() -> Any:
    rng = np.random.default_rng(1)
    return lambda: rng.random()


def test_generators_that_a_data_set_holds_draw_by_seed_epoch_and_index_too() -> None:
    fetch = drawing(Holding(), 5)
    RNG.random()
    (first,) = rows(fetch(2, torch.tensor([7])))
    assert len({*first}) == 6, "no two draw the same"
    assert rows(drawing(Holding(), 5)(2, torch.tensor([3, 7])))[1] == first, "after another example"
    assert rows(drawing(Subset(Holding(), [3, 7]), 5)(2, torch.tensor([1])))[0][0] == 7
    others = [rows(drawing(Holding(), seed)(epoch, torch.tensor([7])))[0][1:] for seed, epoch in ((6, 2), (5, 3))]
    assert not {*first[1:]} & {*others[0]}
    assert not {*first[1:]} & {*others[1]}


def test_generators_that_a_data_set_holds_are_set_back() -> None:
    """A model may draw from the same one."""
    data = Holding()
    RNG.random()
    before = RNG.bit_generator.state, data.generator.get_state()
    drawing(data, 5)(0, torch.arange(4))
    assert RNG.bit_generator.state == before[0]
    assert torch.equal(data.generator.get_state(), before[1])


def test_a_thread_reads_no_data_set_that_holds_a_generator() -> None:
    with pytest.raises(Drew):
        unseeded(Holding())(0, torch.tensor([0]))


def test_a_generator_of_a_secret_stays_as_it_is() -> None:
    class Secret(Noisy):
        secret_rng = SecretGenerator(bytes(32))

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            row = torch.tensor([self.secret_rng.random()])
            return row, row.clone()

    fetch, expected_of = drawing(Secret(), 5), SecretGenerator(bytes(32))
    found = [rows(fetch(0, torch.tensor([1])))[0][0] for _ in range(2)]
    assert found == pytest.approx([expected_of.random() for _ in range(2)])


def test_a_loop_of_the_task_s_own_finds_them_seeded_by_the_job() -> None:
    data, drawn = Holding(), list[float]()

    def fit(model: nn.Module, dataset: Any, local: Local, deadline: Any) -> float:
        drawn.append(dataset[0][0].sum().item())
        return 1.0

    task = Task(model=lambda: nn.Linear(1, 1), data=lambda *_: data, fit=fit, loss=nn.functional.mse_loss)
    for seed in (1, 1, 2):
        train_locally(task, task.model(), data, Local(), seed=seed)
    assert drawn[0] == drawn[1] != drawn[2]
