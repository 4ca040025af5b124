"""The trial of a batch before a training: what it refuses, what it lets pass, and that it leaves nothing behind."""

import logging
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from atoll import Local, Metric, Task
from atoll.task.context import Context
from atoll.task.errors import TaskBroken
from atoll.task.randomness import states_of_generators
from atoll.training.data.row_forms import form_of, kind_of
from atoll.training.trials.first_batch import Batches, Rows, first_batch, first_of_kinds, sites_by_kind
from atoll.training.trials.trial import refuse

INPUTS = torch.linspace(-1, 1, 200).reshape(40, 5)
CLASSES = torch.arange(40) % 3


def tried(
    data: Any = None,
    *,
    is_trained: bool = True,
    at_once: int | None = None,
    unmeasured: Iterable[Any] = (),
    **fields: Any,
) -> None:
    """Try a linear classifier, or a task with other fields, on 40 rows of three classes, or on other ones."""
    rows = TensorDataset(INPUTS, CLASSES) if data is None else data
    given = {"model": lambda: nn.Linear(5, 3), "loss": nn.functional.cross_entropy, "data": lambda site, split: rows}
    task = Task(**(given | fields))  # type: ignore[arg-type]
    where = "the train data of site 'a'"
    others = (Rows(data=other, where="the test data of site 'a'", context=Context()) for other in unmeasured)
    every = [Rows(data=rows, where=where, context=Context(), is_trained=is_trained, at_once=at_once)]
    refuse([first_batch], Batches(task=task, every=every, unmeasured=others))


def accuracy(outputs: Any, targets: Any) -> tuple[int, int]:
    return int((outputs.argmax(1) == targets).sum()), len(targets)


def one_class_has_none(outputs: Any, targets: Any) -> tuple[float, int]:
    """Fail as an AUC of one class does."""
    if len(set(targets.tolist())) < 2:
        raise ValueError("only one class is present")
    return 0.5, 1


