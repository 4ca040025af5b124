"""Means of parts add up by their units; what the task says is checked, and so is the guess."""

import math
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from atoll import Local, Task
from atoll.task.context import Context, contextual, within
from atoll.task.errors import TaskBroken
from atoll.training.data.units import Units, as_units, units_of
from atoll.training.local.training import evaluate, train_locally
from atoll.training.model import as_built
from atoll.training.model.parameters import initial_parameters, load_parameters, parameters_of
from atoll.training.trials.unit_check import UnitCheck, disagreement
from tests.cli import failing_tasks
from tests.training import weighted
from tests.training.weighted import KINDS, Words, data_of, everything, task_of


def batch_of(kind: str) -> tuple[Any, Any]:
    inputs, targets = everything(Words(kind, 12))
    with torch.no_grad():
        return weighted.make_model()(inputs), targets


@given(kind=st.sampled_from(list(KINDS)), cut=st.integers(1, 11))
def test_the_losses_of_any_two_parts_add_up_to_that_of_the_batch(kind: str, cut: int) -> None:
    units, model = Units(KINDS[kind].units), weighted.make_model()
    data, total, weight = Words(kind, 12), 0.0, 0.0
    for rows in (slice(0, cut), slice(cut, 12)):
        inputs, targets = everything(data, rows)
        summand, counted = units.sums(KINDS[kind].loss(model(inputs), targets).item(), targets, len(inputs))
        total, weight = total + summand, weight + counted
    outputs, targets = batch_of(kind)
    whole = KINDS[kind].loss(outputs, targets).item()
    assert total / weight == pytest.approx(whole / 12 if kind == "summed" else whole, rel=1e-5)


def test_two_fields_of_two_rows_are_compared_as_torch_s_own_collation_makes_them() -> None:
    outputs, (words, mask) = batch_of("paired")
    check = UnitCheck(KINDS["paired"].loss, Units(), must_hold=True, may_list=False)
    check.see(outputs[:2], (words[:2], mask[:2]))
    assert "the loss divides by something else" in (check.found or "")


@pytest.mark.parametrize("kind", KINDS)
def test_the_check_passes_what_is_said_rightly_and_finds_each_wrong_guess(kind: str) -> None:
    outputs, targets = batch_of(kind)
    assert disagreement(KINDS[kind].loss, Units(KINDS[kind].units), outputs, targets) is None
    assert "the loss divides by something else" in (disagreement(KINDS[kind].loss, Units(), outputs, targets) or "")


def by_text(outputs: torch.Tensor, targets: list[str]) -> torch.Tensor:
    """The mean over the examples of lists of texts."""
    return torch.stack([row.mean() * len(text) for row, text in zip(outputs, targets, strict=True)]).mean()


def by_letter(outputs: torch.Tensor, targets: list[str]) -> torch.Tensor:
    """The mean over the letters of all texts: what Atoll guesses, the examples, is wrong."""
    return by_text(outputs, targets) * len(targets) / sum(map(len, targets))


def by_box(outputs: torch.Tensor, targets: list[torch.Tensor]) -> torch.Tensor:
    """The mean over the boxes of all images, in differing numbers."""
    of_each = [(row.mean() - boxes).square().sum() for row, boxes in zip(outputs, targets, strict=True)]
    return torch.stack(of_each).sum() / sum(map(len, targets))


TEXTS = ["a", "four", "", "seven", "of", "letters"]
BOXES = [torch.arange(4.0 * number).reshape(number, 4) for number in (3, 1, 0, 2, 5, 1)]
OF_LISTS = {
    "texts": (by_letter, TEXTS, lambda targets: sum(map(len, targets))),
    "boxes": (by_box, BOXES, lambda targets: sum(map(len, targets))),
    "fields": (lambda outputs, targets: by_letter(outputs, targets["text"]), {"text": TEXTS}, None),
}


@pytest.mark.parametrize("name", OF_LISTS)
def test_the_check_finds_a_wrong_guess_also_where_a_loss_takes_lists(name: str) -> None:
    loss, targets, units = OF_LISTS[name]
    outputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    assert "the loss divides by something else" in (disagreement(loss, Units(), outputs, targets) or "")
    if units is not None:
        assert disagreement(loss, Units(units), outputs, targets) is None
    assert disagreement(by_text, Units(), outputs, TEXTS) is None


def test_single_rows_of_lists_are_not_joined_into_a_batch_that_the_loss_never_sees() -> None:
    check = UnitCheck(by_box, Units(), must_hold=True)
    for boxes in BOXES:
        check.see(torch.ones(1, 3), [boxes])
    assert check.found is None


def contrastive(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss of pairs of examples, which is no mean over examples."""
    return nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


RIGHT = {
    "classes": (nn.functional.cross_entropy, torch.randn(8, 3), torch.tensor([0, 1, 2, 0, 1, -100, 2, 2])),
    "module": (nn.CrossEntropyLoss(label_smoothing=0.1), torch.randn(8, 3), torch.tensor([0, 1, 2, 0, 1, 1, 2, 2])),
    "regression": (nn.functional.mse_loss, torch.randn(8, 2), torch.randn(8, 2)),
    "half": (nn.functional.mse_loss, torch.randn(8, 5).bfloat16(), torch.randn(8, 5).bfloat16()),
    "about zero": (lambda outputs, targets: (outputs * targets).mean(), torch.randn(9, 300), torch.randn(9, 300)),
    "partial": (partial(nn.functional.huber_loss, delta=0.5), torch.randn(8, 2), torch.randn(8, 2)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_common_losses_pass_without_a_word(name: str) -> None:
    assert disagreement(*RIGHT[name][:1], Units(), *RIGHT[name][1:]) is None


@pytest.mark.parametrize("said", [None, "sum", lambda targets: len(targets)])
def test_a_loss_of_pairs_is_neither_mean_nor_sum(said: Any) -> None:
    assert disagreement(contrastive, Units(said), torch.randn(8, 3), torch.zeros(8)) is not None


def test_a_loss_that_draws_or_fails_on_parts_is_not_judged() -> None:
    def even(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.view(4, 2, -1) ** 2).sum() + targets.sum()

    for loss in (lambda outputs, _: (outputs * torch.rand(len(outputs), 1)).sum(), even):
        assert disagreement(loss, Units(), torch.randn(8, 3), torch.zeros(8)) is None


def test_a_loss_finds_its_state_as_if_there_were_no_check() -> None:
    calls, number, seen = [], count(), torch.zeros(1)

    def enclosing(outputs: Any, targets: Any) -> Any:
        calls.append(1)
        return outputs.sum()

    def counting(outputs: Any, targets: Any) -> Any:
        return outputs.sum() * next(number)

    def summing(outputs: Any, targets: Any) -> Any:
        seen.add_(1)
        return outputs.sum()

    class Object:
        done = 0

        def __call__(self, outputs: Any, targets: Any) -> Any:
            self.done += 1
            return outputs.sum()

    each = Object()
    for loss in (enclosing, counting, summing, each):
        disagreement(loss, Units(), torch.randn(8, 3), torch.zeros(8))
    assert (calls, next(number), seen.item(), each.done) == ([], 0, 0, 0)


LAST: list[torch.Tensor] = []
CALLS = 0


def remembering(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A sum, which the guess takes for a mean; it keeps its outputs, for a picture of them."""
    global CALLS
    CALLS += 1
    LAST.append(outputs)
    return outputs.square().sum()


def with_context(outputs: torch.Tensor, targets: torch.Tensor, context: Context) -> torch.Tensor:
    return remembering(outputs, targets) * context.round


class Remembering:
    calls = 0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return remembering(outputs, targets)


@pytest.mark.parametrize("loss", [remembering, contextual(with_context, Context()), Remembering()])
def test_a_loss_whose_state_changes_no_value_is_checked_and_finds_it_unchanged(loss: Any) -> None:
    with within(Context(round=3)):
        assert disagreement(loss, Units(), torch.ones(8, 3), torch.zeros(8)) is not None
    assert (CALLS, LAST, Remembering.calls) == (0, [], 0)


def test_a_loss_with_a_generator_is_not_judged_and_draws_as_if_there_were_no_check() -> None:
    generator = torch.Generator().manual_seed(1)
    expected = torch.rand(1, generator=torch.Generator().manual_seed(1))

    def loss(outputs: Any, targets: Any) -> Any:
        return (outputs.squeeze() * torch.rand(len(outputs), generator=generator)).sum()

    assert disagreement(loss, Units(), torch.ones(8, 1), torch.zeros(8)) is None
    assert torch.equal(torch.rand(1, generator=generator), expected)


def test_a_loss_that_holds_more_than_can_be_restored_is_not_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(as_built, "BYTES_MAX", 100)
    queue = torch.zeros(100)

    def enqueuing(outputs: Any, targets: Any) -> Any:
        queue.add_(1)
        return outputs.sum()

    assert disagreement(enqueuing, Units(), torch.ones(8, 3), torch.zeros(8)) is None
    assert not queue.any()


@torch.no_grad()
def test_parameters_that_a_loss_holds_are_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(as_built, "BYTES_MAX", 100)
    teacher = nn.Linear(100, 100)

    def distilled(outputs: Any, targets: Any) -> Any:
        return (outputs - teacher(outputs)).square().sum()

    assert disagreement(distilled, Units(), torch.ones(8, 100), torch.zeros(8)) is not None


@pytest.mark.parametrize("wrong", [-1, math.nan, math.inf, None, "8", True, torch.ones(3)])
def test_units_that_are_no_number_are_refused(wrong: Any) -> None:
    with pytest.raises(TaskBroken, match=r"task\.units must return one number >= 0"):
        as_units(wrong)


def test_units_of_another_kind_are_refused_when_the_task_is_made() -> None:
    with pytest.raises(ValueError, match=r'units must be a function of the targets, "sum" or None, got 3'):
        replace(task_of("masked"), units=3)


def test_the_weight_is_that_of_the_first_epoch_scaled_up_where_it_was_cut_short() -> None:
    units = Units(lambda targets: targets.sum())
    assert units.weight([3.0, 4.5, 1.0, 9.0], [4, 4, 2], 10) == 8.5
    assert units.weight([3.0, 4.5], [4, 4, 2], 10) == 9.375  # 7.5 x 10 / 8
    assert units.weight([0.1, 0.1], [4, 4], 8) == 0.2
    assert type(units.weight([3.0, 4.0], [4, 4], 8)) is int
    for beyond in (1e-31, 1e16):
        with pytest.raises(TaskBroken, match=rf"got {beyond:g}: scale task\.units".replace("+", r"\+")):
            units.weight([beyond], [4], 4)
    for others in (Units(), Units("sum")):
        assert others.weight([3.0], [4, 4, 2], 10) == 10


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "summed"])
def test_fedsgd_weighted_by_units_is_the_step_on_the_pooled_batch(kind: str) -> None:
    """McMahan 2017, section 2, for a mean over other units than examples; in float64 on the pooled side."""
    task, local = task_of(kind, sites=("north", "south")), Local(batch_size=None, lr=0.3)
    start = initial_parameters(task, 0)
    moved, weights = [], []
    for site in task.sites:
        model = task.model()
        load_parameters(model, start)
        weights.append(train_locally(task, model, task.data(site, "train"), local, seed=1).num_examples)
        moved.append({name: value - start[name] for name, value in parameters_of(model).items()})
    pooled = [data_of(kind)(site, "train") for site in task.sites]
    rows = [dataset[index] for dataset in pooled for index in range(len(dataset))]
    inputs, targets = torch.utils.data.default_collate(rows)
    model = weighted.make_model().double()
    KINDS[kind].loss(model(inputs), weighted._in_double(targets)).backward()
    for name, parameter in model.named_parameters():
        mean = sum(w * update[name].astype(float) for w, update in zip(weights, moved, strict=True)) / sum(weights)
        assert parameter.grad is not None
        right = -0.3 * parameter.grad.numpy()
        assert abs(mean - right).max() <= 1e-5 * abs(right).max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [2, 5, 64])