BROKEN = {
    "three": (lambda o, t: (1, 2, 3), r"it returns 3 numbers, .* make it a Metric, whose `value` says"),
    "one": (lambda o, t: (3,), "it returns 1 number, and a plain metric returns two"),
    "number": (lambda o, t: 0.5, r"expected a tuple of numbers, got 0\.5: a metric returns finite numbers of every"),
    "text": (lambda o, t: "12", "expected a tuple of numbers, got '12'"),
    "texts": (lambda o, t: ("1", "2"), "expected a tuple of numbers"),
    "dict": (lambda o, t: {1: 2, 3: 4}, "expected a tuple of numbers"),
    "set": (lambda o, t: {3, 5}, "expected a tuple of numbers"),
    "nested": (lambda o, t: ({"a": 1}, 2), "expected a tuple of numbers"),
    "none": (lambda o, t: None, "expected a tuple of numbers, got None"),
    "raises": (lambda o, t: (o.no_such, 1), "it raises AttributeError: .*no_such"),
    "arguments": (lambda o: (1, 2), "it raises TypeError: .*positional argument"),
    "nan": (lambda o, t: (float("nan"), 1), r"it gives \(nan, 1\.0\), which are not all finite"),
    "value": (Metric(statistics=accuracy, value=lambda sums: sums[5]), "value raises IndexError"),
    "value text": (Metric(statistics=accuracy, value=lambda sums: "x"), "value must return a number or None, got 'x'"),
    "no sums": (Metric(statistics=lambda o, t: (), value=lambda sums: 1.0), "it returns no numbers"),
    "many": (Metric(statistics=lambda o, t: range(20_000), value=lambda sums: 1.0), "may have 10000: send fewer"),
    "by batch": (
        Metric(statistics=lambda o, t: o.flatten(), value=lambda sums: 1.0),
        "its batches have 12 and 24 sums",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_metric_that_breaks_the_contract_on_every_batch_is_refused_by_name(name: str) -> None:
    metric, words = BROKEN[name]
    with pytest.raises(TaskBroken, match=f"(?s)metric 'odd': .*{words}"):
        tried(metrics={"sound": accuracy, "odd": metric})


SOUND = {
    "numbers of numpy": lambda o, t: (np.float32(1.5), np.int64(2)),
    "tensors": lambda o, t: torch.stack([o.sum(), torch.tensor(2.0)]),
    "a generator": lambda o, t: (number for number in (1, 2)),
    "bool": lambda o, t: (True, len(t)),
    "numpy of outputs": lambda o, t: (o.numpy().sum(), 1),  # outputs of a training have gradients
    "two examples": lambda o, t: (torch.corrcoef(o.T)[0, 1], 1),
    "undefined": lambda o, t: (0, 0),
    "value of none": Metric(statistics=accuracy, value=lambda sums: None),
    "value divides": Metric(statistics=lambda o, t: (0, 0), value=lambda sums: sums[0] / sums[1]),
    "classes": Metric(statistics=lambda o, t: t.bincount(minlength=3), value=lambda sums: sums[0]),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_metric_that_keeps_the_contract_passes(name: str) -> None:
    tried(metrics={"odd": SOUND[name]})


def precision(outputs: Any, targets: Any) -> tuple[float, int]:
    positive = outputs.argmax(1) == 2
    return (positive & (targets == 2)).sum().item() / positive.sum().item(), 1


@pytest.mark.parametrize(
    ("metric", "fields"),
    [
        (one_class_has_none, {"data": TensorDataset(INPUTS, torch.zeros(40, dtype=torch.int64))}),
        (one_class_has_none, {"data": TensorDataset(INPUTS, torch.ones(40)), "loss": nn.functional.mse_loss}),
        (precision, {"model": lambda: nn.Sequential(nn.Linear(5, 3), Biased())}),
        (lambda o, t: (float(o.exp().sum()), 1), {"model": lambda: nn.Sequential(nn.Linear(5, 3), Biased())}),
    ],
    ids=["one class", "one value", "no positives", "exponentials of an untrained model"],
)
def test_a_metric_that_fails_by_the_values_of_a_batch_is_named_and_not_refused(
    metric: Any, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    if fields.get("loss") is nn.functional.mse_loss:
        fields = fields | {"model": lambda: nn.Sequential(nn.Linear(5, 1), nn.Flatten(0))}
    with caplog.at_level(logging.WARNING):
        tried(metrics={"odd": metric}, **fields)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("metric 'odd': of 8 rows of the train data of site 'a', it ")
    assert said.endswith(": it is left out wherever it does so")


class Biased(nn.Module):
    """A layer that makes every row predict the first class, by far."""

    def forward(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs + torch.tensor([1000.0, 0.0, 0.0])


class Failing(Dataset[Any]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        raise KeyError("column")


ROWS = {
    "float64": (TensorDataset(INPUTS.double(), CLASSES), "inputs float64 .*: the model takes these inputs as float32"),
    "whole": (TensorDataset(INPUTS.long(), CLASSES), "inputs int64 .*: the model takes these inputs as float32"),
    "arrays": ([(np.ones(5), 1)] * 9, r"inputs float64 \[8, 5\]"),
    "shape": (TensorDataset(torch.ones(9, 6), torch.ones(9)), r"inputs float32 \[8, 6\] .* let task\.data return what"),
    "text": ([("a b", 1), ("c", 0)] * 4, r"inputs a tuple of 8 str .*: make tensors of the rows in task\.data"),
    "targets": (TensorDataset(INPUTS, CLASSES.float()), "the loss takes these targets as int64"),
    "no pairs": ([(torch.ones(5), 1, 2)] * 4, r"a row must be a pair \(inputs, targets\), got list of 3"),
    "unread": (Failing(), r"its rows cannot be read: KeyError: 'column' \(.*test_first_batch\.py, line \d+\)"),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_the_model_or_the_loss_cannot_take_are_refused_with_site_form_and_way_out(name: str) -> None:
    data, words = ROWS[name]
    with pytest.raises(TaskBroken, match=f"(?s)the train data of site 'a': .*{words}"):
        tried(data)


def test_what_a_training_can_take_passes() -> None:
    tried(TensorDataset(INPUTS.half(), CLASSES), model=lambda: nn.Linear(5, 3).half())
    tried([(torch.ones(length), 1) for length in (2, 3, 4)], at_once=1, model=Pooled)  # batches of one ragged row
    sort = torch.sort(CLASSES).values
    tried(TensorDataset(INPUTS, sort), loss=needs_two_classes)
    tried(TensorDataset(INPUTS[:0], CLASSES[:0]))
    tried(model=OfSixteen, at_once=16)


class OfSixteen(nn.Linear):
    """A model that takes batches of one size alone."""

    def __init__(self) -> None:
        super().__init__(5, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows.view(16, 5))


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(rows.mean(1, keepdim=True))
        return found


def needs_two_classes(outputs: Any, targets: Any) -> torch.Tensor:
    assert len(set(targets.tolist())) > 1
    return nn.functional.cross_entropy(outputs, targets)


def test_a_large_model_is_tried_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.training.trials.first_batch.SMALL", 10)
    tried(metrics={"odd": lambda o, t: (1 / 0, 1)})  # its outputs are none of the model's
    with pytest.raises(TaskBroken, match=r"metric .odd.: .* it returns 3 numbers"):
        tried(metrics={"odd": lambda o, t: (1, 2, 3)})


SEEN: list[float] = []
SHARED = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))


class Counting(Dataset[Any]):
    """Rows from a generator of the data set's own, which a trial must not move."""

    def __init__(self) -> None:
        self.drawn, self.reads = random.Random(3), 0

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return torch.full((5,), self.drawn.random()), index % 3


def test_a_trial_leaves_generators_model_loss_metrics_and_data_as_they_were() -> None:
    def loss(outputs: Any, targets: Any) -> torch.Tensor:
        SEEN.append(float(outputs.sum()))
        return nn.functional.cross_entropy(outputs, targets + 0 * int(torch.rand(()) > 2))

    data, before = Counting(), {name: value.clone() for name, value in SHARED.state_dict().items()}
    states = states_of_generators()
    tried(data, model=lambda: SHARED, loss=loss, metrics={"accuracy": accuracy})
    assert states_of_generators() == states
    assert SEEN == []
    assert (data.reads, data.drawn.getstate()) == (0, random.Random(3).getstate())
    assert all(torch.equal(value, SHARED.state_dict()[name]) for name, value in before.items())
    assert all(parameter.grad is None for parameter in SHARED.parameters())
    assert SHARED.training


def test_one_site_of_each_kind_of_rows_is_found() -> None:
    data = {
        "a": TensorDataset(INPUTS[:2], CLASSES[:2]),
        "b": TensorDataset(INPUTS, CLASSES),
        "c": TensorDataset(INPUTS.double(), CLASSES),
        "d": [(torch.ones(5), 1)],
    }
    assert sites_by_kind(data) == [["a", "b"], ["c"], ["d"]]
    kinds = {site: kind_of(rows, reads=False) for site, rows in data.items()}
    assert kinds == {"a": "float32 [5], int64 []", "b": "float32 [5], int64 []", "c": "float64 [5], int64 []", "d": ""}
    assert first_of_kinds(kinds, {site: len(rows) for site, rows in data.items()}) == ["b", "c", "d"]
    assert form_of({"x": [torch.ones(2), "a"], "y": None}) == "{x: (float32 [2], str), y: NoneType}"


class Shifted(nn.Linear):
    """A layer that centres its inputs in place."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs -= 0.5
        return super().forward(inputs)


def targets_in_place(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    targets -= 1
    return nn.functional.cross_entropy(outputs, targets)


def shares_in_place(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[int, int]:
    return int((outputs.softmax(1).max(1).values > outputs.exp_().mean()).sum()), len(targets)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": lambda: Shifted(5, 3)}, "the model changes its inputs in place"),
        ({"loss": targets_in_place, "data": None}, "the loss changes its targets in place"),
        ({"metrics": {"a": accuracy, "b": shares_in_place}}, "metric 'b': it changes its outputs or targets in place"),
    ],
)
def test_code_that_changes_what_others_read_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    rows = TensorDataset(INPUTS.clone(), CLASSES + 1) if "loss" in fields else None
    fields = {name: value for name, value in fields.items() if value is not None}
    with pytest.raises(TaskBroken, match=f"{words}, which others read: let it work on a copy"):
        tried(rows, **fields)


def test_a_metric_reads_the_outputs_before_a_loss_has_changed_them_in_place(caplog: pytest.LogCaptureFixture) -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        outputs /= 0.25
        return nn.functional.cross_entropy(outputs, targets)

    def largest(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, int]:
        assert float(outputs.abs().max()) <= 1
        return 1.0, 1

    bounded = {"model": lambda: nn.Sequential(nn.Linear(5, 3), nn.Hardtanh(-0.5, 0.5))}
    tried(loss=loss, metrics={"largest": largest}, **bounded)
    assert caplog.text == ""
    tried(metrics={"largest": largest}, model=lambda: nn.Sequential(nn.Linear(5, 3), nn.Hardtanh(2.0, 3.0)))
    assert "it raises AssertionError" in caplog.text


class Ragged(Dataset[Any]):
    """Rows of two lengths, in batches of four of one length."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.ones(5 + index // 4, 5), index % 3


def test_rows_that_are_sorted_into_batches_of_one_shape_pass_where_nothing_shuffles_them() -> None:
    pooling = {"model": lambda: nn.Sequential(nn.Linear(5, 3), Mean())}
    tried(Ragged(), at_once=4, local=Local(shuffle=False, batch_size=4), **pooling)
    tried(Ragged(), at_once=4, is_trained=False, **pooling)
    tried(Ragged(), at_once=1, **pooling)
    with pytest.raises(TaskBroken, match="of equal shapes"):
        tried(Ragged(), at_once=4, **pooling)


class Mean(nn.Module):
    """The mean over positions."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.mean(1)


def test_a_metric_without_a_finite_number_of_drawn_outputs_is_named_and_not_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("atoll.training.trials.first_batch.SMALL", 0)
    with caplog.at_level(logging.WARNING):
        tried(metrics={"distance": lambda o, t: (float(torch.acosh(o.mean()).sum()), 1)})  # acosh of less than 1
    assert "metric 'distance'" in caplog.text


class WithHead(nn.Module):
    """A model with an auxiliary head in training alone, as Inception has one."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.auxiliary = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> Any:
        return [self.main(inputs), self.auxiliary(inputs)] if self.training else self.main(inputs)


def of_heads(outputs: Any, targets: Any) -> torch.Tensor:
    heads = outputs if isinstance(outputs, list) else [outputs]
    return torch.stack([nn.functional.cross_entropy(head, targets) for head in heads]).sum()


def test_a_metric_of_the_outputs_in_evaluation_is_named_and_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tried(model=WithHead, loss=of_heads, metrics={"accuracy": accuracy})
    assert "metric 'accuracy': of 8 rows of the train data of site 'a', it raises AttributeError" in caplog.text
    with pytest.raises(TaskBroken, match="metric 'third'"):
        tried(model=WithHead, loss=of_heads, metrics={"third": lambda o, t: (o[2][:, 9].sum(), 1)})


class TwoViews(Dataset[Any]):
    """Two views of an input with its number, as contrastive training reads them."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return (INPUTS[index], -INPUTS[index]), index


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, inputs: Any) -> Any:
        return [self.layer(view) for view in inputs] if isinstance(inputs, list) else self.layer(inputs)


def test_a_metric_of_rows_that_are_for_evaluations_alone_is_tried_with_these() -> None:
    def paired(outputs: Any, targets: Any) -> torch.Tensor:
        if not isinstance(outputs, list):
            return nn.functional.cross_entropy(outputs, targets)
        return nn.functional.cross_entropy(outputs[0] @ outputs[1].T, torch.arange(len(targets)))

    reads = list[str]()

    def rows() -> Iterable[Any]:
        reads.append("test")
        yield TensorDataset(INPUTS, CLASSES)

    task = {"model": Embedding, "loss": paired, "units": len}
    tried(TwoViews(), metrics={"accuracy": accuracy}, unmeasured=rows(), **task)
    assert reads == ["test"]
    tried(TwoViews(), metrics={"views": lambda o, t: (len(o), 1)}, unmeasured=rows(), **task)
    assert reads == ["test"], "no metric needs them"
    with pytest.raises(TaskBroken, match="metric 'accuracy'"):
        tried(TwoViews(), metrics={"accuracy": accuracy}, **task)
    with pytest.raises(TaskBroken, match="metric 'accuracy'"):
        tried(TwoViews(), metrics={"accuracy": accuracy}, unmeasured=[[1, 2, 3]], **task)