def test_an_evaluation_in_batches_is_the_loss_of_the_whole_data_set(kind: str, batch_size: int) -> None:
    task, data = task_of(kind), Words(kind, 12)
    total, weight = evaluate(task, weighted.make_model(), data, batch_size=batch_size)["loss"]
    outputs, targets = batch_of(kind)
    whole = KINDS[kind].loss(outputs.double(), weighted._in_double(targets)).item()
    assert total / weight == pytest.approx(whole / 12 if kind == "summed" else whole, rel=1e-5)


def test_a_batch_without_units_leaves_no_nan_in_a_mean() -> None:
    task = task_of("padding")

    class Empty(Words):
        def __getitem__(self, index: int) -> Any:
            inputs, targets = super().__getitem__(index)
            return inputs, targets * 0 if index < 4 else targets

    total, weight = evaluate(task, weighted.make_model(), Empty("padding", 12), batch_size=4)["loss"]
    assert math.isfinite(total)
    assert weight == sum(units_of(task)(Words("padding", 12)[index][1]) for index in range(4, 12))


@pytest.mark.parametrize("own_loop", [False, True])
def test_an_update_of_targets_that_are_all_ignored_is_refused_since_it_cannot_weigh_nothing(own_loop: bool) -> None:
    task: Task = replace(failing_tasks.ignored, fit=(lambda *_: 1.0) if own_loop else None)
    with pytest.raises(TaskBroken, match="the targets of 5 trained examples have no units"):
        train_locally(task, task.model(), task.data("d", "train"), task.local, seed=1)


def test_a_loop_of_the_tasks_own_is_weighted_by_the_units_of_its_data() -> None:
    task: Task = replace(task_of("masked"), fit=lambda *_: 1.0)
    data = Words("masked", 20)
    work = train_locally(task, weighted.make_model(), data, task.local, seed=1)
    assert work.num_examples == int(sum(data[index][1]["mask"].sum() for index in range(20)))
